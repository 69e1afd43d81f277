"""Decorated training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.recipes import DelayedScaling
from fp8pass.weights.weight_cache import weights_of
from fp8pass.weights.weight_copy import WeightCopy

RECIPE = DelayedScaling(amax_history_len=4)
"""The history is short, so that scales of weights go up and down."""


Decorate = Callable[..., Callable[..., Any]]


def batch(seed: int, *shape: int) -> Tensor:
    x = torch.randn(shape or (16, 32), generator=torch.Generator().manual_seed(seed))
    return x * (1 + 0.5 * (seed % 3))


def decorate(function: Callable[..., Any], **config: Any) -> Any:
    return fp8pass.train_step(function, **{"recipe": RECIPE, "lowering": "eager", **config})


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, **config: Any) -> Any:
    """Return a training step on the mean of the model's squares."""

    @fp8pass.train_step(**{"recipe": "delayed", "min_speedup": 0, **config})
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def weights(*models: nn.Module) -> list[WeightCopy]:
    return weights_of([p for model in models for p in model.parameters()])


def tensors(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield copies of all tensors and numbers in nested containers, by name."""
    if isinstance(x, (Tensor, int, float)):
        yield name, torch.as_tensor(x).detach().clone()
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from tensors(value, f"{name}.{key}")
    elif isinstance(x, (list, tuple)):
        yield from tensors(dict(enumerate(x)), name)


def everything(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of weights, moments and FP8 state."""
    states = [o.state_dict()["state"] for o in optimizers]
    return dict(tensors([model.state_dict(), states, fp8pass.state(model).state_dict()]))


def changed_again(decorated: Decorate) -> tuple[list[Tensor], dict[str, Tensor], nn.Module]:
    """Train a model with two weights, each of which the graph of the update changes twice.

    Return the losses, `everything` after them, and the model.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @decorated
    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x * 0.5)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for w in (model[0].weight, model[1].weight):
                w.div_(w.norm(dim=1, keepdim=True).clamp(min=0.5))
        optimizer.zero_grad()
        return loss.detach()

    return [step(batch(i, 16, 64)) for i in range(4)], everything(model, optimizer), model
