"""Test `weight_amax="predicted"`: the FP8 copy that an update writes never saturates, and has the scale of a bound."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.weights.weight_bounds import bound_of, ratio_of_moments
from fp8pass.weights.weight_copy import DelayedWeight
from tests.helpers.train_step import RECIPE, batch, weights

pytestmark = pytest.mark.compiled

LR = 0.05
Make = Callable[..., torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=LR, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=LR, weight_decay=0.1, amsgrad=True),
    "sgd": functools.partial(torch.optim.SGD, lr=LR, momentum=0.9, nesterov=True),
    "decay": functools.partial(torch.optim.SGD, lr=LR, weight_decay=0.1),
}


def worst_gradients(beta1: float, beta2: float, zeros: int = 4000, steps: int = 60) -> list[float]:
    """Return the gradients for which Adam moves the furthest: see `ratio_of_moments`."""
    return [0.0] * zeros + [(beta2 / beta1) ** i for i in range(steps)]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9)])
def test_ratio_of_moments(betas: tuple[float, float]) -> None:
    """No sequence of gradients exceeds the bound, and one comes as near to it as float64 can show."""
    beta1, beta2 = betas
    limit, most, m, v = ratio_of_moments(beta1, beta2), 0.0, 0.0, 0.0
    gradients = worst_gradients(beta1, beta2) if beta1 else [0.0] * 4000 + [1.0]
    for t, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        if v:
            most = max(most, m / (1 - beta1**t) / math.sqrt(v / (1 - beta2**t)))
    assert 0.99 * limit < most <= limit


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MAKES)
def test_no_weight_exceeds_its_bound(name: str, seed: int) -> None:
    """Gradients of all sizes, which come and go: each step stays within the bound, computed in float64."""
    random = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(64, generator=random, dtype=torch.float32))
    optimizer = MAKES[name]([p])
    for _ in range(200):
        bound = bound_of(optimizer, optimizer.param_groups[0], p.dtype, max_grad=1.0)
        assert not isinstance(bound, str)
        before = p.detach().abs().double()
        sizes = 10.0 ** -torch.randint(0, 8, (64,), generator=random) * (torch.rand(64, generator=random) < 0.3)
        p.grad = torch.where(p.detach() > 0, -1, 1) * sizes  # away from 0
        optimizer.step()
        assert (p.detach().abs().double() <= before * bound.grows + bound.moves).all()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    @fp8pass.train_step(**{"recipe": RECIPE, "lowering": "eager", "weight_amax": "predicted", **options})
    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x * 0.5)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mlp() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


@pytest.mark.parametrize("name", ["adamw", pytest.param("sgd", marks=pytest.mark.variant)])
def test_copies_have_the_scale_of_the_bound(name: str) -> None:
    """Each copy is the new weight, quantized with `fp8_max / (grows * amax + moves)`, and no element saturates."""
    model = mlp()
    optimizer = MAKES[name](model.parameters())
    step = step_of(model, optimizer, max_grad=1.0)
    step(batch(0))
    for i in range(1, 5):
        amaxes = [w.parts[0].detach().abs().amax() for w in weights(model)]
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        step(batch(i))
        for w, amax in zip(weights(model), amaxes, strict=True):
            assert isinstance(w, DelayedWeight) and w.x_q is not None
            (p,), state = w.parts, w.state
            bound = bound_of(optimizer, optimizer.param_groups[0], p.dtype, 1.0)
            assert not isinstance(bound, str)
            scale = 448 / (torch.tensor(bound.grows) * amax + torch.tensor(bound.moves))
            scale_inv, measured = state.tensors.weight_copy_scales[:, w.index]
            torch.testing.assert_close(scale_inv, scale.reciprocal(), rtol=1e-6, atol=0)
            assert measured == p.detach().abs().amax() and measured / scale_inv <= 448
            assert torch.equal(w.x_q, (p.detach() / scale_inv).to(torch.float8_e4m3fn))
            assert w.x_t is None or torch.equal(w.x_t, w.x_q.t())
            assert w.requantized == w.expected == 1
    assert "the amaxes of 2 of 2 weights are predicted" in str(step.report)
    assert "as large as predicted" not in str(step.report)


def test_what_is_not_predicted_is_measured() -> None:
    """The report says why; where the user's code writes weights in the same graph, nothing is predicted."""
    model = mlp()
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=LR))
    for i in range(2):
        step(batch(i))
    assert "the amaxes of 0 of 2 weights are predicted for the update that writes their copies; the others are " in str(
        step.report
    )
    assert "the step of SGD is as large as its gradient: max_grad says how large that can be" in str(step.report)


def test_reasons() -> None:
    p = [nn.Parameter(torch.ones(2))]
    for optimizer, reason in (
        (torch.optim.AdamW(p, betas=(0.99, 0.9)), "has no bound for betas"),
        (torch.optim.RMSprop(p), "no bound is known for the update of RMSprop"),
        (torch.optim.SGD(p, momentum=0.9, weight_decay=0.1), "sums the decay of earlier"),
    ):
        assert reason in str(bound_of(optimizer, optimizer.param_groups[0], torch.float32, 1.0))
    adam = torch.optim.AdamW(p)
    assert bound_of(adam, adam.param_groups[0], torch.float64, None) == "AdamW updates weights in torch.float64"


def test_an_optimizer_that_does_more_is_noticed() -> None:
    """A weight that outgrows its bound saturates, and the report says so: here moments that no gradient explains."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    step = step_of(model, optimizer)
    for i in range(2):
        step(batch(i))
    for of in optimizer.state.values():
        of["exp_avg"].fill_(100.0)
    step(batch(2))
    assert "times as large as predicted, and saturated: its update was larger" in str(step.report)
