"""Recipes: how tensors are scaled, in which formats they are stored, which of a layer's three matmuls run in FP8."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base.errors import first_line
from fp8pass.base.fields import FLAG, Checked, Rule, called_with, choose, names, plain, several, whole, wrong
from fp8pass.base.scaling import E4M3, E5M2, FP8_DTYPES

Role = Literal["input", "weight", "grad_output"]
Kind = Literal["output", "grad_input", "grad_weight"]
"""The matmuls of a layer: its output, and the gradients of its two operands."""
FACTORS: dict[Kind, tuple[Role, Role]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("input", "grad_output"),
}
"""The roles of the two operands of each matmul."""
KINDS: tuple[Kind, ...] = tuple(FACTORS)


def _matmuls(name: str, value: Any) -> tuple[str, ...]:
    kinds: tuple[str, ...] = several(f"one or several of {', '.join(map(repr, KINDS))}").take(name, value)
    for kind in kinds:
        choose(f"matmul in {name}", kind, KINDS)
    return kinds


MATMULS = Rule(_matmuls)


def _fp8_format(name: str, value: Any) -> Any:
    if value == "e5m2":
        raise ValueError(
            "fp8_format='e5m2': no GPU multiplies e5m2 by e5m2, and 2 bits of mantissa are too few for weights; "
            "choose 'hybrid' (e5m2 for gradients only) or 'e4m3'"
        )
    choose(name, value, ("hybrid", "e4m3"))
    return value


FP8_FORMAT = Rule(_fp8_format)


def _compute_algo(name: str, value: Any) -> Any:
    if not callable(value):
        choose(name, value, ("max", "most_recent"))
        return value
    called_with((torch.ones(4, device="cpu"),), "(f32[H]) -> f32[]").take(name, value)
    return value


COMPUTE_ALGO = Rule(_compute_algo)
_EXAMPLE = torch.tensor([1.0, 3.0], device="cpu")
"""Amaxes, or scales, of two tensors: what functions of the user's are checked with."""
SCALE_ALGO = called_with((_EXAMPLE, _EXAMPLE, _EXAMPLE, None), "(amax, old_scale, fp8_max, recipe) -> scale")


def _check_formula(what: str, formula: Callable[[], Any]) -> None:
    """Raise ValueError unless a formula, called for `_EXAMPLE`, returns two scales: f32[2], finite and above 0."""
    expected = "it must return a float32 tensor of the shape of its amaxes, of scales that are finite and above 0"
    try:
        scale = formula()
    except Exception as error:
        said = f"raised {type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{what} {said}, called for two tensors; {expected}") from error
    if not isinstance(scale, Tensor) or scale.shape != _EXAMPLE.shape or scale.dtype != torch.float32:
        returned = f"{scale.dtype}{list(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        raise ValueError(f"{what} returned {returned} for amaxes f32[2]; {expected}")
    if not bool(((scale > 0) & scaling.is_finite(scale)).all()):
        raise ValueError(f"{what} returned {scale.tolist()} for the amaxes {_EXAMPLE.tolist()}; {expected}")


def _scales(name: str, value: Any) -> dict[str, float]:
    is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    if is_number and not isinstance(value, bool):
        value = {"*": value}
    if not isinstance(value, Mapping):
        valid = "a dict {slot or name pattern: scale}, as fp8pass.calibrate(model, batches) returns it, or one number"
        raise wrong(name, value, valid)
    return {slot: _scale(slot, scale) for slot, scale in value.items()}


def _scale(slot: Any, scale: Any) -> float:
    if not isinstance(slot, str):
        raise ValueError(f"slot {slot!r} of a scale: it must be a name, such as 'layers.0.up.input'")
    number = scale.detach().reshape(-1)[0].item() if isinstance(scale, Tensor) and scale.numel() == 1 else plain(scale)
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ValueError(f"scale {scale!r} of {slot!r}: it must be a number, or a tensor with one element")
    if not 0 < (number := float(number)) < float("inf"):
        raise ValueError(
            f"scale {number} of {slot!r}: it must be finite and above 0; calibrate on data that reaches it"
        )
    return number


SCALES = Rule(_scales)


