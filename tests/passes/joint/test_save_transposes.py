"""The save_transposes pass: the transposed copies that the forward makes for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass.base.node_meta import SAVED
from fp8pass.base.scaling import quantize
from fp8pass.graph.pass_base import JointContext
from fp8pass.options.config import Config
from fp8pass.passes.joint.save_transposes import SaveTransposes
from tests.helpers.harness import BF16, E4M3, E5M2, apply, capture, expect_graph, fp8, scale, text

pytestmark = pytest.mark.passes


def product(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, s, s, out_dtype=BF16)


def by_columns(x_q: Tensor) -> Tensor:
    """Return a column-major copy, as a second operand has to be."""
    return x_q.t().contiguous().t()


def grad_input(w: Tensor, s: Tensor, tangents: Tensor) -> Tensor:
    return product(quantize(tangents, s, E5M2), by_columns(w), s)


def layer(w: Tensor, s: Tensor, x_q: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and grad_input of a layer whose input is FP8 already."""
    w_q = quantize(w, s, E4M3)
    return product(x_q, w_q.t(), s), grad_input(w_q, s, tangents)


def inputs(*more: Tensor) -> tuple[Tensor, ...]:
    return torch.randn(48, 32, dtype=BF16), scale(), *more, torch.randn(64, 48, dtype=BF16)


def saved(module: fx.GraphModule) -> list[list[int]]:
    """Return the shapes of marked nodes."""
    return [list(n.meta["val"].shape) for n in module.graph.nodes if SAVED in n.meta]


def test_graph() -> None:
    """The pass only marks a node: the copy of the weight, not that of the gradient."""
    module = capture(layer, *inputs(fp8(64, 32)))
    before = text(module)
    expect_graph(
        module,
        """\
w_1: "bf16[48, 32]",
s_1: "f32[]",
x_q_1: "f8e4m3fn[64, 32]",
tangents_1: "bf16[64, 48]",
convert_element_type: "f32[48, 32]" = prims.convert_element_type.default(w_1, torch.float32)
mul: "f32[48, 32]" = aten.mul.Tensor(convert_element_type, s_1)
clamp_min: "f32[48, 32]" = aten.clamp_min.default(mul, -448.0)
clamp_max: "f32[48, 32]" = aten.clamp_max.default(clamp_min, 448.0)
convert_element_type_1: "f8e4m3fn[48, 32]" = prims.convert_element_type.default(clamp_max, torch.float8_e4m3fn)
permute: "f8e4m3fn[32, 48]" = aten.permute.default(convert_element_type_1, [1, 0])
_scaled_mm: "bf16[64, 48]" = aten._scaled_mm.default(x_q_1, permute, s_1, s_1, None, None, torch.bfloat16)
convert_element_type_2: "f32[64, 48]" = prims.convert_element_type.default(tangents_1, torch.float32)
mul_1: "f32[64, 48]" = aten.mul.Tensor(convert_element_type_2, s_1)
clamp_min_1: "f32[64, 48]" = aten.clamp_min.default(mul_1, -57344.0)
clamp_max_1: "f32[64, 48]" = aten.clamp_max.default(clamp_min_1, 57344.0)
convert_element_type_3: "f8e5m2[64, 48]" = prims.convert_element_type.default(clamp_max_1, torch.float8_e5m2)
permute_1: "f8e4m3fn[32, 48]" = aten.permute.default(convert_element_type_1, [1, 0])
clone: "f8e4m3fn[32, 48]" = aten.clone.default(permute_1, memory_format = torch.contiguous_format)
permute_2: "f8e4m3fn[48, 32]" = aten.permute.default(clone, [1, 0])
_scaled_mm_1: "bf16[64, 32]" = aten._scaled_mm.default(convert_element_type_3, permute_2, s_1, s_1, None, None, torch.bfloat16)
return (_scaled_mm, _scaled_mm_1)
""",
    )
    apply(module, SaveTransposes())
    assert text(module) == before
    assert saved(module) == [[32, 48]]
    (copy,) = (n for n in module.graph.nodes if SAVED in n.meta)
    assert copy.name == "clone"
    assert SaveTransposes().run(module.graph, JointContext(Config(recipe=None))) == 0, "a second run finds something"


