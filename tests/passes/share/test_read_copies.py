"""The read_copies pass: the backward of an op reads its result as a matmul's FP8 operand holds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import scaling
from fp8pass.node_meta import SAVED_RESULT
from fp8pass.passes.common.patterns import aten
from fp8pass.passes.share.read_copies import ReadCopies
from tests.helpers.harness import E4M3, capture, expect_graph, run, scale


def operand(result: Tensor, s: Tensor) -> Tensor:
    """Return the operand of a matmul, made of an op's result."""
    moved = result.transpose(0, 1).reshape(32, 128)
    return scaling.dequantize(scaling.quantize(moved, s, E4M3), 1 / s, moved.dtype)


def attention(x: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operand, and a gradient that reads the result."""
    result = x.softmax(-1)
    return operand(result, s), tangents * result


def captured(function: Any = attention, marked: bool = True) -> fx.GraphModule:
    module = capture(function, torch.randn(4, 32, 32), scale(), torch.randn(4, 32, 32))
    started = False
    for node in module.graph.nodes:
        if marked and started and node.op == "call_function" and "tangents_1" not in map(str, node.all_input_nodes):
            node.meta["custom"] = {SAVED_RESULT: "quantize"}
        started |= node.target is aten.view.default
    return module


def test_graph() -> None:
    module = captured()
    assert [ReadCopies().run(module.graph, context) for context in (run(module), run(module))] == [1, 0]
    run(module)
    expect_graph(
        module,
        """\
x_1: "f32[4, 32, 32]",
s_1: "f32[]",
tangents_1: "f32[4, 32, 32]",
amax: "f32[4, 32, 1]" = aten.amax.default(x_1, [-1], True)
sub: "f32[4, 32, 32]" = aten.sub.Tensor(x_1, amax)
exp: "f32[4, 32, 32]" = aten.exp.default(sub)
sum_1: "f32[4, 32, 1]" = aten.sum.dim_IntList(exp, [-1], True)
div: "f32[4, 32, 32]" = aten.div.Tensor(exp, sum_1)
permute: "f32[32, 4, 32]" = aten.permute.default(div, [1, 0, 2])
clone: "f32[32, 4, 32]" = aten.clone.default(permute, memory_format = torch.contiguous_format)
view: "f32[32, 128]" = aten.view.default(clone, [32, 128])
mul: "f32[32, 128]" = aten.mul.Tensor(view, s_1)
clamp_min: "f32[32, 128]" = aten.clamp_min.default(mul, -448.0)
clamp_max: "f32[32, 128]" = aten.clamp_max.default(clamp_min, 448.0)
convert_element_type: "f8e4m3fn[32, 128]" = prims.convert_element_type.default(clamp_max, torch.float8_e4m3fn)
reciprocal: "f32[]" = aten.reciprocal.default(s_1)
mul_1: "f32[]" = aten.mul.Tensor(reciprocal, 1)
convert_element_type_1: "f32[32, 128]" = prims.convert_element_type.default(convert_element_type, torch.float32)
mul_2: "f32[32, 128]" = aten.mul.Tensor(convert_element_type_1, mul_1)
reshape_default: "f32[32, 4, 32]" = aten.reshape.default(mul_2, [32, 4, 32])
permute_default: "f32[4, 32, 32]" = aten.permute.default(reshape_default, [1, 0, 2])
mul_3: "f32[4, 32, 32]" = aten.mul.Tensor(tangents_1, permute_default)
return (mul_2, mul_3)
""",
    )


def test_numbers() -> None:
    """In float32, where the cast from FP8 is as wide as the result, the scale must not be left out."""
    x, s, tangents = torch.randn(4, 32, 32), scale(3.0), torch.randn(4, 32, 32)
    module = captured()
    run(module, ReadCopies())
    copy, gradient = module(x, s, tangents)
    assert torch.equal(copy, attention(x, s, tangents)[0])
    assert torch.equal(gradient, tangents * copy.view(32, 4, 32).transpose(0, 1))


def test_what_is_not_marked_stays() -> None:
    module = captured(marked=False)
    before = str(module.graph)
    run(module, ReadCopies())
    assert str(module.graph) == before


def test_a_result_that_the_backward_does_not_read_stays() -> None:
    module = captured(lambda x, s, tangents: (operand(x.softmax(-1), s), tangents * 2))
    before = str(module.graph)
    run(module, ReadCopies())
    assert str(module.graph) == before
