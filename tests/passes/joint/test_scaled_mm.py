"""The scaled_mm pass: graphs, reasons to decline, and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import oracle
from tests.helpers.harness import (
    BF16,
    E4M3,
    E5M2,
    F32,
    aten,
    capture,
    count,
    detect,
    dq,
    expect_graph,
    fp8,
    scale,
    sqnr,
    text,
)

pytestmark = pytest.mark.passes


def test_graph_of_a_linear_layer() -> None:
    def linear(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        return dq(x, sx, BF16) @ dq(w, sw, BF16).t()

    module, _ = detect(linear, fp8(32, 64), scale(), fp8(48, 64), scale())
    expect_graph(
        module,
        """\
x_1: "f8e4m3fn[32, 64]",
sx_1: "f32[]",
w_1: "f8e4m3fn[48, 64]",
sw_1: "f32[]",
convert_element_type_1: "bf16[]" = prims.convert_element_type.default(sx_1, torch.bfloat16)
convert_element_type_3: "bf16[]" = prims.convert_element_type.default(sw_1, torch.bfloat16)
permute_default: "f8e4m3fn[64, 48]" = aten.permute.default(w_1, [1, 0])
convert_element_type_default: "f32[]" = prims.convert_element_type.default(convert_element_type_1, torch.float32)
convert_element_type_default_1: "f32[]" = prims.convert_element_type.default(convert_element_type_3, torch.float32)
_scaled_mm_default: "bf16[32, 48]" = aten._scaled_mm.default(x_1, permute_default, convert_element_type_default, convert_element_type_default_1, None, None, torch.bfloat16, True)
return _scaled_mm_default
""",
    )


def test_graph_with_a_transposed_copy() -> None:
    def matmul(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        return dq(x, sx) @ dq(w, sw)

    module, _ = detect(matmul, fp8(32, 64), scale(), fp8(64, 48), scale())
    expect_graph(
        module,
        """\
x_1: "f8e4m3fn[32, 64]",
sx_1: "f32[]",
w_1: "f8e4m3fn[64, 48]",
sw_1: "f32[]",
permute_default: "f8e4m3fn[48, 64]" = aten.permute.default(w_1, [1, 0])
clone_default: "f8e4m3fn[48, 64]" = aten.clone.default(permute_default, memory_format = torch.contiguous_format)
permute_default_1: "f8e4m3fn[64, 48]" = aten.permute.default(clone_default, [1, 0])
_scaled_mm_default: "f32[32, 48]" = aten._scaled_mm.default(x_1, permute_default_1, sx_1, sw_1, None, None, torch.float32, True)
return _scaled_mm_default
""",
    )


def test_a_dequantize_with_another_user_stays() -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = dq(x, 0.5)
        return wide @ dq(w, 0.5), wide.relu()

    inputs = fp8(32, 64), fp8(64, 48)
    module, _ = detect(both, *inputs)
    assert count(module, aten.relu.default) == 1
    torch.testing.assert_close(module(*inputs), both(*inputs))


def test_dead_branches() -> None:
    """An op whose result is not read does not count as a user: it does not affect a number, and is removed."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        wide = dq(a, 0.5)
        y = wide @ dq(b, 0.25)
        torch.where(y > 0, wide[:, :48], 0.0).relu() @ dq(b, 0.5).t()
        return y * 2

    inputs = fp8(32, 64), fp8(64, 48)
    module, _ = detect(function, *inputs)
    assert [n.target for n in module.graph.nodes if n.target in (aten.relu.default, aten.where.self)] == []
    assert count(module, aten._scaled_mm.default) == 1
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)


REFUSALS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], str]] = {
    "one side": (
        lambda a, b: dq(a, 0.5) @ b,
        (fp8(32, 64), torch.randn(64, 48)),
        r"^operand b_1: float32 is not a float8 tensor times a scale; no other rule declines it$",
    ),
    "reached through a view": (
        lambda a, b: dq(a, 0.5) @ b.t(),
        (fp8(32, 64), torch.randn(48, 64)),
        r"operand b_1: float32 is not a float8 tensor times a scale \(reached through permute\); no other rule declines it",
    ),
    "neither side": (
        lambda a, b: a @ b.t(),
        (torch.randn(32, 64), torch.randn(48, 64)),
        r"^operand a_1: float32 is not a float8 tensor times a scale; and operand b_1: .* \(reached through permute\)$",
    ),
    "two conditions": (
        lambda a, s, b: a.float() * s @ dq(b, 0.5).relu(),
        (fp8(32, 64), torch.rand(1, 64), fp8(64, 48)),
        r"^mul scales by .*; and relu = aten.relu is between b_1 and the matmul; only .* commute with the matmul$",
    ),
    "one scale per column": (
        lambda a, s, b: a.float() * s @ dq(b, 0.5),
        (fp8(32, 64), torch.rand(64), fp8(64, 48)),
        r"^mul scales by a tensor of shape \[64\], which may change along the sum; no other rule declines it$",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_declined_matmul_does_not_change_the_graph(case: str) -> None:
    function, inputs, reason = REFUSALS[case]
    before = text(capture(function, *inputs))
    module, (gemm,) = detect(function, *inputs)
    assert text(module) == before
    assert gemm.status == "declined"
    assert re.search(reason, gemm.reason), gemm.reason
    assert count(module, aten._scaled_mm.default) == 0


# In float32 the rewrite is exact except for the order of the sums.
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("out", [F32, BF16, torch.float16])
def test_against_the_float64_oracle(dtypes: tuple[torch.dtype, torch.dtype], out: torch.dtype) -> None:
    a, b = torch.randn(32, 64), torch.randn(64, 48)
    a_q, b_q = (oracle.round_to(x * 16, n) for x, n in zip((a, b), map(_name, dtypes), strict=True))
    exact = (a_q / 16) @ (b_q / 16)
    inputs = a_q.to(dtypes[0]), b_q.to(dtypes[1])
    module, _ = detect(lambda a, b: dq(a, 1 / 16, out) @ dq(b, 1 / 16, out), *inputs)
    assert count(module, aten._scaled_mm.default) == 1
    assert sqnr(exact, module(*inputs)) > {F32: 130, BF16: 50, torch.float16: 65}[out]


def _name(dtype: torch.dtype) -> str:
    return {E4M3: "e4m3", E5M2: "e5m2"}[dtype]


def test_nan_reaches_the_result() -> None:
    a = fp8(32, 64)
    module, _ = detect(lambda a, s, b: dq(a, s) @ dq(b, 0.5), a, scale(), fp8(64, 48))
    assert module(a, scale(float("nan")), fp8(64, 48)).isnan().all()
    a.view(torch.uint8)[3, 5] = 0x7F  # NaN in e4m3
    assert module(a, scale(), fp8(64, 48))[3].isnan().all()


def test_one_scale_of_both_signs() -> None:
    """Matmuls share a computed scale only if it is also multiplied by the same numbers."""

    def both(x: Tensor, s: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return dq(x, s) @ dq(w, s), -dq(x, s) @ dq(w, s), dq(x, s) * 2 @ dq(w, s)

    inputs = fp8(32, 64), scale(), fp8(64, 48)
    module, _ = detect(both, *inputs)
    assert count(module, aten._scaled_mm.default) == 3
    plain, negative, double = module(*inputs)
    assert plain.any() and torch.equal(negative, -plain) and torch.equal(double, 2 * plain)
