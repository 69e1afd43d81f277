"""An optimizer that torch does not have."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """The Lion optimizer, which fp8pass does not know by name, written as users write optimizers."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        defaults: dict[str, Any] = {"lr": lr, "beta": 0.9, "decay": 0.1}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(momentum.lerp(p.grad, 1 - group["beta"]).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)
