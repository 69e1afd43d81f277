"""FP8 operands in the layout that `_scaled_mm` takes, with symbolic sizes and reshapes that Inductor compiles."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.harness import (
    BF16,
    E4M3,
    RefusedByCuda,
    aten,
    capture,
    check_legal_on_cuda,
    compiled,
    count,
    detect,
    dq,
    fp8,
    sqnr,
    verdicts,
)


@pytest.mark.passes
def test_unaligned_sizes_are_padded_with_zeros_and_the_result_is_sliced_back() -> None:
    inputs = fp8(32, 60), fp8(60, 40)
    module, _ = detect(lambda x, w: dq(x, 1.0) @ dq(w, 1.0), *inputs)
    (call,) = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    assert [list(n.meta["val"].shape) for n in (call.args[0], call.args[1], call)] == [[32, 64], [64, 48], [32, 48]]
    actual = module(*inputs)
    assert (actual.shape, actual.stride()) == ((32, 40), (40, 1))
    torch.testing.assert_close(actual, inputs[0].float() @ inputs[1].float(), rtol=1e-5, atol=1e-3)


@pytest.mark.passes
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_copies_for_every_gpu(target: str) -> None:
    """cuBLASLt needs no copies on sm_100, but torch's check is the same for all GPUs."""
    function, inputs = (lambda a, b: dq(a.t(), 0.5) @ dq(b, 0.5)), (fp8(64, 32), fp8(64, 48))
    module, _ = detect(function, *inputs, target=target)
    assert count(module, aten.clone.default) == 2
    assert check_legal_on_cuda(module.graph) == 1


