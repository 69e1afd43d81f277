"""Test the insert_monitors pass: counts against float64, unchanged numbers of the model, and repeated forwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base.node_meta import QuantizedTensor
from fp8pass.graph.annotation import Annotation
from fp8pass.quant import monitor_ops
from fp8pass.quant.monitor_ops import MonitorBuffer, WatchTable
from fp8pass.recipes import DelayedScaling, StaticScaling
from fp8pass.weights.monitor_inputs import MonitorInput
from tests.helpers import oracle
from tests.helpers.annotate import annotation
from tests.helpers.harness import compiled, expect_graph, verdicts
from tests.helpers.models import Parts, batches, make

pytestmark = [pytest.mark.filterwarnings("ignore:fp8pass. (blockwise|mxfp8) kernels exist"), pytest.mark.shares_code]


def trained(monitor: Any, model: nn.Module | None = None, steps: int = 4, **options: Any) -> tuple[list[Tensor], Any]:
    """Train a model. Return losses and weights, and the stats if `monitor` is on."""
    torch.manual_seed(0)
    model = model or make(Parts)
    run = compiled(model, monitor=monitor, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i, x in enumerate(batches(steps, 16, 32)):
        loss = run((x * 30 if i == 2 else x).requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())], fp8pass.stats(model) if monitor else None


RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "dynamic": "dynamic",
    "rowwise": "rowwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
    "static": StaticScaling({f"{name}.{role}": 20.0 for name in ("up", "down") for role in ("input", "weight")}),
}


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(32, 32)


E5M2 = "e5m2"


@pytest.mark.passes
@pytest.mark.parametrize("fmt", ["e4m3", E5M2])
def test_against_float64(fmt: str) -> None:
    """Count small and large elements, zeros of both signs, NaN, infinities, and numbers that almost overflow."""
    dtype = torch.float8_e4m3fn if fmt == "e4m3" else torch.float8_e5m2
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator) * torch.exp2(torch.randint(-20, 12, (64, 1), generator=generator))
    top = oracle.MAX[fmt]
    x[0, :8] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, top / 2, top / 2 * 1.03, top])
    scale = 2.0
    x_q = fp8pass.quantize(x, scale, dtype)
    found = monitor_ops.Numerics(*monitor_ops.numerics_of(x, torch.tensor(scale), x_q).tolist())
    finite = x.double()[torch.isfinite(x)]
    q = oracle.round_to(finite * scale, fmt)
    assert math.isnan(found.amax) and found.scale_inv == 0.5
    assert found.elements == x.numel() and found.nonfinite == 3
    assert found.nonzero == (x != 0).sum()
    assert found.underflowed == ((finite != 0) & (q == 0)).sum() > 0
    step = 2.0 ** (math.floor(math.log2(top)) - oracle.MANTISSA[fmt])
    assert found.saturated == (finite.abs() * scale > top + step / 2).sum() > 0
    assert found.signal == pytest.approx((finite * scale).square().sum().item(), rel=1e-5)
    assert found.noise == pytest.approx((q - finite * scale).square().sum().item(), rel=1e-5)
    assert kurtosis_of(found) == pytest.approx(exact_kurtosis(finite), rel=1e-5)


def kurtosis_of(found: monitor_ops.Numerics) -> float:
    return float((found.elements - found.nonfinite) * found.fourth / found.square**2)


def exact_kurtosis(x: torch.Tensor) -> float:
    x = x.double()
    return float(x.numel() * x.pow(4).sum() / x.square().sum() ** 2)


@pytest.mark.passes
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30])
@pytest.mark.parametrize("scales", ["one", "rows"])
@pytest.mark.parametrize("stale", [1e-3, 1.0, 1e6])
def test_kurtosis_of_any_size(size: float, scales: str, stale: float) -> None:
    """x**4 would overflow or vanish in float32. stale: how far the scale is from that of the tensor's own amax."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * size
    x[3, 5], x[7] = 50 * size, 0.0
    amax = x.abs().amax(-1, keepdim=True) if scales == "rows" else x.abs().amax()
    scale = torch.where(amax > 0, 448 / amax * stale, 1.0)
    found = monitor_ops.Numerics(*monitor_ops.numerics_of(x, scale, fp8pass.quantize(x, scale, torch.float8_e4m3fn)))
    assert kurtosis_of(found) == pytest.approx(exact_kurtosis(x), rel=1e-5)
    assert exact_kurtosis(x) > 500


