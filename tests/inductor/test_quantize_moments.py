"""Training with moments in FP8, against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.quant.moments import Fp8Moment
from tests.helpers.quantize_moments import BOTH, power_of_2, read, stored


class Product(nn.Module):
    """A model whose weight has its input as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class Oracle:
    """The formulas of optimizers and stored moments, in float64. kinds: of the moments, by name."""

    def __init__(self, w: Tensor, kinds: dict[str, str]) -> None:
        self.w, self.kinds, self.steps = w.detach().double(), kinds, 0
        self.moments = {name: torch.zeros_like(self.w) for name in kinds}
        self.amaxes: dict[str, float] = {}
        self.scales: dict[str, float] = {}
        self.x_q: dict[str, Tensor] = {}

    def store(self) -> None:
        for name, kind in self.kinds.items():
            x, first = self.moments[name], kind == "first"
            if not self.steps:  # the first step stores with the scale of its own amax
                root = float((x if first else x.sqrt()).abs().max())
                scale = power_of_2(448 if first else 65504, root)
            else:
                amax = self.amaxes[name]
                scale = power_of_2(224 if first else 256, amax) if amax else self.scales[name]
            x_q = self.x_q[name] = stored(kind, x, scale)
            self.moments[name], self.scales[name] = read(kind, x_q, scale), scale
            self.amaxes[name] = float(x_q.double().abs().max()) / scale
        self.steps += 1

    def adamw(self, grad: Tensor) -> None:
        m, v, t = self.moments["exp_avg"], self.moments["exp_avg_sq"], self.steps + 1
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad.square()
        self.moments = {"exp_avg": m, "exp_avg_sq": v}
        denominator = (v / (1 - 0.999**t)).sqrt() + 1e-8
        self.w = self.w * (1 - 0.01 * 0.1) - 0.01 * (m / (1 - 0.9**t)) / denominator

    def sgd(self, grad: Tensor) -> None:
        m = self.moments["momentum_buffer"]
        self.moments = {"momentum_buffer": grad if not self.steps else 0.9 * m + grad}
        self.w = self.w - 0.01 * self.moments["momentum_buffer"]


ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


TRAINED: dict[str, tuple[Callable[..., Any], dict[str, str], Callable[[Oracle, Tensor], None]]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, **ADAMW, foreach=False), BOTH, Oracle.adamw),
    "AdamW foreach": (lambda p: torch.optim.AdamW(p, **ADAMW, foreach=True), BOTH, Oracle.adamw),
    "SGD": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
        {"momentum_buffer": "first"},
        Oracle.sgd,
    ),
}


RANGES = [1.0, 1.5, 0.5, 40.0, 1.0, 1e-3, 0.0, 1.0]
"""Factors of the gradients. Some make a first moment saturate, and some make moments small."""


SKIPS: dict[str, Any] = {"skip_nonfinite": True}


FORMULAS: list[Any] = [("AdamW", SKIPS), ("AdamW foreach", {"lowering": "inductor"})]


OTHERS: list[Any] = [("SGD", {}), ("AdamW", {}), ("AdamW foreach", {}), ("AdamW foreach", SKIPS), ("SGD", SKIPS)]


@pytest.mark.parametrize(
    ("case", "config"), [*FORMULAS, *(pytest.param(*case, marks=pytest.mark.variant) for case in OTHERS)], ids=str
)
def test_training_by_the_formulas(case: str, config: dict[str, Any]) -> None:
    make, kinds_, update = TRAINED[case]
    torch.manual_seed(0)
    of = Product()
    optimizer, oracle = make(of.parameters()), Oracle(of.w, kinds_)

    @fp8pass.train_step(**{"lowering": "eager", "recipe": None, "optimizer_state": "fp8+float16", **config})
    def step(x: Tensor) -> None:
        of(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for factor in RANGES:
        grad = torch.randn(64, 64) * factor
        step(grad)
        update(oracle, grad.double())
        oracle.store()
        torch.testing.assert_close(of.w.detach().double(), oracle.w, rtol=0, atol=2e-4)
        for name, kind in kinds_.items():
            got = optimizer.state[of.w][name]
            if (
                name == "momentum_buffer" and oracle.steps == 1
            ):  # after one step it is the gradient, which no update has quantized
                continue
            assert isinstance(got, Fp8Moment) and got.kind == kind
            assert float(got.moment_scales[0, got.column]) == 1 / oracle.scales[name], name
            differ = (got.x_q.float() != oracle.x_q[name].float()).float().mean()
            assert differ < 0.01, "more than values that float32 rounds to the other side"
