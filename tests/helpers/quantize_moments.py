"""The formulas of stored moments, for the files test_quantize_moments.py of two tiers."""

from __future__ import annotations

import math

from torch import Tensor

from tests.helpers.harness import E4M3, F16

BOTH = {"exp_avg": "first", "exp_avg_sq": "second"}
"""The kinds of AdamW's moments, by name."""


def stored(kind: str, x: Tensor, scale: float) -> Tensor:
    """Return the stored tensor for a moment, by the formula."""
    x = x.double()
    if kind == "first":
        return (x * scale).clamp(-448, 448).float().to(E4M3)
    return (x.sqrt() * scale).clamp(max=65504).float().to(F16)


def read(kind: str, x_q: Tensor, scale: float) -> Tensor:
    """Return the moment in float64 that a stored tensor stands for."""
    x = x_q.double() / scale
    return x if kind == "first" else x.square()


def power_of_2(target: float, amax: float) -> float:
    """Return the largest power of two whose product with amax is at most `target`; 1 for an amax of 0."""
    return min(2.0 ** math.floor(math.log2(target / amax)), 2.0**126) if amax else 1.0
