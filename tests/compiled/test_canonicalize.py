"""Test models with FP8 quantize and dequantize ops of other libraries, in graphs that torch.export made."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines torch.ops.quantized_decomposed

from tests.helpers.canonicalize import Exported, TorchAO, export
from tests.helpers.harness import BF16, compiled, sqnr, verdicts


@pytest.mark.parametrize("overload", ["default", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_quantized_decomposed(overload: str, dtype: torch.dtype) -> None:
    module, x = Exported(overload, dtype=dtype), torch.randn(32, 64)
    exported = export(module, x)
    with verdicts() as report:
        actual = compiled(exported, recipe=None, strict=True)(x)
    assert len(report.rewritten) == 1
    assert sqnr(module(x), actual) > (48 if dtype is BF16 else 110)


def test_a_zero_point_that_is_not_constant() -> None:
    exported, x = export(Exported("tensor", zero_point=None), torch.randn(32, 64)), torch.randn(32, 64)
    with verdicts() as report:
        actual = compiled(exported, recipe=None)(x)
    (gemm,) = report.gemms
    assert gemm.rule == "zero point"
    assert "float8 needs none, so pass the number 0" in gemm.reason
    assert sqnr(exported(x), actual) > 110


def test_a_zero_point_of_3() -> None:
    exported, x = export(Exported(zero_point=3), torch.randn(32, 64)), torch.randn(32, 64)
    with verdicts() as report:
        actual = compiled(exported, recipe=None)(x)
    assert report.rules() == {"zero point": 1}
    assert sqnr(exported(x), actual) > 110


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_torchao(general: bool, shape: tuple[int, ...]) -> None:
    module, x = TorchAO(general, shape, shape), torch.randn(32, 64)
    exported = export(module, x)
    with verdicts() as report:
        actual = compiled(exported, recipe=None, strict=True)(x)
    assert len(report.rewritten) == 1
    assert sqnr(module(x), actual) > 110


def test_torchao_with_blocks_is_declined_and_right() -> None:
    module, x = TorchAO(False, (1, 1), (3, 4)), torch.randn(32, 64)
    exported = export(module, x)
    with verdicts() as report:
        actual = compiled(exported, recipe=None)(x)
    assert report.rules() == {"scale shape": 1}
    assert sqnr(module(x), actual) > 110
