"""The expand_blocks pass: dequantization by blocks becomes ATen ops."""

from __future__ import annotations

import pytest
import torch

from fp8pass.graph.pass_base import JointContext
from fp8pass.options.config import Config
from fp8pass.passes.joint.expand_blocks import ExpandBlocks
from fp8pass.quant import ops
from tests.helpers.harness import BF16, F16, F32, capture, count, expect_graph, fp8, run

pytestmark = pytest.mark.passes


def test_graph() -> None:
    module = capture(lambda x, s: ops.dequantize_blocks(x, s, BF16), fp8(32, 256), torch.rand(32, 2))
    assert run(module, ExpandBlocks()).gemms == {}
    expect_graph(
        module,
        """\
x_1: "f8e4m3fn[32, 256]",
s_1: "f32[32, 2]",
view_default: "f8e4m3fn[32, 1, 2, 128]" = aten.view.default(x_1, [32, 1, 2, 128])
view_default_1: "f32[32, 1, 2, 1]" = aten.view.default(s_1, [32, 1, 2, 1])
convert_element_type_default: "f32[32, 1, 2, 128]" = prims.convert_element_type.default(view_default, torch.float32)
mul_tensor: "f32[32, 1, 2, 128]" = aten.mul.Tensor(convert_element_type_default, view_default_1)
convert_element_type_default_1: "bf16[32, 1, 2, 128]" = prims.convert_element_type.default(mul_tensor, torch.bfloat16)
view_default_2: "bf16[32, 256]" = aten.view.default(convert_element_type_default_1, [32, 256])
return view_default_2
""",
    )


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_numbers_are_those_of_the_op(dtype: torch.dtype) -> None:
    x, square, codes = fp8(256, 384), torch.rand(2, 3), torch.randint(110, 140, (256, 12), dtype=torch.uint8)
    codes[0, 0], codes[1, 1] = 255, 0
    x[1, 32:64] = 0.0
    for scale in (square, codes):
        module = capture(lambda x, s: ops.dequantize_blocks(x, s, dtype), x, scale)
        assert ExpandBlocks().run(module.graph, JointContext(Config(recipe=None))) == 1
        module.recompile()
        assert count(module, ops.DEQUANTIZE_BLOCKS) == 0
        torch.testing.assert_close(
            module(x, scale), ops.dequantize_blocks(x, scale, dtype), equal_nan=True, rtol=0, atol=0
        )
    of_codes = ops.dequantize_blocks(x, codes, F32)
    assert of_codes[0, :32].isnan().all()
    assert of_codes[1, 32:64].eq(0).all()
    assert torch.equal(of_codes[2, :32], x[2, :32].float() * 2.0 ** (int(codes[2, 0]) - 127))
    assert torch.equal(ops.dequantize_blocks(x, square, F32)[130, 200], x[130, 200].float() * square[1, 1])


def test_twice_finds_nothing() -> None:
    module = capture(lambda x, s: ops.dequantize_blocks(x, s, BF16), fp8(32, 256), torch.rand(32, 2))
    run(module, ExpandBlocks())
    assert ExpandBlocks().run(module.graph, JointContext(Config(recipe=None))) == 0
