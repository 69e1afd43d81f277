"""Ways to run a module with `ScaleState`, for the files test_scale_state.py of several tiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass import ScaleState, in_qdq, out_qdq
from tests.helpers.harness import annotated, compiled


def eager(module: nn.Module) -> Any:
    return module


def ours(module: nn.Module) -> Any:
    return compiled(module, recipe=None)


def reference(module: nn.Module) -> Any:
    return annotated(module, recipe=None)


def inductor(module: nn.Module) -> Any:
    return compiled(module, recipe=None, lowering="inductor")


def delayed(module: nn.Module) -> Any:
    return compiled(module, recipe="delayed")


def other_backend(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def other_inductor(module: nn.Module) -> Any:
    return torch.compile(module, backend="inductor")


HOW = (eager, ours, inductor, delayed, reference, other_backend, other_inductor)


VARIANTS = {f: pytest.param(f, marks=pytest.mark.variant) for f in (inductor, other_inductor)}


EVERY_DAY = [VARIANTS.get(f, f) for f in HOW]


VARIANTS[delayed] = pytest.param(delayed, marks=pytest.mark.variant)
"""Together with a recipe; a variant in tests that are not about a step's numbers, which run `ours` without one."""


class Product(nn.Module):
    """`x @ weight`, [16, 16] by [16, 16]; x, weight and the output's gradient are quantized by states."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))
        self.x, self.w, self.g = (ScaleState(**arguments) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return out_qdq(in_qdq(x, self.x) @ in_qdq(self.weight, self.w), self.g)
