"""Recipes: how tensors are scaled, in which formats they are stored, which of a layer's three matmuls run in FP8."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fp8pass.scaling import E4M3, E5M2

Role = Literal["input", "weight", "grad_output"]
Kind = Literal["output", "grad_input", "grad_weight"]
"""The matmuls of a layer: its output, and the gradients of its two operands."""
FACTORS: dict[Kind, tuple[Role, Role]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("input", "grad_output"),
}
KINDS: tuple[Kind, ...] = tuple(FACTORS)


def choose(what: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ValueError, listing the valid names and the nearest one, unless `value` is one of `valid`."""
    if value in valid:
        return
    near = difflib.get_close_matches(str(value), valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(map(repr, valid))}{hint}")


@dataclass(frozen=True, repr=False)
class Recipe:
    """Common to all recipes: which of the matmuls "output", "grad_input" and "grad_weight" are done how.

    high_precision: those that stay as they are. fast_accum: those that use fast accumulation (`use_fast_accum`), with
    which Hopper's tensor cores add up in less than float32. Either takes one name or several. Raises ValueError for a
    name that is none of the three.
    """

    high_precision: tuple[str, ...] = field(default=(), kw_only=True)
    fast_accum: tuple[str, ...] = field(default=("output",), kw_only=True)

    def __post_init__(self) -> None:
        for name in ("high_precision", "fast_accum"):
            value = getattr(self, name)
            kinds = (value,) if isinstance(value, str) else tuple(value)
            for kind in kinds:
                choose(f"matmul in {name}", kind, get_args(Kind))
            object.__setattr__(self, name, kinds)

    def __repr__(self) -> str:
        """What differs from the defaults. Valid Python even where that is a function: graphs are printed with it."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        shown = (f"{name}={getattr(v, '__qualname__', v)!r}" for name, v in values)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def name(self) -> str:
        """ "delayed", "dynamic", ..."""
        return type(self).__name__.removesuffix("Scaling").lower()

    def dtype(self, role: Role) -> torch.dtype:
        """The FP8 type that operands of this role are stored in: e4m3, where the recipe has no choice."""
        return E4M3


@dataclass(frozen=True, repr=False)
class TensorwiseRecipe(Recipe):
    """One scale per tensor, the same in all matmuls. `fp8_format`: "hybrid" (gradients in e5m2) or "e4m3"."""

    fp8_format: str = "hybrid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8_format == "e5m2":
            raise ValueError(
                "fp8_format='e5m2': no GPU multiplies e5m2 by e5m2, and 2 bits of mantissa are too few for weights; "
                "choose 'hybrid' (e5m2 for gradients only) or 'e4m3'"
            )
        choose("fp8_format", self.fp8_format, ("hybrid", "e4m3"))

    def dtype(self, role: Role) -> torch.dtype:
        """The FP8 type that operands of this role are stored in."""
        return E5M2 if role == "grad_output" and self.fp8_format == "hybrid" else E4M3


@dataclass(frozen=True, repr=False)
class DynamicScaling(TensorwiseRecipe):
    """Tensorwise, the scale from this very tensor: `scale = fp8_max / amax`, 1 for a tensor of zeros.

    `power_of_2` rounds the scale down to a power of two, so that scaling itself rounds nothing.
    """

    power_of_2: bool = False


@dataclass(frozen=True, repr=False)
class DelayedScaling(TensorwiseRecipe):
    """Tensorwise, the scale from the amaxes of earlier steps: `scale = fp8_max / amax / 2**margin`.

    amax_history_len: steps that are remembered (H). amax_compute_algo: "max", "most_recent", or a callable
    f32[H] -> f32[] written in torch. on_nonfinite: what a NaN or inf leaves in the history: "evict" records 0, "skip"
    records nothing and does not roll, "freeze" records it, which keeps the scale until it leaves the window.
    Raises ValueError for a history of no steps, a negative margin, and names that do not exist.
    """

    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    margin: int = 0
    on_nonfinite: str = "evict"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len={self.amax_history_len}: at least one step must be remembered")
        if self.margin < 0:
            raise ValueError(
                f"margin={self.margin}: a negative one makes the largest values overflow; 0 leaves no room"
            )
        if not callable(self.amax_compute_algo):
            choose("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        choose("on_nonfinite", self.on_nonfinite, ("evict", "skip", "freeze"))


@dataclass(frozen=True, repr=False)
class RowwiseScaling(Recipe):
    """One scale per row of A and per column of B, from this very tensor; e4m3 throughout.

    Each operand is quantized anew for each matmul that it is in, along the dimension that this one contracts.
    `power_of_2` rounds scales down to powers of two.
    """

    power_of_2: bool = True


@dataclass(frozen=True, repr=False)
class BlockwiseScaling(Recipe):
    """One scale per block, from this very tensor: 1x128 of inputs and gradients, 128x128 of weights; e4m3 throughout.

    The 128 elements lie along the dimension that the matmul contracts. `power_of_2` rounds scales down to powers of 2.
    """

    power_of_2: bool = True


@dataclass(frozen=True, repr=False)
class MXFP8Scaling(Recipe):
    """One power of two per 32 elements along the contracted dimension, stored as e8m0; e4m3 throughout.

    OCP Microscaling's MXFP8, the exponent rounded up as TransformerEngine does. Each operand is quantized from the
    original for each matmul that it is in, never from FP8 of another orientation.
    """


@dataclass(frozen=True, repr=False)
class StaticScaling(Recipe):
    """Tensorwise, scales fixed in advance: those that `fp8pass.calibrate` returns. e4m3; for inference.

    scales: {slot: number or one-element tensor}, which multiply into FP8. A matmul for whose operands there is none
    stays in high precision. Nothing looks at amaxes: what is out of range saturates, infinite values too; NaN stays.
    Raises ValueError for scales that are not finite and positive.
    """

    scales: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scales", {name: float(scale) for name, scale in self.scales.items()})
        for name, scale in self.scales.items():
            if not 0 < scale < float("inf"):
                raise ValueError(
                    f"scale {scale} of {name!r}: it must be finite and above 0; calibrate on data that reaches it"
                )

    def __hash__(self) -> int:
        return hash((self.high_precision, self.fast_accum, *sorted(self.scales.items())))

    def __repr__(self) -> str:
        """Without the scales, of which there are many."""
        return f"{type(self).__name__}({{}})" if not self.scales else f"{type(self).__name__}({{...}})"

    def has(self, slot: str) -> bool:
        """Whether some instance may have a scale of this name, which is relative to the code that is compiled."""
        return any(name == slot or name.endswith(f".{slot}") for name in self.scales)


@dataclass(frozen=True, repr=False)
class Calibration(DelayedScaling):
    """What `fp8pass.calibrate` compiles with: amaxes are recorded, and nothing is quantized."""


@dataclass(frozen=True)
class ByModule:
    """Recipes by name pattern, as in `{"layers.*.attn.*": "rowwise", "*": "delayed"}`: the first that matches counts.

    rules: (pattern, recipe) in order; None for high precision. What no pattern matches stays in high precision too.
    """

    rules: tuple[tuple[str, Recipe | None], ...]

    def of(self, fqn: str) -> tuple[Recipe | None, str]:
        """The recipe of the matmul of this name, and if that is None, why."""
        for pattern, recipe in self.rules:
            if matches(fqn, pattern):
                return (
                    recipe,
                    f"{fqn!r} matches the pattern {pattern!r}, whose recipe is None" if recipe is None else "",
                )
        return None, f"{fqn!r} matches no pattern of recipe={{{', '.join(repr(p) for p, _ in self.rules)}}}"


def matches(fqn: str, pattern: str) -> bool:
    """Whether a module, or one that it is in, has a name of this pattern: "layers.*.attn" covers "layers.0.attn.q"."""
    return fnmatchcase(fqn, pattern) or fnmatchcase(fqn, f"{pattern}.*")


NAMED: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "dynamic": DynamicScaling,
    "rowwise": RowwiseScaling,
    "rowwise_gw_hp": lambda: RowwiseScaling(high_precision=("grad_weight",)),
    "blockwise": BlockwiseScaling,
    "mxfp8": MXFP8Scaling,
}

Plan = Recipe | ByModule | None
"""What `Config.recipe` is resolved to, at one step of the training."""


def resolve(recipe: Any) -> Plan | Schedule:
    """The recipe for a name, an object, a dict of name patterns, or None. Raises ValueError for what does not exist."""
    if recipe is None or (isinstance(recipe, (Recipe, ByModule, Schedule)) and type(recipe) is not Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        rules = tuple((str(pattern), resolve(value)) for pattern, value in recipe.items())
        for pattern, value in rules:
            if isinstance(value, (ByModule, Schedule)):
                raise ValueError(f"the recipe of {pattern!r} must be one recipe, not {type(value).__name__}")
        return ByModule(rules)  # type: ignore[arg-type]
    if recipe == "static":
        raise ValueError(
            "the static recipe needs scales: StaticScaling(scales), with scales = fp8pass.calibrate(model, batches)"
        )
    choose("recipe", recipe, tuple(NAMED))
    return NAMED[str(recipe)]()


class Schedule:
    """Recipes by step: `Schedule({0: None, 1000: "delayed", 9000: {"head": None, "*": "delayed"}})`.

    From each step on, whatever `recipe=` may be. Each compiled graph of an instance counts the training steps in which
    it runs; they are saved with its state. Delayed scaling keeps its state through the steps in which it is not used.
    Raises ValueError for a schedule that does not begin at step 0, or is nested.
    """

    def __init__(self, phases: Mapping[int, Any]) -> None:
        resolved = [(int(step), resolve(recipe)) for step, recipe in sorted(phases.items())]
        if not resolved or resolved[0][0] != 0:
            raise ValueError(f"a schedule says what to do from step 0 on, not only at {sorted(phases)}")
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
        """The step with which the phase of a step, counted from 0, begins."""
        return max(begin for begin, _ in self.phases if begin <= step)

    def at(self, step: int) -> Plan:
        """The recipe of a step, counted from 0."""
        return dict(self.phases)[self.begin_of(step)]
