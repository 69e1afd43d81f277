"""Cases of the ops of the kernel passes, for the files test_kernel_ops.py of several tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8pass.quant.kernel_ops import CONCATENATED, JOINED, QUANTIZE, REPEATED, ROWS
from tests.helpers.harness import BF16, E4M3, E5M2, scale

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
