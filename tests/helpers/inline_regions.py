"""Models with marked regions, for the files test_inline_regions.py of several tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

marked: Any = torch.compiler.nested_compile_region


def unmarked(function: Any) -> Any:
    return function


class Scores(nn.Module):
    """A matmul without parameters: its slots are named after the module alone."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.t()).tanh() @ x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.up = Scores(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.scores(x))
        return y


class Model(nn.Module):
    """Two layers, each of which `step` calls."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.step(layer, x)
        return x


def of_a_function(mark: Any) -> nn.Module:
    return Model(mark(lambda layer, x: layer(x)))
