"""Data and annotated graphs, for the files test_static.py of several tiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.compiler.dynamo_passes import annotated as annotate
from fp8pass.options.config import Config
from fp8pass.recipes import StaticScaling


def data(n: int = 3, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape or (2, 8, 32), generator=generator) for _ in range(n)]


def graph_of(model: nn.Module, x: Tensor, scales: Any) -> Any:
    made: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        made.append(annotate(module, Config(recipe=StaticScaling(scales))))
        return module.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(x)
    return made[0]
