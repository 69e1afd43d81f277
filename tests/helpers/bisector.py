"""Models with a fault, for the files test_bisector.py of several tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.inspect.bisector import Bisection
from tests.helpers.harness import compiled
from tests.helpers.models import make


class Tied(nn.Module):
    """One layer, called twice on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(torch.tanh(self.fc(x)) * self.factor) / self.factor
        return y


class Once(Tied):
    """One layer, called once, so that there is little to compile."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x * self.factor) / self.factor
        return y


def outputs(model: nn.Module, run: Callable[..., Tensor], since: int = 2, large: float = 1e6) -> Tensor:
    """Return the outputs of four training steps; from step `since` on the factor is `large`."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(4):
        model.factor.fill_(large if i >= since else 1.0)
        y = run(torch.randn(16, 32, generator=generator))
        y.square().mean().backward()
        found.append(y.detach())
    return torch.stack(found)


def faulty(kind: Callable[[], nn.Module], lowering: str = "eager", max_runs: int = 100, **config: Any) -> Bisection:
    """Bisect the training of a model, which each run makes anew and compares with high precision."""

    def step() -> Tensor:
        model = make(kind)
        return outputs(model, compiled(model, lowering=lowering, **config))

    model = make(kind)
    wanted = outputs(model, model)
    return fp8pass.bisect(step, lambda y: float((y - wanted).abs().max()) < 0.1, max_runs=max_runs)


def for_cli() -> Tensor:
    model = make(Once)
    return outputs(model, compiled(model))


def never(y: Tensor) -> bool:
    return False