def _rules(name: str, value: Any) -> tuple[tuple[str, Recipe | None], ...]:
    valid = "pairs (name pattern, recipe), at least one; or write recipe={name pattern: recipe}"
    if not isinstance(value, (tuple, list)) or not value or not all(isinstance(x, (tuple, list)) for x in value):
        raise wrong(name, value, valid)
    if any(len(pair) != 2 or not isinstance(pair[0], str) for pair in value):
        raise wrong(name, value, valid)
    rules = tuple((pattern, resolve(recipe)) for pattern, recipe in value)
    for pattern, recipe in rules:
        if isinstance(recipe, (ByModule, Schedule)):
            raise ValueError(f"the recipe of {pattern!r} must be one recipe, not {type(recipe).__name__}")
    return rules  # type: ignore[return-value]


RULES = Rule(_rules)


@dataclass(frozen=True, repr=False)
class Recipe(Checked):
    """The base of all recipes: how the matmuls "output", "grad_input" and "grad_weight" are computed.

    high_precision: the matmuls that stay in high precision. fast_accum: the matmuls that use fast accumulation
    (`use_fast_accum`), with which Hopper's tensor cores accumulate in less than float32. Each takes one name or
    several. Raises ValueError for a name that is not one of the three.
    """

    high_precision: tuple[str, ...] = field(default=(), kw_only=True, metadata=MATMULS.field)
    # As torchao, and TransformerEngine for scales per tensor.
    fast_accum: tuple[str, ...] = field(default=("output",), kw_only=True, metadata=MATMULS.field)

    def __init_subclass__(cls) -> None:
        """Keep the `__repr__` below: a dataclass gets another one unless its class has one."""
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_custom:
            _check_custom(self)

    def __repr__(self) -> str:
        """Return a text with the fields that differ from their defaults.

        It is valid Python even if a field is a function, because fx prints it as part of a graph's code.
        """
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        shown = (f"{name}={getattr(v, '__qualname__', v)!r}" for name, v in values)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def name(self) -> str:
        """The name of the recipe: "delayed", "dynamic", ..., or that of `register_recipe`."""
        return _registered.get(type(self)) or type(self).__name__.removesuffix("Scaling").lower()

    @property
    def is_custom(self) -> bool:
        """True if the class is a user's: see `register_recipe`."""
        return type(self).__module__ != __name__

    @property
    def has_own_code(self) -> bool:
        """True if code of the user's computes scales: the class, or a function in a field."""
        return self.is_custom or any(callable(getattr(self, f.name)) for f in fields(self))

    def dtype(self, role: Role) -> torch.dtype:
        """Return the FP8 dtype of operands with this role: e4m3, for recipes without a choice of formats."""
        return E4M3


def _dtype_in(fp8_format: str, role: Role) -> torch.dtype:
    return E5M2 if role == "grad_output" and fp8_format == "hybrid" else E4M3


@dataclass(frozen=True, repr=False)
class TensorwiseRecipe(Recipe):
    """One scale per tensor, the same in all matmuls. `fp8_format`: "hybrid" (gradients in e5m2) or "e4m3"."""

    fp8_format: str = field(default="hybrid", metadata=FP8_FORMAT.field)

    def dtype(self, role: Role) -> torch.dtype:
        """Return the FP8 dtype of operands with this role."""
        return _dtype_in(self.fp8_format, role)


@dataclass(frozen=True, repr=False)
class DynamicScaling(TensorwiseRecipe):
    """Tensorwise, with the scale from the tensor itself: `scale = fp8_max / amax`, 1 for a tensor of zeros.

    `power_of_2` rounds the scale down to a power of two, so that scaling itself rounds nothing.
    """

    power_of_2: bool = field(default=False, metadata=FLAG.field)

    def scale(self, amax: Tensor, fp8_max: Tensor | float) -> Tensor:
        """Return the scale of a tensor from its own amax, f32[]; 1 for an amax that is 0, NaN or infinite."""
        return _own_scale(amax, fp8_max, self.power_of_2)


def _own_scale(amax: Tensor, fp8_max: Tensor | float, power_of_2: bool) -> Tensor:
    return (scaling.power_of_2_from_amax if power_of_2 else scaling.scale_from_amax)(amax, fp8_max, 1.0)


