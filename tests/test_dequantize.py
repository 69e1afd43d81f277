"""Operands that are dequantized, beyond the cases of XLA's rules: exactness, equal scales, reasons."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.errors import Fp8Error
from tests.harness import E4M3, aten, capture, compiled, count, detect, fp8, scale, verdicts


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-8, 9, shape).to(E4M3)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a.float() @ b.float(),
        lambda a, b: (a.float() * 0.5) @ (b.float() / 4),
        lambda a, b: ((a.float() * -0.5 * 8).t() @ b.float()) * 0.25,
        lambda a, b: torch.cat([a.float(), -a.float()], 1)[:, 32:96] @ b.float(),
        lambda a, b: torch.addmm(torch.ones(64, 48), a.float(), b.float(), beta=2, alpha=3),
    ],
)
def test_bit_equal_where_nothing_rounds(function: Callable[..., Tensor]) -> None:
    """Whole numbers and powers of two: every sum is exact, in any order."""
    inputs = whole_numbers(64, 64), whole_numbers(64, 48)
    module, gemms = detect(function, *inputs)
    assert [g.status for g in gemms] == ["rewritten"]
    assert torch.equal(module(*inputs), function(*inputs))


def test_a_chain_of_scales_is_one_scale_to_float32() -> None:
    def function(a: Tensor, b: Tensor, s: Tensor, t: Tensor, u: Tensor) -> Tensor:
        return (a.float() * s / t * 0.3) @ (u * b.float() * 7) / s

    inputs = fp8(32, 64), fp8(64, 48), scale(1.7), scale(0.9).view(1), scale(3.3).view(1, 1)
    module, _ = detect(function, *inputs)
    a, b, s, t, u = (x.double() for x in inputs)
    exact = (a @ b) * (s / t * 0.3 * u * 7 / s)
    assert (module(*inputs) - exact).abs().max() < 1e-6 * exact.abs().max()


SCALES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cast twice": (lambda a, b, s: torch.cat([a.float() * s.bfloat16(), b.float() * s.bfloat16()]), ""),
    "in another order": (lambda a, b, s: torch.cat([a.float() * s * 3, 3 * b.float() * s.view(1)[0]]), "2 different"),
    "same numbers": (lambda a, b, s: torch.cat([a.float() * 2 / s, b.float() * 4 / s / 2]), ""),
    "signs": (lambda a, b, s: torch.cat([a.float() * -s, b.float() * -s]), ""),
    "squared": (lambda a, b, s: torch.cat([a.float() * s * s, b.float() * s]), "2 different scales"),
    "divided": (lambda a, b, s: torch.cat([a.float() * s, b.float() / s]), "2 different scales"),
    "rounded": (lambda a, b, s: torch.cat([a.float() * s, b.float() * s.bfloat16()]), "2 different scales"),
}


@pytest.mark.parametrize("case", SCALES)
def test_which_scales_are_the_same(case: str) -> None:
    join, reason = SCALES[case]

    def function(a: Tensor, b: Tensor, s: Tensor, w: Tensor) -> Tensor:
        return join(a, b, s) @ w.float()

    inputs = fp8(16, 64), fp8(32, 64), scale(0.3), fp8(64, 48)
    module, (gemm,) = detect(function, *inputs)
    assert (gemm.status == "rewritten") == (not reason), gemm.reason
    assert reason in gemm.reason
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)


def test_a_long_chain() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        x = a.float()
        for _ in range(300):
            x = (x * 2).t() / 2
        return x @ b.float()

    module, (gemm,) = detect(function, fp8(64, 64), fp8(64, 48))
    assert gemm.status == "rewritten"
    assert count(module, aten.clone.default) == 1  # for b


def test_a_diamond_of_joins_takes_no_exponential_time() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        x = a.float() * 0.5
        for _ in range(12):
            x = torch.cat([x[:16], x[16:]])
        for _ in range(4):
            x = torch.cat([x, x])
        return x @ b.float()

    inputs = fp8(32, 64), fp8(64, 48)
    module, (gemm,) = detect(function, *inputs)
    assert gemm.status == "rewritten"
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)


def rows(a: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return (a.float() * s) @ b.float()


ROWS = fp8(16, 32), torch.rand(16, 1), fp8(32, 16)


def test_a_near_miss_names_the_condition_and_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with verdicts() as report, caplog.at_level(logging.INFO, "fp8pass"):
        compiled(rows, recipe=None)(*ROWS)
    (gemm,) = report.gemms
    assert gemm.near_miss
    assert gemm.quantized
    line = rows.__code__.co_firstlineno + 1
    assert gemm.reason == (
        f"mul (test_dequantize.py:{line}) scales by a tensor of shape [16, 1], not by one number; all else matches"
    )
    assert report.rules() == {"scale shape": 1}
    summary = "0 of 1 matmuls in FP8, 0% of matmul FLOPs (1 graph); declined: 1 scale shape"
    assert report.summary() == summary
    assert summary in [r.getMessage() for r in caplog.records]


def test_strict_takes_a_malformed_quantize_for_meant() -> None:
    with pytest.raises(
        Exception, match=r"strict: output of .*, \[16, 32\] by \[32, 16\], .*scales by a tensor of shape"
    ):
        compiled(rows, recipe=None, strict=True)(*ROWS)
    assert issubclass(Fp8Error, Exception)


def test_what_is_dequantized_for_nothing_is_noted() -> None:
    def function(a: Tensor) -> Tensor:
        return (a.float() * 0.5).softmax(-1)

    with verdicts() as report:
        compiled(function, recipe=None)(fp8(16, 32))
    (note,) = report.notes
    assert re.fullmatch(
        r"\w+ is dequantized for amax \(\S+\) and sub \(\S+\), and for no matmul; only those run in FP8", note
    )


def test_float8_of_another_kind() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return a.float() @ b.float()

    inputs: Any = torch.ones(16, 32).to(torch.float8_e8m0fnu), fp8(32, 16)
    _, (gemm,) = detect(function, *inputs)
    assert gemm.rule == "not float8"
    assert capture(function, *inputs) is not None
