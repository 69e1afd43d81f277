"""Test that `in_qdq`, `out_qdq` and `ScaleState` give the same numbers and state eagerly and under every backend."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass import ScaleState, in_qdq, out_qdq
from fp8pass.options.config import Config
from tests.helpers import oracle
from tests.helpers.amaxes import SEQUENCES, data
from tests.helpers.harness import E4M3, E5M2, annotated, compiled, sqnr

pytestmark = pytest.mark.shares_code


def eager(module: nn.Module) -> Any:
    return module


def ours(module: nn.Module) -> Any:
    return compiled(module, recipe=None)


def reference(module: nn.Module) -> Any:
    return annotated(module, recipe=None)


def inductor(module: nn.Module) -> Any:
    return compiled(module, recipe=None, lowering="inductor")


def delayed(module: nn.Module) -> Any:
    return compiled(module, recipe="delayed")


def other_backend(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def other_inductor(module: nn.Module) -> Any:
    return torch.compile(module, backend="inductor")


HOW = (eager, ours, inductor, delayed, reference, other_backend, other_inductor)


VARIANTS = {f: pytest.param(f, marks=pytest.mark.variant) for f in (inductor, other_inductor)}


EVERY_DAY = [VARIANTS.get(f, f) for f in HOW]


VARIANTS[delayed] = pytest.param(delayed, marks=pytest.mark.variant)
"""Together with a recipe; a variant in tests that are not about a step's numbers, which run `ours` without one."""