@pytest.mark.passes
def test_kurtosis_of_several_uses() -> None:
    """Uses with different scales have different units. The first record is merged into zeros."""
    found, parts = torch.zeros(monitor_ops.N), []
    for i, (size, scale) in enumerate(((1.0, 100.0), (30.0, 2.0), (0.0, 7.0), (1e-3, 1e5))):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) * size
        parts.append(x)
        new = monitor_ops.numerics_of(x, torch.tensor(scale), fp8pass.quantize(x, scale, torch.float8_e4m3fn))
        found = monitor_ops.merge(found, new)
    numerics = monitor_ops.Numerics(*found.tolist())
    assert numerics.elements == 4 * 256 and numerics.scale_inv == 0.5
    assert kurtosis_of(numerics) == pytest.approx(exact_kurtosis(torch.cat(parts)), rel=1e-5)


@pytest.mark.passes
def test_graph() -> None:
    def of(**options: Any) -> Annotation:
        return annotation(nn.Linear(32, 64, bias=False), torch.randn(16, 32), recipe="dynamic", **options)

    off = str(of().module.graph)
    assert "numerics" not in off and str(of(monitor="nothing").module.graph) == off
    watched = of(monitor=True, monitor_steps=7)
    expect_graph(
        watched.module,
        """\
L_fn_parameters_weight_: "f32[64, 32]",
L_args_0_: "f32[16, 32]",
fp8pass_numerics_forward,
fp8pass_numerics_backward,
l_fn_parameters_weight_ = L_fn_parameters_weight_
l_args_0_ = L_args_0_
watch_operand = fp8pass_quant_monitor_ops_watch_operand(l_args_0_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn), fp8pass_numerics_forward, 0)
qdq_operand: "f32[16, 32]" = fp8pass_quant_ops_qdq_operand(l_args_0_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn))
watch_operand_1 = fp8pass_quant_monitor_ops_watch_operand(l_fn_parameters_weight_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn), fp8pass_numerics_forward, 1)
qdq_operand_1: "f32[64, 32]" = fp8pass_quant_ops_qdq_operand(l_fn_parameters_weight_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn))
linear_1: "f32[16, 64]" = torch._C._nn.linear(qdq_operand, qdq_operand_1, None)
qdq_gradient: "f32[16, 64]" = fp8pass_quant_ops_qdq_gradient(linear_1, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e5m2))
watch_gradient: "f32[16, 64]" = fp8pass_quant_monitor_ops_watch_gradient(qdq_gradient, (Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e5m2),), fp8pass_numerics_backward, (0,))
return (watch_gradient,)
""",
    )
    names = [QuantizedTensor(f"weight.{role}", role, "") for role in ("input", "weight", "grad_output")]
    assert [i.table for i in watched.inputs if isinstance(i, MonitorInput)] == 2 * [
        WatchTable(tuple(names), 2, torch.device("cpu"), 7)
    ]


VARIANTS = {r: pytest.param(r, marks=pytest.mark.variant) for r in ("dynamic", "rowwise", "blockwise")}


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", [VARIANTS.get(r, r) for r in RECIPES])
def test_no_number_of_the_model_changes(recipe: str) -> None:
    sizes = {"blockwise": (128, 256), "mxfp8": (32, 64)}.get(recipe, (32, 56))
    options = {"recipe": RECIPES[recipe], "lowering": "eager", "min_speedup": 0}

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Model(*sizes)

    (off, _), (on, found) = (trained(m, model(), **options) for m in (False, True))
    for a, b in zip(off, on, strict=True):
        assert torch.equal(a, b)
    roles = [row.role for row in found.of("up") if row.step == 3]
    gradients = 0 if recipe == "static" else 1
    assert {"input", "weight"} <= set(roles) and roles.count("grad_output") >= gradients
    assert all(10 < row.sqnr < 60 and row.nonfinite == 0 for row in found.rows if row.step != 2 and recipe != "static")


