"""Test calibration and static scales: their values, graphs that are compiled with them, and frozen weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.compiler.dynamo_passes import annotated as annotate
from fp8pass.options.config import Config
from fp8pass.quant import ops
from fp8pass.recipes import StaticScaling
from fp8pass.weights.prequantized import PrequantizedInput
from tests.helpers import oracle
from tests.helpers.harness import annotated, compiled, sqnr, verdicts
from tests.helpers.models import Block, Parts, Transformer, make


def data(n: int = 3, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape or (2, 8, 32), generator=generator) for _ in range(n)]


def graph_of(model: nn.Module, x: Tensor, scales: Any) -> Any:
    made: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        made.append(annotate(module, Config(recipe=StaticScaling(scales))))
        return module.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(x)
    return made[0]


ONE_LAYER = partial(Transformer, layers=1)


@pytest.mark.compiled
def test_the_scales_are_those_of_the_largest_values_seen() -> None:
    model = make(Block)
    xs = data(3, 16, 32)
    scales = fp8pass.calibrate(model, xs)
    assert sorted(scales) == ["down.input", "down.weight", "up.input", "up.weight"]
    hidden = [torch.nn.functional.gelu(model.up(model.norm(x))) for x in xs]
    expected = {
        "up.input": max(float(model.norm(x).detach().abs().max()) for x in xs),
        "down.input": max(float(h.detach().abs().max()) for h in hidden),
        "up.weight": float(model.up.weight.detach().abs().max()),
        "down.weight": float(model.down.weight.detach().abs().max()),
    }
    for name, amax in expected.items():
        assert scales[name].shape == ()
        assert float(scales[name]) == pytest.approx(448 / amax, rel=1e-6), name


@pytest.mark.compiled
def test_inf_saturates_and_nan_stays() -> None:
    model, (x,) = nn.Linear(32, 48, bias=False), data(1, 16, 32)
    run = compiled(model, recipe=StaticScaling(fp8pass.calibrate(model, [x])))
    x[0, 0], x[1, 0] = math.inf, math.nan
    with torch.no_grad():
        y = run(x)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    assert y[2:].isfinite().all()


@pytest.mark.compiled
def test_weights_come_in_fp8() -> None:
    model, (x,) = make(Block), data(1, 16, 32)
    a = graph_of(model, x, fp8pass.calibrate(model, [x]))
    assert [f.position for f in a.inputs if isinstance(f, PrequantizedInput)] == [2, 4]
    targets = [n.target for n in a.module.graph.nodes if n.op == "call_function"]
    assert targets.count(ops.frozen_operand) == targets.count(ops.qdq_operand) == 2


@pytest.mark.compiled
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_weights_are_quantized_once_and_again_when_they_change(
    lowering: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, xs = make(Block), data(3, 16, 32)
    scales = fp8pass.calibrate(model, xs)
    made = 0

    def counted(*args: Any) -> Tensor:
        nonlocal made
        made += 1
        return quantize(*args)

    quantize = fp8pass.quantize
    monkeypatch.setattr("fp8pass.base.scaling.quantize", counted)
    run = compiled(model, recipe=StaticScaling(scales), lowering=lowering)
    with mode():
        run(xs[0])
        first = made
        for x in xs:
            assert sqnr(model(x), run(x)) > 25
    assert made == first
    with torch.no_grad():
        model.up.weight.mul_(0.5)
    with mode():
        assert sqnr(model(xs[0]), run(xs[0])) > 25
    assert made == first + 1
    model.load_state_dict(make(Block, seed=3).state_dict())
    with mode():
        assert sqnr(model(xs[0]), run(xs[0])) > 20
    assert made == first + 3


@pytest.mark.compiled
@pytest.mark.parametrize("how", [annotated, compiled])
def test_a_transformer_whole_and_in_parts(how: Any) -> None:
    model, xs = make(ONE_LAYER), data()
    scales = fp8pass.calibrate(model, xs)
    assert len(scales) == 12  # q, k and v each name their one input
    with torch.no_grad():
        expected = model(xs[0])
        assert sqnr(expected, how(model, recipe=StaticScaling(scales))(xs[0])) > 25
    for layer in model.layers:
        for part in layer:
            part.compile(backend="fp8pass", options={"recipe": StaticScaling(scales), "lowering": "eager"})
    with torch.no_grad():
        assert sqnr(expected, model(xs[0])) > 25


@pytest.mark.compiled
def test_scales_that_are_saved_as_text() -> None:
    """Another process knows nothing of the model but its names."""
    import json

    model, xs = make(ONE_LAYER), data()
    scales = json.loads(json.dumps({k: float(v) for k, v in fp8pass.calibrate(model, xs).items()}))
    other = make(ONE_LAYER)
    with torch.no_grad():
        assert sqnr(model(xs[0]), compiled(other, recipe=StaticScaling(scales), strict=True)(xs[0])) > 25


@pytest.mark.compiled
def test_what_was_not_calibrated_stays_in_high_precision() -> None:
    model, (x,) = make(Block), data(1, 16, 32)
    scales = {k: v for k, v in fp8pass.calibrate(model, [x]).items() if not k.startswith("down.")}
    with torch.no_grad(), verdicts() as report:
        y = compiled(model, recipe=StaticScaling(scales))(x)
        assert sqnr(model(x), y) > 27
    assert [(g.name, g.status) for g in report.gemms] == [("up", "rewritten"), ("down", "declined")]
    (gemm,) = report.declined
    assert (gemm.rule, gemm.reason) == ("not calibrated", "no scale for down.input and down.weight was calibrated")


@pytest.mark.compiled
def test_parts_of_a_model_that_is_not_known_say_so() -> None:
    model, xs = make(Transformer), data()
    scales = fp8pass.calibrate(model, xs)
    other = make(Transformer, seed=9)
    other.layers[0][1].compile(backend="fp8pass", options={"recipe": StaticScaling(scales), "lowering": "eager"})
    with (
        pytest.raises(fp8pass.Fp8Error, match=r"no scales were calibrated for up.input.* Calibrate the compiled model"),
        torch.no_grad(),
    ):
        other(xs[0])


@pytest.mark.compiled
def test_gradients_of_a_static_model_are_those_of_high_precision() -> None:
    model, (x,) = make(Block), data(1, 16, 32)
    recipe = StaticScaling(fp8pass.calibrate(model, [x]))
    with verdicts() as report:
        y = compiled(model, recipe=recipe)(x)
        y.square().sum().backward()
    assert {(g.kind, g.status) for g in report.gemms} == {
        ("output", "rewritten"), ("grad_input", "declined"), ("grad_weight", "declined"),
    }  # fmt: skip
    assert {g.reason for g in report.declined} == {
        f"there is no static scale for {n}.grad_output" for n in ("up", "down")
    }
    assert model.up.weight.grad is not None


@pytest.mark.compiled
def test_arguments_of_calibrate() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            y: Tensor = self.fc(x * scale)
            return y

    (x,) = data(1, 16, 32)
    amax = float(x.abs().max())
    for batch, factor in ((x, 1), ((x, 2.0), 2), ({"x": x, "scale": 4.0}, 4)):
        assert float(fp8pass.calibrate(Two(), [batch])["fc.input"]) == pytest.approx(448 / amax / factor)
    x[0, 0] = math.nan
    with pytest.warns(UserWarning, match=r"calibrate saw NaN or inf in fc.input: these calls are skipped"):
        assert fp8pass.calibrate(torch.compile(Two()), [x, torch.ones(16, 32)])["fc.input"] == 448
    with pytest.warns(UserWarning, match=r"calibrate saw nothing but zeros in fc.input: their scales are 1"):
        assert fp8pass.calibrate(Two(), [torch.zeros(16, 32)])["fc.input"] == 1
    with pytest.raises(TypeError, match="takes a module or a compiled module, not function"):
        fp8pass.calibrate(lambda x: x, [x])
    with pytest.raises(ValueError, match="no matmul with parameters was seen in 0 batches"):
        fp8pass.calibrate(Two(), [])


@pytest.mark.compiled
def test_a_weight_that_the_graph_itself_changes_is_not_frozen() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 32), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.5)
            return x @ self.weight.t()

    model, (x,) = Changing(), data(1, 16, 32)
    scales = fp8pass.calibrate(model, [x])
    run = compiled(model, recipe=StaticScaling(scales))
    with torch.no_grad():
        for _ in range(2):
            y = run(x)
            assert sqnr(x @ model.weight.t(), y) > 27


class Named(nn.Module):
    """A module that is compiled anew for every name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor, name: str) -> Tensor:
        y: Tensor = self.fc(x) + len(name)
        return y