class Product(nn.Module):
    """`x @ weight`, [16, 16] by [16, 16]; x, weight and the output's gradient are quantized by states."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))
        self.x, self.w, self.g = (ScaleState(**arguments) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return out_qdq(in_qdq(x, self.x) @ in_qdq(self.weight, self.w), self.g)


BY_STEP = pytest.mark.parametrize("how", EVERY_DAY, ids=lambda f: f.__name__)
"""Only variants run Inductor; `test_the_numbers_that_a_step_uses` runs ours every day."""


COMPILED = pytest.mark.parametrize(
    "how", [ours, VARIANTS[inductor], VARIANTS[delayed], reference], ids=lambda f: f.__name__
)


FEW = pytest.mark.parametrize("how", [eager, ours, other_backend], ids=lambda f: f.__name__)


NONFINITE = ("evict", "skip", "freeze")


EVERY_CHOICE = (("evict", "max"), ("skip", "most_recent"), ("freeze", "max"))
"""Configurations of compiled states that run every day. Eagerly all pairs run; through another backend, one does."""


def entry(state: ScaleState, length: int = 4) -> tuple[float, list[float], float]:
    return state.scale.item(), state.amax_history[:length].tolist(), state.amax.item()


def is_entry(state: ScaleState, slot: oracle.Slot, pending: float | None) -> None:
    scale, history, amax = entry(state, slot.length)
    assert scale == pytest.approx(slot.scale, rel=1e-6, abs=0)
    assert history == pytest.approx(slot.history, nan_ok=True)
    assert amax == pytest.approx(-1.0 if pending is None else pending, nan_ok=True)


CHOICES = {
    eager: [(n, algo) for n in NONFINITE for algo in ("max", "most_recent")],
    ours: EVERY_CHOICE,
    other_backend: EVERY_CHOICE[1:2],
}


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("on_nonfinite", "algo", "how"),
    [
        pytest.param(n, algo, how, marks=[pytest.mark.variant] * ((n, algo) not in CHOICES[how]))
        for n in NONFINITE
        for algo in ("max", "most_recent")
        for how in (eager, ours, other_backend)
    ],
    ids=lambda of: getattr(of, "__name__", of),
)
def test_against_the_oracle(on_nonfinite: str, algo: str, how: Callable[..., Any]) -> None:
    """x needs no gradient, and its state follows the steps nevertheless."""
    for sequence in SEQUENCES.values():
        model = Product(amax_history_len=4, margin=1, amax_compute_algo=algo, on_nonfinite=on_nonfinite)
        run = how(model)
        slot = oracle.Slot("e4m3", 4, algo, margin=1, on_nonfinite=on_nonfinite)
        previous: list[float] = []
        for amax in sequence:
            if previous:
                slot.step(previous)
            run(data(amax)).sum().backward()
            is_entry(model.x, slot, slot._record(amax))
            previous = [amax]
        assert entry(model.w)[0] == 448 / 2
        assert entry(model.g)[0] == 57344 / 2 or any(map(math.isinf, sequence)) or any(map(math.isnan, sequence))


class Layer(nn.Module):
    """An MLP of a few matmuls in bfloat16, quantized by hand."""

    def __init__(self, matmuls: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(matmuls))
        self.states = nn.ModuleList(ScaleState(amax_history_len=4) for _ in range(3 * matmuls))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for i, w in enumerate(self.weights):
            a, b, g = (self.states[3 * i + j] for j in range(3))
            x = F.gelu(out_qdq(F.linear(in_qdq(x, a), in_qdq(w, b)), g)) + x
        return x


@pytest.mark.compiled
@pytest.mark.parametrize(
    "how",
    [
        eager,
        ours,
        reference,
        *(pytest.param(f, marks=pytest.mark.variant) for f in (other_backend, *VARIANTS)),
    ],
    ids=lambda f: f.__name__,
)
def test_a_model_in_bfloat16_stays_with_eager(how: Callable[..., Any]) -> None:
    """Inductor, which takes long, compiles one matmul."""
    models = [copy.deepcopy(m) for m in [Layer(1 if how in (inductor, other_inductor) else 3).bfloat16()] * 2]
    run = how(models[1])
    for factor in (1.0, 2.0, 0.5, 8.0, 1.0):
        x = (torch.randn(64, 32) * factor).bfloat16()
        y, y_ = models[0](x), run(x)
        assert y.dtype == y_.dtype == torch.bfloat16
        assert sqnr(y, y_) > 30
        y.square().mean().backward()
        y_.square().mean().backward()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert sqnr(p.grad, q.grad) > 25
    for a, b in zip(*(m.states for m in models), strict=True):
        assert a.scale.dtype == torch.float32
        torch.testing.assert_close(a.amax_history, b.amax_history, rtol=0.05, atol=0)
        torch.testing.assert_close(a.amax, b.amax, rtol=0.05, atol=0)


class Uses(nn.Module):
    """A module that uses one state several times."""

    def __init__(self, *factors: float, **arguments: Any) -> None:
        super().__init__()
        self.factors, self.state = factors, ScaleState(**arguments)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(in_qdq(x * f, self.state) for f in self.factors)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("on_nonfinite", "how"),
    [
        *((n, how) for n in NONFINITE for how in (eager, ours)),
        ("evict", other_backend),
        *(pytest.param(n, other_backend, marks=pytest.mark.variant) for n in NONFINITE[1:]),
    ],
    ids=lambda of: getattr(of, "__name__", of),
)
def test_uses_within_a_step_merge_by_max(on_nonfinite: str, how: Callable[..., Any]) -> None:
    factors = [1.0, 3.0, 0.5]
    model, slot = Uses(*factors, amax_history_len=4, on_nonfinite=on_nonfinite), oracle.Slot("e4m3", 4)
    slot.on_nonfinite = on_nonfinite
    run = how(model)
    for step, amax in enumerate([1.0, 2.0, 0.125, 0.125, math.inf, 0.5]):
        x = data(amax).requires_grad_()
        outputs = run(x)
        for y, factor, scale in zip(outputs, factors, slot.step([amax * f for f in factors]), strict=True):
            expected = oracle.qdq(x.detach() * factor, scale, "e4m3")
            torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
        sum(y.sum() for y in outputs).backward()
        assert x.grad.unique().tolist() == [4.5], step
    run(data(1.0))
    assert entry(model.state)[1] == slot.history


@pytest.mark.compiled
@pytest.mark.parametrize("how", [VARIANTS.get(f, f) for f in HOW], ids=lambda f: f.__name__)
def test_without_gradients_nothing_changes(how: Callable[..., Any]) -> None:
    model = Product(amax_history_len=4)
    run = how(model)
    x = torch.rand(16, 16) * 1e-4
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():  # before any training, scales are dynamic
            torch.testing.assert_close(run(x).double(), oracle.qdq(x, 448 / float(x.max()), "e4m3"), rtol=1e-5, atol=0)
    assert entry(model.x) == (0.0, [0.0] * 4, -1.0)
    for _ in range(2):
        run(data(1.0)).sum().backward()
    before = {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        x = torch.rand(16, 16) * 4
        torch.testing.assert_close(run(x).double(), oracle.qdq(x, 448.0, "e4m3"), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers())


@pytest.mark.compiled
@FEW
def test_no_grad_within_a_step(how: Callable[..., Any]) -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state = ScaleState(amax_history_len=2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                early = in_qdq(x * 8, self.state)
            return early, in_qdq(x, self.state)

    model = Teacher()
    run = how(model)
    for _ in range(3):
        early, y = run(data(1.0).requires_grad_())
        assert not early.requires_grad
        y.sum().backward()
    assert entry(model.state) == (448.0, [1.0, 1.0], 1.0)
    assert early.max() == 1.0  # saturated


@pytest.mark.compiled
@BY_STEP
def test_accumulation_is_one_step(how: Callable[..., Any]) -> None:
    model = Product(amax_history_len=4)
    run = how(model)
    for amaxes in ([1.0, 2.0], [4.0, 0.5, 8.0], [1.0]):
        for state in (model.x, model.w, model.g):
            state.begin_accumulation()
        for amax in amaxes:
            (run(data(amax)) * amax).sum().backward()
        for state in (model.x, model.w, model.g):
            state.end_accumulation()
    assert entry(model.x) == (56.0, [8.0, 2.0, 0.0, 0.0], 1.0)
    assert entry(model.g) == (57344 / 8, [8.0, 2.0, 0.0, 0.0], 1.0)
    run(data(1.0))
    assert entry(model.x)[1] == [1.0, 8.0, 2.0, 0.0]


@pytest.mark.compiled
def test_accumulation_ends_the_forward_before_it() -> None:
    model = Product(amax_history_len=3)
    model(data(4.0))
    model.x.begin_accumulation()
    model.x.begin_accumulation()
    for _ in range(2):
        model(data(2.0)).sum().backward()
        model.x.begin_accumulation()
    assert entry(model.x) == (112.0, [4.0, 0.0, 0.0], 2.0)


@pytest.mark.compiled
def test_an_eager_step_lasts_until_the_backward() -> None:
    model = Product(amax_history_len=3)
    losses = [model(data(amax)).sum() * amax for amax in (2.0, 1.0)]
    assert entry(model.x) == (0.0, [0.0] * 3, 2.0)
    for loss in losses:
        loss.backward()
    assert entry(model.g) == (0.0, [0.0] * 3, 2.0)
    model(data(8.0))
    assert [entry(s)[1:] for s in (model.x, model.g)] == [([2.0, 0.0, 0.0], 8.0), ([2.0, 0.0, 0.0], -1.0)]


@pytest.mark.compiled
@COMPILED
def test_compiled_forwards_before_their_backwards(how: Callable[..., Any]) -> None:
    model = Product(amax_history_len=4)
    run = how(model)
    run(data(1.0)).sum().backward()
    losses = [run(data(amax)).sum() * amax for amax in (2.0, 4.0)]
    for loss in losses:
        loss.backward()
    assert entry(model.x) == (224.0, [2.0, 1.0, 0.0, 0.0], 4.0)
    assert entry(model.g) == (57344.0, [1.0, 0.0, 0.0, 0.0], 4.0)
    first, second = (run(data(amax)).sum() * amax for amax in (0.5, 0.25))
    second.backward()
    first.backward()
    assert entry(model.g)[1:] == ([4.0, 1.0, 0.0, 0.0], 0.5)


VARIED = [eager, ours, reference, *(pytest.param(f, marks=pytest.mark.variant) for f in (delayed, inductor))]


@pytest.mark.compiled
@pytest.mark.parametrize("how", VARIED, ids=lambda f: f.__name__)
def test_a_second_backward_merges(how: Callable[..., Any]) -> None:
    torch._dynamo.reset()  # code that is compiled with donated buffers has no second backward
    model = Product(amax_history_len=4)
    run = how(model)
    with torch._functorch.config.patch(donated_buffer=False):
        for factor in (1.0, 3.0):
            y = run(data(1.0).requires_grad_())
            for again in (4.0, 2.0):
                y.backward(torch.full_like(y, factor * again), retain_graph=True)
    torch._dynamo.reset()
    assert entry(model.g) == (57344 / 4, [4.0, 0.0, 0.0, 0.0], 12.0)
    assert entry(model.x) == (448.0, [1.0, 0.0, 0.0, 0.0], 1.0)


@pytest.mark.compiled
@FEW
def test_a_callable_algorithm(how: Callable[..., Any]) -> None:
    mean, least = (Uses(1.0, amax_history_len=2, amax_compute_algo=a) for a in (lambda h: h.mean(), lambda h: h.min()))
    assert mean.state.key != least.state.key
    for model in (mean, least):
        run = how(model)
        for amax in (1.0, 3.0, 3.0):
            run(data(amax).requires_grad_())[0].sum().backward()
    assert (entry(mean.state)[0], entry(least.state)[0]) == (448 / 2, 448.0)


@pytest.mark.compiled
@pytest.mark.parametrize("how", [ours, VARIANTS[inductor], VARIANTS[delayed]], ids=lambda f: f.__name__)
def test_instances_share_code_and_no_state(how: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    models = [Product(amax_history_len=4) for _ in range(2)]
    runs = [how(m) for m in models]
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    for amax in (1.0, 1.0, 1.0):
        for run, factor in zip(runs, (1.0, 1e4), strict=True):
            run(data(amax * factor)).sum().backward()
    assert frames["ok"] - before == 1
    assert [entry(m.x)[2] for m in models] == [1.0, 1e4]
    assert models[0].x.scale == pytest.approx(1e4 * models[1].x.scale.item())


@pytest.mark.compiled
def test_eager_and_compiled_take_turns() -> None:
    model = Product(amax_history_len=8)
    run = ours(model)
    for i, f in enumerate((run, model, run, run, model, model, run), 1):
        f(data(float(i))).sum().backward()
    assert entry(model.x, 8)[1:] == ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0], 7.0)
    assert entry(model.g, 8)[1:] == ([1.0] * 6 + [0.0] * 2, 1.0)


@pytest.mark.compiled
def test_a_checkpoint_is_not_a_second_step() -> None:
    model = Product(amax_history_len=4)
    for amax in (1.0, 2.0, 3.0):
        checkpoint(model, data(amax).requires_grad_(), use_reentrant=False).sum().backward()
    assert entry(model.x) == (224.0, [2.0, 1.0, 0.0, 0.0], 3.0)
    assert entry(model.w)[1] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.compiled
@pytest.mark.parametrize("how", [VARIANTS.get(f, f) for f in HOW[1:]], ids=lambda f: f.__name__)
def test_a_checkpoint_inside_compiled_code(how: Callable[..., Any]) -> None:
    """Recomputation in the backward uses the scales of its forward; steps are counted as in eager mode.

    tests/states/test_steps.py has checkpoints in compiled code with slots, which run op by op.
    """

    class Checkpointed(Product):
        def part(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x * 1.5))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=False) * 2

    models = [Checkpointed(amax_history_len=4) for _ in range(2)]
    runs = models[0], how(models[1])
    for amax in (1.0, 8.0, 64.0, 1.0, 0.01, 0.01, 0.01, 0.01):
        x = torch.randn(16, 16) * amax
        for m, run in zip(models, runs, strict=True):
            m.weight.grad = None
            run(x.clone().requires_grad_()).square().sum().backward()
        assert sqnr(*(m.weight.grad for m in models)) > 60
    for a, b in zip(*(m.buffers() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=0)


@pytest.mark.compiled
def test_a_checkpoint_beside_the_recipe() -> None:
    """The first steps, which run eagerly, pass the checkpoint its state as arguments."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_hand, self.fc = Product(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(checkpoint(self.by_hand, x, use_reentrant=False))
            return y

    model = Checkpointed()
    run = delayed(model)
    for amax in (1.0, 2.0, 3.0):
        run(data(amax).requires_grad_()).sum().backward()
    assert entry(model.by_hand.x)[1:] == ([2.0, 1.0, 0.0, 0.0], 3.0)
    assert fp8pass.state(model).slots == ["fc.grad_output", "fc.input", "fc.weight"]