class Model(nn.Module):
    """Two layers of any width."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, self.up.in_features // x.shape[-1]) if x.shape[-1] != self.up.in_features else x
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


@pytest.mark.compiled
def test_what_is_watched_is_what_was_named() -> None:
    _, found = trained(["a.input", "*.grad_output"], lowering="eager", steps=2)
    assert {row.slot for row in found.rows} == {"a.input", "a.grad_output", "b.grad_output"}
    assert {row.source.split(":")[0] for row in found.rows} == {"models.py"}


@pytest.mark.compiled
def test_in_the_order_in_which_they_are_quantized() -> None:
    _, found = trained(True, lowering="eager")
    order = ["a.input", "a.weight", "b.input", "b.weight", "b.grad_output", "a.grad_output"]
    assert [row.slot for row in found.rows] == order * 4
    assert [row.step for row in found.rows] == [i for i in range(4) for _ in order]


@pytest.mark.compiled
def test_microbatches_of_a_step_are_counted_together() -> None:
    model = make(Parts)
    run = compiled(model, monitor=True, lowering="eager")
    parts = batches(4, 16, 32)
    for step in (parts[:2], parts[2:]):
        with fp8pass.accumulate(model):
            for x in step:
                run(x.requires_grad_()).square().mean().backward()
    found = fp8pass.stats(model).of("a.weight")
    assert [(row.step, row.elements) for row in found] == [(0, 2 * 32 * 32), (1, 2 * 32 * 32)]
    assert found[0].amax == model.a.weight.abs().max()


@pytest.mark.compiled
def test_two_instances_of_one_class() -> None:
    models = [make(Parts, seed=i) for i in range(2)]
    runs = [compiled(m, monitor=True, lowering="eager") for m in models]
    x = batches(1, 16, 32)[0]
    for i, run in enumerate(runs):
        run((x * 10**i).requires_grad_()).square().mean().backward()
    a, b = (fp8pass.stats(m).of("b.weight") for m in models)
    assert a[0].amax == models[0].b.weight.abs().max() != b[0].amax
    assert len(a) == len(b) == 1


class Checkpointed(nn.Module):
    """A model with activation checkpointing within what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(32, 56)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


@pytest.mark.compiled
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_within_a_checkpointed_region(lowering: str) -> None:
    torch.manual_seed(0)
    (off, _), (on, found) = (trained(m, Checkpointed(), lowering=lowering) for m in (False, True))
    assert len(found.latest) == 6
    assert all(row.elements in (16 * 32, 16 * 56, 32 * 56) for row in found.rows), "counted once a step"
    assert [a.shape for a in off] == [b.shape for b in on]


@pytest.mark.compiled
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_around_what_is_compiled(use_reentrant: bool) -> None:
    """The backward repeats a forward that has been counted; if that ran without gradients, the repetition counts."""
    model = make(Parts)
    run = compiled(model, monitor=True, lowering="eager")
    for x in batches(3, 16, 32):
        checkpoint(run, x.requires_grad_(), use_reentrant=use_reentrant).square().mean().backward()
    found = fp8pass.stats(model)
    assert [row.elements for row in found.of("a.input")] == [16 * 32] * 3
    assert [row.elements for row in found.of("a.grad_output")] == [16 * 32] * 3
    assert len(found.latest) == 6


