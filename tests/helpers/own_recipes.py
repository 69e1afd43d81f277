"""Recipes as users write them, in a function or a class, and an oracle in plain Python of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8pass.recipes import DelayedScaling, DynamicScaling, RowwiseScaling, register_recipe
from tests.helpers import oracle


def halfway(amax: Tensor, old_scale: Tensor, fp8_max: Tensor, recipe: Any) -> Tensor:
    """Return the geometric mean of the old scale and that of the usual formula."""
    return old_scale.sqrt() * (fp8_max / 2.0**recipe.margin).sqrt() / amax.sqrt()  # fp8_max / amax may overflow


class Halfway(oracle.Slot):
    """`halfway` in Python."""

    def first(self, amax: float) -> float:
        # two equal scales, unless the usual formula overflows before the margin divides
        return self._mean(super().first(amax), amax) if 0 < amax < math.inf else 1.0

    def next(self, amax: float) -> float:
        if not 0 < amax < math.inf:
            return self.scale
        # in the first step, `amax` is that of the history, by whose scale the old one is replaced
        return self._mean(self.scale or super().first(amax), amax)

    def _mean(self, old: float, amax: float) -> float:
        return bounded(math.sqrt(old) * math.sqrt(oracle.MAX[self.fmt] / amax / 2.0**self.margin))


def bounded(scale: float) -> float:
    return min(max(scale, oracle.FLOAT32_TINY), oracle.FLOAT32_MAX)


@register_recipe("test-steady")
@dataclass(frozen=True)
class SteadyScaling(DelayedScaling):
    """The scale of the mean of the amaxes and 2; it changes only if that is more than twice the old one, or half."""

    amax_history_len: int = 3

    def scale(self, amax: Tensor, fp8_max: Tensor | float) -> Tensor:
        return fp8_max / (amax + 1)

    def next_scale(self, amax_history: Tensor, old_scale: Tensor, fp8_max: Tensor) -> Tensor:
        new = fp8_max / (amax_history.mean(0) + 2)
        return torch.where((new > 2 * old_scale) | (new < old_scale / 2), new, old_scale)


class Steady(oracle.Slot):
    """`SteadyScaling` in Python, but for quotients in float32, which may be just half of the old scale."""

    def first(self, amax: float) -> float:
        return float(oracle.MAX[self.fmt] / (torch.tensor(amax) + 1)) if 0 < amax < math.inf else 1.0

    def next(self, amax: float) -> float:
        if not 0 < amax < math.inf:
            return self.scale
        mean = torch.tensor(self.history).mean()  # whose sum may overflow
        old, new = self.scale or self.first(amax), float(oracle.MAX[self.fmt] / (mean + 2))
        if new == 0:  # of an infinite mean
            return self.scale if old / 2 > 0 else old
        return bounded(new if new > 2 * old or new < old / 2 else old)


@register_recipe("test-less")
@dataclass(frozen=True)
class LessScaling(DynamicScaling):
    """Two thirds of the usual scale."""

    def scale(self, amax: Tensor, fp8_max: Tensor | float) -> Tensor:
        return super().scale(amax, fp8_max) / 1.5


@register_recipe("test-rows")
@dataclass(frozen=True)
class LessRows(RowwiseScaling):
    """Two thirds of the usual scale of each row."""

    def scale(self, amax: Tensor, fp8_max: Tensor | float) -> Tensor:
        return super().scale(amax, fp8_max) / 1.5


@register_recipe("test-requantize")
@dataclass(frozen=True)
class TooLargeScaling(DelayedScaling):
    """Scales of four times the usual size, so that each step with a history saturates, and quantizes again."""

    on_saturation: str = "requantize"

    def next_scale(self, amax_history: Tensor, old_scale: Tensor, fp8_max: Tensor) -> Tensor:
        return 4 * fp8_max / amax_history[0]


@register_recipe("test-again")
def again() -> DelayedScaling:
    """Return delayed scaling with a second quantize where the first saturates."""
    return DelayedScaling(on_saturation="requantize")


_SHORT: Any = {"amax_history_len": 3, "margin": 1}
SLOTS: dict[str, tuple[DelayedScaling, Callable[[], oracle.Slot]]] = {
    "max": (DelayedScaling(**_SHORT), partial(oracle.Slot, "e4m3", 3, margin=1)),
    "most_recent": (
        DelayedScaling(amax_compute_algo="most_recent", on_nonfinite="freeze", **_SHORT),
        partial(oracle.Slot, "e4m3", 3, "most_recent", margin=1, on_nonfinite="freeze"),
    ),
    "a function": (
        DelayedScaling(scaling_factor_compute_algo=halfway, **_SHORT),
        partial(Halfway, "e4m3", 3, margin=1),
    ),
    "a function, freeze": (
        DelayedScaling(scaling_factor_compute_algo=halfway, on_nonfinite="freeze", **_SHORT),
        partial(Halfway, "e4m3", 3, margin=1, on_nonfinite="freeze"),
    ),
    "a class": (SteadyScaling(on_nonfinite="skip"), partial(Steady, "e4m3", 3, on_nonfinite="skip")),
}
"""Recipes with state, each with its oracle."""
