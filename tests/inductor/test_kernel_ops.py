"""Ops of the kernel passes: the code that Inductor generates computes their formula."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.helpers.kernel_ops import CASES


@functools.cache
def generated() -> dict[str, torch.Tensor]:
    """Return the results of all cases, compiled as one program."""
    functions = [function for function, _ in CASES.values()]

    def everything(inputs: list[tuple[Any, ...]]) -> list[torch.Tensor]:
        return [f(*args) for f, args in zip(functions, inputs, strict=True)]

    found = torch.compile(everything, fullgraph=True)([args for _, args in CASES.values()])
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_inductor_generates_the_formula(case: str) -> None:
    function, inputs = CASES[case]
    got, wanted = generated()[case], function(*inputs)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    torch.testing.assert_close(
        got, wanted, rtol=0 if "computed" not in case and case != "concatenated" else 1e-6, atol=0
    )
