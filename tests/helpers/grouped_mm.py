"""Tokens and training steps of experts, for the files test_grouped_mm.py of several tiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.harness import (
    E4M3,
    fp8,
)

H100 = {"target": "h100", "min_speedup": 0}


OFFS = torch.tensor([9, 9, 40, 57], dtype=torch.int32)
"""Ends of the groups of 64 rows: 9 tokens, 0, 31, 17; the last 7 rows belong to no expert."""


def tokens(nobodys: float = 1.0) -> Tensor:
    """Return 64 rows, of which the last 7, which belong to no expert, hold `nobodys`."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x[57:] = nobodys
    return x.bfloat16().requires_grad_()


def trained(function: Any, experts: nn.Module, x: Tensor, offs: Tensor = OFFS) -> list[Tensor]:
    """Return a step's output and grad_input of the rows that belong to experts, and the gradients of the weights."""
    y = function(x, offs)
    n = int(offs[-1])
    y[:n].float().square().sum().backward()
    of_weights = [p.grad for p in experts.parameters()]
    assert x.grad is not None
    found = [y[:n].detach(), x.grad[:n], *of_weights]
    for p in (x, *experts.parameters()):
        p.grad = None
    return found


def of(m: int, k: int, g: int, n: int, dtype: torch.dtype = E4M3) -> list[Tensor]:
    return [fp8(m, k, dtype=dtype), torch.rand(m, 1), fp8(g, k, n), torch.rand(g, 1, n)]
