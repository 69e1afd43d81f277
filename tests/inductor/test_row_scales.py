"""A scale for each row: where it may stand, when it can be taken out of the sum, and what becomes of it."""

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
    """Cases in one graph; strict, so that each is rewritten in it. every: one of rows and one of batches take less time."""
    chosen = dict(list(TAKEN.items())[::every])
    functions = [function for function, _ in chosen.values()]

    def everything(inputs: list[tuple[Any, ...]]) -> list[Tensor]:
        return [f(*args).to(dtype) for f, args in zip(functions, inputs, strict=True)]

    found = compiled(everything, recipe=None, lowering="inductor", strict=True)([args for _, args in chosen.values()])
    for (case, (function, args)), actual in zip(chosen.items(), found, strict=True):
        assert sqnr(function(*args), actual) > (120 if dtype == F32 else 45), case
