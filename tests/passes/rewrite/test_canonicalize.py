"""The canonicalize pass: quantize and dequantize ops of torch's exporter become ATen ops."""

from __future__ import annotations

import torch
import torch.ao.quantization.fx._decomposed  # defines torch.ops.quantized_decomposed
from torch import Tensor

from fp8pass.passes.joint.canonicalize import Canonicalize
from tests.helpers.canonicalize import ops
from tests.helpers.harness import E5M2, apply, capture, expect_graph, text


def test_integers_do_not_change() -> None:
    def function(x: Tensor) -> Tensor:
        return ops.dequantize_per_tensor.default(x, 0.5, 0, -128, 127, torch.int8)

    module = capture(function, torch.ones(4, 4, dtype=torch.int8))
    before = text(module)
    apply(module, Canonicalize())
    assert text(module) == before


def test_graph() -> None:
    def function(x: Tensor) -> Tensor:
        x_q = ops.quantize_per_tensor.default(x, 0.5, 0, -57344, 57344, E5M2)
        return ops.dequantize_per_tensor.default(x_q, 0.5, 0, -57344, 57344, E5M2)

    x = torch.randn(8, 8)
    module = capture(function, x)
    apply(module, Canonicalize())
    expect_graph(
        module,
        """\
x_1: "f32[8, 8]",
mul_tensor: "f32[8, 8]" = aten.mul.Tensor(x_1, 2.0)
round_default: "f32[8, 8]" = aten.round.default(mul_tensor)
add_tensor: "f32[8, 8]" = aten.add.Tensor(round_default, 0)
clamp_min_default: "f32[8, 8]" = aten.clamp_min.default(add_tensor, -57344)
clamp_max_default: "f32[8, 8]" = aten.clamp_max.default(clamp_min_default, 57344)
convert_element_type_default: "f8e5m2[8, 8]" = prims.convert_element_type.default(clamp_max_default, torch.float8_e5m2)
convert_element_type_default_1: "f32[8, 8]" = prims.convert_element_type.default(convert_element_type_default, torch.float32)
mul_tensor_1: "f32[8, 8]" = aten.mul.Tensor(convert_element_type_default_1, 0.5)
return mul_tensor_1
""",
    )
    assert torch.equal(module(x), function(x))
