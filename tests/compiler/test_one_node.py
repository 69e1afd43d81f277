"""Calls of functions as one node of autograd's, against one node for each: numbers, memory, and what is declined."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base._torch import functorch_config
from fp8pass.compiler import bodies, one_node
from tests.helpers.harness import compiled
from tests.helpers.train_step import batch


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Layers, and a head that shares its weight with the embedding if it is tied. Returns each layer's result too."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Linear(32, 32, bias=False), nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(x)
        results = []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        return self.head(x), *results


def last(results: tuple[Tensor, ...]) -> Tensor:
    return results[0].square().mean()


def middle(results: tuple[Tensor, ...]) -> Tensor:
    """The head and the last layer have no gradient."""
    return results[2].square().mean()


def trained(
    later: Callable[[Any], Tensor] = last, tied: bool = False, microbatches: int = 1, **options: Any
) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Train for some steps; return the parameters, the FP8 state, and the last loss. later: the loss from step 3 on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(tied)
    run = compiled(model, on_fault="raise", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(6):
        with fp8pass.accumulate(model):
            for k in range(microbatches):
                value = (later if i > 2 else last)(run(batch(i + k, 16, 32)))
                value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), fp8pass.state(model).state_dict(), value


def nodes(x: Tensor) -> dict[str, Any]:
    """Return the nodes that a tensor was computed by, by name."""
    found, todo = dict[str, Any](), [x.grad_fn]
    while todo:
        if (node := todo.pop()) is not None:
            found[type(node).__name__] = node
            todo += [following for following, _ in node.next_functions]
    return found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which each call has a node."""
    return lambda: monkeypatch.setattr(bodies.LineOfCalls, "_join", lambda *_: None)


CASES: dict[str, dict[str, Any]] = {
    "delayed": {},
    "rowwise": {"recipe": "rowwise"},
    "a part of the gradients": {"later": middle},
    "microbatches": {"microbatches": 2},
    "reduce-overhead": {"mode": "reduce-overhead", "compile_once": True},
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", CASES)
def test_bits(apart: Callable[[], None], name: str) -> None:
    """Parameters and FP8 state are those of a node for each call, to the bit."""
    check_bits(apart, **CASES[name])


@pytest.mark.inductor
def test_bits_through_inductor(apart: Callable[[], None]) -> None:
    check_bits(apart, lowering="inductor")


def check_bits(apart: Callable[[], None], **case: Any) -> None:
    parameters, state, loss = trained(**case)
    assert "_NodeBackward" in nodes(loss) and "CompiledFunctionBackward" not in nodes(loss)
    apart()
    expected, expected_state, loss = trained(**case)
    assert "CompiledFunctionBackward" in nodes(loss)
    torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)


def in_turn(*seeds: int) -> dict[int, Any]:
    """Train models in turn with the same code; return the parameters and the FP8 state of each."""
    torch._dynamo.reset()
    models: dict[int, Model] = {}
    for seed in seeds:
        torch.manual_seed(seed)
        models[seed] = Model()

    def forward(model: nn.Module, x: Tensor) -> Any:
        return model(x)

    run = compiled(forward, on_fault="raise")
    for i in range(6):
        for seed, model in models.items():
            value = last(run(model, batch(i + seed, 16, 32)))
            value.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    assert "_NodeBackward" in nodes(value)
    return {seed: (list(m.parameters()), fp8pass.state(m).state_dict()) for seed, m in models.items()}


@pytest.mark.compiled
def test_models_that_share_code_have_separate_states() -> None:
    """The node keeps the parts of state tensors from one call to the next: not for another model."""
    torch.testing.assert_close(in_turn(0, 1), {**in_turn(0), **in_turn(1)}, rtol=0, atol=0)


@pytest.mark.compiled
def test_a_tied_weight(apart: Callable[[], None]) -> None:
    """Both gradients of the weight are added before they are added to `.grad`."""
    parameters, _, loss = trained(tied=True, microbatches=2)
    assert "_NodeBackward" in nodes(loss)
    apart()
    expected, _, _ = trained(tied=True, microbatches=2)
    torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.compiled
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_graph(apart: Callable[[], None], use_reentrant: bool) -> None:
    def run() -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        forward, grads = compiled(model), []
        for i in range(5):
            x = batch(i, 16, 32).requires_grad_()
            last(checkpoint(forward, x, use_reentrant=use_reentrant)).backward()
            grads.append(x.grad)
        return [g for g in (*grads, *(p.grad for p in model.parameters())) if g is not None]

    one = run()
    apart()
    torch.testing.assert_close(one, run(), rtol=0, atol=0)


