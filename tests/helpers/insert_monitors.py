"""Monitored training, for the files test_insert_monitors.py of several tiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.recipes import DelayedScaling, StaticScaling
from tests.helpers.harness import compiled
from tests.helpers.models import Parts, batches, make


def trained(monitor: Any, model: nn.Module | None = None, steps: int = 4, **options: Any) -> tuple[list[Tensor], Any]:
    """Train a model. Return losses and weights, and the stats if `monitor` is on."""
    torch.manual_seed(0)
    model = model or make(Parts)
    run = compiled(model, monitor=monitor, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i, x in enumerate(batches(steps, 16, 32)):
        loss = run((x * 30 if i == 2 else x).requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())], fp8pass.stats(model) if monitor else None


RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "dynamic": "dynamic",
    "rowwise": "rowwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
    "static": StaticScaling({f"{name}.{role}": 20.0 for name in ("up", "down") for role in ("input", "weight")}),
}


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(32, 32)