@pytest.mark.compiled
def test_calibrating_many_times() -> None:
    (x,) = data(1, 16, 32)
    for i in range(9):
        model = make(Parts, seed=i)
        assert len(fp8pass.calibrate(model, [x, x * 2])) == 4
    named = Named()
    names = [(x / x.abs().max() * i, f"{i}") for i in range(6, 15)]
    assert float(fp8pass.calibrate(named, names)["fc.input"]) == 32


@pytest.mark.compiled
def test_calibrating_a_model_that_is_compiled_in_place() -> None:
    model, xs = make(Transformer), data()
    expected = fp8pass.calibrate(make(Transformer), xs)
    model.compile(backend="eager")
    model.layers[0].compile(backend="eager")
    call = model._compiled_call_impl
    assert fp8pass.calibrate(model, xs) == expected
    assert model._compiled_call_impl is call


@pytest.mark.compiled
@pytest.mark.parametrize("change", ["view", "item"])
def test_a_weight_that_is_changed_through_a_view_is_not_frozen(change: str) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 32), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if change == "view":
                self.weight.view(-1).mul_(0.5)
            else:
                self.weight.data[:24] = 0
            return x @ self.weight.t()

    model, (x,) = Changing(), data(1, 16, 32)
    run = compiled(model, recipe=StaticScaling(fp8pass.calibrate(model, [x])))
    with torch.no_grad():
        y = run(x)
        assert sqnr(x @ model.weight.t(), y) > 27


