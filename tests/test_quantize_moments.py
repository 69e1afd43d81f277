"""The quantize_moments pass: which tensors are moments, how they are read and written, and what numbers come of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fp8pass.passes.quantize_moments import moments_of
from fp8pass.passes.write_weights import written
from fp8pass.updates import attribute
from tests.harness import BF16, F32
from tests.test_write_weights import Lion

# ---------------------------------------------------------------------------------------------------------------------
# Pattern


def model(dtype: torch.dtype = F32) -> nn.Sequential:
    """With gradients; the first weight is large enough for FP8, its bias and the second weight are not."""
    made = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 63, bias=False)).to(dtype)
    made(torch.randn(5, 64, dtype=dtype)).square().sum().backward()
    return made


def kinds(make: Callable[..., Any], dtype: torch.dtype = F32) -> dict[str, str]:
    """Of the state that the optimizer has of a weight, by name, what is found to be a moment. Nothing else is found."""
    of = model(dtype)
    optimizer = make(of.parameters())
    optimizer.step()
    found: dict[int, str] = {}

    def backend(module: fx.GraphModule, _: Any) -> Any:
        before = module.code
        moments = moments_of(module, places) if (places := written(module)) else []
        assert module.code == before, "only reads"

        def run(*args: Any) -> Any:
            for moment in moments:
                x = args[moment.place] if isinstance(moment.place, int) else attribute(module, moment.place)
                assert moment.dtype == x.dtype
                found[id(x)] = moment.kind
            return module.forward(*args)

        return run

    torch.compile(optimizer.step, backend=backend)()
    state = optimizer.state[of[0].weight]
    named = {name: found.pop(id(x)) for name, x in state.items() if id(x) in found}
    assert not found, "what is small, or no moment"
    return named


class Momentum(torch.optim.Optimizer):
    """By hand. kind: what it has beside a moment."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.kind = kind
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum": torch.zeros_like(p), "other": p.detach().clone()}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum, other = self.state[p]["momentum"], self.state[p]["other"]
                momentum.lerp_(p.grad, 0.1)
                if self.kind == "average":
                    p.sub_(momentum, alpha=group["lr"])
                    other.lerp_(p, 0.01)
                elif self.kind == "master":
                    other.mul_(1 - 1e-3).sub_(momentum, alpha=group["lr"])
                    p.copy_(other)


BOTH = {"exp_avg": "first", "exp_avg_sq": "second"}
OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "SGD": (lambda p, **k: torch.optim.SGD(p, lr=0.1, **k), {}),
    "SGD momentum": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **k),
        {"momentum_buffer": "first"},
    ),
    "SGD nesterov": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k),
        {"momentum_buffer": "first"},
    ),
    "Adam": (lambda p, **k: torch.optim.Adam(p, lr=0.1, **k), BOTH),
    "Adam, weight decay": (lambda p, **k: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **k), BOTH),
    "AdamW": (lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k), BOTH),
    "AdamW, lr in a tensor": (lambda p, foreach: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False), BOTH),
    "AdamW maximize": (lambda p, **k: torch.optim.AdamW(p, lr=0.1, maximize=True, **k), BOTH),
    "amsgrad": (
        lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
        {**BOTH, "max_exp_avg_sq": "second"},
    ),
    "NAdam": (lambda p, **k: torch.optim.NAdam(p, lr=0.1, **k), BOTH),
    "Adamax": (lambda p, **k: torch.optim.Adamax(p, lr=0.1, **k), {"exp_avg": "first"}),
    "RMSprop": (lambda p, **k: torch.optim.RMSprop(p, lr=0.1, **k), {"square_avg": "second"}),
    "Adagrad": (lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k), {}),
    "Adafactor": (lambda p, **k: torch.optim.Adafactor(p, lr=0.1, **k), {}),
}


@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_what_is_a_moment(case: str, foreach: bool) -> None:
    make, wanted = OPTIMIZERS[case]
    if case == "amsgrad" and foreach:  # a maximum on lists is not looked into
        wanted = BOTH
    assert kinds(lambda p: make(p, foreach=foreach)) == wanted


def test_of_an_optimizer_that_nobody_knows() -> None:
    assert kinds(Lion) == {"momentum": "first"}


@pytest.mark.parametrize("kind", ["average", "master"])
def test_no_moments(kind: str) -> None:
    """Averages of parameters, and their copies in full precision, that an optimizer has beside its moments."""
    assert kinds(lambda p: Momentum(p, kind)) == {"momentum": "first"}


def test_moments_in_bfloat16() -> None:
    """A square root in float16 is as large: only first ones."""
    assert kinds(lambda p: torch.optim.AdamW(p, foreach=True), BF16) == {"exp_avg": "first"}
