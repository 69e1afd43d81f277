"""Test recipes that a user writes: a formula for the scale, and classes with a name; against the float64 oracle."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass import recipes
from fp8pass.compiler.cache_keys import known_to_caches
from fp8pass.compiler.dynamo_passes import annotated as annotated_graph
from fp8pass.options.config import make_config
from fp8pass.recipes import DelayedScaling, DynamicScaling, RowwiseScaling, register_recipe
from tests.helpers import oracle
from tests.helpers.amaxes import SEQUENCES, data
from tests.helpers.harness import annotated, compiled, sqnr, verdicts
from tests.helpers.own_recipes import SLOTS, LessScaling, SteadyScaling, halfway

HOW = pytest.mark.parametrize("how", [annotated, compiled], ids=["annotated", "compiled"])
OWN = [name for name in SLOTS if name.startswith("a ")]


class Product(nn.Module):
    """`x @ weight`, [16, 16] by [16, 16]: the rows of the result are those of the quantized `x`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.compiled
@HOW
@pytest.mark.parametrize("name", OWN)
def test_a_scale_from_a_history_against_the_oracle(name: str, how: Callable[..., Any]) -> None:
    """The state after each step, and the numbers that each step computes with."""
    recipe, new_slot = SLOTS[name]
    for sequence in ("grows and shrinks", "zeros age the history", "nan and inf first"):
        model, slot, weight = Product(), new_slot(), new_slot()
        run = how(model, recipe=recipe)
        for amax in SEQUENCES[sequence]:
            ((scale,), (of_weight,)) = slot.step([amax]), weight.step([1.0])
            y = run(data(amax))
            y.sum().backward()
            expected = oracle.qdq(data(amax), scale, "e4m3") @ oracle.qdq(torch.eye(16), of_weight, "e4m3")
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=0, equal_nan=True)
        run(data(1.0))  # rolls the last amax
        saved = fp8pass.state(model).state_dict()
        assert float(saved["weight.input.scale"]) == pytest.approx(slot.scale, rel=1e-5), sequence


@pytest.mark.compiled
@HOW
@pytest.mark.parametrize("name", ["test-less", "test-rows"])
def test_a_scale_from_the_own_amax_against_the_oracle(name: str, how: Callable[..., Any]) -> None:
    layer = nn.Linear(32, 48, bias=False)
    x, g = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48) * 1e-6
    with torch.no_grad():
        x[3], x[4] = 1e-3, 0.0

    def less(x: Tensor, along: int, fmt: str) -> Tensor:
        """Quantize with two thirds of the usual scale: of the tensor, or of each slice along a dimension."""
        if name == "test-less":
            return oracle.qdq(x, oracle.scale_of(float(x.abs().max()), fmt) / 1.5, fmt)
        parts = x.double().unbind(1 - along)  # rowwise scales are powers of two, and a row of zeros has scale 1
        scales = [oracle.power_of_2(oracle.scale_of(float(p.abs().max()), "e4m3")) / 1.5 for p in parts]
        return torch.stack([oracle.qdq(p, s, "e4m3") for p, s in zip(parts, scales, strict=True)], 1 - along)

    with verdicts() as report:
        y = how(layer, recipe=name)(x)
        y.backward(g)
    w, of = layer.weight.detach(), x.detach()
    assert x.grad is not None and layer.weight.grad is not None
    for actual, expected in (
        (y, less(of, 1, "e4m3") @ less(w, 1, "e4m3").t()),
        (x.grad, less(g, 1, "e5m2") @ less(w, 0, "e4m3")),
        (layer.weight.grad, less(g, 0, "e5m2").t() @ less(of, 0, "e4m3")),
    ):
        assert sqnr(expected, actual) > 110
    if how is compiled:
        assert {(g.status, g.scaling) for g in report.gemms} == {("rewritten", name)}


@pytest.mark.compiled
def test_names_are_valid_wherever_a_recipe_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipes.resolve("test-less") == LessScaling()
    monkeypatch.setenv("FP8PASS_RECIPE", "test-less")
    assert make_config({}).recipe == LessScaling()
    monkeypatch.delenv("FP8PASS_RECIPE")
    schedule = recipes.Schedule({0: None, 2: {"up": "test-less", "*": "test-steady"}})
    assert schedule.at(5) == recipes.ByModule((("up", LessScaling()), ("*", SteadyScaling())))
    with pytest.raises(ValueError, match=r"unknown recipe 'test-lesz': .*did you mean 'test-less'"):
        recipes.resolve("test-lesz")


