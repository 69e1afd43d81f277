"""Sequences of amaxes that state machines are run over."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SEQUENCES: dict[str, list[float]] = {
    "grows and shrinks": [1.0, 3.0, 0.5, 0.25, 7.0, 0.125, 0.125, 0.125, 0.125],
    "zeros age the history": [2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 3.0],
    "zeros first": [0.0, 0.0, 5.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "tiny": [1e-38, 2e-38, 1e-38, 1.0, 1e-38, 1e-38, 1e-38, 1e-38, 1e-38],
    "subnormal": [1e-40, 2e-42, 1e-45, 1e-40, 1e-40, 1.0, 1e-40, 1e-40, 1e-40, 1e-40],
    "nan": [1.0, math.nan, 2.0, 2.0, 2.0, 2.0, math.nan, math.nan, 4.0],
    "inf": [1.0, math.inf, 2.0, 2.0, 2.0, 2.0, math.inf, math.inf, 4.0],
    "nan and inf first": [math.nan, math.inf, 0.0, 3.0, 1.0, math.inf, 0.0, 0.0, 1.0],
}


def data(amax: float) -> Tensor:
    x = torch.zeros(16, 16)
    x[3, 5] = amax
    return x
