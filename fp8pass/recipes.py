"""Recipes: when scales are computed, and in which formats the operands are stored."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from fp8pass.scaling import E4M3, E5M2

Role = Literal["input", "weight", "grad_output"]


def choose(what: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ValueError, listing the valid names and the nearest one, unless `value` is one of `valid`."""
    if value in valid:
        return
    near = difflib.get_close_matches(str(value), valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(map(repr, valid))}{hint}")


@dataclass(frozen=True, repr=False)
class Recipe:
    """Common to all recipes. `fp8_format`: "hybrid" (e4m3 forward, e5m2 gradients) or "e4m3" throughout."""

    fp8_format: str = "hybrid"

    def __repr__(self) -> str:
        """What differs from the defaults. Valid Python even where that is a function: graphs are printed with it."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        shown = (f"{name}={getattr(v, '__qualname__', v)!r}" for name, v in values)
        return f"{type(self).__name__}({', '.join(shown)})"

    def __post_init__(self) -> None:
        choose("fp8_format", self.fp8_format, ("hybrid", "e4m3"))

    @property
    def name(self) -> str:
        """ "delayed", "dynamic", ..."""
        return type(self).__name__.removesuffix("Scaling").lower()

    def dtype(self, role: Role) -> torch.dtype:
        """The FP8 type that operands of this role are stored in."""
        return E5M2 if role == "grad_output" and self.fp8_format == "hybrid" else E4M3


@dataclass(frozen=True, repr=False)
class DynamicScaling(Recipe):
    """Tensorwise, the scale from this very tensor: `scale = fp8_max / amax`, 1 for a tensor of zeros.

    `power_of_2` rounds the scale down to a power of two, so that scaling itself rounds nothing.
    """

    power_of_2: bool = False


@dataclass(frozen=True, repr=False)
class DelayedScaling(Recipe):
    """Tensorwise, the scale from the amaxes of earlier steps: `scale = fp8_max / amax / 2**margin`.

    amax_history_len: steps that are remembered (H). amax_compute_algo: "max", "most_recent", or a callable
    f32[H] -> f32[] written in torch. on_nonfinite: what a NaN or inf leaves in the history: "evict" records 0, "skip"
    records nothing and does not roll, "freeze" records it, which keeps the scale until it leaves the window.
    """

    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    margin: int = 0
    on_nonfinite: str = "evict"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len={self.amax_history_len}: at least one step must be remembered")
        if not callable(self.amax_compute_algo):
            choose("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        choose("on_nonfinite", self.on_nonfinite, ("evict", "skip", "freeze"))


NAMED: dict[str, Callable[[], Recipe]] = {"delayed": DelayedScaling, "dynamic": DynamicScaling}


def resolve(recipe: str | Recipe | None) -> Recipe | None:
    """The recipe object for a name, an object or None. Raises ValueError for a name that does not exist."""
    if recipe is None or isinstance(recipe, (DelayedScaling, DynamicScaling)):
        return recipe
    choose("recipe", recipe, tuple(NAMED))
    return NAMED[str(recipe)]()