@pytest.mark.compiled
def test_autocast_takes_the_name_around_and_within_compiled_code() -> None:
    layer, x = nn.Linear(32, 32, bias=False), torch.randn(16, 32)

    def within(x: Tensor) -> Tensor:
        with fp8pass.autocast(recipe="test-less"):
            return layer(x)

    run, expected = compiled(layer, recipe="dynamic"), annotated(layer, recipe="test-less")(x)
    assert not torch.equal(run(x), expected)
    with fp8pass.autocast(recipe="test-less"):
        around = run(x)
    assert sqnr(expected, around) > 110
    assert sqnr(expected, compiled(within, recipe="dynamic")(x)) > 110


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:fp8pass")
def test_explain_bisect_and_state() -> None:
    torch._dynamo.reset()
    model, x = nn.Linear(32, 32), torch.randn(16, 32)
    report = fp8pass.explain(model, x, config=fp8pass.Config(recipe="test-steady"))
    assert {g.scaling for g in report.gemms} == {"test-steady"}

    def step() -> float:
        return float(compiled(model, recipe="test-steady")(x).detach().abs().max())

    assert fp8pass.bisect(step, lambda value: True, max_runs=3).verdict == "passes"

    def trained(model: nn.Module, steps: range, state: Any = None) -> tuple[dict[str, Tensor], list[float]]:
        run, losses = compiled(model, recipe="test-steady"), []
        if state is not None:
            fp8pass.state(model).load_state_dict(state)
        for i in steps:
            loss = run(x * (i + 1)).square().mean()
            loss.backward()
            losses.append(loss.item())
        return fp8pass.state(model).state_dict(), losses

    saved, _ = trained(model, range(3))
    other = nn.Linear(32, 32)
    other.load_state_dict(model.state_dict())
    assert trained(other, range(3, 5), saved)[1] == trained(model, range(3, 5))[1]
    fp8pass.state(other).load_state_dict(saved)
    with pytest.raises(fp8pass.Fp8Error, match=r"saved under SteadyScaling\(\), and this model is trained with Delay"):
        compiled(other, recipe="delayed")(x)


@pytest.mark.compiled
def test_code_of_the_users_is_in_no_cache() -> None:
    known = []
    for recipe in (SteadyScaling(), LessScaling(), DelayedScaling(scaling_factor_compute_algo=halfway), "dynamic"):
        torch._dynamo.reset()

        def backend(module: torch.fx.GraphModule, inputs: Any, recipe: Any = recipe) -> Any:
            known.append(known_to_caches(annotated_graph(module, make_config({"recipe": recipe})).module))
            return module.forward

        torch.compile(nn.Linear(32, 32), backend=backend)(torch.randn(16, 32))
    assert [found is None for found in known] == [True, True, True, False]


@pytest.mark.compiled
def test_a_cached_weight_of_a_formula_that_reads_the_old_scale() -> None:
    """Even under a constant weight the scale moves, so the copy must be made anew in each step."""
    torch._dynamo.reset()
    recipe = DelayedScaling(scaling_factor_compute_algo=lambda a, old, m, _: (old + m / a / 2) / 2, amax_history_len=1)
    layer, x = nn.Linear(32, 32, bias=False), torch.randn(16, 32)
    results, scales = [], []
    for options in ({}, {"weight_cache": "fp8+transpose"}):
        model = copy.deepcopy(layer)  # with a state of its own
        run = compiled(model, recipe=recipe, **options)
        results.append([run(x).detach() for _ in range(3)])
        scales.append(float(fp8pass.state(model).state_dict()["weight.weight.scale"]))
        torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    amax = float(layer.weight.detach().abs().max())
    assert scales == pytest.approx([(0.75 + 0.5) / 2 * 448 / amax] * 2, rel=1e-5)