def _share(name: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < 1:
        raise wrong(name, value, "a share of a tensor's elements, 0 or more and below 1")
    return float(value)


_SHARE = Rule(_share)


@dataclass(frozen=True, repr=False)
class DelayedScaling(TensorwiseRecipe):
    """Tensorwise, with the scale from the amaxes of earlier steps: `scale = fp8_max / amax / 2**margin`.

    amax_history_len: number of steps in the history (H). amax_compute_algo: "max", "most_recent", or a callable
    f32[H] -> f32[] written in torch. on_nonfinite: how a NaN or inf is recorded in the history: "evict" records 0,
    "skip" records nothing and does not roll, "freeze" records it, so that the scale stays until it leaves the history.
    scaling_factor_compute_algo: None for the formula above, or a callable (amax, old_scale, fp8_max, recipe) -> scale
    written in torch, with TransformerEngine's signature: f32[T] each, for T tensors at once, so it must be elementwise.
    Where amax is 0, NaN or infinite, it isn't asked and the scale stays, as in TransformerEngine. old_scale is the
    scale that the step before used; before the first step, that of the formula above. on_saturation: "saturate", or
    "requantize" to quantize a tensor again, by its own amax, in a step in which the delayed scale saturates more than
    the share `saturation_threshold` of its elements. At a threshold of 0.001, clipping a normal distribution adds a
    fifth of the noise that rounding to e4m3 makes.
    Raises ValueError for a history of no steps, a negative margin, unknown names, and functions that do not return what
    they must.
    """

    # amax_history_len, amax_compute_algo and margin have TransformerEngine's defaults.
    amax_history_len: int = field(
        default=1024, metadata=whole(1, "a number of steps, 1 or more", "at least one step must be remembered").field
    )
    amax_compute_algo: str | Callable[[Tensor], Tensor] = field(default="max", metadata=COMPUTE_ALGO.field)
    margin: int = field(
        default=0,
        metadata=whole(
            0, "a whole number, 0 or more", "a negative one makes the largest values overflow; 0 leaves no room"
        ).field,
    )
    on_nonfinite: str = field(default="evict", metadata=names("evict", "skip", "freeze").field)
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = field(
        default=None, metadata=(SCALE_ALGO | None).field
    )

    on_saturation: str = field(default="saturate", metadata=names("saturate", "requantize").field)
    saturation_threshold: float = field(default=1e-3, metadata=_SHARE.field)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (algo := self.scaling_factor_compute_algo) is not None:
            limits = torch.full_like(_EXAMPLE, scaling.fp8_max(E4M3))
            _check_formula(f"scaling_factor_compute_algo={algo!r}", lambda: algo(_EXAMPLE, _EXAMPLE, limits, self))

    def scale(self, amax: Tensor, fp8_max: Tensor | float) -> Tensor:
        """Return the scale of a tensor without history from its own amax, f32[...]; 1 where that is 0, NaN or inf."""
        exact = scaling.scale_from_amax(amax, fp8_max, 1.0, self.margin)
        return exact if self.scaling_factor_compute_algo is None else self._by_formula(amax, exact, fp8_max, 1.0)

    def next_scale(self, amax_history: Tensor, old_scale: Tensor, fp8_max: Tensor) -> Tensor:
        """Return the scales f32[T] of the next step, from `amax_history` f32[H, T] and the scales f32[T] of this step.

        old_scale: 0 for a tensor without a scale. A tensor keeps it where the amax of its history is 0, NaN or inf.
        """
        amax = scaling.amax_of_history(amax_history, self.amax_compute_algo)
        if self.scaling_factor_compute_algo is None:
            return scaling.scale_from_amax(amax, fp8_max, old_scale, self.margin)
        exact = scaling.scale_from_amax(amax, fp8_max, 1.0, self.margin)
        return self._by_formula(amax, torch.where(old_scale == 0, exact, old_scale), fp8_max, old_scale)

    def _by_formula(self, amax: Tensor, old: Tensor, fp8_max: Tensor | float, keep: Tensor | float) -> Tensor:
        algo = self.scaling_factor_compute_algo
        assert algo is not None
        limits = fp8_max if isinstance(fp8_max, Tensor) else torch.full_like(amax, fp8_max)
        return scaling.scale_by(lambda a: algo(a, old, limits, self), amax, keep, "scaling_factor_compute_algo")

    @property
    def requantizes(self) -> bool:
        """True if a tensor that saturates is quantized again by its own amax."""
        return self.on_saturation == "requantize"

    @property
    def reads_old_scale(self) -> bool:
        """True if a scale may depend on the one before it, not on the history alone."""
        return self.scaling_factor_compute_algo is not None or type(self).next_scale is not DelayedScaling.next_scale


@dataclass(frozen=True, repr=False)
class RowwiseScaling(Recipe):
    """One scale per row of A and per column of B, from the tensor itself; e4m3 throughout.

    Each operand is quantized separately for each matmul that reads it, along the dimension that this matmul sums over.
    `power_of_2` rounds scales down to powers of two.
    """

    power_of_2: bool = field(default=True, metadata=FLAG.field)  # as in torchao's recipe "rowwise"

    def scale(self, amax: Tensor, fp8_max: Tensor | float) -> Tensor:
        """Return the scales of rows from their amaxes, f32[...] each; 1 for an amax that is 0, NaN or infinite."""
        return _own_scale(amax, fp8_max, self.power_of_2)


# block sizes of cuBLASLt's modes VEC128_32F and BLK128x128_32F, and of VEC32_UE8M0, which is OCP's MXFP8
BLOCK, MX_BLOCK = 128, 32


@dataclass(frozen=True, repr=False)
class BlockwiseScaling(Recipe):
    """One scale per block, from the tensor itself: 1x128 of inputs and gradients, 128x128 of weights; e4m3 throughout.

    The 128 elements lie along the dimension that the matmul sums over. `power_of_2` rounds scales down to powers of 2.
    """

    power_of_2: bool = field(default=True, metadata=FLAG.field)

    def scale(self, amax: Tensor, fp8_max: Tensor | float) -> Tensor:
        """Return the scales of blocks from their amaxes, f32[...] each; 1 for an amax that is 0, NaN or infinite."""
        return _own_scale(amax, fp8_max, self.power_of_2)


@dataclass(frozen=True, repr=False)
class MXFP8Scaling(Recipe):
    """One power of two per 32 elements along the summed dimension, stored as e8m0.

    fp8_format: "e4m3" throughout, or "hybrid" (gradients in e5m2), as in TransformerEngine's MXFP8BlockScaling. This is
    MXFP8 of OCP Microscaling, with the exponent rounded up as TransformerEngine does. Each operand is quantized from
    the original for each matmul that reads it, never from FP8 of another orientation.
    """

    fp8_format: str = field(default="e4m3", metadata=FP8_FORMAT.field)

    def dtype(self, role: Role) -> torch.dtype:
        """Return the FP8 dtype of operands with this role."""
        return _dtype_in(self.fp8_format, role)


@dataclass(frozen=True, repr=False)
class StaticScaling(Recipe):
    """Tensorwise, with fixed scales: those that `fp8pass.calibrate` returns, or one number for a unit-scaled model.

    scales: {slot or name pattern: number or one-element tensor}, which multiply high precision to FP8. A slot's own
    name is stronger than patterns, of which the first that matches counts: `{"*.grad_output": 2.0, "*": 1.0}`. One
    number is for all slots. A matmul whose operands have no scale stays in high precision. No amax is computed: values
    out of range saturate, infinite ones too, also of gradients; NaN stays NaN. fp8_format: "hybrid" (gradients in e5m2)
    or "e4m3". Raises ValueError for scales that are not finite and positive.
    """

    scales: Any = field(metadata=SCALES.field)  # a dict {name: float}, whatever was given
    fp8_format: str = field(default="hybrid", kw_only=True, metadata=FP8_FORMAT.field)

    def __hash__(self) -> int:  # a dict has no hash
        return hash((self.high_precision, self.fast_accum, self.fp8_format, *sorted(self.scales.items())))

    def __repr__(self) -> str:
        """Return a text without the scales, of which there are many."""
        return f"{type(self).__name__}({{}})" if not self.scales else f"{type(self).__name__}({{...}})"

    def dtype(self, role: Role) -> torch.dtype:
        """Return the FP8 dtype of operands with this role."""
        return _dtype_in(self.fp8_format, role)

    @functools.cached_property
    def _patterns(self) -> list[tuple[str, float]]:
        return [(name, scale) for name, scale in self.scales.items() if self.is_pattern(name)]

    def scale_of(self, slot: str) -> float | None:
        """Return the scale of the slot with this name; None if it has none."""
        if slot in self.scales:
            return float(self.scales[slot])
        name = _NUMBER.sub("", slot)  # a module's second use in a graph has the pattern of the first
        return next((scale for pattern, scale in self._patterns if matches(name, pattern)), None)

    def has(self, slot: str) -> bool:
        """Return whether any instance may have a scale for this slot, whose name is relative to the compiled code."""
        return self.scale_of(slot) is not None or any(name.endswith(f".{slot}") for name in self.scales)

    @property
    def trains(self) -> bool:
        """True if gradients may have scales."""
        return any(self.is_pattern(name) or ".grad_output" in name for name in self.scales)

    @staticmethod
    def is_pattern(name: str) -> bool:
        """Return whether a key of `scales` is a name pattern, not the name of a slot."""
        return not _SLOT.fullmatch(name)


_SLOT = re.compile(r"[^*?\[]*\.(input|weight|grad_output)(_\d+)?(~\d+)?")
"""The name of a slot. Any other key is a pattern."""
_NUMBER = re.compile(r"(_\d+)?(~\d+)?$")


@dataclass(frozen=True, repr=False)
class Calibration(DelayedScaling):
    """The recipe that `fp8pass.calibrate` compiles with: amaxes are recorded, and nothing is quantized.

    gradients: True to record those of gradients too.
    """

    gradients: bool = field(default=False, metadata=FLAG.field)


@dataclass(frozen=True)
class ByModule(Checked):
    """Recipes by name pattern, as in `{"layers.*.attn.*": "rowwise", "*": "delayed"}`: the first that matches counts.

    rules: (pattern, recipe) in order; None for high precision, in which a matmul without a pattern stays too.
    """

    rules: tuple[tuple[str, Recipe | None], ...] = field(metadata=RULES.field)

    def of(self, fqn: str) -> tuple[Recipe | None, str]:
        """Return (recipe, "") for the matmul with this name; (None, reason) if it has no recipe."""
        for pattern, recipe in self.rules:
            if matches(fqn, pattern):
                return (
                    recipe,
                    f"{fqn!r} matches the pattern {pattern!r}, whose recipe is None" if recipe is None else "",
                )
        return None, f"{fqn!r} matches no pattern of recipe={{{', '.join(repr(p) for p, _ in self.rules)}}}"


def matches(fqn: str, pattern: str) -> bool:
    """Return whether a pattern matches a module, or a module that holds it: "layers.*.attn" for "layers.0.attn.q"."""
    return fnmatchcase(fqn, pattern) or fnmatchcase(fqn, f"{pattern}.*")


NAMED: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "dynamic": DynamicScaling,
    "rowwise": RowwiseScaling,
    "rowwise_gw_hp": lambda: RowwiseScaling(high_precision=("grad_weight",)),
    "blockwise": BlockwiseScaling,
    "mxfp8": MXFP8Scaling,
}