@pytest.mark.compiled
def test_what_is_saved_is_freed_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the backward of the first layer begins, what the last one has saved is freed."""
    saved: list[StorageWeakRef] = []
    alive: list[int] = []
    taken, body_run = one_node._taken, one_node._Body.run

    def counting(tensors: list[Tensor], count: int) -> list[Tensor]:
        alive.append(sum(not storage.expired() for storage in saved))
        return taken(tensors, count)

    def noting(self: Any, arguments: list[Any]) -> Any:
        results = body_run(self, arguments)
        saved.extend(
            StorageWeakRef(x.untyped_storage()) for x in results[self.saved] if not isinstance(x, nn.Parameter)
        )
        return results

    torch.manual_seed(0)
    run = compiled(Model(), recipe="dynamic")
    for i in range(4):
        last(run(batch(i, 16, 32))).backward()
    monkeypatch.setattr(one_node, "_taken", counting)
    monkeypatch.setattr(one_node._Body, "run", noting)
    last(run(batch(5, 16, 32))).backward()
    assert len(saved) > 6 and alive[0] == len(saved) and alive[-1] < len(saved) / 2


@pytest.mark.compiled
@pytest.mark.parametrize("what", ["parameter", "output"])
def test_what_is_saved_is_not_overwritten(what: str) -> None:
    """Autograd's error is raised where a tensor changes that the backward reads, and that others have, too."""
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, result: result.tanh())  # its backward reads the layer's result
    run = compiled(model, recipe="dynamic")
    for i in range(4):
        last(run(batch(i, 16, 32))).backward()
    loss = last(results := run(batch(5, 16, 32)))
    assert "_NodeBackward" in nodes(loss)
    with torch.no_grad():
        (results[1] if what == "output" else model.layers[1].norm.weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.compiled
def test_hooks_get_what_is_saved() -> None:
    """Without hooks, autograd has only what others have, too; hooks get all, and the backward reads what they return."""
    torch.manual_seed(0)
    run = compiled(Model(), recipe="dynamic")
    x, counts, grads, packed = batch(0, 16, 32).requires_grad_(), list[int](), list[Tensor](), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    for i in range(6):
        with saved_tensors_hooks(pack, Tensor.clone) if i == 5 else nullcontext():
            loss = last(run(x))
        if i > 3:
            counts.append(len(nodes(loss)["_NodeBackward"].checked))
        grads += torch.autograd.grad(loss, x)
    assert 0 < counts[0] < counts[1] <= len(packed)
    assert torch.equal(grads[4], grads[5])


@pytest.mark.compiled
@pytest.mark.parametrize("donates", [True, False])
def test_second_derivatives_and_retained_graphs(donates: bool) -> None:
    """A backward runs once, unless AOTAutograd lets it overwrite nothing; there are no second derivatives."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with functorch_config.patch(donated_buffer=donates):
        run = compiled(Model(), recipe="dynamic")
        x = batch(0, 16, 32).requires_grad_()
        for _ in range(4):
            loss = last(run(x))
            loss.backward()
        assert "_NodeBackward" in nodes(loss)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        loss, grads = last(run(x)), list[Tensor]()
        if donates:
            with pytest.raises(RuntimeError, match="without retain_graph=True"):
                loss.backward(retain_graph=True)
            return
        for retain_graph in (True, False):
            grads += torch.autograd.grad(loss, x, retain_graph=retain_graph)
        assert torch.equal(*grads)
        (grad,) = torch.autograd.grad(last(run(x)), x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            grad.sum().backward()


@pytest.mark.compiled
@pytest.mark.parametrize("why", ["hooks", "large gradients", "other ranks"])
def test_gradients_that_are_waited_for(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Where something waits for the gradients of a layer, or all together are large, each call has a node."""
    torch.manual_seed(0)
    model = Model()
    order: list[int] = []
    if why == "hooks":
        for i, layer in enumerate(model.layers):
            layer.up.weight.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))  # type: ignore[misc]
    elif why == "large gradients":
        monkeypatch.setattr(bodies, "MOST_BYTES", 1000)
    else:
        monkeypatch.setattr(bodies, "_ranks_wait", lambda: True)
    run = compiled(model)
    for i in range(4):
        loss = last(run(batch(i, 16, 32)))
        loss.backward()
    assert "_NodeBackward" not in nodes(loss)
    assert order == ([2, 1, 0] * 4 if why == "hooks" else [])
