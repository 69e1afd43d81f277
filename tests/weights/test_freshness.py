"""Copies that share a `Freshness` are quantized again exactly when copies that share none are."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.states.slots import registry
from fp8pass.weights.freshness import Copies, Freshness
from fp8pass.weights.weight_cache import CopiesOfGraph
from tests.helpers.train_step import RECIPE, batch, everything, tensors, weights

EVENTS = 60
"""Events of a sequence: two of eight kinds follow each other in any order."""


class Run:
    """A model, and what may happen to it. update: how it is updated, one of `UPDATES`."""

    def __init__(self, update: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
        self.model[6].requires_grad_(update != "without the last weight")
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        parts = (parameters[::2], parameters[1::2]) if update == "two optimizers" else (parameters,)
        fused = update == "fused"
        self.optimizers = [torch.optim.AdamW(p, lr=1e-3, fused=fused, foreach=not fused) for p in parts]
        options: Any = {"recipe": RECIPE, "lowering": "eager", "weight_cache": "fp8+transpose"}
        self.forward: Any = torch.compile(self.model, backend="fp8pass", options=options)
        self.step = fp8pass.train_step(self._step, **options, skip_nonfinite=not fused)
        self.saved = {name: x.clone() for name, x in self.model.state_dict().items()}
        self.freed: list[Tensor] = []

    def _step(self, x: Tensor, fails: bool = False) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = (self.model(x) - x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if fails:
            raise KeyError("lost")
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def fail(self, x: Tensor) -> None:
        """Raise an error between forward and update."""
        with pytest.raises(KeyError, match="lost"):
            self.step(x, fails=True)

    def skip(self, x: Tensor) -> None:
        """Run a step whose update is skipped, if updates are."""
        self.step(x * torch.inf if self.step.config.skip_nonfinite else x)

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> Tensor:
        """Read the copies in the graph of evaluation."""
        result: Tensor = self.forward(x)
        return result.clone()

    def train_apart(self, x: Tensor) -> Tensor:
        """Read the copies in another graph that trains, and update the weights by an optimizer that runs eagerly."""
        loss = self.forward(x).square().mean()
        loss.backward()
        for p in self.model.parameters():
            p.grad = None if p.grad is None else p.grad.nan_to_num()
        torch.optim.SGD(self.model.parameters(), lr=1e-3).step()
        return loss.detach()  # type: ignore[no-any-return]

    @torch.no_grad()
    def edit(self, x: Tensor) -> None:
        """Change one weight in place."""
        self.model[2].weight.mul_(0.75)

    def move(self, x: Tensor) -> None:
        """Give one weight other memory, without a change of its version."""
        weight: Any = self.model[4].weight
        self.freed.append(weight.data)  # or the next one may get the memory that the copy was made of
        weight.data = weight.data * 1.25

    def load(self, x: Tensor) -> None:
        """Load parameters, or the FP8 state."""
        if x[0, 0] > 0:
            self.model.load_state_dict(self.saved)
        else:
            fp8pass.state(self.model).load_state_dict(fp8pass.state(self.model).state_dict())

    def happens(self, seed: int) -> tuple[list[Any], list[dict[str, Tensor]]]:
        """Let things happen in an order that the seed gives; return what is known of each copy after each, and all
        values."""
        ways: list[Callable[[Tensor], Any]] = [self.fail, self.skip, self.evaluate, self.train_apart]
        ways += [self.edit, self.move, self.load, *[self.step] * 4]
        known = list[Any]()
        values = list[dict[str, Tensor]]()
        for i, way in enumerate([self.step] * 4 + random.Random(seed).choices(ways, k=EVENTS)):
            result = way(batch(i, 32, 32))
            known.append([(w.requantized, w.expected, *known_of(w.freshness)) for w in weights(self.model)])
            values.append(dict(tensors([result, everything(self.model)])))
        known.append([w.is_fresh() for w in weights(self.model)])
        return known, values


def known_of(f: Freshness) -> tuple[Any, ...]:
    return f.made_of is None, f.was_written, f.steps_stale, f.unchanged, f.changes


UPDATES = ("fused", "compiled", "two optimizers", "without the last weight")


@pytest.mark.compiled
@pytest.mark.parametrize("update", UPDATES)
def test_sequences_of_events(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are known together are quantized when copies that are known apart are, to the same bits."""
    seed = UPDATES.index(update)
    together, values = Run(update).happens(seed)
    monkeypatch.setattr(Freshness, "alike", lambda known: id(known))
    monkeypatch.setattr(CopiesOfGraph, "values", lambda _, inputs, call: [x.value(call) for x in inputs])
    apart, same = Run(update).happens(seed)
    for i, (one, other) in enumerate(zip(together, apart, strict=True)):
        assert one == other, i
    for i, (got, want) in enumerate(zip(values, same, strict=True)):
        assert [n for n in want if not torch.equal(got[n].nan_to_num(), want[n].nan_to_num())] == [], i


@pytest.mark.compiled
def test_a_warm_step_knows_all_copies_together() -> None:
    run = Run("fused")
    for i in range(4):
        run.step(batch(i, 32, 32))
    (known,) = {w.freshness for w in weights(run.model)}
    run.edit(batch(0, 32, 32))
    assert not known.is_of_now() and {w.is_fresh() for w in weights(run.model)} == {True, False}
    assert len({w.freshness for w in weights(run.model)}) == 4
    run.step(batch(4, 32, 32))
    assert len({w.freshness for w in weights(run.model)}) == 1


@pytest.mark.compiled
def test_weights_that_go_other_ways_do_not_join_again() -> None:
    run = Run("fused")
    for i in range(4):
        run.step(batch(i, 32, 32))
    all_copies, first = Copies(weights(run.model)), Copies(weights(run.model)[:1])
    assert len(all_copies.freshness()) == len(first.freshness()) == 1
    two = all_copies.freshness()
    assert len(two) == 2 and first.freshness()[0] in two
    first.invalidate()
    assert [w.is_fresh() for w in weights(run.model)] == [False, True, True, True]


@pytest.mark.compiled
def test_what_is_kept_for_the_next_step_holds_no_copy() -> None:
    run = Run("compiled")
    for i in range(4):
        run.step(batch(i, 32, 32))
    kept, copies = run.step._weights_of._found, weights(run.model)
    assert len(kept.freshness()) == 1
    x_q = [weakref.ref(w.x_q) for w in copies if w.x_q is not None]
    del run, copies
    torch._dynamo.reset()
    registry.keep([])  # as a new model's state does
    gc.collect()
    assert kept.freshness() == [] and len(x_q) == 4 and not any(ref() is not None for ref in x_q)