_registered: dict[type, str] = {}
"""The names of the classes that `register_recipe` was given."""
BUILT_IN = tuple(NAMED)
"""The names that users can't register."""
Made = TypeVar("Made", bound=Callable[[], Recipe])


def register_recipe(name: str) -> Callable[[Made], Made]:
    """Return a decorator that gives a recipe class a name, which is valid wherever the name of a recipe is.

    The class is a frozen dataclass that derives from `DynamicScaling` (a scale for each tensor, from its own amax),
    `RowwiseScaling` (a scale for each row) or `DelayedScaling` (a scale for each tensor, from a history). Each field
    has a default. Of three methods the class overrides those that it changes, in torch ops that work elementwise:

    - `dtype(role) -> torch.dtype`: the FP8 dtype of operands with the role "input", "weight" or "grad_output".
    - `scale(amax, fp8_max) -> scale`: from the tensor's own amax, f32[...] for tensors or rows, whose shape the result
      has. Under `DelayedScaling`, for a tensor without history. `fp8_max` is a number or a tensor that broadcasts.
    - `next_scale(amax_history, old_scale, fp8_max) -> scale`: only of `DelayedScaling`, for T tensors at once. The
      arguments are f32[H, T], with the newest amaxes in row 0, f32[T] and f32[T]; the result is f32[T].

    The methods do not see amaxes that are 0, NaN or infinite as such: their results are not used there, and the scale
    is 1, or the old one. Results are clamped to the normal numbers of float32. What they return NaN or 0 for keeps 1,
    or the old scale. A function without arguments that returns a recipe can be registered, too.

    Args:
        name: Letters, digits and "_", "-", ".". Registering the same class again replaces it.

    Returns:
        A decorator that returns what it decorates. It raises ValueError for anything but such a class, and for a
        class whose methods return wrong dtypes, shapes or scales.

    Raises:
        ValueError: If the name is not valid, or is taken.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name.lower() in (*BUILT_IN, "static", "none"):
        raise ValueError(
            f"register_recipe({name!r}): a name of letters and digits, and none of {', '.join(BUILT_IN)}, static, none"
        )

    def register(made: Made) -> Made:
        before = NAMED.get(name)
        if before is not None and _place(before) != _place(made):
            raise ValueError(f"register_recipe({name!r}): the name is taken, by {'.'.join(_place(before))}")
        try:
            recipe = made()
        except TypeError as error:
            raise ValueError(f"register_recipe({name!r}): {_place(made)[1]}() raised {first_line(error)}") from error
        if not isinstance(recipe, Recipe):
            raise ValueError(f"register_recipe({name!r}): {made!r} makes {recipe!r}; derive from DynamicScaling")
        NAMED[name] = made
        if isinstance(made, type):
            _registered[made] = name
        return made

    return register


def _place(made: Any) -> tuple[str, str]:
    return made.__module__, made.__qualname__


def _check_custom(recipe: Recipe) -> None:
    """Raise ValueError unless the methods of a user's class return what `register_recipe` says."""
    name = type(recipe).__name__
    if not isinstance(recipe, (DynamicScaling, RowwiseScaling, DelayedScaling)):
        raise ValueError(f"{name}: a recipe class derives from DynamicScaling, RowwiseScaling or DelayedScaling")
    for role in ("input", "weight", "grad_output"):
        dtype = recipe.dtype(role)
        valid = FP8_DTYPES if role == "grad_output" else (E4M3,)
        if dtype not in valid:
            raise ValueError(f"{name}.dtype({role!r}) returned {dtype}: return {' or '.join(map(str, valid))}")
    limit = scaling.fp8_max(E4M3)
    _check_formula(f"{name}.scale(amax, fp8_max)", lambda: recipe.scale(_EXAMPLE, limit))
    if isinstance(recipe, DelayedScaling):
        history, limits = _EXAMPLE.expand(recipe.amax_history_len, -1), torch.full_like(_EXAMPLE, limit)
        what = f"{name}.next_scale(amax_history, old_scale, fp8_max)"
        _check_formula(what, lambda: recipe.next_scale(history, _EXAMPLE, limits))


