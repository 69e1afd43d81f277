"""CUDA graphs: the state is where Inductor lets graphs write, stays at its address, and no step waits for the device.

The tests call Inductor's own functions for what it decides at compile time, on graphs for a fake GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.graph.inputs import Call, SlotInput
from fp8pass.passes.common.state_inputs import INPUTS
from fp8pass.states.slots import registry
from fp8pass.weights.update_graph import _KeptPlan
from tests.helpers.harness import BF16, compiled
from tests.helpers.models import Block, batches, make
from tests.helpers.pretend_gpu import pretend

pytestmark = [pytest.mark.gpu_code, pytest.mark.xdist_group("pretended_gpu")]

MUTATED = {"delayed": (4, 1), "rowwise": (0, 0)}
"""State inputs that a forward writes (scale, history, both amaxes), and a backward (its amax once more)."""


@pytest.mark.parametrize(
    ("recipe", "model"),
    [("delayed", "block"), ("rowwise", "layer"), pytest.param("rowwise", "block", marks=pytest.mark.variant)],
)
def test_inductor_finds_no_reason_against_cuda_graphs(recipe: str, model: str) -> None:
    forward, backward, evaluation = pretend("cudagraphs", recipe, model)
    for graph, n in zip((forward, backward, evaluation), (*MUTATED[recipe], 0), strict=True):
        assert graph["wanted"] and graph["reasons"] == []
        assert len(graph["mutated"]) == n and set(graph["mutated"]) <= set(graph["static"])
    for graph in forward, evaluation:  # all but the batch
        assert len(set(graph["inputs"]) - set(graph["static"])) == 1


@pytest.mark.parametrize(
    ("model", "parameters", "layers"), [("linear", 1, 1), pytest.param("block", 4, 2, marks=pytest.mark.variant)]
)
def test_inductor_finds_no_reason_against_those_of_a_whole_step(model: str, parameters: int, layers: int) -> None:
    """The updates write FP8 copies of weights, counters and moments; the second finds moments that are in FP8."""
    forward, backward, *updates = pretend("cudagraphs", "step", model)
    assert len(updates) == 2
    for graph in forward, backward, *updates:
        assert graph["wanted"] and graph["reasons"] == []
        assert set(graph["mutated"]) <= set(graph["static"])
    for graph in updates:  # all but the gradients
        assert len(set(graph["inputs"]) - set(graph["static"])) == parameters
        # parameters; moments, steps; copies, transposes; state
        assert len(graph["mutated"]) >= parameters + 3 * parameters + 2 * layers + 2


def test_nothing_stands_against_those_of_layers_that_are_compiled_once() -> None:
    """Forward and backward, and the update, are recorded across the functions; Inductor records none of these."""
    layers, update = pretend("recorded")
    for graph, moving in (layers, 1), (update, 4 * 12 + 1):  # the batch; gradients, and the learning rate
        assert graph["refusal"] == "" and graph["written"]
        assert set(graph["written"]) <= set(graph["static"])
        assert len(set(graph["inputs"]) - set(graph["static"])) == moving


def whole_step(model: nn.Module, rate: float | Tensor = 1e-2, **options: Any) -> Any:
    """Return a decorated step that updates the model by AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    @fp8pass.train_step(skip_nonfinite=True, **{"min_speedup": 0, **options})
    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_state_stays_at_its_address() -> None:
    """Each call passes other tensor objects, but a recorded graph depends on their addresses only."""
    models = [make(seed=seed) for seed in (0, 1)]
    runs = [compiled(model) for model in models]
    mine = {id(p) for model in models for p in model.parameters()}
    pointers: list[list[int]] | None = None
    for x in batches(3, 16, 32):
        for run in runs:
            run(x).square().mean().backward()
        states = [s for s in registry.states() if mine & set(map(id, s.owned_tensors()))]
        now = [[t.data_ptr() for t in state.tensors if t.numel()] for state in states]
        pointers = pointers or now
        assert now == pointers
    assert pointers is not None
    first, second = pointers
    # another instance has its own recorded graph, because torch records again where addresses change
    assert not set(first) & set(second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_state_of_a_repeated_forward_stays_at_its_address(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded graph depends on the addresses of its state: with new ones, torch would record repetitions again."""
    seen: list[int] = []

    def value(self: SlotInput, call: Call) -> Tensor:
        found = real(self, call)
        seen.append(found.data_ptr())
        return found

    real = SlotInput.value
    run, kept = compiled(make()), []
    for i, x in enumerate(batches(6, 16, 32)):
        if i == 2:
            monkeypatch.setattr(SlotInput, "value", value)
        y = checkpoint(run, x.requires_grad_(), use_reentrant=use_reentrant)
        y.square().mean().backward()
        kept.append(
            [torch.empty(6), torch.empty(4)]
        )  # so that freed memory is not reused at the same address by chance
    of_calls = list(zip(*[iter(seen)] * len(INPUTS), strict=True))
    assert len(of_calls) == 2 * 4
    assert len(set(of_calls)) == 2  # one set of addresses for forwards, one for repetitions


def test_after_warm_up_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    run = compiled(model)

    def step(x: Tensor) -> None:
        run(x).square().mean().backward()

    def accumulated(x: Tensor) -> None:
        with fp8pass.accumulate(model):
            step(x)
            step(x)

    whole = whole_step(make(), lowering="eager")
    data = batches(8, 16, 32)
    for x in data[:4]:
        step(x)
        accumulated(x)
        whole(x)

    def waits(*_: Any, **__: Any) -> Any:
        raise AssertionError("waits for the device")

    for name in ("item", "tolist", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, waits)
    monkeypatch.setattr(torch, "tensor", waits)  # it copies from the CPU and waits for the copy
    for x in data[4:]:
        step(x)
        accumulated(x)
        whole(x)


def test_an_update_finds_everything_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs after Dynamo's keep their addresses: copies of weights, state, counters."""
    seen: list[list[int]] = []

    def values(self: _KeptPlan, *args: Any) -> list[Tensor]:
        tensors = real(self, *args)
        seen.append([x.data_ptr() for x in tensors])
        return tensors

    real = _KeptPlan.values
    monkeypatch.setattr(_KeptPlan, "values", values)
    step = whole_step(make(), lowering="eager")
    for x in batches(4, 16, 32):
        step(x)
    assert len(seen) == 4
    assert all(pointers == seen[1] for pointers in seen[2:]) and len(seen[1]) > 2 * 2 + 4


def same_with_and_without_graphs(results: Callable[..., list[Tensor]]) -> list[Tensor]:
    """Check that results are equal to the bit with CUDA graphs, of which none is skipped, and without; return them."""
    skips = torch._dynamo.utils.counters["inductor"]
    before = skips["cudagraph_skips"]
    graphs, plain = results(mode="reduce-overhead"), results()
    assert skips["cudagraph_skips"] == before
    for i, (a, b) in enumerate(zip(graphs, plain, strict=True)):
        assert torch.equal(a, b), i
    return graphs


def layers(n: int, seed: int = 0) -> nn.Module:
    """Return layers, on the GPU; three or more are compiled once."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(n))).to(BF16).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 4])
def test_steps_under_cuda_graphs_are_those_without(n: int) -> None:
    """Two instances of a graph, with evaluation in between, give the same bits with and without CUDA graphs."""

    def results(**options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        models = [layers(n, seed) for seed in (0, 1)]
        runs: list[Callable[..., Any]] = [
            compiled(m, lowering="inductor", strict=True, min_speedup=0, **options) for m in models
        ]
        found: list[Tensor] = []
        for i, batch in enumerate(batches(20, 16, 32, dtype=BF16)):
            x = batch.cuda()
            for model, run in zip(models, runs, strict=True):
                torch.compiler.cudagraph_mark_step_begin()
                y = run(x)
                y.float().square().mean().backward()
                found += [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
                model.zero_grad()
                if i % 5 == 4:
                    with torch.no_grad():
                        found.append(run(x).clone())
        state = [e for m in models for _, e in sorted(fp8pass.state(m).state_dict().items()) if isinstance(e, Tensor)]
        return found + [e.clone() for e in state]

    assert len(same_with_and_without_graphs(results)) > 20 * 2 * 5


@pytest.mark.gpu
@pytest.mark.parametrize("rate_on", ["cpu", "cuda"])
@pytest.mark.parametrize("n", [1, 12])
def test_whole_steps_under_cuda_graphs_are_those_without(n: int, rate_on: str) -> None:
    """Scales roll in each step, the gradients of one are infinite, and the learning rate changes."""

    def results(**options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model, rate = layers(n), torch.tensor(1e-2, device=rate_on)
        step = whole_step(model, rate, **options)
        losses = []
        for i, batch in enumerate(batches(20, 16, 32, dtype=BF16)):
            if i == 12:
                batch[0, 0] = float("inf")
                rate.mul_(0.5)
            torch.compiler.cudagraph_mark_step_begin()
            losses.append(step(batch.cuda()).nan_to_num())
        assert step.skipped == 1
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    same_with_and_without_graphs(results)


@pytest.mark.gpu
def test_calls_in_other_settings_under_cuda_graphs_are_those_without() -> None:
    """Each setting has recorded graphs of its own, which share the parameters and leave the state at its address."""

    def results(**options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model = make(Block, BF16).cuda()
        run = compiled(model, lowering="inductor", min_speedup=0, **options)
        found: list[Tensor] = []
        for i, batch in enumerate(batches(20, 16, 32, dtype=BF16)):
            torch.compiler.cudagraph_mark_step_begin()
            with fp8pass.autocast(i % 3 != 1, recipe="dynamic" if i % 3 == 2 else None):
                y = run(batch.cuda())
            y.float().square().mean().backward()
            found += [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return found

    same_with_and_without_graphs(results)


def test_the_state_stays_at_its_address_in_other_settings() -> None:
    model = make()
    run, found = compiled(model), []
    for i, x in enumerate(batches(6, 16, 32)):
        with fp8pass.enabled(i % 3 != 1):
            run(x).square().mean().backward()
        ids = {id(p) for p in model.parameters()}
        states = [s for s in registry.states() if ids & set(map(id, s.owned_tensors()))]
        found.append([t.data_ptr() for state in states for t in state.tensors])
    assert found[0] and all(pointers == found[0] for pointers in found)
