"""A model whose gradients are its inputs, in bfloat16, for the files test_stochastic_rounding.py of two tiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fp8pass


class Product(nn.Module):
    """A model whose weight has its input as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter((torch.rand(64, 64) + 0.5).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class Training:
    """A `Product` that is trained."""

    def __init__(self, make: Any, **config: Any) -> None:
        torch.manual_seed(0)
        self.of = Product()
        self.optimizer = make(self.of.parameters())
        options = {"lowering": "eager", "recipe": None, "update_rounding": "stochastic", **config}

        @fp8pass.train_step(**options)
        def step(x: Tensor) -> None:
            self.of(x).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.step = step

    def run(self, *grads: Tensor) -> Tensor:
        """Do a step with each gradient; return the weight."""
        for grad in grads:
            self.step(grad)
        return self.of.w.detach().clone()


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=2.0**-14, foreach=True)


def adamw(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=1e-3, foreach=True)


def gradients(n: int) -> list[Tensor]:
    """Return n gradients bf16[64, 64] that are no small ones."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(64, 64, generator=generator) + 0.5).bfloat16() for _ in range(n)]
