"""Test how the matmuls of a traced graph are assigned to layers, by the data alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fp8pass.passes.traced.matmuls_of_layers import Finder, TracedLayer, Values, backward_of
from tests.helpers.harness import capture

pytestmark = pytest.mark.passes

X, W, V = torch.randn(6, 8), torch.randn(8, 8), torch.randn(8, 8)


def grads(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return loss, *torch.autograd.grad(loss, of)  # type: ignore[return-value]


def find_layers(graph: fx.Graph, same: bool = True) -> tuple[list[TracedLayer], dict[fx.Node, str]]:
    found = Finder(graph, Values(graph), lambda _: same).run()
    return list(found.layers.values()), found.reasons


def layers_of(function: Any, *inputs: Tensor, same: bool = True) -> tuple[list[TracedLayer], dict[fx.Node, str]]:
    graph = capture(function, *(x.detach().requires_grad_() for x in inputs)).graph
    return find_layers(graph, same)


def kinds(layers: list[TracedLayer]) -> list[list[str]]:
    return [sorted(p.kind for p in layer.products) for layer in layers]


ALL = ["grad_input", "grad_weight", "output"]


def test_three_products_of_a_layer() -> None:
    layers, reasons = layers_of(lambda x, w: grads((x @ w.t()).sum(), x, w), X, W)
    assert kinds(layers) == [ALL]
    assert not reasons
    assert [p.roles for p in layers[0].products if p.kind == "grad_weight"] == [("grad_output", "input")]


def test_a_forward_has_outputs_only() -> None:
    graph = capture(lambda x, w: torch.ones((), dtype=x.dtype) * (x @ w), X, W).graph
    assert kinds(find_layers(graph)[0]) == [["output"]]
    assert not backward_of(capture(lambda x, w: x @ w, X, W).graph)


def test_a_tied_weight_in_the_forward_is_not_taken_for_a_gradient() -> None:
    """relu(x @ w.T) @ w has the operands and sizes of a gradient of the first matmul."""
    layers, reasons = layers_of(lambda x, w: grads((torch.relu(x @ w.t()) @ w).sum(), w), X, W)
    assert kinds(layers) == [["grad_weight", "output"], ALL]
    assert not reasons


def test_a_weight_that_is_applied_twice() -> None:
    def twice(x: Tensor, w: Tensor) -> Any:
        return grads(torch.tanh(torch.tanh(x @ w) @ w).sum(), x, w)

    layers, _ = layers_of(twice, X, W)
    assert kinds(layers) == [ALL, ALL]
    first, second = ({p.kind: p.node for p in layer.products} for layer in layers)
    assert second["grad_input"] < first["grad_input"], "the backward of the second comes first"


def test_layers_with_one_gradient_are_told_apart() -> None:
    layers, _ = layers_of(lambda x, w, v: grads((x @ w + torch.relu(x) @ v).sum(), w, v), X, W, V)
    assert kinds(layers) == [["grad_weight", "output"]] * 2


def test_equal_sizes_are_told_apart_by_the_order_of_autograd() -> None:
    """Each layer has the same input, and no gradient of it: sizes and operands of the three gradients are equal."""

    def three(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Any:
        return grads((torch.relu(x @ w) * torch.tanh(x @ v) + torch.sigmoid(x @ u)).sum(), w, v, u)

    graph = capture(three, X, *(W.detach().requires_grad_() for _ in range(3))).graph
    layers, reasons = find_layers(graph, same=False)
    assert not reasons
    results: Any = graph.output_node().args[0]
    for layer, gradient in zip(layers, results[1:], strict=True):
        assert [p.node for p in layer.products if p.kind == "grad_weight"] == [gradient]


def test_a_choice_that_matters_is_declined() -> None:
    def one_is_frozen(x: Tensor, w: Tensor, v: Tensor) -> Any:
        return grads((torch.relu(x @ w) * (x @ v)).sum(), w)

    graph = capture(one_is_frozen, X, W.detach().requires_grad_(), V).graph
    layers, reasons = find_layers(graph, same=False)
    assert kinds(layers) == [["output"], ["output"]]
    assert list(reasons.values()) == ["it may belong to any of 2 matmuls of the forward, whose recipes differ"]
    assert kinds(find_layers(graph)[0]) == [["output"], ["grad_weight", "output"]]


def test_a_forward_that_checkpointing_repeats_is_one_layer() -> None:
    def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.relu(x @ w) @ v

    def step(x: Tensor, w: Tensor, v: Tensor) -> Any:
        return grads(checkpoint(block, x, w, v, use_reentrant=False).sum(), x, w, v)

    layers, reasons = layers_of(step, X, W, V)
    assert kinds(layers) == [ALL, ALL]
    assert len(layers[0].repeats) == 1
    assert not reasons


@pytest.mark.parametrize("dynamic", [False, True])
def test_batches_and_symbolic_sizes(dynamic: bool) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return grads((torch.softmax(q @ k.transpose(1, 2), -1) @ v).sum(), q, k, v)

    inputs = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(3)]
    graph = make_fx(attention, tracing_mode="symbolic" if dynamic else "fake")(*inputs).graph
    assert kinds(find_layers(graph)[0]) == [ALL, ALL]


def test_a_second_derivative_is_declined() -> None:
    def penalty(x: Tensor, w: Tensor) -> Any:
        (g,) = torch.autograd.grad(torch.tanh(x @ w).sum(), x, create_graph=True)
        return grads((g * g).sum(), w)

    _, reasons = layers_of(penalty, X, W)
    assert any("no matmul of the forward" in r or "both of its operands" in r for r in reasons.values())


def test_a_product_with_itself_has_no_roles() -> None:
    layers, reasons = layers_of(lambda w: grads((w @ w.t()).sum(), w), W)
    assert kinds(layers) == [["output"]]
    assert len(reasons) == 2


def test_a_backward_without_a_seed_is_noticed() -> None:
    """Its gradient is an input of any name. A tied weight looks alike, and is the only forward that does."""

    def backward(x: Tensor, w: Tensor, dy: Tensor) -> Any:
        return x @ w.t(), dy @ w

    graph = capture(backward, X, W, torch.randn(6, 8)).graph
    found = Finder(graph, Values(graph), lambda _: True).run().disguised()
    assert found is not None
    assert [n.name for n in found] == ["mm_1", "mm"]
    for forward in (lambda x, w: torch.tanh(x @ w) @ w, lambda x, w: (x @ w) @ torch.relu(w).t()):
        graph = capture(forward, X, W).graph
        assert Finder(graph, Values(graph), lambda _: True).run().disguised() is None
