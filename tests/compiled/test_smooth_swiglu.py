"""Smooth-SwiGLU in compiled models: what an outlier does to delayed scaling without it, and what it keeps from doing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from tests.helpers.harness import annotated, compiled, sqnr, train, verdicts


class Layer(nn.Module):
    """A SwiGLU layer whose gate and up are aligned in channel 0, so that it is quadratic in the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            self.gate.weight[0] = self.up.weight[0] = 1 / 32**0.5

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, 32]."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def batches() -> list[Tensor]:
    """Return two usual batches, and one with tokens along the aligned weights, whose elements are no larger."""
    torch.manual_seed(1)
    usual = [torch.randn(48, 32) for _ in range(3)]
    usual[2][:8] = 3.0
    return usual


@pytest.mark.parametrize("smooth", [True, False])
def test_an_outlier_saturates_without_it(smooth: bool) -> None:
    """The last batch comes after two with small amaxes: gradients and output are good with it, and bad without."""
    model, exact = Layer(), Layer()
    ours = list(train(model, annotated(model, smooth_swiglu=smooth), batches(), rate=0.0))
    wanted = list(train(exact, exact, batches(), rate=0.0))
    assert sqnr(wanted[1]["output"], ours[1]["output"]) > 20
    error = sqnr(wanted[2]["output"], ours[2]["output"])
    assert error > 20 if smooth else error < 8


def test_compiled_layers_are_the_annotated_ones() -> None:
    ours, reference = Layer(), Layer()
    with verdicts() as report:
        steps = list(train(ours, compiled(ours, smooth_swiglu=["down"], strict=True), batches()))
    for step, expected in zip(
        steps, train(reference, annotated(reference, smooth_swiglu=True), batches()), strict=True
    ):
        assert min(sqnr(expected[name], step[name]) for name in step) > 60
    assert len(report.rewritten) == 9 and not report.declined
    assert {g.note for g in report.gemms if (g.name, g.kind) == ("down", "output")} == {
        "smooth_swiglu scales its weight by channels of the input: it is quantized in each forward"
    }
    assert "down.weight" not in fp8pass.state(ours).slots and "down.input" in fp8pass.state(ours).slots


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("dynamic", marks=pytest.mark.variant)])
def test_other_recipes(recipe: str) -> None:
    model, x = Layer(), batches()[2]
    assert sqnr(model(x), annotated(model, recipe=recipe, smooth_swiglu=True)(x)) > 20


@pytest.mark.variant
def test_a_whole_step_keeps_no_copy_of_the_weight() -> None:
    model = Layer()

    @fp8pass.train_step(smooth_swiglu=True, lowering="eager")
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = [float(step(model, optimizer, x)) for x in batches() * 2]
    assert found[3] < found[0] and found[5] < found[2]
    assert len(step.report.rewritten) == 9


def test_a_pattern_without_a_match_is_an_error() -> None:
    with pytest.raises(Exception, match=r"smooth_swiglu: 'dwn' matches no module or matmul of Layer; .*'down'"):
        compiled(Layer(), smooth_swiglu=["dwn"])(batches()[0])
