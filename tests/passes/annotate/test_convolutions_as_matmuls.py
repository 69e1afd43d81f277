"""The convolutions_as_matmuls pass: convolutions that read each element once become linear layers, and no other does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass.graph.builder import laid_out_alike
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.options.config import Config
from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.passes.dynamo.convolutions_as_matmuls import ConvolutionsAsMatmuls
from fp8pass.recipes import StaticScaling
from tests.helpers.convolutions import FORMS, OTHERS, Form, leaves
from tests.helpers.harness import expect_graph, on_dynamos_graph


def graphs_of(function: Callable[..., Any], *inputs: Any, dynamic: bool = False, **options: Any) -> list[Any]:
    """Compile and call; return the graph after the pass, how often it was applied twice, and the result."""
    found: list[Any] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found[:] = on_dynamos_graph(module, ConvolutionsAsMatmuls(), ConvolutionsAsMatmuls(), config=Config(**options))
        result: Callable[..., Any] = found[0].forward
        return result

    torch._dynamo.reset()
    found.append(torch.compile(function, backend=backend, dynamic=dynamic)(*inputs))
    return found


ALL = [(name, dynamic) for dynamic in (False, True) for name in FORMS if not (dynamic and name == "the whole")]
DAILY = {("patches, remainder", True)}
DAILY |= {
    (name, False) for name in FORMS if name.split(", ")[-1] not in ("dilated", "1d", "3d", "patches", "input last")
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [pytest.param(*c, marks=[pytest.mark.variant] * (c not in DAILY)) for c in ALL]
)
def test_numbers_gradients_and_strides_are_those_of_the_convolution(name: str, dynamic: bool) -> None:
    """The oracle is the convolution in float64."""
    form = FORMS[name]
    inputs = leaves(form)
    module, applied, y = graphs_of(form.call, *inputs, dynamic=dynamic)
    assert applied == [1, 0]
    (linear,) = (n for n in module.graph.nodes if signature_of(n))
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = form.call(*exact)
    assert laid_out_alike(y, form.call(*inputs))
    gradient = torch.randn_like(expected)
    of_ours = torch.autograd.grad(y, inputs, gradient.float())
    of_oracle = torch.autograd.grad(expected, exact, gradient)
    for ours, oracle in zip((y, *of_ours), (expected, *of_oracle), strict=True):
        torch.testing.assert_close(ours.double(), oracle, rtol=1e-5, atol=1e-5)
    assert linear.meta["example_value"].requires_grad


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.copies_weight])
def test_the_view_of_the_weight_is_free(name: str) -> None:
    inputs = leaves(FORMS[name])
    module, *_ = graphs_of(FORMS[name].call, *inputs)
    (linear,) = (n for n in module.graph.nodes if signature_of(n))
    weight, view = inputs[1], linear.args[1].meta["example_value"]
    assert view._is_view() or view.untyped_storage().nbytes() == weight.untyped_storage().nbytes()
    assert sorted(view.stride())[0] == 1 and view.numel() == weight.numel()


def test_a_patch_embedding() -> None:
    form = Form(lambda x, w, b: F.conv2d(x, w, b, stride=4), ((2, 3, 16, 18), (8, 3, 4, 4), (8,)))
    module, *_ = graphs_of(form.call, *leaves(form))
    expect_graph(
        module,
        """\
L_x_: "f32[2, 3, 16, 18]",
L_w_: "f32[8, 3, 4, 4]",
L_b_: "f32[8]",
l_x_ = L_x_
l_w_ = L_w_
l_b_ = L_b_
narrow: "f32[2, 3, 16, 16]" = torch.narrow(l_x_, 3, 0, 16)
unflatten: "f32[2, 3, 16, 4, 4]" = torch.unflatten(narrow, 3, (-1, 4))
unflatten_1: "f32[2, 3, 4, 4, 4, 4]" = torch.unflatten(unflatten, 2, (-1, 4))
permute: "f32[2, 4, 4, 3, 4, 4]" = torch.permute(unflatten_1, [0, 2, 4, 1, 3, 5])
flatten: "f32[2, 4, 4, 48]" = torch.flatten(permute, 3)
flatten_1: "f32[8, 48]" = torch.flatten(l_w_, 1)
linear: "f32[2, 4, 4, 8]" = torch._C._nn.linear(flatten, flatten_1, l_b_)
permute_1: "f32[2, 8, 4, 4]" = torch.permute(linear, [0, 3, 1, 2])
contiguous: "f32[2, 8, 4, 4]" = torch_Tensor_contiguous(permute_1)
return (contiguous,)
""",
    )


def refused(form: Form, **options: Any) -> Reject:
    """Return why the pass leaves the convolution alone, after a check that the graph is unchanged."""
    contexts: list[DynamoContext] = []

    class Watched(ConvolutionsAsMatmuls):
        def run(self, graph: fx.Graph, context: DynamoContext) -> int:
            contexts.append(context)
            before = str(graph)
            applied = super().run(graph, context)
            assert applied == 0 and str(graph) == before
            return applied

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        on_dynamos_graph(module, Watched(), config=Config(**options))
        return module.forward

    torch._dynamo.reset()
    torch.compile(form.call, backend=backend)(*leaves(form))
    (reject,) = contexts[0].refused.values()
    return reject


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_out_with_a_reason(name: str) -> None:
    form, reason = OTHERS[name]
    reject = refused(form)
    assert isinstance(reject, LeftOut) and reject.rule == "convolution" and reason in str(reject)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"recipe": None}, "recipe"),
        ({"filter": ["*"]}, "filter"),
        ({"target": "h100"}, "min_speedup"),
        ({"recipe": StaticScaling({})}, "not calibrated"),
        ({"recipe": "blockwise"}, "block size"),
    ],
)
def test_what_stays_in_high_precision_stays_a_convolution(options: dict[str, Any], rule: str) -> None:
    assert refused(FORMS["kernel 1"], **options).rule == rule


def test_an_input_of_several_is_laid_out_once_until_it_is_written() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = F.conv2d(x, a) + F.conv2d(x, b)
        x = x.relu_()
        return y + F.conv2d(x, c)

    inputs = [torch.randn(2, 8, 4, 4), *(torch.randn(16, 8, 1, 1, requires_grad=True) for _ in range(3))]
    expected = function(inputs[0].clone(), *inputs[1:])
    module, applied, y = graphs_of(function, inputs[0].clone(), *inputs[1:])
    assert applied == [3, 0]
    rows = [n.args[0] for n in module.graph.nodes if signature_of(n)]
    assert rows[0] is rows[1] and rows[2] is not rows[0]
    torch.testing.assert_close(y, expected)
