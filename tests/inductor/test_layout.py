"""FP8 operands in the layout that `_scaled_mm` takes, with symbolic sizes and reshapes that Inductor compiles."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.harness import (
    E4M3,
    compiled,
    fp8,
    sqnr,
    verdicts,
)


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
