"""Test training with static scales: a unit-scaled model with one number, patterns, and calibrated gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.recipes import StaticScaling
from tests.helpers import oracle
from tests.helpers.harness import annotated, compiled, sqnr, verdicts
from tests.helpers.models import Block, make

pytestmark = pytest.mark.compiled


class Unit(nn.Module):
    """A linear layer with weights of variance 1, whose product is divided by the root of what it sums over."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight) / math.sqrt(x.shape[-1])


class UnitScaled(nn.Module):
    """Two such layers, and ReLU times the factor that keeps the variance at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Unit(64, 128), Unit(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)) * math.sqrt(2))
        return y


def losses(model: nn.Module, run: Callable[..., Tensor], steps: int) -> list[float]:
    """Train towards another such model. The loss is half a sum of squares, so that its gradient has variance 1."""
    torch.manual_seed(1)
    teacher, found = UnitScaled(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(steps):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            wanted = teacher(x)
        loss = (run(x) - wanted).square().sum() / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item() / wanted.numel())
    return found


def test_a_unit_scaled_model_trains_as_in_float32() -> None:
    """With scale 1 for everything: the loss falls to less than a half, within 3% of float32's in every step.

    Compiled and annotated numbers differ in the order of sums, and training makes such differences grow.
    """
    torch.manual_seed(0)
    model = UnitScaled()
    with verdicts() as report:
        results = {}
        for name, how in (("float32", lambda f, **_: f), ("annotated", annotated), ("compiled", compiled)):
            own = copy.deepcopy(model)
            results[name] = losses(own, how(own, recipe=StaticScaling(1.0)), 40)
    exact = results["float32"]
    assert exact[-1] < exact[0] / 2
    assert all(abs(a - b) < 0.03 * a for a, b in zip(exact, results["annotated"], strict=True))
    assert results["annotated"] != exact
    assert results["compiled"][:20] == pytest.approx(results["annotated"][:20], rel=1e-5)
    assert results["compiled"] == pytest.approx(results["annotated"], rel=0.01)
    assert {(g.kind, g.status, g.dtypes[0]) for g in report.gemms} == {
        ("output", "rewritten", "e4m3"), ("grad_input", "rewritten", "e5m2"), ("grad_weight", "rewritten", "e5m2"),
    }  # fmt: skip


@pytest.mark.parametrize("how", [annotated, compiled], ids=["annotated", "compiled"])
@pytest.mark.parametrize("fmt", ["hybrid", "e4m3"])
def test_a_linear_layer_against_the_float64_oracle(fmt: str, how: Callable[..., Any]) -> None:
    """Each tensor has its scale, and saturates at the format's largest value: no amax is computed."""
    layer = nn.Linear(32, 48, bias=False)
    x, g = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48)
    with torch.no_grad():
        x[0, 0], g[1, 1], g[2, 2] = 1e6, -1e9, math.inf
    scales = {"*.grad_output": 4.0, "weight.input": 8.0, "*": 16.0}
    y = how(layer, recipe=StaticScaling(scales, fp8_format=fmt))(x)
    y.backward(g)
    of_g = "e5m2" if fmt == "hybrid" else "e4m3"
    x_, w_ = oracle.round_to(x.detach() * 8, "e4m3") / 8, oracle.round_to(layer.weight.detach() * 16, "e4m3") / 16
    g_ = oracle.round_to(g * 4, of_g) / 4
    assert x.grad is not None and layer.weight.grad is not None
    for actual, expected in ((y, x_ @ w_.t()), (x.grad, g_ @ w_), (layer.weight.grad, g_.t() @ x_)):
        assert sqnr(expected, actual) > 110


