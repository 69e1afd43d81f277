"""The emulate_matmuls pass: FP8 matmuls in float32, where a processor has no kernel for them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass import hardware
from fp8pass.passes.kernels.emulate_matmuls import EmulateMatmuls
from tests.helpers.harness import (
    BF16,
    E4M3,
    E5M2,
    F32,
    aten,
    capture,
    compiled,
    count,
    expect_graph,
    fp8,
    on_kernels,
    scale,
    sqnr,
)

SAPPHIRE_RAPIDS = {"amx_int8": True, "amx_bf16": True, "amx_fp16": False}


GRANITE_RAPIDS = {**SAPPHIRE_RAPIDS, "amx_fp16": True}


ICE_LAKE = {"amx_int8": False, "amx_fp16": False}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the processor that the passes see, and oneDNN's limit."""

    def be(can: dict[str, bool], limited: bool = False) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
        monkeypatch.setattr(hardware, "onednn_multiplies", lambda dtype: not limited)

    return be


def linear(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias, out_dtype=BF16)


def operands(a: torch.dtype = E4M3, b: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    return fp8(32, 64, dtype=a), fp8(48, 64, dtype=b), scale(0.5), scale(0.25), torch.randn(48).to(BF16)


@pytest.mark.passes
def test_graph(processor: Any) -> None:
    processor(SAPPHIRE_RAPIDS)
    module = capture(linear, *operands())
    on_kernels(module, EmulateMatmuls())
    expect_graph(
        module,
        """\
a_1: "f8e4m3fn[32, 64]",
b_1: "f8e4m3fn[48, 64]",
scale_a_1: "f32[]",
scale_b_1: "f32[]",
bias_1: "bf16[48]",
permute: "f8e4m3fn[64, 48]" = aten.permute.default(b_1, [1, 0])
convert_element_type_default: "f32[32, 64]" = prims.convert_element_type.default(a_1, torch.float32)
mul_tensor: "f32[32, 64]" = aten.mul.Tensor(convert_element_type_default, scale_a_1)
convert_element_type_default_1: "f32[64, 48]" = prims.convert_element_type.default(permute, torch.float32)
mul_tensor_1: "f32[64, 48]" = aten.mul.Tensor(convert_element_type_default_1, scale_b_1)
mm_default: "f32[32, 48]" = aten.mm.default(mul_tensor, mul_tensor_1)
convert_element_type_default_2: "f32[48]" = prims.convert_element_type.default(bias_1, torch.float32)
add_tensor: "f32[32, 48]" = aten.add.Tensor(mm_default, convert_element_type_default_2)
convert_element_type_default_3: "bf16[32, 48]" = prims.convert_element_type.default(add_tensor, torch.bfloat16)
return convert_element_type_default_3
""",
    )


@pytest.mark.passes
@pytest.mark.parametrize("can", [SAPPHIRE_RAPIDS, GRANITE_RAPIDS, ICE_LAKE, {}])
@pytest.mark.parametrize(("a", "b"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_only_matmuls_without_a_kernel_are_emulated(processor: Any, can: Any, a: torch.dtype, b: torch.dtype) -> None:
    processor(can)
    module = capture(linear, *operands(a, b))
    on_kernels(module, EmulateMatmuls())
    assert count(module, aten._scaled_mm.default) == (can is not SAPPHIRE_RAPIDS or a != b)


@pytest.mark.passes
@pytest.mark.parametrize(
    ("can", "a", "b", "why"),
    [
        (ICE_LAKE, E4M3, E4M3, ""),
        (SAPPHIRE_RAPIDS, E5M2, E4M3, ""),
        (SAPPHIRE_RAPIDS, E4M3, E4M3, "without AMX for 16-bit floats"),
        (GRANITE_RAPIDS, E4M3, E4M3, "ONEDNN_MAX_CPU_ISA disables"),
        (GRANITE_RAPIDS, E5M2, E4M3, "ONEDNN_MAX_CPU_ISA disables"),
    ],
)
def test_a_limit_of_onednn_counts_where_torch_calls_it(
    processor: Any, can: Any, a: torch.dtype, b: torch.dtype, why: str
) -> None:
    """Before torch calls oneDNN it checks the processor, but not oneDNN's limit."""
    processor(can, limited=True)
    said = hardware.why_emulated(torch.device("cpu"), a, b)
    assert why in said and bool(said) == bool(why)


@pytest.mark.passes
def test_on_a_gpu_nothing_is_emulated(processor: Any) -> None:
    processor(SAPPHIRE_RAPIDS)
    module = capture(linear, *operands(), device="cuda")
    on_kernels(module, EmulateMatmuls())
    assert count(module, aten._scaled_mm.default) == 1


@pytest.mark.passes
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_numbers_are_those_of_the_op(processor: Any, dtype: torch.dtype) -> None:
    processor(SAPPHIRE_RAPIDS)

    def plain(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), s, s, out_dtype=dtype)

    a, b, s, *_ = operands()
    module = capture(plain, a, b, s)
    on_kernels(module, EmulateMatmuls())
    exact = (a.double() @ b.double().t()) * 0.25
    assert sqnr(exact.to(dtype), plain(a, b, s)) > 60
    assert sqnr(exact.to(dtype), module(a, b, s)) > 60


@pytest.mark.passes
def test_fp8_results_stay(processor: Any) -> None:
    """A user's own matmul with an FP8 result stays, because only the kernel defines what happens beyond the range."""
    processor(SAPPHIRE_RAPIDS)
    module = capture(
        lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, out_dtype=E4M3), fp8(32, 64), fp8(48, 64), scale()
    )
    on_kernels(module, EmulateMatmuls())
    assert count(module, aten._scaled_mm.default) == 1


@pytest.mark.compiled
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_a_model_says_so_once_a_graph(processor: Any, caplog: pytest.LogCaptureFixture, lowering: str) -> None:
    processor(SAPPHIRE_RAPIDS)
    model = nn.Linear(64, 32)
    with caplog.at_level(logging.DEBUG, "fp8pass"):
        compiled(model, recipe="dynamic", lowering=lowering)(torch.randn(16, 64)).sum().backward()
    said = [r.getMessage() for r in caplog.records if "float32" in r.getMessage()]
    assert said == [
        "FP8 matmuls computed in float32: 1; with AMX, torch calls oneDNN, which has no FP8 kernel for processors "
        "without AMX for 16-bit floats"
    ]
