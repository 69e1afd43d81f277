"""Matmuls with a scale for each row compile in Inductor and compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.harness import (
    BF16,
    F32,
    compiled,
    sqnr,
)
from tests.helpers.row_scales import TAKEN


@pytest.mark.parametrize(
    ("dtype", "every"),
    [(F32, 12), *(pytest.param(dtype, 1, marks=pytest.mark.variant) for dtype in (F32, BF16))],
    ids=str,
)
def test_taken_compiled_by_inductor(dtype: torch.dtype, every: int) -> None:
    """Compile cases in one graph; strict makes sure that each is rewritten. every: 12 runs two cases, to save time."""
    chosen = dict(list(TAKEN.items())[::every])
    functions = [function for function, _ in chosen.values()]

    def everything(inputs: list[tuple[Any, ...]]) -> list[Tensor]:
        return [f(*args).to(dtype) for f, args in zip(functions, inputs, strict=True)]

    found = compiled(everything, recipe=None, lowering="inductor", strict=True)([args for _, args in chosen.values()])
    for (case, (function, args)), actual in zip(chosen.items(), found, strict=True):
        assert sqnr(function(*args), actual) > (120 if dtype == F32 else 45), case
