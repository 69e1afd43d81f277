"""Ops of the kernel passes: their formulas, and the metadata of their nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8pass.graph.verify import verify
from fp8pass.quant.kernel_ops import CONCATENATED, JOINED, QUANTIZE, REPEATED, ROWS
from tests.helpers.harness import BF16, E4M3, E5M2, capture, scale

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "quantize": (lambda x, s: QUANTIZE(x, s, E4M3).float(), (torch.randn(4, 48, dtype=BF16) * 99, scale())),
    "quantize by rows": (lambda x, s: QUANTIZE(x, s, E5M2).float(), (torch.randn(4, 48), torch.rand(4, 1) * 1e6)),
    "quantize a transposed tensor": (lambda x, s: QUANTIZE(x.t(), s, E4M3).float(), (torch.randn(48, 4), scale())),
    "quantize what is computed": (lambda x, s: QUANTIZE(x.sin(), s, E4M3).float(), (torch.randn(4, 48), scale())),
    "rows": (lambda *parts: ROWS(parts), (torch.randn(5), torch.randn(2, 6, dtype=BF16), torch.randn(()))),
    "one row": (lambda *parts: ROWS(parts), (torch.randn(5),)),
    "rows of one number": (lambda *parts: ROWS(parts), (torch.randn(()), torch.randn(1, 1), torch.randn(1))),
    "rows, reduced": (lambda *parts: ROWS(parts).amax(1), (torch.rand(900), torch.rand(7), torch.rand(30, 30))),
    "joined": (lambda *parts: JOINED(parts), (torch.randn(5), torch.randn(()), torch.randn(2, 3), torch.randn(1))),
    "joined numbers": (lambda *parts: JOINED(parts), (torch.randn(()), torch.randn(1), torch.randn(()))),
    "joined booleans": (lambda *parts: JOINED(parts), (torch.tensor([True, False]), torch.tensor([False, True, True]))),
    "joined integers": (lambda *parts: JOINED(parts), (torch.arange(3), torch.arange(7, 9))),
    "one, joined": (lambda *parts: JOINED(parts), (torch.randn(3),)),
    "concatenated": (lambda a, b: CONCATENATED([a.exp(), b * 2], 1), (torch.randn(3, 4), torch.randn(3, 5))),
    "concatenated inputs": (lambda a, b: CONCATENATED([a, b], 0), (torch.randn(3, 4), torch.randn(2, 4))),
    "concatenated, reduced": (lambda a, b: CONCATENATED([a.amax(1), b.amax(1)], 0), (torch.randn(3, 4), torch.randn(2, 9))),
    "concatenated, transposed": (lambda a, b: CONCATENATED([a.t().contiguous(), b.t().contiguous()], 0), (torch.randn(3, 4), torch.randn(3, 5))),
    "concatenated FP8": (lambda a, b, s: CONCATENATED([QUANTIZE(x, s, E4M3) for x in (a, b)], 1).float(), (torch.randn(3, 4), torch.randn(3, 5), scale())),
    "repeated": (lambda x: torch.stack([r * i for i, r in enumerate(REPEATED(x * 2, 3))]), (torch.randn(3, 4),)),
    "repeated, turned": (lambda x: torch.add(*REPEATED(x.t(), 2)).contiguous(), (torch.randn(3, 4),)),
}  # fmt: skip


@pytest.mark.passes
def test_formulas() -> None:
    """The ops compute these examples."""
    a, b = torch.tensor([1.0, -0.0]), torch.tensor([[float("nan"), 2.0, 3.0]])
    torch.testing.assert_close(ROWS([a, b]), torch.tensor([[1, 0, 0], [float("nan"), 2, 3]]), equal_nan=True)
    torch.testing.assert_close(JOINED([a, b]), torch.tensor([1, 0, float("nan"), 2, 3]), equal_nan=True)
    assert JOINED([a, b])[1].signbit()
    torch.testing.assert_close(
        CONCATENATED([a[None], b], 1), torch.tensor([[1, 0, float("nan"), 2, 3]]), equal_nan=True
    )
    x = torch.tensor([1.0, 1e9, -1e9, float("nan")])
    torch.testing.assert_close(
        QUANTIZE(x, scale(2.0), E4M3).float(), torch.tensor([2, 448, -448, float("nan")]), equal_nan=True
    )


@pytest.mark.passes
@pytest.mark.parametrize("case", CASES)
def test_metadata(case: str) -> None:
    function, inputs = CASES[case]
    module = capture(function, *inputs)
    wanted = function(*inputs)
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    said = output.args[0].meta["val"]
    assert (said.dtype, said.shape, said.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    verify(module.graph)


@functools.cache
def generated() -> dict[str, torch.Tensor]:
    """Return the results of all cases, compiled as one program."""
    functions = [function for function, _ in CASES.values()]

    def everything(inputs: list[tuple[Any, ...]]) -> list[torch.Tensor]:
        return [f(*args) for f, args in zip(functions, inputs, strict=True)]

    found = torch.compile(everything, fullgraph=True)([args for _, args in CASES.values()])
    return dict(zip(CASES, found, strict=True))


@pytest.mark.inductor
@pytest.mark.xdist_group("kernel_ops")  # one compilation for all cases
@pytest.mark.parametrize("case", CASES)
def test_inductor_generates_the_formula(case: str) -> None:
    function, inputs = CASES[case]
    got, wanted = generated()[case], function(*inputs)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    torch.testing.assert_close(
        got, wanted, rtol=0 if "computed" not in case and case != "concatenated" else 1e-6, atol=0
    )