def _broken(amax: Tensor, old_scale: Tensor, fp8_max: Tensor, recipe: Any) -> Tensor:
    raise ZeroDivisionError("planted")


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ("log", "scaling_factor_compute_algo='log': a function that is called as"),
        (lambda amax: amax, r"called as scaling_factor_compute_algo\(amax, old_scale, fp8_max, recipe\)"),
        (_broken, "raised ZeroDivisionError: planted, called for two tensors; it must return a float32 tensor"),
        (lambda amax, *_: amax.max(), r"returned torch.float32\[\] for amaxes f32\[2\]; it must return"),
        (lambda amax, *_: amax.double(), r"returned torch.float64\[2\]"),
        (lambda *_: 3.0, "returned 3.0 for amaxes"),
        (lambda amax, *_: -amax, r"returned \[-1.0, -3.0\] for the amaxes \[1.0, 3.0\]; it must .* above 0"),
    ],
)
def test_a_formula_that_does_not_return_scales(algo: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DelayedScaling(scaling_factor_compute_algo=algo)


@pytest.mark.compiled
def test_a_formula_that_fails_later() -> None:
    """At option time it gets two tensors, and later all."""
    torch._dynamo.reset()

    def of_two(amax: Tensor, *_: Any) -> Tensor:
        if amax.shape != (2,):
            raise RuntimeError("only two")
        return 1 / amax

    run = compiled(nn.Linear(32, 32), recipe=DelayedScaling(scaling_factor_compute_algo=of_two))
    with pytest.raises(Exception, match=r"scaling_factor_compute_algo raised RuntimeError: only two\. Fix it"):
        run(torch.randn(16, 32))


@dataclass(frozen=True)
class NoDefault(DynamicScaling):
    """A class that can't be made without arguments."""

    factor: Any = None

    def scale(self, amax: Tensor, fp8_max: Tensor | float) -> Tensor:
        return self.factor * amax  # type: ignore[no-any-return]


@dataclass(frozen=True)
class WrongDtype(DelayedScaling):
    """A class whose weights are e5m2."""

    def dtype(self, role: Any) -> torch.dtype:
        return torch.float8_e5m2


@dataclass(frozen=True)
class Blocks(recipes.BlockwiseScaling):
    """A class of scales that have no protocol."""


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "made", "message"),
    [
        ("delayed", LessScaling, "a name of letters and digits, and none of delayed, dynamic"),
        ("a name", LessScaling, "a name of letters and digits"),
        ("test-less", SteadyScaling, "the name is taken, by tests.helpers.own_recipes.LessScaling"),
        ("test-x", dict, "makes {}; derive from DynamicScaling"),
        ("test-x", NoDefault, r"NoDefault.scale\(amax, fp8_max\) raised TypeError"),
        ("test-x", WrongDtype, r"WrongDtype.dtype\('input'\) returned torch.float8_e5m2: return torch.float8_e4m3fn"),
        ("test-x", Blocks, "Blocks: a recipe class derives from DynamicScaling, RowwiseScaling or DelayedScaling"),
    ],
)
def test_what_cannot_be_registered(name: str, made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_recipe(name)(made)
    assert "test-x" not in recipes.NAMED


@pytest.mark.compiled
def test_to_register_a_class_anew_replaces_it_and_a_function_is_registered_too() -> None:
    assert register_recipe("test-less")(LessScaling) is LessScaling

    def short() -> DelayedScaling:
        return DelayedScaling(amax_history_len=16)

    try:
        register_recipe("test-short")(short)
        assert recipes.resolve("test-short") == DelayedScaling(amax_history_len=16)
    finally:
        del recipes.NAMED["test-short"]


@pytest.mark.compiled
def test_the_text_of_an_own_recipe_is_valid_python() -> None:
    """fx prints it as a part of the graph's code; the repr that a dataclass makes is not valid for a function."""
    recipe = SteadyScaling(amax_compute_algo=lambda h: h.mean(), margin=1)
    assert repr(recipe).startswith("SteadyScaling(amax_compute_algo='test_the_text")
    assert RowwiseScaling().name == "rowwise" and recipe.name == "test-steady"


@pytest.mark.compiled
def test_a_nan_from_a_formula_keeps_the_scale() -> None:
    recipe = DelayedScaling(scaling_factor_compute_algo=lambda a, old, m, _: torch.where(a > 4, math.nan, m / a))
    model = Product()
    run = annotated(model, recipe=recipe)
    for amax in (1.0, 8.0, 8.0):
        run(data(amax)).sum().backward()
    assert float(fp8pass.state(model).state_dict()["weight.input.scale"]) == 448.0


@pytest.mark.inductor
@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(scaling_factor_compute_algo=halfway), pytest.param(SteadyScaling(), marks=pytest.mark.variant)],
    ids=["a function", "a class"],
)
def test_the_numbers_are_those_of_the_annotated_graph(recipe: Any) -> None:
    layer, x = nn.Linear(32, 32, bias=False), torch.randn(16, 32)
    results = []
    for how, options in ((annotated, {}), (compiled, {"lowering": "inductor"})):
        run = how(copy.deepcopy(layer), recipe=recipe, **options)
        results.append([run(x * factor).detach() for factor in (1.0, 3.0, 3.0)])
    for expected, actual in zip(*results, strict=True):
        assert sqnr(expected, actual) > 100
