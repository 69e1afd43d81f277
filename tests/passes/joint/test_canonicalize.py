"""Test models with FP8 quantize and dequantize ops of other libraries, in graphs that torch.export made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines torch.ops.quantized_decomposed
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass.passes.joint.canonicalize import Canonicalize
from tests.helpers.harness import BF16, E4M3, E5M2, apply, capture, compiled, expect_graph, fp8, sqnr, text, verdicts

ops = torch.ops.quantized_decomposed


class Exported(nn.Module):
    """A linear layer with an FP8 weight, as quantization for export leaves it."""

    def __init__(self, overload: str = "default", zero_point: Any = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("weight", fp8(48, 64))
        self.register_buffer("scale", torch.tensor([0.25]))
        self.register_buffer("zero_point", torch.zeros(1, dtype=torch.int64))
        self.overload, self.constant, self.dtype = overload, zero_point, dtype

    def forward(self, x: Tensor) -> Tensor:
        quantize, dequantize = (
            getattr(op, self.overload) for op in (ops.quantize_per_tensor, ops.dequantize_per_tensor)
        )
        zero_point = self.zero_point if self.constant is None else self.constant
        if self.overload == "tensor" and self.constant is not None:
            zero_point = torch.full((1,), self.constant)
        scale = 0.25 if self.overload == "default" else self.scale
        limits = -448, 448, E4M3
        x_q = quantize(x, scale, zero_point, *limits)
        x, weight = (dequantize(q, scale, zero_point, *limits, out_dtype=self.dtype) for q in (x_q, self.weight))
        return F.linear(x, weight)


def export(module: nn.Module, *inputs: Tensor) -> Any:
    return torch.export.export(module, inputs).module()


torchao = pytest.importorskip("torchao.quantization.quant_primitives")


class TorchAO(nn.Module):
    """A linear layer with torchao's affine ops; `general`: with the general dequantize instead of the one for FP8."""

    def __init__(self, general: bool, scale_shape: tuple[int, ...], weight_scale_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("weight", fp8(48, 64))
        self.register_buffer("scale", torch.full(scale_shape, 0.25))
        self.register_buffer("weight_scale", torch.rand(weight_scale_shape) + 0.5)
        self.general = general

    def forward(self, x: Tensor) -> Tensor:
        x_q = torchao._quantize_affine_float8_non_decomposed(x, self.scale)
        if self.general:
            args = None, E4M3, -448, 448
            x = torchao.dequantize_affine(x_q, tuple(x.shape), self.scale, *args)
            return F.linear(x, torchao.dequantize_affine(self.weight, (48, 64), self.weight_scale, *args))
        x = torchao._dequantize_affine_float8_non_decomposed(x_q, self.scale)
        return F.linear(x, torchao._dequantize_affine_float8_non_decomposed(self.weight, self.weight_scale))


@pytest.mark.passes
def test_integers_do_not_change() -> None:
    def function(x: Tensor) -> Tensor:
        return ops.dequantize_per_tensor.default(x, 0.5, 0, -128, 127, torch.int8)

    module = capture(function, torch.ones(4, 4, dtype=torch.int8))
    before = text(module)
    apply(module, Canonicalize())
    assert text(module) == before


@pytest.mark.passes
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


@pytest.mark.compiled
@pytest.mark.parametrize("overload", ["default", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_quantized_decomposed(overload: str, dtype: torch.dtype) -> None:
    module, x = Exported(overload, dtype=dtype), torch.randn(32, 64)
    exported = export(module, x)
    with verdicts() as report:
        actual = compiled(exported, recipe=None, strict=True)(x)
    assert len(report.rewritten) == 1
    assert sqnr(module(x), actual) > (48 if dtype is BF16 else 110)


@pytest.mark.compiled
def test_a_zero_point_that_is_not_constant() -> None:
    exported, x = export(Exported("tensor", zero_point=None), torch.randn(32, 64)), torch.randn(32, 64)
    with verdicts() as report:
        actual = compiled(exported, recipe=None)(x)
    (gemm,) = report.gemms
    assert gemm.rule == "zero point"
    assert "float8 needs none, so pass the number 0" in gemm.reason
    assert sqnr(exported(x), actual) > 110


@pytest.mark.compiled
def test_a_zero_point_of_3() -> None:
    exported, x = export(Exported(zero_point=3), torch.randn(32, 64)), torch.randn(32, 64)
    with verdicts() as report:
        actual = compiled(exported, recipe=None)(x)
    assert report.rules() == {"zero point": 1}
    assert sqnr(exported(x), actual) > 110


@pytest.mark.compiled
@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_torchao(general: bool, shape: tuple[int, ...]) -> None:
    module, x = TorchAO(general, shape, shape), torch.randn(32, 64)
    exported = export(module, x)
    with verdicts() as report:
        actual = compiled(exported, recipe=None, strict=True)(x)
    assert len(report.rewritten) == 1
    assert sqnr(module(x), actual) > 110


@pytest.mark.compiled
def test_torchao_with_blocks_is_declined_and_right() -> None:
    module, x = TorchAO(False, (1, 1), (3, 4)), torch.randn(32, 64)
    exported = export(module, x)
    with verdicts() as report:
        actual = compiled(exported, recipe=None)(x)
    assert report.rules() == {"scale shape": 1}
    assert sqnr(module(x), actual) > 110


@pytest.mark.inductor
@pytest.mark.parametrize("chosen", [[0, 3, 4, 7], pytest.param(range(8), marks=pytest.mark.variant)], ids=len)
def test_compiled_by_inductor(chosen: Sequence[int]) -> None:
    """Compile modules with the ops in one graph. The variant compiles all of them."""
    overloads, dtypes, shapes = ("default", "tensor"), (torch.float32, BF16), ((1,), (1, 1))
    modules: list[nn.Module] = [Exported(o, dtype=dtype) for o in overloads for dtype in dtypes]
    modules += [TorchAO(general, shape, shape) for general in (False, True) for shape in shapes]
    modules = [modules[i] for i in chosen]
    x = torch.randn(32, 64)
    exported = [export(module, x) for module in modules]
    with verdicts() as report:
        run = compiled(lambda x: [e(x) for e in exported], recipe=None, strict=True, lowering="inductor")
        found = run(x)
    assert len(report.rewritten) == len(modules)
    for module, actual in zip(modules, found, strict=True):
        assert sqnr(module(x), actual) > (48 if getattr(module, "dtype", None) is BF16 else 110), module
