"""Batched matmuls as 2-D products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.harness import BF16, aten, check_legal_on_cuda, detect, dq, fp8, sqnr

pytestmark = pytest.mark.passes


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_bmm(batch: int) -> None:
    inputs = fp8(batch, 8, 24), fp8(batch, 24, 40), torch.randn(batch, 8, 40)

    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.baddbmm(c, dq(a, 0.5), dq(b, 0.25), alpha=2)

    module, _ = detect(product, *inputs)
    assert check_legal_on_cuda(module.graph) == batch
    torch.testing.assert_close(module(*inputs), product(*inputs), rtol=1e-5, atol=1e-4)


SHARED: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "second operand": (lambda a, b: torch.bmm(a, b.expand(40, 24, 48)), ((40, 8, 24), (24, 48))),
    "second operand, unaligned": (lambda a, b: torch.bmm(a, b.expand(5, 23, 47)), ((5, 7, 23), (23, 47))),
    "first operand": (lambda a, b: torch.bmm(a.expand(40, 8, 24), b), ((8, 24), (40, 24, 48))),
    "first operand, unaligned": (lambda a, b: torch.bmm(a.expand(5, 7, 23), b), ((7, 23), (5, 23, 47))),
    "both": (lambda a, b: torch.bmm(a.expand(20, 8, 24), b.expand(20, 24, 48)), ((8, 24), (24, 48))),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_matrix_that_the_batch_shares_makes_one_product(case: str, with_bias: bool) -> None:
    product, (shape_a, shape_b) = SHARED[case]

    def function(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        y = product(dq(a, 0.5, BF16), dq(b, 0.25, BF16))
        return y + bias if with_bias else y

    inputs = fp8(*shape_a), fp8(*shape_b), torch.randn(shape_b[-1], dtype=BF16)
    module, (gemm,) = detect(function, *inputs)
    assert gemm.status == "rewritten"
    (call,) = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    assert (call.args[4] is not None) == with_bias
    assert check_legal_on_cuda(module.graph) == 1
    wanted, got = function(*inputs), module(*inputs)
    assert wanted.stride() == got.stride()
    assert sqnr(wanted, got) > 45