@pytest.mark.passes
def test_operands_are_prepared_once() -> None:
    def two(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        wide = dq(x, 0.5).t()
        return wide @ dq(w, 0.5), wide @ dq(v, 0.5)

    module, gemms = detect(two, fp8(64, 32), fp8(64, 48), fp8(64, 16))
    assert [g.status for g in gemms] == ["rewritten"] * 2
    assert count(module, aten.clone.default) == 3  # one for x, one for each of w and v


@pytest.mark.passes
def test_views_and_scales_are_written_once() -> None:
    def two(x: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = dq(w, 0.5).t()
        return dq(x, 0.5) @ wide, dq(z, 0.5) @ wide

    inputs = fp8(32, 64), fp8(16, 64), fp8(48, 64)
    module, gemms = detect(two, *inputs)
    assert [g.status for g in gemms] == ["rewritten"] * 2
    assert count(module, aten.permute.default) == 1
    first, second = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    assert first.args[1:] == second.args[1:]
    for wanted, got in zip(two(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.passes
def test_a_product_that_is_written_twice_is_two_calls() -> None:
    """Each call has its own verdict and node; they share their arguments."""
    module, gemms = detect(lambda x, w: (dq(x, 0.5) @ dq(w, 0.5), dq(x, 0.5) @ dq(w, 0.5)), fp8(32, 64), fp8(64, 48))
    assert [g.status for g in gemms] == ["rewritten"] * 2
    first, second = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    assert first.args == second.args


SHAPES = [(32, 64, 48), (31, 64, 48), (32, 63, 48), (32, 64, 47), (7, 5, 3), (1, 64, 48), (32, 1, 48), (32, 64, 1)]


@pytest.mark.passes
@pytest.mark.parametrize("a_columns", [False, True], ids=["a rows", "a columns"])
@pytest.mark.parametrize("b_columns", [False, True], ids=["b rows", "b columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_and_layouts(shape: tuple[int, int, int], a_columns: bool, b_columns: bool) -> None:
    m, k, n = shape
    a = fp8(k, m).t() if a_columns else fp8(m, k)
    b = fp8(n, k).t() if b_columns else fp8(k, n)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return aten.mm.default(dq(a, 0.5), dq(b, 0.25))

    module, (gemm,) = detect(product, a, b)
    assert gemm.status == "rewritten", gemm.reason
    assert check_legal_on_cuda(module.graph) == 1
    actual = module(a, b)
    assert actual.shape == (m, n)
    torch.testing.assert_close(actual, product(a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.passes
def test_unrewritten_layouts_are_illegal_on_cuda() -> None:
    """The check fails for operands that a CPU accepts without a copy and CUDA refuses."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, torch.tensor(1.0), torch.tensor(1.0), out_dtype=BF16)

    for inputs in ((fp8(32, 64), fp8(64, 48)), (fp8(32, 40), fp8(48, 40).t()), (fp8(32, 64), fp8(47, 64).t())):
        assert product(*inputs).isfinite().all()
        with pytest.raises(RefusedByCuda):
            check_legal_on_cuda(capture(product, *inputs).graph)


@pytest.mark.compiled
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


@pytest.mark.compiled
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_a_first_operand_without_batch_and_symbolic_sizes(lowering: str) -> None:
    """`test_a_symbolic_batch_compiles_once` runs some of Inductor's code with symbolic sizes every day."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a.float().expand(b.shape[0], -1, -1), b.float())

    run = compiled(function, recipe=None, strict=True, lowering=lowering, dynamic=True)
    for batch, k, n in ((40, 32, 48), (3, 24, 17)):
        a, b = fp8(8, k), fp8(batch, k, n)
        assert sqnr(function(a, b), run(a, b)) > 110


@pytest.mark.inductor
def test_a_symbolic_batch_compiles_once() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        x_q = (x * 8).clamp(-448, 448).to(E4M3)
        return ((x_q.float() / 8) @ (w.float() * 0.5) + v).relu()[:, 1:]

    w, v = fp8(24, 40), torch.randn(40)
    for lowering in ("eager", "inductor"):
        torch._dynamo.utils.counters.clear()
        run = compiled(function, recipe=None, strict=True, lowering=lowering)
        for batch in (3, 5, 16, 40):
            x = torch.randn(batch, 7, 24)
            torch._dynamo.mark_dynamic(x, 0)
            assert sqnr(function(x, w, v), run(x, w, v)) > 100
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


COPYING_RESHAPES: list[tuple[Callable[..., Tensor], tuple[int, ...]]] = [
    (lambda b: b[:, None].expand(-1, 3, -1).reshape(-1, 32).t(), (16, 32)),
    (lambda b: b.permute(1, 0, 2).reshape(-1, 32).t(), (4, 16, 32)),
    (lambda b: b[:, 1:9].reshape(-1, 32).t(), (4, 16, 32)),
    (lambda b: b.repeat_interleave(2, 0).t(), (16, 32)),
    (lambda b: b.unfold(0, 4, 2).reshape(-1, 32).t(), (18, 32)),
]


@pytest.mark.inductor
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.variant)])
def test_reshapes_that_copy_compile(every: int) -> None:
    """Inductor keeps such a reshape as a view, and copies it in a layout that `_scaled_mm` refuses.

    An annotated layer with such a reshape is in the same graph. every: with 4, the first and the last run, in half of the
    time.
    """
    reshapes = COPYING_RESHAPES[::every]

    def function(a: Tensor, bs: list[Tensor], x: Tensor, w: Tensor) -> list[Tensor]:
        moved = [y for (f, _), b in zip(reshapes, bs, strict=True) for y in (f(b).float(), f(b.float()))]
        of_layer = x @ w[:, None].expand(-1, 3, -1, -1).reshape(-1, 32).t()
        return [*(a.float() @ b for b in moved), of_layer]

    inputs = fp8(8, 32), [fp8(*shape) for _, shape in reshapes], torch.randn(8, 32), torch.randn(4, 16, 32)
    *actual, of_layer = compiled(function, recipe="dynamic", strict=True, lowering="inductor")(*inputs)
    *expected, of_layer_in_high_precision = function(*inputs)
    for wanted, got in zip(expected, actual, strict=True):
        assert sqnr(wanted, got) > 110
    assert sqnr(of_layer_in_high_precision, of_layer) > 20


def _checked(i: Tensor) -> int:
    n = int(i.item())
    torch._check(n >= 0)
    torch._check(n <= 8)
    return n


UNBACKED: dict[str, tuple[Callable[..., Tensor], bool, str]] = {
    "gate": (lambda a, b, g: (a.float() * g) @ b.float(), True, ""),
    "epilogue": (lambda a, b, g: ((a.float() @ b.float()) * g.sum()).clamp(-448, 448).to(E4M3).float(), True, ""),
    "batch": (lambda a, b, g: torch.bmm(a.float()[:, None], b.float().expand(a.shape[0], -1, -1)), True, ""),
    "select": (lambda a, b, i: (a.float() * 0.5)[i.item()][None] @ b.float(), False, "index or to a size that depends on data"),
    "slice": (lambda a, b, i: (a.float() * 0.5)[i.item() :] @ b.float(), False, "index or to a size that depends on data"),
    "select with bounds": (lambda a, b, i: (a.float() * 0.5)[_checked(i)][None] @ b.float(), False, ""),
    "slice with bounds": (lambda a, b, i: (a.float() * 0.5).narrow(0, _checked(i), 20) @ b.float(), False, ""),
    "mask": (lambda a, b, g: (a.float() * 0.5)[g[:, 0] > 0] @ b.float(), False, "index or to a size that depends on data"),
}  # fmt: skip


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("case", "lowering"),
    [
        *((case, "eager") for case in UNBACKED),
        ("slice with bounds", "inductor"),
        *(
            pytest.param(case, "inductor", marks=pytest.mark.variant)
            for case in UNBACKED
            if case != "slice with bounds"
        ),
    ],
)
def test_sizes_and_indices_that_depend_on_data(case: str, lowering: str) -> None:
    function, unbacked, reason = UNBACKED[case]
    a, b = fp8(31, 63), fp8(63, 47)
    last = torch.tensor(1) if case.startswith(("select", "slice")) else torch.rand(31, 1)
    if unbacked:
        torch._dynamo.decorators.mark_unbacked(a, 0)
        torch._dynamo.decorators.mark_unbacked(last, 0)
    with (
        verdicts() as report,
        torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
    ):
        run = compiled(function, recipe=None, lowering=lowering)
        assert sqnr(function(a, b, last), run(a, b, last)) > 100
    for gemm in report.gemms:
        assert (gemm.status == "declined") == bool(reason)
        assert re.search(reason, gemm.reason), gemm.reason