def after_a_norm(w: Tensor, s: Tensor, x: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """Compute the input from statistics of `x`, which the backward also reads, but late, in another kernel."""
    rstd = x.float().square().mean(-1, keepdim=True).rsqrt()
    x_q, w_q = quantize(x * rstd, s, E4M3), quantize(w, s, E4M3)
    grad_weight = product(quantize(tangents, s, E5M2).t().contiguous(), by_columns(x_q), s)
    return product(x_q, w_q.t(), s), grad_input(w_q, s, tangents) * x * rstd, grad_weight


def viewed(w: Tensor, s: Tensor, x_q: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    w_q = quantize(w.view(4, 12, 32), s, E4M3)
    return product(x_q, w_q.view(-1, 32).t(), s), grad_input(w_q.view(-1, 32), s, tangents)


CHOSEN: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[list[int]]]] = {
    "weight": (layer, inputs(fp8(64, 32)), [[32, 48]]),
    "after a norm": (after_a_norm, inputs(torch.randn(64, 32)), [[32, 64], [32, 48]]),
    "views": (viewed, inputs(fp8(64, 32)), [[32, 48]]),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_chosen(case: str) -> None:
    function, args, shapes = CHOSEN[case]
    module = capture(function, *args)
    apply(module, SaveTransposes())
    assert sorted(saved(module)) == sorted(shapes)


def read_elementwise(w: Tensor, s: Tensor, x_q: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """Let a kernel of the backward read the weight elementwise."""
    y, grad = layer(w, s, x_q, tangents)
    return y, grad, tangents[:48, :32] * w


def after_an_activation(w: Tensor, s: Tensor, x: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """The gradient of an activation function reads the tensor that the copy is made of."""
    x_q = quantize(torch.sigmoid(x), s, E4M3)
    g_q = quantize(tangents, s, E5M2)
    y = product(x_q, quantize(w, s, E4M3).t(), s)
    return y, product(g_q.t().contiguous(), by_columns(x_q), s), product(g_q, w.to(E4M3), s) * torch.sigmoid(x)


def read_in_the_forward(w: Tensor, s: Tensor, x_q: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    w_q = quantize(w, s, E4M3)
    copy = w_q.t().contiguous()
    y = product(x_q, w_q.t(), s)
    return y, product(quantize(tangents, s, E5M2), copy.t(), s), copy.float()


def for_the_backward_alone(w: Tensor, s: Tensor, x_q: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    """The backward quantizes the weight again, as with rowwise scales."""
    y = product(x_q, quantize(w, s, E4M3).t(), s)
    return y, grad_input(quantize(w, s * 2, E4M3), s, tangents)


def quantized_before(w_q: Tensor, s: Tensor, x_q: Tensor, tangents: Tensor) -> tuple[Tensor, ...]:
    return product(x_q, w_q.t(), s), grad_input(w_q, s, tangents)


DECLINED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "the backward reads what it is made of": (read_elementwise, inputs(fp8(64, 32))),
    "after an activation function": (after_an_activation, inputs(torch.randn(64, 32))),
    "the forward reads it": (read_in_the_forward, inputs(fp8(64, 32))),
    "quantized for the backward alone": (for_the_backward_alone, inputs(fp8(64, 32))),
    "quantized before": (quantized_before, (fp8(48, 32), *inputs(fp8(64, 32))[1:])),
}


@pytest.mark.parametrize("case", DECLINED)
def test_declined(case: str) -> None:
    function, args = DECLINED[case]
    module = capture(function, *args)
    before = text(module)
    apply(module, SaveTransposes())
    assert saved(module) == []
    assert text(module) == before


def test_regions_of_activation_checkpointing_keep_nothing() -> None:
    module = capture(layer, *inputs(fp8(64, 32)))
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    apply(module, SaveTransposes())
    assert saved(module) == []


def test_without_a_backward() -> None:
    module = capture(lambda w, s, x_q: F.relu(product(x_q, quantize(w, s, E4M3).t(), s)), *inputs(fp8(64, 32))[:3])
    apply(module, SaveTransposes())
    assert saved(module) == []
