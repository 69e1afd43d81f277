"""Test rowwise scales that the user wrote, in graphs with symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.harness import (
    E4M3,
    compiled,
    fp8,
    sqnr,
)
from tests.helpers.row_scales import rows


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_symbolic_sizes(lowering: str) -> None:
    """tests/passes/rewrite/test_layout.py runs a symbolic batch by Inductor every day."""

    def function(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        s = x.abs().amax(-1, keepdim=True) / 448
        return ((x / s).to(E4M3).float() * s) @ (w.float() * t)

    w, t = fp8(24, 40), rows(40)
    run = compiled(function, recipe=None, strict=True, lowering=lowering)
    for batch in (3, 5, 16):
        x = torch.randn(batch, 7, 24)
        torch._dynamo.mark_dynamic(x, 0)
        assert sqnr(function(x, w, t), run(x, w, t)) > 100
