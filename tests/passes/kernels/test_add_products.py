"""The add_products pass: products that a graph adds to a tensor that it writes into."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fp8pass import hardware
from fp8pass.passes.kernels.add_products import ADDS, AddProducts
from tests.helpers.added_products import SCALED_ADDMM
from tests.helpers.functions import WithMainGrad
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
    verdicts,
)
from tests.helpers.models import make

ADDING = mock.patch.object(hardware, "adds_products", return_value=True)


def product(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), s, s, out_dtype=BF16)


def add_once(main_grad: Tensor, a: Tensor, b: Tensor, s: Tensor) -> None:
    main_grad.copy_(main_grad + product(a, b, s))


def add_twice(main_grad: Tensor, a: Tensor, b: Tensor, s: Tensor) -> None:
    main_grad.copy_(product(a, b, 2 * s).float() + (main_grad + product(a, b, s)))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return torch.randn(48, 64).to(dtype), fp8(48, 32, dtype=E5M2), fp8(64, 32, dtype=E4M3), scale()


@pytest.mark.passes
def test_graph() -> None:
    module = capture(add_once, *inputs())
    with ADDING:
        context = on_kernels(module, AddProducts())
    assert list(context.fused.values()) == [ADDS]
    expect_graph(
        module,
        """\
main_grad_1: "f32[48, 64]",
a_1: "f8e5m2[48, 32]",
b_1: "f8e4m3fn[64, 32]",
s_1: "f32[]",
permute: "f8e4m3fn[32, 64]" = aten.permute.default(b_1, [1, 0])
_scaled_addmm_default: "f32[48, 64]" = aten._scaled_addmm.default(main_grad_1, a_1, permute, [s_1], [0], [], [s_1], [0], [], use_fast_accum = False)
copy_: "f32[48, 64]" = aten.copy_.default(main_grad_1, _scaled_addmm_default)
return None
""",
    )


@pytest.mark.passes
@pytest.mark.parametrize(("function", "products"), [(add_once, 1), (add_twice, 2)])
def test_numbers(function: Any, products: int) -> None:
    given = inputs()
    module, exact = capture(function, *given), given[0].double()
    a, b, s = (x.double() for x in given[1:])
    exact = exact + (1 if products == 1 else 5) * s * s * (a @ b.t())
    with ADDING:
        on_kernels(module, AddProducts())
    assert (count(module, SCALED_ADDMM), count(module, aten._scaled_mm.default)) == (products, 0)
    added, rounded = given[0].clone(), given[0].clone()
    module(added, *given[1:])
    function(rounded, *given[1:])
    assert sqnr(exact, added) > 120 > sqnr(exact, rounded) > 40


@pytest.mark.passes
def test_rows_of_a_product() -> None:
    """The matmul computes only the rows that are added."""

    def add_rows(main_grad: Tensor, a: Tensor, b: Tensor, s: Tensor) -> None:
        main_grad.copy_(main_grad + product(a, b, s)[32:])

    into, *given = inputs()
    into = into[:16].clone()
    module, wanted = capture(add_rows, into, *given), into.clone()
    add_rows(wanted, *given)
    with ADDING:
        on_kernels(module, AddProducts())
    assert count(module, SCALED_ADDMM) == 1
    module(into, *given)
    assert sqnr(wanted, into) > 40


@pytest.mark.passes
def test_sums_that_stay() -> None:
    def read(main_grad: Tensor, *x: Tensor) -> Tensor:
        y = product(*x)
        main_grad.copy_(main_grad + y)
        return y

    def returned(main_grad: Tensor, *x: Tensor) -> Tensor:
        total = main_grad + product(*x)
        main_grad.copy_(total)
        return total * 2

    def not_written(main_grad: Tensor, *x: Tensor) -> Tensor:
        return main_grad + product(*x)

    def transposed(main_grad: Tensor, *x: Tensor) -> None:
        main_grad.copy_(main_grad + product(*x).t().contiguous().view(48, 64))

    def less(main_grad: Tensor, *x: Tensor) -> None:
        main_grad.copy_(torch.add(main_grad, product(*x), alpha=0.5))

    def moved(main_grad: Tensor, *x: Tensor) -> None:
        main_grad.copy_(main_grad * 0.9 + product(*x))

    shifted = torch.randn(48 * 64 + 1)[1:].view(48, 64)
    cases = [(f, inputs()) for f in (read, returned, not_written, transposed, less, moved)]
    for function, given in (
        *cases,
        (add_once, inputs(BF16)),
        (add_once, (shifted, *inputs()[1:])),
        (add_once, (torch.randn(64, 48).t(), *inputs()[1:])),
    ):
        module = capture(function, *given)
        before = module.code
        with ADDING:
            context = on_kernels(module, AddProducts())
        assert module.code == before, function
        assert len(context.fused) == (function is read)  # the others are not sums that a matmul could compute


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_main_grad_of_a_function(dtype: torch.dtype) -> None:
    """Training with sums in the matmul is training without, but for the rounding of products to bfloat16."""
    found = []
    for adding in (False, True):
        model: Any = make(WithMainGrad).to(dtype)
        model.weight.main_grad = torch.zeros(48, 64)  # in float32, as Megatron-LM keeps it
        with ADDING if adding else contextlib.nullcontext(), verdicts() as report:
            run = compiled(model, lowering="eager")
            for x in torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)).to(dtype):
                run(x).float().square().sum().backward()
        found.append(model.weight.main_grad)
        assert [gemm.note for gemm in report.gemms].count(ADDS) == adding
    assert torch.equal(*found) if dtype == F32 else 40 < sqnr(*found) < 120