@pytest.mark.compiled
def test_copies_of_weights_are_watched_too() -> None:
    def run(cache: str) -> Any:
        model = make(Parts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @fp8pass.train_step(monitor=True, weight_cache=cache, lowering="eager", min_speedup=0)
        def step(x: Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for x in batches(4, 16, 32):
            step(x)
        return fp8pass.stats(step)

    off, on = run("off"), run("fp8+transpose")
    assert [(a.slot, a.step) for a in off.rows] == [(b.slot, b.step) for b in on.rows]
    for a, b in zip(off.rows, on.rows, strict=True):
        assert b.scale == pytest.approx(a.scale, rel=1e-6) and b.sqnr == pytest.approx(a.sqnr, abs=0.01)


@pytest.mark.compiled
def test_the_ring_keeps_the_newest_steps() -> None:
    _, found = trained("a.input", lowering="eager", steps=6, monitor_steps=2)
    assert [row.step for row in found.rows] == [3, 4, 5]
    monitor_buffer = MonitorBuffer(WatchTable((QuantizedTensor("a", "input", ""),), 1, torch.device("cpu"), 2))
    for step in range(5):
        monitor_buffer.begin(step, step)
        monitor_buffer.begin(step, step)  # the monitor goes on after the saved step
        monitor_buffer.inputs()[0].add_(step)
    assert list(monitor_buffer.steps) == [2, 3, 4] and monitor_buffer.read()[:, 0, 0].tolist() == [2, 3, 4]
    assert not MonitorBuffer(monitor_buffer.table).inputs(repeats=True)[0].any()


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["delayed", pytest.param("dynamic", marks=pytest.mark.variant)])
def test_in_one_of_three_steps(recipe: str) -> None:
    """In the steps between, a graph without monitors runs, with the same state."""
    options = {"recipe": RECIPES[recipe], "lowering": "eager", "min_speedup": 0}
    intervals: list[dict[str, Any]] = [{}, {"monitor_interval": 3}]
    (all_numbers, each), (numbers, some) = (trained(True, linear(), steps=7, **options, **of) for of in intervals)
    for a, b in zip(all_numbers, numbers, strict=True):
        assert torch.equal(a, b)
    assert list(some.rows) == [row for row in each.rows if row.step in (0, 3, 6)] != []


@pytest.mark.compiled
def test_evaluation_is_compiled_once() -> None:
    model = nn.Linear(32, 48)
    run = compiled(model, monitor=True, monitor_interval=2, recipe="dynamic", lowering="eager")
    with verdicts() as report:
        for x in batches(4, 16, 32):
            run(x.requires_grad_()).sum().backward()
        assert report.graphs == 2
        for x in batches(4, 16, 32):
            run(x.requires_grad_()).sum().backward()
            with torch.no_grad():
                run(x)
        assert report.graphs == 3


@pytest.mark.compiled
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.variant)])
def test_in_one_of_two_steps_repeated_in_the_backward(use_reentrant: bool) -> None:
    """The backward repeats a region by the graph of its forward's step, also after evaluation: tensors count once."""
    model = nn.Linear(32, 48)
    run = compiled(model, monitor=True, monitor_interval=2, recipe="dynamic", lowering="eager")
    for x in batches(4, 16, 32):
        checkpoint(run, x.requires_grad_(), use_reentrant=use_reentrant).square().mean().backward()
        with torch.no_grad():
            run(x)
    found = [(row.role, row.step, row.elements) for row in fp8pass.stats(model).rows]
    sizes = {"input": 16 * 32, "weight": 32 * 48, "grad_output": 16 * 48}
    assert found == [(role, step, size) for step in (0, 2) for role, size in sizes.items()]


