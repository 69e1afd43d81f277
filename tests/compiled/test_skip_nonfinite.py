"""Test the skip_nonfinite pass: an update whose gradients are not finite leaves everything as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from tests.helpers.optimizers import Lion

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "Lion": Lion,
}


class Trained:
    """A small model, trained. bad: the steps before which an extra batch makes gradients inf or NaN.

    layers: 1 or 2; one layer compiles in half the time.
    """

    def __init__(self, optimizer: Callable[..., Any], bad: Iterable[int] = (), layers: int = 2, **config: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        two = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
        self.model = nn.Sequential(*(two if layers == 2 else [nn.Linear(64, 64)]))
        self.optimizer = optimizer(self.model.parameters())

        @fp8pass.train_step(**{"min_speedup": 0, "lowering": "eager", "skip_nonfinite": True, **config})
        def step(x: Tensor) -> float:
            loss = F.mse_loss(self.model(x), x.roll(1, 0))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.item()

        generator = torch.Generator().manual_seed(1)
        self.losses, self.skipped = [], []
        for i in range(5):
            x = torch.randn(16, 64, generator=generator)
            if i in bad:
                step(poisoned(x, math.nan if i == 3 else math.inf))
            self.losses.append(step(x))
            self.skipped.append(step.skipped)
        self.step = step
        self.state = fp8pass.state(self.model).state_dict()

    def check_same(self, other: Trained) -> None:
        """Check that the results are equal to the bit, except for the number of steps, which counts begun forwards."""
        assert self.losses == other.losses
        for p, q in zip(self.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q) and p.isfinite().all()
        mine, theirs = (x.optimizer.state_dict()["state"] for x in (self, other))
        assert mine and mine.keys() == theirs.keys()
        for key, of in mine.items():
            assert of.keys() == theirs[key].keys()
            assert all(torch.equal(x, theirs[key][name]) for name, x in of.items())
        assert self.state.keys() == other.state.keys()
        for key in self.state.keys() - {"steps"}:
            assert torch.equal(self.state[key], other.state[key]), key


def poisoned(x: Tensor, value: float) -> Tensor:
    """Return another batch, with one value that makes gradients inf or NaN."""
    bad = x.flip(0) * 3
    bad[3, 4] = value
    return bad


def variant(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.variant)


CASES = [
    variant("AdamW", "off", {}),
    variant("AdamW", "fp8+transpose", {}),
    variant("AdamW foreach", "off", {}),
    variant("AdamW foreach", "fp8", {}),
    variant("AdamW foreach", "fp8+transpose", {}),
    ("SGD", "fp8", {"layers": 1}),
    variant("SGD", "fp8", {}),
    variant("SGD", "fp8+transpose", {}),
    variant("Lion", "fp8+transpose", {}),
    ("AdamW foreach", "fp8+transpose", {"optimizer_state": "fp8", "layers": 1}),
    variant("AdamW foreach", "fp8+transpose", {"optimizer_state": "fp8"}),
    variant("AdamW", "off", {"optimizer_state": "fp8"}),
    variant("AdamW foreach", "fp8+transpose", {"lowering": "inductor"}),
]


@pytest.mark.parametrize(
    ("optimizer", "cache", "config"), CASES, ids=lambda x: " ".join(map(str, x.values())) if isinstance(x, dict) else x
)
def test_as_if_the_batch_had_not_been(optimizer: str, cache: str, config: dict[str, Any]) -> None:
    """Bad batches come after the first step and twice later; one of them has a NaN."""
    config = {"weight_cache": cache, **config}
    wanted = Trained(OPTIMIZERS[optimizer], **config)
    got = Trained(OPTIMIZERS[optimizer], bad=(1, 3, 4), **config)
    assert len(set(wanted.losses)) == len(wanted.losses), "each step changes the loss"
    assert wanted.skipped == [0] * 5 and got.skipped == [0, 1, 1, 2, 3]
    got.check_same(wanted)
    assert int(got.state["steps"]) == int(wanted.state["steps"]) + 3


@pytest.mark.parametrize(("cache", "layers"), [("fp8+transpose", 1), variant("fp8+transpose", 2), variant("off", 2)])
def test_the_very_first_batch(cache: str, layers: int) -> None:
    """Parameters and moments stay; the first scales are made from the bad batch.

    On finite gradients, the option changes no number; without it, a batch with an infinity makes the loss NaN.
    """
    got = Trained(OPTIMIZERS["AdamW"], bad=(0,), weight_cache=cache, layers=layers)
    without = Trained(OPTIMIZERS["AdamW"], skip_nonfinite=False, weight_cache=cache, layers=layers)
    assert got.skipped == [1] * 5 and without.skipped == [0] * 5
    assert all(p.isfinite().all() for p in got.model.parameters())
    got.check_same(without)
    x = torch.randn(16, 64)
    without.step(poisoned(x, math.inf))
    assert math.isnan(without.step(x)) and without.step.skipped == 0
