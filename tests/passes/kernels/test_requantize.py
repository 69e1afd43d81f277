"""Test `on_saturation="requantize"`: the numbers of dynamic scaling in steps that saturate, of delayed in others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.base import scaling
from fp8pass.recipes import DelayedScaling
from tests.helpers import oracle
from tests.helpers.harness import annotated, compiled, sqnr

pytestmark = pytest.mark.compiled

RECIPE = DelayedScaling(amax_history_len=1, on_saturation="requantize")
DELAYED = DelayedScaling(amax_history_len=1)
FACTORS = (1.0, 1.0, 30.0, 1.0, 0.1, 1.0)
"""The amaxes of inputs and gradients. A step has the scale of the step before: steps 2 and 5 saturate."""
SATURATE = (2, 5)


def numbers(layer: nn.Module, run: Callable[..., Tensor]) -> list[list[Any]]:
    """Return output and gradients of each step."""
    generator, found = torch.Generator().manual_seed(0), list[list[Any]]()
    x0, g = torch.randn(64, 32, generator=generator), torch.randn(64, 48, generator=generator)
    for factor in FACTORS:
        x = (x0 * factor).requires_grad_()
        y = run(x)
        y.backward(g * factor)
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    return found


def results(how: Callable[..., Any], **options: Any) -> dict[str, list[list[Any]]]:
    torch.manual_seed(0)
    layer, found = nn.Linear(32, 48, bias=False), {}
    for name, recipe in (("requantize", RECIPE), ("delayed", DELAYED), ("dynamic", "dynamic")):
        own = copy.deepcopy(layer)
        found[name] = numbers(own, how(own, recipe=recipe, **options))
    return found


@pytest.mark.parametrize("how", [annotated, compiled], ids=["annotated", "compiled"])
def test_the_numbers_are_those_of_dynamic_scaling_where_it_saturates(how: Callable[..., Any]) -> None:
    found = results(how)
    for step in range(len(FACTORS)):
        same, other = ("dynamic", "delayed") if step in SATURATE else ("delayed", "dynamic")
        assert all(map(torch.equal, found["requantize"][step], found[same][step])), step
        if step in (*SATURATE, 3):  # in the others, both scales are the same, or differ by too little
            assert not torch.equal(found["requantize"][step][0], found[other][step][0])


def test_compiled_as_annotated() -> None:
    for reference, actual in zip(results(annotated)["requantize"], results(compiled)["requantize"], strict=True):
        assert all(sqnr(a, b) > 110 for a, b in zip(reference, actual, strict=True))


@pytest.mark.parametrize("how", [annotated, compiled], ids=["annotated", "compiled"])
def test_a_share_up_to_the_threshold_saturates(how: Callable[..., Any]) -> None:
    """A share of 2 of 2048 elements is below 0.001, and one of 3 is above."""
    model = nn.Linear(32, 16, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(16, 32))
    for count in (2, 3):
        own, x = copy.deepcopy(model), torch.ones(64, 32)
        run = how(own, recipe=RECIPE)
        for _ in range(2):
            run(x).sum().backward()
        x[:count, 0] = 4.0
        expected = oracle.qdq(x, 448 / 4, "e4m3") if count == 3 else oracle.round_to(x * 448, "e4m3") / 448
        assert sqnr(expected[:, :16], run(x)) > 110


def test_the_noise_of_the_threshold() -> None:
    """Clipping 0.001 of a normal distribution makes a fifth of the noise of rounding to e4m3, as the docs say."""
    x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).double()
    edge = float(x.abs().kthvalue(int(x.numel() * 0.999)).values)
    clipping = (x.abs() - edge).clamp(min=0).square().mean()
    rounding = (oracle.qdq(x, 448 / float(x.abs().max()), "e4m3") - x).square().mean()
    assert 0.15 < clipping / rounding < 0.25


def test_nan_and_inf() -> None:
    """The tensor becomes NaN, as in all recipes with amaxes, and its history evicts the infinity."""
    model = nn.Linear(32, 16, bias=False)
    run, x = compiled(model, recipe=RECIPE), torch.ones(64, 32)
    run(x).sum().backward()
    x[:8] = math.inf
    assert run(x).isnan().all()
    x = torch.ones(64, 32)
    assert run(x).isfinite().all()


def test_the_monitor_counts_it() -> None:
    model = nn.Linear(32, 48, bias=False)
    run = compiled(model, recipe=RECIPE, monitor=True)
    numbers(model, run)
    stats = fp8pass.stats(model)
    of = {row.step: row for row in stats.of("weight.input")}
    assert [step for step, row in of.items() if row.requantized] == list(SATURATE)
    assert all(row.saturation == 0 for row in of.values())
    assert {row.slot for row in stats.rows if row.requantized} == {"weight.input", "weight.grad_output"}
    assert "quantized again by their own amax: 2 tensors" in str(stats)


def test_symbolic_sizes() -> None:
    model = nn.Linear(32, 16, bias=False)
    run = compiled(model, recipe=RECIPE, dynamic=True)
    for rows, factor in ((64, 1.0), (48, 1.0), (80, 30.0)):
        x = torch.randn(rows, 32) * factor
        y = run(x)
        y.sum().backward()
    assert sqnr(x @ model.weight.t(), y) > 28


def test_evaluation_requantizes_too() -> None:
    model, x = nn.Linear(32, 16, bias=False), torch.randn(64, 32)
    run = compiled(model, recipe=RECIPE)
    run(x).sum().backward()
    with torch.no_grad():
        assert sqnr(model(x * 100), run(x * 100)) > 28
        assert sqnr(model(x * 100), compiled(copy.deepcopy(model), recipe="dynamic")(x * 100)) > 28


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_saturation": "again"}, "unknown on_saturation 'again': choose one of 'saturate', 'requantize'"),
        (
            {"saturation_threshold": 1.0},
            "saturation_threshold=1.0: a share of a tensor's elements, 0 or more and below 1",
        ),
        ({"saturation_threshold": True}, "saturation_threshold=True: a share"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DelayedScaling(**options)


def test_off_changes_no_graph() -> None:
    assert repr(DelayedScaling()) == "DelayedScaling()"
    assert not DelayedScaling().requantizes and scaling.overflow_from(torch.float8_e4m3fn) == 464
