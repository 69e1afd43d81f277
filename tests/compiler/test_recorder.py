"""CUDA graphs of layers that are compiled once, as tapes on a CPU: how many there are, and what their replays compute."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8pass.compiler import cuda_graphs
from fp8pass.compiler.cuda_graphs import Recorder
from fp8pass.compiler.line import Line, Op
from fp8pass.graph.annotation import Annotation
from tests.compiler.test_one_node import Layer, last, middle
from tests.compiler.test_one_node import Model as Few
from tests.helpers.harness import compiled
from tests.helpers.tape import Log, taped
from tests.helpers.train_step import batch, decorate, everything

pytestmark = pytest.mark.compiled


class Many(Few):
    """Enough layers for an update that is compiled once for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(Layer() for _ in range(9))


def stepped(tapes: bool) -> tuple[list[Tensor], dict[str, Tensor], Log]:
    """Train by a decorated step; return losses, `everything`, and what was recorded and replayed.

    Scales roll in each step. The gradients of one are infinite, and then the learning rate changes.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, rate = Many(), torch.tensor(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def function(x: Tensor) -> Tensor:
        loss = last(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with taped() if tapes else nullcontext(Log()) as log:
        step, losses = decorate(function, skip_nonfinite=True, min_speedup=0, on_fault="raise"), []
        for i in range(9):
            x = batch(i, 16, 32)
            if i == 6:
                x[0, 0] = float("inf")
                rate.mul_(0.5)
            losses.append(step(x).clone())
    assert step.skipped == 1
    return losses, everything(model, optimizer), log


def test_a_whole_step_is_three_graphs() -> None:
    losses, values, log = stepped(tapes=True)
    replays = Counter(log.replays)
    assert sorted(log.recordings) == ["backward", "forward", "update"]
    assert replays["forward"] == replays["backward"] > 4 and replays["update"] > 4
    expected_losses, expected, _ = stepped(tapes=False)
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def test_instances_evaluation_and_gradients_of_other_outputs() -> None:
    """Two instances have graphs of their own, evaluation has, and a backward from other outputs."""

    def results(tapes: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        models, found = [Few(), Few()], list[Tensor]()
        with taped() if tapes else nullcontext(Log()) as log:
            runs = [compiled(model, on_fault="raise") for model in models]
            for i in range(12):
                for model, run in zip(models, runs, strict=True):
                    (middle if i in (7, 8, 9) else last)(run(batch(i, 16, 32))).backward()
                    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                    model.zero_grad()
                    if i > 5:
                        with torch.no_grad():
                            found.append(run(batch(i, 16, 32))[0].clone())
        if tapes:
            assert Counter(log.recordings) == {
                "forward": 2,
                "backward": 4,
                "update": 2,
            }  # evaluation is recorded as updates are
        return found

    torch.testing.assert_close(results(tapes=True), results(tapes=False), rtol=0, atol=0)


def test_the_reason_why_nothing_is_recorded() -> None:
    module = fx.symbolic_trace(nn.ReLU())
    recorder = Recorder(Annotation(module, [], []), [])
    recorder.note("layer", "3 equal layers, a to c", module, None, is_backward=True)
    with pytest.warns(UserWarning, match="no CUDA graph is recorded .* 3 equal layers, a to c runs op by op"):
        assert not recorder.accepts(Any, trains=True)  # type: ignore[arg-type]


def test_a_replay_changes_the_versions_of_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that a CUDA graph replays changes no version, by which a stale copy of a weight is known."""
    module = fx.symbolic_trace(nn.ReLU())
    recorder = Recorder(Annotation(module, [], []), [])
    recorder._written = {"update": (0,)}
    monkeypatch.setattr(cuda_graphs, "cudagraphify", lambda *_, **__: lambda inputs: inputs.clear() or [])
    weight, gradient = torch.zeros(2), torch.zeros(2)
    replay = recorder.forward(list, Line([Op("update", (0, 1), 2, 0, ())], 2, 2, (), ()), trains=False)
    for version in (1, 2):
        assert replay([weight, gradient]) == []
        assert (weight._version, gradient._version) == (version, 0)
