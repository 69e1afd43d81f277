"""The numbers of `fp8pass/base/scaling.py` against the float64 oracle."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.recipes import DelayedScaling, next_scale_of, scale_of
from tests.helpers import oracle
from tests.helpers.own_recipes import SLOTS

pytestmark = pytest.mark.passes

FORMATS = {"e4m3": scaling.E4M3, "e5m2": scaling.E5M2}
floats = st.floats(width=32, allow_subnormal=False)


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=200, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=32), scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_quantize_rounds_to_nearest_even_and_saturates(fmt: str, values: list[float], scale: float) -> None:
    x = torch.tensor(values)
    expected = oracle.round_to(x * scale, fmt)  # the product is rounded to float32, as documented
    actual = scaling.quantize(x, scale, FORMATS[fmt])
    assert actual.dtype == FORMATS[fmt]
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("fmt", "x", "expected"),
    [
        ("e4m3", 2.0**-10, 0.0),  # half of the smallest subnormal is a tie, which rounds to even
        ("e4m3", 3 * 2.0**-10, 2.0**-8),
        ("e4m3", 17.0, 16.0),
        ("e4m3", 19.0, 20.0),
        ("e4m3", 1e30, 448.0),
        ("e4m3", -math.inf, -448.0),
        ("e5m2", 2.0**-17, 0.0),
        ("e5m2", 1.125, 1.0),
        ("e5m2", 61440.0, 57344.0),
        ("e5m2", math.inf, 57344.0),
    ],
)
def test_quantize_at_the_edges(fmt: str, x: float, expected: float) -> None:
    assert scaling.quantize(torch.tensor([x]), 1.0, FORMATS[fmt]).item() == expected


@given(amax=st.floats(0, width=32), margin=st.integers(0, 4))
@example(amax=9.302473332311283e-38, margin=4)
@settings(deadline=None)
def test_scale_from_amax(amax: float, margin: int) -> None:
    actual = scaling.scale_from_amax(torch.tensor(amax), 448.0, 7.0, margin).item()
    assert 0 < actual < math.inf
    assert actual == pytest.approx(oracle.scale_of(amax, "e4m3", 7.0, margin), rel=1e-6)


@pytest.mark.parametrize("amax", [0.0, math.nan, math.inf])
def test_scale_is_kept_without_a_usable_amax(amax: float) -> None:
    assert scaling.scale_from_amax(torch.tensor(amax), 448.0, 3.5).item() == 3.5


@given(amax=st.floats(0, allow_infinity=False, width=32), limit=st.sampled_from([448.0, 57344.0, 4.0]))
@example(amax=1.75, limit=448.0)  # 448 / 1.75 is a power of two, and must not become half of it
@example(amax=1.7500001192092896, limit=448.0)
@example(amax=2.0**-149, limit=57344.0)
@example(amax=3.4028234663852886e38, limit=4.0)
@settings(deadline=None)
def test_a_power_of_2_is_the_largest_that_fits(amax: float, limit: float) -> None:
    for fp8_max in (limit, torch.tensor(limit)):
        scale = scaling.power_of_2_from_amax(torch.tensor(amax), fp8_max, 3.5).item()
        if amax == 0:
            assert scale == 3.5
        else:
            exponent = int(math.log2(scale))
            assert scale == 2.0**exponent and exponent <= 127
            assert Fraction(amax) * 2**exponent <= limit
            assert exponent == 127 or Fraction(amax) * 2 ** (exponent + 1) > limit


@pytest.mark.parametrize("amax", [math.nan, math.inf, -1.0])
def test_a_power_of_2_is_kept_without_a_usable_amax(amax: float) -> None:
    assert scaling.power_of_2_from_amax(torch.tensor(amax), 448.0, 3.5).item() == 3.5


def test_inverses_of_powers_of_2_are_exact() -> None:
    scale = torch.exp2(torch.arange(-126.0, 128.0))
    amax = torch.ones_like(scale)
    amax[:3] = torch.tensor([math.nan, math.inf, 0.0])
    inverse = scaling.inverse_unless_nonfinite(scale, amax, power_of_2=True)
    assert torch.equal(inverse[2:], scale[2:].reciprocal())
    assert inverse[:2].isnan().all()


@given(st.floats(2.0**-126, 2.0**126, width=32))
@settings(deadline=None)
def test_floor_to_power_of_2(x: float) -> None:
    assert scaling.floor_to_power_of_2(torch.tensor(x)).item() == 2.0 ** math.floor(math.log2(x))


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_amax_is_exact_and_shows_nan(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    assert scaling.amax(x).item() == max(map(abs, x.flatten().tolist()))
    x.view(-1)[2] = math.nan
    assert scaling.amax(x).isnan()


def test_the_amax_of_an_empty_tensor() -> None:
    assert scaling.amax(torch.empty(0, 16)).item() == scaling.NOTHING
    for dims, shape in (((0,), (1, 16)), ((1,), (0, 1))):
        assert torch.equal(scaling.amax_along(torch.empty(0, 16), dims), torch.full(shape, scaling.NOTHING))


def merge(on_nonfinite: str, new: list[float]) -> list[float]:
    return scaling.merge_amax(torch.tensor([5.0, 5.0, -1.0, -1.0]), torch.tensor(new), on_nonfinite).tolist()


def test_amaxes_of_one_step_merge_by_max() -> None:
    assert merge("evict", [4.0, 6.0, 4.0, -1.0]) == [5.0, 6.0, 4.0, -1.0]


def test_nonfinite_amaxes() -> None:
    new = [math.nan, math.inf, math.nan, 1.0]
    assert merge("evict", new) == [5.0, 5.0, 0.0, 1.0]
    assert merge("skip", new) == [5.0, 5.0, -1.0, 1.0]
    amax = merge("freeze", new)
    assert math.isnan(amax[0]) and amax[1] == math.inf and math.isnan(amax[2]) and amax[3] == 1.0


def roll_all(amaxes: list[float], **options: Any) -> tuple[Tensor, Tensor]:
    scale, history, next_scale = torch.zeros(1), torch.zeros(4, 1), next_scale_of(DelayedScaling(**options))
    for a in amaxes:
        scale, history = scaling.roll_history(scale, history, torch.tensor([a]), torch.tensor([448.0]), next_scale)
    return scale, history


def test_zeros_age_the_history_and_keep_the_scale() -> None:
    scale, history = roll_all([2.0, 0.0, 0.0, 0.0, 0.0])
    assert scale.item() == 224.0 and history.flatten().tolist() == [0.0] * 4
    assert roll_all([2.0, 0.0, 0.0, 0.0, 0.0, 1.0])[0].item() == 448.0


@pytest.mark.parametrize("algo", ["max", "most_recent", lambda h: h.mean()])
def test_amax_compute_algo(algo: object) -> None:
    scale, history = roll_all([1.0, 4.0, 2.0], amax_compute_algo=algo)
    assert history.flatten().tolist() == [2.0, 4.0, 1.0, 0.0]
    assert scale.item() == {"max": 112.0, "most_recent": 224.0}.get(str(algo), 448 / 1.75)


def test_an_unused_slot_does_not_change() -> None:
    scale, history = torch.tensor([3.0, 3.0]), torch.ones(2, 2)
    limits = torch.tensor([448.0, 448.0])
    next_scale = next_scale_of(DelayedScaling())
    scale, history = scaling.roll_history(scale, history, torch.tensor([2.0, -1.0]), limits, next_scale)
    assert scale.tolist() == [224.0, 3.0] and history.tolist() == [[2.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", SLOTS)
@settings(max_examples=60, deadline=None)
@given(amaxes=st.lists(st.floats(0, width=32, allow_subnormal=False), max_size=12))
@example(amaxes=[0.0, math.nan, math.inf, 3.0, 3.0, math.inf, 1e-38, 3e38, 0.0, 0.0, 0.0, 0.0])
@example(amaxes=[1e-30, 2.0**-24])
@example(amaxes=[1.2e-36])  # 448 / amax overflows, half of it does not
def test_the_scales_of_any_sequence_of_amaxes(name: str, amaxes: list[float]) -> None:
    """Formulas of the user's, in a field or a class, obey the rules of the built-in one."""
    recipe, slot = SLOTS[name][0], SLOTS[name][1]()
    limit, scale, history = torch.tensor([448.0]), torch.zeros(1), torch.zeros(recipe.amax_history_len, 1)
    for amax in amaxes:
        own = scale_of(recipe, torch.tensor(amax), 448.0)
        (expected,) = slot.step([amax])
        assert torch.where(scale == 0, own, scale).item() == pytest.approx(expected, rel=1e-5)
        recorded = scaling.merge_amax(torch.tensor([-1.0]), torch.tensor([amax]), recipe.on_nonfinite)
        scale, history = scaling.roll_history(scale, history, recorded, limit, next_scale_of(recipe))
        assert scale.item() == pytest.approx(slot.scale, rel=1e-5, abs=0)
        assert history.flatten().tolist() == pytest.approx(slot.history, nan_ok=True)
