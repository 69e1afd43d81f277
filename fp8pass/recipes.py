"""Recipes: how tensors are scaled, in which formats they are stored, which of a layer's three matmuls run in FP8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from fp8pass.fields import FLAG, Checked, Rule, called_with, choose, names, plain, several, whole, wrong
from fp8pass.scaling import E4M3, E5M2

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
    found: tuple[str, ...] = several(f"one or several of {', '.join(map(repr, KINDS))}").take(name, value)
    for kind in found:
        choose(f"matmul in {name}", kind, KINDS)
    return found


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


def _scales(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a dict {slot: scale}, as fp8pass.calibrate(model, batches) returns it")
    return {slot: _scale(slot, scale) for slot, scale in value.items()}


def _scale(slot: Any, scale: Any) -> float:
    if not isinstance(slot, str):
        raise ValueError(f"slot {slot!r} of a scale: it must be a name, 'layers.0.up.input' say")
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
    found = tuple((pattern, resolve(recipe)) for pattern, recipe in value)
    for pattern, recipe in found:
        if isinstance(recipe, (ByModule, Schedule)):
            raise ValueError(f"the recipe of {pattern!r} must be one recipe, not {type(recipe).__name__}")
    return found  # type: ignore[return-value]


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

    def __repr__(self) -> str:
        """Return a text with the fields that differ from their defaults.

        It is valid Python even if a field is a function, because fx prints it as part of a graph's code.
        """
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        shown = (f"{name}={getattr(v, '__qualname__', v)!r}" for name, v in values)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def name(self) -> str:
        """The name of the recipe: "delayed", "dynamic", ..."""
        return type(self).__name__.removesuffix("Scaling").lower()

    def dtype(self, role: Role) -> torch.dtype:
        """Return the FP8 dtype of operands with this role: e4m3, for recipes without a choice of formats."""
        return E4M3


@dataclass(frozen=True, repr=False)
class TensorwiseRecipe(Recipe):
    """One scale per tensor, the same in all matmuls. `fp8_format`: "hybrid" (gradients in e5m2) or "e4m3"."""

    fp8_format: str = field(default="hybrid", metadata=FP8_FORMAT.field)

    def dtype(self, role: Role) -> torch.dtype:
        """Return the FP8 dtype of operands with this role."""
        return E5M2 if role == "grad_output" and self.fp8_format == "hybrid" else E4M3


@dataclass(frozen=True, repr=False)
class DynamicScaling(TensorwiseRecipe):
    """Tensorwise, with the scale from the tensor itself: `scale = fp8_max / amax`, 1 for a tensor of zeros.

    `power_of_2` rounds the scale down to a power of two, so that scaling itself rounds nothing.
    """

    power_of_2: bool = field(default=False, metadata=FLAG.field)


@dataclass(frozen=True, repr=False)
class DelayedScaling(TensorwiseRecipe):
    """Tensorwise, with the scale from the amaxes of earlier steps: `scale = fp8_max / amax / 2**margin`.

    amax_history_len: number of steps in the history (H). amax_compute_algo: "max", "most_recent", or a callable
    f32[H] -> f32[] written in torch. on_nonfinite: how a NaN or inf is recorded in the history: "evict" records 0,
    "skip" records nothing and does not roll, "freeze" records it, so that the scale stays until it leaves the history.
    Raises ValueError for a history of no steps, a negative margin, and unknown names.
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


@dataclass(frozen=True, repr=False)
class RowwiseScaling(Recipe):
    """One scale per row of A and per column of B, from the tensor itself; e4m3 throughout.

    Each operand is quantized anew for each matmul that reads it, along the dimension that this matmul sums over.
    `power_of_2` rounds scales down to powers of two.
    """

    power_of_2: bool = field(default=True, metadata=FLAG.field)  # as in torchao's recipe "rowwise"


@dataclass(frozen=True, repr=False)
class BlockwiseScaling(Recipe):
    """One scale per block, from the tensor itself: 1x128 of inputs and gradients, 128x128 of weights; e4m3 throughout.

    The 128 elements lie along the dimension that the matmul sums over. `power_of_2` rounds scales down to powers of 2.
    """

    power_of_2: bool = field(default=True, metadata=FLAG.field)


@dataclass(frozen=True, repr=False)
class MXFP8Scaling(Recipe):
    """One power of two per 32 elements along the summed dimension, stored as e8m0; e4m3 throughout.

    This is MXFP8 of OCP Microscaling, with the exponent rounded up as TransformerEngine does. Each operand is quantized
    from the original for each matmul that reads it, never from FP8 of another orientation.
    """


@dataclass(frozen=True, repr=False)
class StaticScaling(Recipe):
    """Tensorwise, with fixed scales, which `fp8pass.calibrate` returns; e4m3; for inference.

    scales: {slot: number or one-element tensor}, which multiply high precision to FP8. A matmul whose operands have no
    scale stays in high precision. No amax is computed: values out of range saturate, infinite ones too; NaN stays NaN.
    Raises ValueError for scales that are not finite and positive.
    """

    scales: Mapping[str, Any] = field(metadata=SCALES.field)

    def __hash__(self) -> int:
        return hash((self.high_precision, self.fast_accum, *sorted(self.scales.items())))  # a dict has no hash

    def __repr__(self) -> str:
        """Return a text without the scales, of which there are many."""
        return f"{type(self).__name__}({{}})" if not self.scales else f"{type(self).__name__}({{...}})"

    def has(self, slot: str) -> bool:
        """Return whether any instance may have a scale for this slot, whose name is relative to the compiled code."""
        return any(name == slot or name.endswith(f".{slot}") for name in self.scales)


@dataclass(frozen=True, repr=False)
class Calibration(DelayedScaling):
    """The recipe that `fp8pass.calibrate` compiles with: amaxes are recorded, and nothing is quantized."""


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
                raise ValueError(f"recipe={{{pattern!r}: ...}}: keys are patterns of module names, 'layers.*.attn' say")
        if not recipe:
            raise ValueError("recipe={}: needs a name pattern, {'*': 'delayed'} say; unmatched names stay as they are")
        return ByModule(tuple(recipe.items()))
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise ValueError(f"recipe={recipe.__name__} is a class; write {recipe.__name__}(...)")
    if recipe == "static":
        raise ValueError(
            "the static recipe needs scales: StaticScaling(scales), with scales = fp8pass.calibrate(model, batches)"
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
            raise ValueError(f"Schedule({phases!r}): a dict {{first step: recipe}}, {{0: None, 100: 'delayed'}} say")
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
