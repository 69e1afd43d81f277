"""Matmuls with a scale for each row, for the files test_row_scales.py of several tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.harness import (
    F16,
    F32,
    fp8,
)


def rows(n: int, *shape: int) -> Tensor:
    return torch.rand(n, *shape) + 0.5


# The scale may stand at any of these places: it is folded into the matmul.
TAKEN: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
    "rows of a": (lambda a, s, b: (a.float() * s) @ b.float(), (fp8(32, 64), rows(32, 1), fp8(64, 48))),
    "columns of b": (lambda a, s, b: a.float() @ (b.float() * s), (fp8(32, 64), rows(48), fp8(64, 48))),
    "columns of b, constant": (lambda a, b: a.float() @ (b.float() * torch.arange(1, 49, dtype=F32)), (fp8(32, 64), fp8(64, 48))),
    "divided": (lambda a, s, b: (a.float() / s) @ b.float(), (fp8(32, 64), rows(32, 1), fp8(64, 48))),
    "both, and a number": (lambda a, s, t, b: (a.float() * s * 2) @ (b.float() * t / 4), (fp8(32, 64), rows(32, 1), rows(48), fp8(64, 48))),
    "expanded": (lambda a, s, b: (a.float() * s.expand(32, 64)) @ b.float(), (fp8(32, 64), rows(32, 1), fp8(64, 48))),
    "transposed": (lambda a, s, b: (a.float() * s).t() @ b.float(), (fp8(64, 32), rows(32), fp8(64, 48))),
    "more dimensions": (lambda a, s, b: (a.float() * s).view(-1, 64) @ b.float(), (fp8(4, 8, 64), rows(4, 8, 1), fp8(64, 48))),
    "one of more dimensions": (lambda a, s, b: (a.float() * s).view(-1, 64) @ b.float(), (fp8(4, 8, 64), rows(1, 8, 1), fp8(64, 48))),
    "a part": (lambda a, s, b: (a.float() * s)[4:20] @ b.float(), (fp8(32, 64), rows(32, 1), fp8(64, 48))),
    "rearranged": (lambda a, s, b: (a.float() * s).permute(1, 2, 0).reshape(-1, 64) @ b.float(), (fp8(64, 4, 8), rows(1, 4, 8), fp8(64, 48))),
    "batches": (lambda a, s, b: torch.bmm(a.float() * s, b.float()), (fp8(3, 32, 64), rows(3, 32, 1), fp8(3, 64, 48))),
    "batches of columns": (lambda a, s, b: torch.bmm(a.float(), b.float() * s), (fp8(3, 32, 64), rows(3, 1, 40), fp8(3, 64, 40))),
    "one matrix for a batch": (lambda a, s, b: torch.bmm(a.float() * s, b.float().expand(3, -1, -1)), (fp8(3, 32, 64), rows(3, 32, 1), fp8(64, 48))),
    "one matrix, scaled by entry": (lambda a, s, b: torch.bmm(a.float(), b.float().expand(3, -1, -1) * s), (fp8(3, 32, 64), rows(3, 1, 1), fp8(64, 48))),
    "one matrix as first operand": (lambda a, s, b: torch.bmm(a.float().expand(3, -1, -1), b.float() * s), (fp8(32, 64), rows(3, 1, 48), fp8(3, 64, 48))),
    "alpha and bias": (lambda a, s, b, c: torch.addmm(c, a.float() * s, b.float(), alpha=0.5), (fp8(32, 64), rows(32, 1), fp8(64, 48), torch.randn(48))),
    "odd sizes": (lambda a, s, b, t: (a.float() * s) @ (b.float() * t), (fp8(17, 37), rows(17, 1), fp8(37, 19), rows(1, 19))),
    "half scales": (lambda a, s, b: (a.float() * s.float()) @ b.float(), (fp8(32, 64), rows(32, 1).to(F16), fp8(64, 48))),
}  # fmt: skip
