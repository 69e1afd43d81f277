"""Test layouts of FP8 operands under symbolic sizes: `_scaled_mm` gets what it takes, or the matmul is declined."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tests.helpers.harness import (
    compiled,
    fp8,
    sqnr,
    verdicts,
)


def test_a_symbolic_number_of_products_is_declined() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a.float(), b.float())

    run = compiled(function, recipe=None)
    with verdicts() as report:
        for batch in (3, 5):
            a, b = fp8(batch, 8, 24), fp8(batch, 24, 40)
            torch._dynamo.mark_dynamic(a, 0)
            torch._dynamo.mark_dynamic(b, 0)
            assert torch.equal(run(a, b), function(a, b))
    (gemm,) = report.gemms
    assert re.match(r"s\d+ products of \[8, 24\] by \[24, 40\]: `_scaled_mm` has no batch dimension", gemm.reason)


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_a_first_operand_without_batch_and_symbolic_sizes(lowering: str) -> None:
    """`test_a_symbolic_batch_compiles_once` runs some of Inductor's code with symbolic sizes every day."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a.float().expand(b.shape[0], -1, -1), b.float())

    run = compiled(function, recipe=None, strict=True, lowering=lowering, dynamic=True)
    for batch, k, n in ((40, 32, 48), (3, 24, 17)):
        a, b = fp8(8, k), fp8(batch, k, n)
        assert sqnr(function(a, b), run(a, b)) > 110
