"""Quantizers of recipes and their oracles, for the files test_quantizers.py of several tiers."""

from __future__ import annotations

from torch import Tensor

from tests.helpers import oracle

ALL = ("output", "grad_input", "grad_weight")


def rows(x: Tensor, dim: int) -> Tensor:
    return oracle.qdq_rows(x, dim)


def blocks(x: Tensor, dim: int) -> Tensor:
    return oracle.qdq_blocks(x, *((1, 128) if dim else (128, 1)))


def mx(x: Tensor, dim: int, fmt: str = "e4m3") -> Tensor:
    return oracle.qdq_mx(x, fmt) if dim else oracle.qdq_mx(x.t(), fmt).t()
