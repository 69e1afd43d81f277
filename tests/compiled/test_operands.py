"""Operands that are dequantized, beyond the cases of XLA's rules: exactness, equal scales, reasons."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import Tensor

from tests.helpers.harness import compiled, fp8, verdicts


def test_a_symbolic_alpha_is_declined() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(c, a.bfloat16(), b.bfloat16(), alpha=x.shape[0])

    with verdicts() as report:
        compiled(function, recipe=None, dynamic=True)(
            fp8(32, 64), fp8(64, 48), torch.zeros(48).bfloat16(), torch.ones(3)
        )
    assert report.rules() == {"alpha": 1}


def columns(a: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return (a.float() * s) @ b.float()


COLUMNS = fp8(16, 32), torch.rand(1, 32), fp8(32, 16)


def test_a_near_miss_names_the_condition_and_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with verdicts() as report, caplog.at_level(logging.INFO, "fp8pass"):
        compiled(columns, recipe=None)(*COLUMNS)
    (gemm,) = report.gemms
    assert gemm.near_miss
    assert gemm.quantized
    line = columns.__code__.co_firstlineno + 1
    assert gemm.reason == (
        f"mul (test_operands.py:{line}) scales by a tensor of shape [1, 32], which may change along the sum; no other rule declines it"
    )
    assert report.rules() == {"scale shape": 1}
    summary = "0 of 1 matmuls in FP8, 0% of matmul FLOPs (1 graph); declined: 1 scale shape"
    assert report.summary() == summary
    assert [summary in r.getMessage() for r in caplog.records] == [True]


def test_strict_takes_a_malformed_quantize_for_meant() -> None:
    with pytest.raises(
        Exception, match=r"strict: output of .*, \[16, 32\] by \[32, 16\], .*scales by a tensor of shape"
    ):
        compiled(columns, recipe=None, strict=True)(*COLUMNS)


def test_what_is_dequantized_for_nothing_is_noted() -> None:
    def function(a: Tensor) -> Tensor:
        return (a.float() * 0.5).softmax(-1)

    with verdicts() as report:
        compiled(function, recipe=None)(fp8(16, 32))
    (note,) = report.notes
    assert re.match(r"\w+ is dequantized for amax \(\S+\) and sub \(\S+\), not for mm, addmm, bmm or baddbmm", note)
