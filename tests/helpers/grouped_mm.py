"""Tokens and training steps of experts, for the files test_grouped_mm.py of several tiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

H100 = {"target": "h100", "min_speedup": 0}


OFFS = torch.tensor([9, 9, 40, 57], dtype=torch.int32)
"""Ends of the groups of 64 rows: 9 tokens, 0, 31, 17; the last 7 rows belong to no expert."""


def tokens(unused: float = 1.0) -> Tensor:
    """Return 64 rows, of which the last 7, which belong to no expert, hold `unused`."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x[57:] = unused
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
