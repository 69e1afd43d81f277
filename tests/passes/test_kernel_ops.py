"""Ops of the kernel passes: their formulas, and the metadata of their nodes."""

from __future__ import annotations

import pytest
import torch

from fp8pass.graph.verify import verify
from fp8pass.quant.kernel_ops import CONCATENATED, JOINED, QUANTIZE, ROWS
from tests.helpers.harness import E4M3, capture, scale
from tests.helpers.kernel_ops import CASES


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


@pytest.mark.parametrize("case", CASES)
def test_metadata(case: str) -> None:
    function, inputs = CASES[case]
    module = capture(function, *inputs)
    wanted = function(*inputs)
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    said = output.args[0].meta["val"]
    assert (said.dtype, said.shape, said.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    verify(module.graph)