@pytest.mark.compiled
def test_frozen_weights_in_a_region_that_is_repeated() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.a(x)
            out: Tensor = self.b(x).sin() + target
            return out

    model, (x,) = Both(), data(1, 16, 32)
    run = compiled(model, recipe=StaticScaling(fp8pass.calibrate(model, [x])))
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    assert model.b.weight.grad is not None


LOWERINGS = ["eager", "inductor"]


@pytest.mark.inductor
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_output_against_the_float64_oracle(lowering: str) -> None:
    model, (x,) = nn.Linear(32, 48), data(1, 16, 32)
    scales = fp8pass.calibrate(model, [x])
    run = compiled(model, recipe=StaticScaling(scales), lowering=lowering, strict=True)
    if lowering == "inductor":  # static scales need no amax
        with torch.no_grad():
            code = "".join(torch._inductor.utils.run_and_get_code(run, x)[1])
        assert "amax" not in code and "float8_e4m3fn" in code
    for factor in (1.0, 0.25, 3.0):  # with a factor of 3, the input exceeds the calibrated range and saturates
        with torch.no_grad():
            y = run(x * factor)
        x_ = oracle.qdq(x * factor, float(scales["weight.input"]), "e4m3")
        w_ = oracle.qdq(model.weight, float(scales["weight.weight"]), "e4m3")
        torch.testing.assert_close(y.double(), x_ @ w_.t() + model.bias.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.inductor
def test_a_weight_that_is_summed_over_its_first_dimension() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 48))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model, (x,) = Product(), data(1, 16, 32)
    scales = fp8pass.calibrate(model, [x])
    a = graph_of(model, x, scales)
    assert [f.by_columns for f in a.inputs if isinstance(f, PrequantizedInput)] == [True]
    for lowering in LOWERINGS:
        with torch.no_grad():
            assert sqnr(model(x), compiled(model, recipe=StaticScaling(scales), lowering=lowering)(x)) > 27
