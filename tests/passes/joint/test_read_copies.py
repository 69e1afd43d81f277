"""The read_copies pass: the backward of an op reads its result as a matmul's FP8 operand holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass.base import scaling
from fp8pass.base.node_meta import SAVED_RESULT, STRIDES
from fp8pass.graph.builder import val
from fp8pass.graph.other_libraries import has_strides, tensors_of
from fp8pass.passes.common.patterns import aten
from fp8pass.passes.joint.read_copies import ReadCopies
from tests.helpers.harness import E4M3, capture, count, expect_graph, run, scale

pytestmark = pytest.mark.passes


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
    return mark(module) if marked else module


def mark(module: fx.GraphModule) -> fx.GraphModule:
    """Mark what quantizes and dequantizes an op's result for a matmul, as the save_fp8 pass does."""
    started = False
    for node in module.graph.nodes:
        if started and node.op == "call_function" and "tangents_1" not in map(str, node.all_input_nodes):
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
clone_default: "f32[4, 32, 32]" = aten.clone.default(permute_default, memory_format = torch.contiguous_format)
mul_3: "f32[4, 32, 32]" = aten.mul.Tensor(tangents_1, clone_default)
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


def operand_of_positions(result: Tensor, s: Tensor) -> Tensor:
    """Return an operand of [batch * positions, heads * channels], made of [batch, heads, positions, channels]."""
    moved = result.transpose(1, 2).reshape(-1, result.shape[1] * result.shape[3])
    return scaling.dequantize(scaling.quantize(moved, s, E4M3), 1 / s, moved.dtype)


FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
HEADS = {
    "heads first, as rotary positions leave them": ((2, 4, 8, 16), (0, 1, 2, 3), 1),
    "positions first, as a layer of transformers has them": ((2, 8, 4, 16), (0, 2, 1, 3), 0),
    "heads before the batch": ((4, 2, 8, 16), (1, 0, 2, 3), 1),
}
"""Shape in memory, the order of its dimensions as [batch, heads, positions, channels], and copies that are needed."""


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "symbolic"])
@pytest.mark.parametrize("case", HEADS)
def test_attentions_backward_reads_a_result_with_the_strides_of_the_result(case: str, dynamic: bool) -> None:
    shape, order, copies = HEADS[case]
    inputs = [torch.randn(shape).permute(order) for _ in range(4)]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        q, k, v, s, tangents = given
        result, sums = FORWARD(q, k, v)
        return operand_of_positions(result, s), *BACKWARD(tangents, q, k, v, result, sums, 0.0, False)

    module = mark(capture(function, *inputs[:3], scale(), inputs[3], dynamic=dynamic))
    (*_, tangents) = module.graph.find_nodes(op="placeholder")
    tangents.name = "tangents_1"
    before = count(module, aten.clone.default)
    run(module, ReadCopies())
    (forward,) = (n for n in module.graph.nodes if n.target is FORWARD)
    (backward,) = (n for n in module.graph.nodes if n.target is BACKWARD)
    (result,) = (u for u in forward.users if u.args[1] == 0)
    given: Any = backward.args[4]
    assert given is not result and given not in result.users
    assert has_strides(val(given), val(result).stride())
    assert count(module, aten.clone.default) == before + copies
    for node, others in ((forward, 3), (backward, 6)):
        assert len(node.meta[STRIDES]) == len(tensors_of(node)) == others
    assert backward.meta[STRIDES][0] is None  # the gradient comes from the backward, and may have any
    got, wanted = module(*inputs[:3], scale(), inputs[3]), function(*inputs[:3], scale(), inputs[3])
    assert torch.equal(got[0], wanted[0])
    assert not torch.equal(got[1], wanted[1])


def test_a_result_whose_strides_no_copy_has_stays() -> None:
    """Elements of an expanded tensor lie on one another."""

    def function(x: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
        result = x.softmax(-1)[:, :1].expand(4, 32, 32)
        return operand(result, s), tangents * result

    module = captured(function)
    before = str(module.graph)
    run(module, ReadCopies())
    assert str(module.graph) == before
