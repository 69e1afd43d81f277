"""Copies of weights that are written after an optimizer which runs eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fp8pass
from fp8pass.base._torch import compilations
from tests.helpers.train_step import batch, everything, plain_step, weights
from tests.passes.update.test_outline_strands import model_of


def trained(cache: str) -> tuple[dict[str, Tensor], Any]:
    """Train with a fused AdamW; return all that has changed, and the step."""
    torch._dynamo.reset()
    model = model_of(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = plain_step(model, optimizer, weight_cache=cache)
    for i in range(4):
        step(batch(i, 16, 32))
    assert all((w.requantized, w.expected) == (2, 2) for w in weights(model))
    return everything(model, optimizer), step


@pytest.mark.inductor
def test_bits_and_what_dynamo_looks_at() -> None:
    """A step that reads copies has the bits of one that quantizes weights in its forward.

    Dynamo compiles no code of the optimizer: it would read all its tensors before it finds that it can't trace it.
    """
    earlier = {id(c): c for c in compilations()}
    with_copies, step = trained("fp8+transpose")
    files = [c.co_filename or "" for c in compilations() if id(c) not in earlier]
    assert files and not [name for name in files if "optim" in name]
    without, _ = trained("off")
    assert [name for name in without if not torch.equal(with_copies[name], without[name])] == []
    assert "quantized again" not in str(step.report)


def trained_with_changes(cache: str) -> dict[str, Tensor]:
    """Train while what is updated changes between steps; return all that has changed."""
    torch._dynamo.reset()
    model = model_of(2)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    @fp8pass.train_step(recipe="delayed", min_speedup=0, weight_cache=cache, lowering="eager")
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(14):
        step(batch(i, 16, 32))
        if i == 2:
            optimizer = torch.optim.AdamW(parameters[:3], lr=1e-2, fused=True)
        elif i == 5:
            optimizer.add_param_group({"params": parameters[3:]})
        elif i == 8:
            parameters[0].requires_grad_(False)
        elif i == 11:
            with torch.no_grad():
                parameters[0].requires_grad_().mul_(2)
                parameters[1].data = parameters[1] * 2
    return everything(model, optimizer)


@pytest.mark.compiled
def test_what_is_updated_changes() -> None:
    """A new optimizer, a new group, a weight that is frozen and no more, and edited weights are noticed."""
    with_copies, without = trained_with_changes("fp8+transpose"), trained_with_changes("off")
    assert [name for name in without if not torch.equal(with_copies[name], without[name])] == []