class OwnScales(nn.Module):
    """A layer that the recipe quantizes, and a matmul that the user quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32))
        self.x_scale, self.w_scale = fp8pass.ScaleState(4), fp8pass.ScaleState(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return fp8pass.in_qdq(y, self.x_scale) @ fp8pass.in_qdq(self.head, self.w_scale)


@pytest.mark.compiled
def test_scales_that_the_user_placed_are_not_counted() -> None:
    _, stats = trained(True, make(OwnScales), steps=2)
    assert {row.slot for row in stats.latest} == {"up.input", "up.weight", "up.grad_output"}


@pytest.mark.compiled
def test_nothing_watched() -> None:
    model = nn.Linear(32, 48)
    run = compiled(model, lowering="eager")
    run(batches(1, 16, 32)[0])
    with pytest.raises(fp8pass.Fp8Error, match="no tensor of this model is watched"):
        fp8pass.stats(model)
    for option in ("monitor_steps", "monitor_interval"):
        with pytest.raises(ValueError, match=f"{option}=0: a number of steps, 1 or more"):
            fp8pass.Config(**{option: 0})


@pytest.mark.compiled
def test_names_are_those_of_the_model_of_which_blocks_are_compiled() -> None:
    model = nn.Sequential(make(Parts), make(Parts, seed=1))
    for block in model:
        block.compile(backend="fp8pass", options={"monitor": True, "lowering": "eager", "min_speedup": 0})
    model(batches(1, 16, 32)[0].requires_grad_()).square().mean().backward()
    slots = [row.slot for row in fp8pass.stats(model).rows]
    roles = ["a.input", "a.weight", "b.input", "b.weight"]
    forward = [f"{i}.{role}" for i in range(2) for role in roles]
    backward = [f"{i}.{name}.grad_output" for i in (1, 0) for name in ("b", "a")]
    assert slots == [*forward, *backward]


class Outlier(nn.Module):
    """A layer whose input has one large element in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).clamp(-1, 1) + 200 * (torch.arange(64) == 5))
        return y


@pytest.mark.compiled
def test_a_kurtosis_above_the_level_is_warned_of_once() -> None:
    """The warning names slot, step and numbers, when the numbers are read; weights and gradients get none."""
    model = Outlier()
    run = compiled(model, monitor=True, monitor_kurtosis=20, lowering="eager")
    for x in batches(2, 16, 32):
        run(x).square().mean().backward()
    exact = []
    with torch.no_grad():
        inner = (model.up(x).clamp(-1, 1) + 200 * (torch.arange(64) == 5)).double()
        exact = [float(t.numel() * t.pow(4).sum() / t.square().sum() ** 2) for t in (x.double(), inner)]
    level = r"kurtosis of down.input is [\d.]+ in step 0 \(test_insert_monitors.py:\d+\), above monitor_kurtosis=20"
    with pytest.warns(UserWarning, match=level) as caught:
        found = fp8pass.stats(model)
    assert len(caught) == 1
    for slot, expected in zip(("up.input", "down.input"), exact, strict=True):
        assert found.of(slot)[-1].kurtosis == pytest.approx(expected, rel=1e-4)
    assert found.of("down.input")[-1].kurtosis > 50
    run(x).square().mean().backward()
    fp8pass.stats(model)  # warns no more
    assert "kurtosis" in str(found)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("model", "layers"), [(linear, 1), pytest.param(lambda: make(Parts), 2, marks=pytest.mark.variant)]
)
def test_inductor_counts_as_the_graph_does(model: Callable[[], nn.Module], layers: int) -> None:
    options = {"recipe": RECIPES["delayed"], "min_speedup": 0}
    (_, eager), (_, fused) = (trained(True, model(), lowering=low, **options) for low in ("eager", "inductor"))
    assert len(eager.rows) == len(fused.rows) == 3 * layers * 4
    for a, b in zip(eager.rows, fused.rows, strict=True):
        assert (a.slot, a.step, a.elements, a.nonfinite) == (b.slot, b.step, b.elements, b.nonfinite)
        assert b.amax == pytest.approx(a.amax, rel=1e-4) and b.scale == pytest.approx(a.scale, rel=1e-4)
        assert b.sqnr == pytest.approx(a.sqnr, abs=0.5)
        assert abs(a.saturation - b.saturation) * a.elements <= 2 and abs(a.underflow - b.underflow) * a.elements <= 2