def test_which_scale_a_slot_has() -> None:
    """Its own name is stronger than patterns, of which the first counts; a second use has the pattern of the first."""
    recipe = StaticScaling({"*.grad_output": 2.0, "up": 4.0, "*": 1.0, "up.input": 3.0, "up.input_1": 5.0})
    slots = ("up.grad_output", "up.grad_output_1", "up.weight", "up.input", "up.input_1", "down.weight", "down.input_1")
    assert [recipe.scale_of(s) for s in slots] == [2.0, 2.0, 4.0, 3.0, 5.0, 1.0, 1.0]
    exact = StaticScaling({"layers.0.up.input": 3.0})
    assert exact.scale_of("up.input") is None and exact.has("up.input") and not exact.has("up.weight")
    assert exact.scale_of("layers.0.up.input_1") is None  # another tensor, which was not calibrated
    assert (exact.trains, recipe.trains, StaticScaling({"up.grad_output": 1.0}).trains) == (False, True, True)
    assert StaticScaling(2.0) == StaticScaling({"*": 2.0}) != StaticScaling(2.0, fp8_format="e4m3")
    assert len({StaticScaling(2.0), StaticScaling(2.0), StaticScaling(2.0, fp8_format="e4m3")}) == 2


def test_gradients_without_a_scale_stay_in_high_precision() -> None:
    model, x = make(Block), torch.randn(16, 32)
    scales = {"*.input": 16.0, "*.weight": 64.0, "up.grad_output": 1.0}
    with verdicts() as report:
        compiled(model, recipe=StaticScaling(scales))(x).square().sum().backward()
    assert {(g.name, g.kind, g.reason) for g in report.declined} == {
        ("down", kind, "there is no static scale for down.grad_output") for kind in ("grad_input", "grad_weight")
    }
    assert {g.rule for g in report.declined} == {"not calibrated"}


def test_calibrated_gradients() -> None:
    """With a loss, `calibrate` returns scales of gradients too: fp8_max by their amax over all batches."""
    model, xs = make(Block), [torch.randn(16, 32) * factor for factor in (1, 2)]

    def loss(y: Tensor) -> Tensor:
        return y.square().sum()

    amaxes = []
    for x in xs:
        y = model(x)
        y.retain_grad()
        loss(y).backward()
        amaxes.append(float(y.grad.abs().max()))
        model.zero_grad()
    scales = fp8pass.calibrate(model, xs, loss=loss)
    assert sorted(s for s in scales if s.endswith("grad_output")) == ["down.grad_output", "up.grad_output"]
    assert float(scales["down.grad_output"]) == pytest.approx(57344 / max(amaxes), rel=1e-5)
    assert all(p.grad is None for p in model.parameters())
    of_e4m3 = fp8pass.calibrate(model, xs, loss=loss, fp8_format="e4m3")
    assert float(of_e4m3["down.grad_output"]) == pytest.approx(448 / max(amaxes), rel=1e-5)
    assert {k: v for k, v in scales.items() if "grad" not in k} == fp8pass.calibrate(model, xs)
    exact, actual = copy.deepcopy(model), copy.deepcopy(model)
    loss(exact(xs[0])).backward()
    with verdicts() as report:
        loss(compiled(actual, recipe=StaticScaling(scales), strict=True)(xs[0])).backward()
    assert len(report.rewritten) == 6
    for a, b in zip(exact.parameters(), actual.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and sqnr(a.grad, b.grad) > 20
    with pytest.raises(ValueError, match=r"loss=3: a function that is called as loss\(output\)"):
        fp8pass.calibrate(model, xs, loss=3)  # type: ignore[arg-type]


def test_train_step_and_checkpointing_with_one_number() -> None:
    model, x = make(Block), torch.randn(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    @fp8pass.train_step(recipe=StaticScaling(32.0), lowering="eager")
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = [float(step(x).detach()) for _ in range(3)]
    assert found[2] < found[1] < found[0]
    again, plain = copy.deepcopy(model), copy.deepcopy(model)
    run = compiled(again, recipe=StaticScaling(32.0))
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).square().sum().backward()
    compiled(plain, recipe=StaticScaling(32.0))(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(again.parameters(), plain.parameters(), strict=True))


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(Exception, match=r"StaticScaling: 'upp' .* did you mean 'up'"):
        compiled(make(Block), recipe=StaticScaling({"upp": 2.0, "*": 1.0}))(torch.randn(16, 32))