@pytest.mark.compiled
def test_a_gradient_of_the_inputs_only() -> None:
    """`torch.autograd.grad` runs the backward only of ops between the inputs and the result."""
    model = Product(amax_history_len=4)
    for amax in (1.0, 2.0):
        x = data(amax).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
    assert [entry(s)[1][:2] for s in (model.x, model.w, model.g)] == [[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]


# Detection of matmuls
@pytest.mark.compiled
@pytest.mark.parametrize("recipe", [None, "delayed", pytest.param("dynamic", marks=pytest.mark.variant)])
def test_all_three_matmuls_are_found(recipe: Any) -> None:
    model = Product()
    model(data(1.0)).sum().backward()
    before = {n: b.clone() for n, b in model.named_buffers()}
    report = fp8pass.explain(model, data(1.0).requires_grad_(), config=Config(recipe=recipe, strict=True))
    assert [(g.kind, g.status, g.scaling) for g in report.gemms] == [
        (kind, "rewritten", "user") for kind in ("output", "grad_weight", "grad_input")
    ]
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers())


@pytest.mark.compiled
def test_beside_the_recipe() -> None:
    """Each has its own state, and neither changes the other's."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_hand, self.fc = Product(), nn.Linear(16, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(self.by_hand(x))
            return y

    model = Both()
    x = torch.randn(16, 16, requires_grad=True)
    report = fp8pass.explain(model, x)
    assert sorted(g.scaling for g in report.rewritten) == ["delayed"] * 3 + ["user"] * 3
    run = delayed(model)
    for _ in range(5):
        run(x).sum().backward()
    assert fp8pass.state(model).slots == ["fc.grad_output", "fc.input", "fc.weight"]
    assert [entry(s)[1].count(0.0) for s in (model.by_hand.x, model.by_hand.w, model.by_hand.g)] == [0, 0, 0]
    assert entry(model.by_hand.x)[2] == float(x.detach().abs().max())


@pytest.mark.compiled
def test_other_types() -> None:
    model, g = Uses(1.0), ScaleState()
    x = torch.randn(4, 5, 6, dtype=torch.float16, requires_grad=True)
    y = out_qdq(in_qdq(x, model.state, E5M2), g, E4M3)
    assert (y.dtype, y.shape, y._is_view()) == (x.dtype, x.shape, False)
    y.sum().backward()
    assert (model.state.fp8_max.item(), g.fp8_max.item()) == (57344.0, 448.0)


# Saving and loading
def train(model: nn.Module, run: Any, amaxes: list[float]) -> list[Tensor]:
    outputs = []
    for amax in amaxes:
        x = torch.randn(16, 16)
        y = run(x * amax)
        (y * x).sum().backward()
        outputs.append(y.detach().clone())
    return [*outputs, *(p.grad.clone() for p in model.parameters()), *model.state_dict().values()]


@pytest.mark.compiled
@FEW
def test_resuming_continues_bit_for_bit(how: Callable[..., Any]) -> None:
    model, resumed = Product(on_nonfinite="skip"), Product(on_nonfinite="skip")
    run = how(model)
    train(model, run, [1.0, 2.0, 3.0])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    results = []
    for m, f in ((model, run), (resumed, how(resumed))):
        torch.manual_seed(7)
        m.zero_grad()
        results.append(train(m, f, [4.0, 1.0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.compiled
def test_what_is_saved() -> None:
    assert {k: tuple(v.shape) for k, v in ScaleState(amax_history_len=8).state_dict().items()} == {
        "scale": (), "amax_history": (8,), "amax": (), "fp8_max": (),
    }  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("length", [2, 8])
def test_another_history_length_keeps_the_newest(length: int, assign: bool) -> None:
    model = Product(amax_history_len=4)
    for amax in (8.0, 1.0, 2.0, 3.0):
        model(data(amax)).sum().backward()
    assert entry(model.x) == (56.0, [2.0, 1.0, 8.0, 0.0], 3.0)
    other = Product(amax_history_len=length)
    saved = model.state_dict()
    other.load_state_dict(saved, assign=assign)
    expected = (224.0, [2.0, 1.0], 3.0) if length == 2 else (56.0, [2.0, 1.0, 8.0] + [0.0] * 5, 3.0)
    assert entry(other.x, length) == expected
    assert entry(other.g, length)[0] == 57344.0
    assert len(saved["x.amax_history"]) == 4
    never_used = ScaleState(amax_history_len=length)
    never_used.load_state_dict(ScaleState(amax_history_len=4).state_dict())
    assert entry(never_used, length) == (0.0, [0.0] * length, -1.0)


@pytest.mark.compiled
def test_a_model_that_begins_on_the_meta_device() -> None:
    with torch.device("meta"):
        empty, loaded = Product(amax_history_len=4), Product(amax_history_len=4)
    for model in (empty, loaded):
        model.to_empty(device="cpu")
        for buffer in model.buffers():
            buffer.fill_(7)
    for state in (empty.x, empty.w, empty.g):
        state.reset_parameters()
    saved = Product(amax_history_len=4).state_dict()
    loaded.load_state_dict(saved)
    empty.load_state_dict({"weight": saved["weight"]}, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(empty.buffers(), loaded.buffers(), strict=True))
    x = data(1.0)
    assert torch.equal(empty(x), loaded(x))
    empty(x).sum().backward()


@pytest.mark.compiled
def test_a_resized_history_that_does_not_fit_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale", "amax", "fp8_max"'):
        ScaleState(amax_history_len=4).load_state_dict({"amax_history": torch.zeros(2)})
    saved = ScaleState(amax_history_len=4).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for amax_history"):
        ScaleState(amax_history_len=4).load_state_dict({**saved, "amax_history": torch.zeros(2, 2)})


@pytest.mark.compiled
def test_buffers_stay_float32() -> None:
    model = Product(amax_history_len=2)
    for _ in range(2):
        model(data(1.1)).sum().backward()
    before = {n: b.clone() for n, b in model.named_buffers()}
    for cast in (nn.Module.bfloat16, nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16)):
        cast(model)
        assert all(b.dtype == before[n].dtype and torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert model.weight.dtype == torch.bfloat16
    assert all(b.is_meta and b.dtype == before[n].dtype for n, b in model.to("meta", torch.float16).named_buffers())


@pytest.mark.compiled
@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "pickled"])
def test_copies_have_their_own_state(twin: Callable[..., Any]) -> None:
    model = Product(amax_history_len=2)
    train(model, model, [1.0, 2.0])
    other = twin(model)
    results = []
    for m in (model, other):
        torch.manual_seed(7)
        m.zero_grad()
        results.append(train(m, m, [3.0, 1.0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Errors
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amax_history_len": 0}, "amax_history_len=0: at least one step must be remembered"),
        ({"amax_compute_algo": "maximum"}, "unknown amax_compute_algo 'maximum': choose one of 'max', 'most_recent'"),
        ({"on_nonfinite": "skpi"}, "did you mean 'skip'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScaleState(**arguments)


@pytest.mark.compiled
@pytest.mark.parametrize("function", [in_qdq, out_qdq])
def test_wrong_calls(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"dtype is torch.int8: choose one of torch.float8_e4m3fn, torch.float8_e5m2"):
        function(data(1.0), ScaleState(), torch.int8)
    with pytest.raises(TypeError, match=r"state is a Tensor, not a fp8pass\.ScaleState"):
        function(data(1.0), torch.ones(()))


@pytest.mark.compiled
def test_repr() -> None:
    assert repr(ScaleState(margin=1)) == "ScaleState(margin=1)"


@pytest.mark.compiled
@FEW
def test_a_tensor_without_rows_keeps_scale_and_history(how: Callable[..., Any]) -> None:
    """An expert without tokens has such a tensor, eagerly and compiled, in forward and backward."""
    model = Product(amax_history_len=4)
    run = how(model)

    def step(x: Tensor) -> None:
        (run(x) * 2.0).sum().backward()

    for amax in (1.0, 4.0):
        step(data(amax))
    step(torch.zeros(0, 16))
    for state, newest, format_max in ((model.x, 4.0, 448.0), (model.g, 2.0, 57344.0)):
        scale, history, pending = entry(state)
        assert (history[0], pending) == (newest, -1.0)
        assert scale == pytest.approx(format_max / newest)
    kept = entry(model.x), entry(model.g)
    step(torch.zeros(0, 16))
    assert (entry(model.x), entry(model.g)) == kept


@pytest.mark.inductor
@pytest.mark.parametrize("how", [*HOW[:-1], EVERY_DAY[-1]], ids=lambda f: f.__name__)
def test_the_numbers_that_a_step_uses(how: Callable[..., Any]) -> None:
    """Step k uses scales from the amaxes before k, forward and backward, as the oracle in float64 does."""
    model = Product(amax_history_len=4)
    run = how(model)
    slots = oracle.Slot("e4m3", 4), oracle.Slot("e5m2", 4)
    for amax in [1.0, 4.0, 0.01, 0.01, 0.01, 0.01, 0.01, 3.0]:
        x, gradient = ((torch.rand(16, 16) * 2 - 1) * amax for _ in range(2))
        x.requires_grad_()
        y = run(x)
        y.backward(gradient)
        (of_x,), (of_gradient,) = (
            s.step([float(t.detach().abs().max())]) for s, t in zip(slots, (x, gradient), strict=True)
        )
        x_, gradient_ = oracle.qdq(x.detach(), of_x, "e4m3"), oracle.qdq(gradient, of_gradient, "e5m2")
        torch.testing.assert_close(y.double(), x_, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(x.grad.double(), gradient_, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(model.weight.grad.double(), x_.T @ gradient_, rtol=1e-5, atol=1e-6)
        model.weight.grad = None