def scale_of(
    recipe: DynamicScaling | RowwiseScaling | BlockwiseScaling | DelayedScaling, amax: Tensor, fp8_max: Tensor | float
) -> Tensor:
    """Return a recipe's scales for amaxes f32[...] of tensors, rows or blocks themselves, of the same shape.

    1 where the amax is 0, NaN or infinite. Raises Fp8Error if a user's method raises.
    """
    if not recipe.is_custom:
        return recipe.scale(amax, fp8_max)
    name = f"{type(recipe).__name__}.scale"
    return scaling.scale_by(lambda a: recipe.scale(a, fp8_max), amax, 1.0, name)


def next_scale_of(recipe: DelayedScaling) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function (history f32[H, T], scale f32[T], fp8_max f32[T]) -> f32[T] of a recipe's next scales.

    A tensor keeps its scale where its history holds no positive amax, or a NaN or inf. The function raises Fp8Error if
    a user's function raises.
    """
    if type(recipe).next_scale is DelayedScaling.next_scale:
        return recipe.next_scale

    def next_scale(history: Tensor, old: Tensor, fp8_max: Tensor) -> Tensor:
        amax = history.amax(0)
        # a user's method may divide by the old scale: a tensor that has none gets the one of its own amax
        before = torch.where(old == 0, scale_of(recipe, amax, fp8_max), old)
        name = f"{type(recipe).__name__}.next_scale"
        return scaling.scale_by(lambda _: recipe.next_scale(history, before, fp8_max), amax, old, name)

    return next_scale


@dataclass(frozen=True)
class Disabled:
    """No recipe, for code that is called within `fp8pass.enabled(False)`. plan: the recipe outside of it."""

    plan: Any

    def of(self, fqn: str) -> tuple[None, str]:
        """Return (None, reason) for every matmul."""
        return None, "it runs within fp8pass.enabled(False)"


Plan = Recipe | ByModule | Disabled | None
"""The type that `Config.recipe` resolves to, at one step of the training."""


def resolve(recipe: Any, what: str = "recipe") -> Plan | Schedule:
    """Return the recipe for a name, an object, a dict of name patterns, or None. Raises ValueError for anything else.

    what: the name of the option, for errors.
    """
    if recipe is None or (isinstance(recipe, (Recipe, ByModule, Disabled, Schedule)) and type(recipe) is not Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        for pattern in recipe:
            if not isinstance(pattern, str):
                raise ValueError(f"recipe={{{pattern!r}: ...}}: keys are module name patterns, like 'layers.*.attn'")
        if not recipe:
            raise ValueError("recipe={}: needs a name pattern, such as {'*': 'delayed'}; other names stay as they are")
        return ByModule(tuple(recipe.items()))
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise ValueError(f"recipe={recipe.__name__} is a class; write {recipe.__name__}(...)")
    if recipe == "static":
        raise ValueError(
            "the static recipe needs scales: StaticScaling(scales), with scales = fp8pass.calibrate(model, batches); "
            "or StaticScaling(1.0) for a unit-scaled model"
        )
    choose(what, recipe, tuple(NAMED))
    return NAMED[recipe]()


STEP = whole(0, "a schedule's keys are numbers of steps, whole and 0 or more")


class Schedule:
    """Recipes by step: `Schedule({0: None, 1000: "delayed", 9000: {"head": None, "*": "delayed"}})`.

    A value holds from its step on, and may be anything that `recipe=` takes. Each compiled graph of an instance counts
    the training steps in which it runs, and the counts are saved with its state. Delayed scaling keeps its state during
    steps that do not use it. Raises ValueError for a schedule that does not begin at step 0, or is nested.
    """

    def __init__(self, phases: Mapping[int, Any]) -> None:
        if not isinstance(phases, Mapping):
            raise ValueError(f"Schedule({phases!r}): a dict {{first step: recipe}}, like {{0: None, 100: 'delayed'}}")
        steps = {STEP.take("step", plain(step)): recipe for step, recipe in phases.items()}
        resolved = [(step, resolve(recipe)) for step, recipe in sorted(steps.items())]
        if not resolved or resolved[0][0] != 0:
            raise ValueError(f"a schedule must begin at step 0, and this one has the steps {sorted(phases)}")
        if any(isinstance(plan, Schedule) for _, plan in resolved):
            raise ValueError("a schedule within a schedule: write all steps in one")
        self.phases: tuple[tuple[int, Plan], ...] = tuple(resolved)  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.phases == other.phases

    def __hash__(self) -> int:
        return hash(self.phases)

    def __repr__(self) -> str:
        return f"Schedule({dict(self.phases)!r})"

    def begin_of(self, step: int) -> int:
        """Return the step at which the phase of a step, counted from 0, begins."""
        return max(begin for begin, _ in self.phases if begin <= step)

    def at(self, step: int) -> Plan:
        """Return the recipe of a step, counted from 0."""
        return dict(self.phases)[self.begin_of(step)]
