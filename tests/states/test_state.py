"""Test the state of delayed scaling, api.md, "Delayed scaling, exactly", line by line; and whose state it is."""

from __future__ import annotations

import copy
import functools
import gc
import io
import logging
import math
import pickle
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.base.errors import warn_once
from fp8pass.recipes import DelayedScaling, Schedule
from fp8pass.report.report import collect
from fp8pass.states.slots import PARTS, registry
from tests.helpers import oracle
from tests.helpers.amaxes import SEQUENCES, data
from tests.helpers.harness import annotated, compiled, sqnr
from tests.helpers.models import AcrossABreak, Block, Parts, make

pytestmark = pytest.mark.shares_code


class Product(nn.Module):
    """`x @ weight`, [16, 16] by [16, 16], where a test sets the input's amax."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def entry(module: nn.Module, slot: str) -> tuple[float, list[float], float]:
    saved = fp8pass.state(module).state_dict()
    return saved[f"{slot}.scale"].item(), saved[f"{slot}.amax_history"].tolist(), saved[f"{slot}.amax"].item()


*WARM, COLD = SEQUENCES
"""Graphs whose slots have no scale for long are compiled once more for each recipe: daily for one algorithm each."""


@pytest.mark.compiled
@pytest.mark.parametrize("on_nonfinite", ["evict", "skip", "freeze"])
@pytest.mark.parametrize(
    ("algo", "how", "sequences"),
    [
        pytest.param("max", annotated, SEQUENCES, id="max-annotated"),
        pytest.param("most_recent", annotated, [COLD], id="most_recent-annotated-cold"),
        pytest.param("most_recent", annotated, WARM, id="most_recent-annotated", marks=pytest.mark.variant),
        pytest.param("max", compiled, SEQUENCES, id="max-compiled"),
        pytest.param("most_recent", compiled, WARM, id="most_recent-compiled"),
        pytest.param("most_recent", compiled, [COLD], id="most_recent-compiled-cold", marks=pytest.mark.variant),
    ],
)
def test_against_the_oracle(algo: str, how: Callable[..., Any], sequences: Sequence[str], on_nonfinite: str) -> None:
    """Each sequence has its own model; all models share their code."""
    recipe = DelayedScaling(amax_history_len=4, margin=1, amax_compute_algo=algo, on_nonfinite=on_nonfinite)
    for sequence in sequences:
        model, slot = Product(), oracle.Slot("e4m3", 4, algo, margin=1, on_nonfinite=on_nonfinite)
        run = how(model, recipe=recipe)
        previous: list[float] = []
        for amax in SEQUENCES[sequence]:
            if previous:
                slot.step(previous)
            run(data(amax)).sum().backward()
            scale, history, pending = entry(model, "weight.input")
            assert scale == pytest.approx(slot.scale, rel=1e-6, abs=0), sequence
            assert history == pytest.approx(slot.history, nan_ok=True), sequence
            recorded = slot._record(amax)
            assert pending == pytest.approx(-1.0 if recorded is None else recorded, nan_ok=True), sequence
            previous = [amax]


@pytest.mark.compiled
def test_the_numbers_that_a_step_uses() -> None:
    """Step k is scaled by the amaxes before k: outputs are compared with the oracle, in float64."""
    model, slot = Product(), oracle.Slot("e4m3", 2)
    run = compiled(model, recipe=DelayedScaling(amax_history_len=2))
    for step, amax in enumerate([1.0, 4.0, 0.01, 0.01, 0.01, 3.0]):
        torch.manual_seed(step)
        x = (torch.rand(16, 16) * 2 - 1) * amax
        x[0, 0] = amax
        (scale,) = slot.step([float(x.abs().max())])
        torch.testing.assert_close(run(x).double(), oracle.qdq(x, scale, "e4m3"), rtol=1e-6, atol=1e-12)


@pytest.mark.compiled
def test_margin_and_history_of_gradients() -> None:
    model = Product()
    run = compiled(model, recipe=DelayedScaling(amax_history_len=2, margin=1))
    for factor in (1.0, 2.0, 4.0):
        (run(data(1.0)) * factor).sum().backward()
    scale, history, pending = entry(model, "weight.grad_output")
    assert (scale, history, pending) == (57344 / 2 / 2, [2.0, 1.0], 4.0)


@pytest.mark.compiled
def test_formats() -> None:
    for fmt, largest in (("hybrid", 57344.0), ("e4m3", 448.0)):
        model = Product()
        run = compiled(model, recipe=DelayedScaling(fp8_format=fmt))
        for _ in range(2):
            run(data(1.0)).sum().backward()
        assert entry(model, "weight.grad_output")[0] == largest
        assert entry(model, "weight.input")[0] == 448.0


@pytest.mark.compiled
def test_a_callable_algorithm() -> None:
    model = Product()
    run = compiled(model, recipe=DelayedScaling(amax_history_len=2, amax_compute_algo=lambda h: h.mean()))
    for amax in (1.0, 3.0, 3.0):
        run(data(amax)).sum().backward()
    assert entry(model, "weight.input")[0] == 448 / 2


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("recipe", "first"),
    [
        (DelayedScaling(amax_history_len=3, on_nonfinite="freeze"), float("nan")),
        (DelayedScaling(amax_history_len=3, amax_compute_algo=lambda h: h[-1]), 1e-4),
    ],
    ids=["a NaN in the window", "the oldest of the window"],
)
def test_a_slot_is_scaled_by_its_own_amax_until_its_history_makes_a_scale(recipe: DelayedScaling, first: float) -> None:
    """A recorded amax need not give a scale; with scale 1, these values would all be rounded to 0."""
    model = Product()
    run = compiled(model, recipe=recipe)
    for step in range(6):
        x = data(1e-4)
        if not step:
            x[0, 0] = first
        y = run(x)
        y.sum().backward()
        if step:
            torch.testing.assert_close(y.double(), oracle.qdq(x, 448 / 1e-4, "e4m3"), rtol=1e-6, atol=1e-12)


@pytest.mark.compiled
def test_a_nan_in_the_first_step_makes_one_more_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """It makes no other graph: the next step records finite amaxes."""
    model = Product()
    run = compiled(model, recipe=DelayedScaling(amax_history_len=3))
    with caplog.at_level(logging.WARNING, "fp8pass"):
        for step in range(6):
            x = data(1.0)
            if not step:
                x[0, 0] = float("nan")
            run(x).sum().backward()
            (state,) = [
                s for s in registry.states() if s.table.training and any(x is model.weight for x in s.owned_tensors())
            ]
            assert state.warm == (step >= 2)
    assert "compiling once more" not in caplog.text


@pytest.mark.compiled
def test_a_forward_without_backward_leaves_gradients_alone() -> None:
    model = Product()
    run = compiled(model)
    for _ in range(2):
        run(data(1.0)).sum().backward()
    before = entry(model, "weight.grad_output")
    for _ in range(3):
        run(data(2.0))
    scale, history, pending = entry(model, "weight.grad_output")
    assert (scale, history[:2], pending) == (before[0], [1.0, 1.0], -1.0)
    assert entry(model, "weight.input")[1][:5] == [2.0, 2.0, 1.0, 1.0, 0.0]


@pytest.mark.compiled
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_evaluation_uses_the_scales_and_changes_nothing(mode: Any, lowering: str) -> None:
    model = Product()
    run = compiled(model, recipe=DelayedScaling(amax_history_len=2), lowering=lowering)
    with mode():  # before any training, scales are dynamic
        x = torch.rand(16, 16) * 1e-4
        torch.testing.assert_close(run(x).double(), oracle.qdq(x, 448 / float(x.max()), "e4m3"), rtol=1e-5, atol=0)
    for _ in range(2):
        run(data(1.0)).sum().backward()
    before = fp8pass.state(model).state_dict()
    with mode():
        x = torch.rand(16, 16) * 4
        torch.testing.assert_close(run(x).double(), oracle.qdq(x, 448.0, "e4m3"), rtol=1e-6, atol=1e-6)
    after = fp8pass.state(model).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.compiled
def test_an_early_evaluation_makes_no_step() -> None:
    model = Product()
    run = compiled(model)
    with torch.no_grad():
        run(data(1.0))
    assert entry(model, "weight.input")[2] == -1.0
    run(data(8.0)).sum().backward()
    assert entry(model, "weight.input")[1:] == ([0.0] * 1024, 8.0)


# Models and their states
def train(run: Callable[[Tensor], Tensor], amaxes: Sequence[float]) -> None:
    for amax in amaxes:
        x = torch.randn(16, 32)
        run(x * amax / x.abs().max()).square().sum().backward()


@pytest.mark.compiled
def test_two_models_of_one_class() -> None:
    torch._dynamo.reset()
    first, second = make(seed=0), make(seed=1)
    runs = compiled(first), compiled(second)
    frames = torch._dynamo.utils.counters["frames"]
    train(runs[0], [1.0, 1.0, 1.0])
    before = frames["ok"]
    train(runs[1], [100.0, 100.0])
    states = [fp8pass.state(m).state_dict() for m in (first, second)]
    assert states[0].keys() == states[1].keys()
    assert states[0]["down.weight.amax"] == pytest.approx(float(first.down.weight.detach().abs().max()))
    assert states[1]["down.weight.amax"] == pytest.approx(float(second.down.weight.detach().abs().max()))
    assert [s["up.input.amax_history"].count_nonzero().item() for s in states] == [2, 1]
    assert frames["ok"] - before <= 1


@pytest.mark.compiled
def test_blocks_compiled_one_by_one_share_code_but_no_state() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*(make(seed=i) for i in range(4)))
    for block in model:
        block.compile(backend="fp8pass", options={"lowering": "eager"})
    train(model, [1.0, 2.0, 3.0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    state = fp8pass.state(model)
    assert len(state.slots) == 4 * 6
    saved = state.state_dict()
    for i, block in enumerate(model):
        assert saved[f"{i}.up.weight.amax"] == float(block.up.weight.detach().abs().max())
        assert fp8pass.state(block).state_dict()["up.weight.amax"] == saved[f"{i}.up.weight.amax"]
    assert len({saved[f"{i}.up.weight.scale"].item() for i in range(4)}) == 4


@pytest.mark.compiled
def test_blocks_compiled_one_by_one_train_as_the_whole_does() -> None:
    """They have the same numbers and the same state, and load each other's checkpoints."""
    gradients, states = [], []
    for whole in (True, False):
        model = nn.Sequential(*(make(seed=i) for i in range(3)))
        for part in [model] if whole else model:
            part.compile(backend="fp8pass", options={"lowering": "eager"})
        torch.manual_seed(1)
        train(model, [1.0, 2.0, 3.0])
        gradients.append([p.grad for p in model.parameters()])
        states.append(fp8pass.state(model))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    saved, other = states[0].state_dict(), states[1].state_dict()
    assert saved.keys() == other.keys()
    assert all(torch.equal(saved[name], other[name]) for name in saved)
    states[1].load_state_dict(saved)


@pytest.mark.compiled
def test_graph_breaks_and_recompiles_keep_state_by_name() -> None:
    class Broken(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            torch._dynamo.graph_break()
            out: Tensor = self.down(hidden)
            return out

    model = Broken()
    run = annotated(model)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        for rows in (16, 24, 32, 40):  # the first size is static, the later ones are symbolic
            run(torch.ones(rows, 32)).sum().backward()
    assert len(fp8pass.state(model).slots) == 6
    assert fp8pass.state(model).state_dict()["up.input.amax_history"][:4].tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.compiled
def test_entry_points_that_share_slots_share_their_state() -> None:
    model = make(Parts)
    whole, half = compiled(model), compiled(model.part)
    for i, run in enumerate((whole, whole, half, half, whole), 1):
        run(torch.full((16, 32), float(i))).sum().backward()
    scale, history, pending = entry(model, "a.input")
    assert (scale, history[:5], pending) == (112.0, [4.0, 3.0, 2.0, 1.0, 0.0], 5.0)
    assert entry(model, "a.grad_output")[1][:4].count(0.0) == 0
    assert len(entry(model, "b.input")[1]) == 1024
    assert sum(a > 0 for a in entry(model, "b.input")[1]) == 2


def scaled(module: nn.Module, name: str, factor: float) -> nn.Module:
    with torch.no_grad():
        module.get_parameter(name).mul_(factor)
    return module


@pytest.mark.compiled
def test_instances_that_share_one_layer_share_only_its_slots() -> None:
    class Pair(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(32, 32, bias=False), shared

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.shared(self.own(x))
            return y

    shared = nn.Linear(32, 32, bias=False)
    pairs = [scaled(Pair(shared), "own.weight", k) for k in (1e4, 1e-3)]
    runs = [compiled(p) for p in pairs]
    for _ in range(3):
        for run in runs:
            run(torch.randn(64, 32)).sum().backward()
    states = [fp8pass.state(p).state_dict() for p in pairs]
    assert states[0]["own.weight.scale"] * 1e6 < states[1]["own.weight.scale"]
    assert states[0]["shared.weight.scale"] == states[1]["shared.weight.scale"]


@pytest.mark.compiled
def test_modules_that_own_nothing_share_nothing() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.mT

    large, small = compiled(Attend()), compiled(Attend())
    for _ in range(3):
        q, k = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
        for run, factor in ((large, 1e4), (small, 1e-4)):
            y = run(q * factor, k)
            assert sqnr((q * factor) @ k.mT, y) > 25
            y.sum().backward()


def check_both_halves(model: nn.Module) -> Tensor:
    """Train three steps, and check both outputs in each; return the last input."""
    run = compiled(model)
    for _ in range(3):
        x = torch.randn(16, 32)
        outputs = run(x)
        for actual, expected in zip(outputs, model(x), strict=True):
            assert sqnr(expected, actual) > 22
        sum(y.sum() for y in outputs).backward()
    return x


@pytest.mark.compiled
def test_two_halves_of_one_forward_may_give_slots_the_same_name() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = x * self.g
            y = h @ h.mT
            torch._dynamo.graph_break()
            h = x * self.g * 1e-6
            return y, h @ h.mT

    model = Halves()
    x = check_both_halves(model)
    slots = fp8pass.state(model).slots
    assert slots == sorted(f"matmul.{r}{n}" for r in ("input", "weight", "grad_output") for n in ("", "~1"))
    saved = fp8pass.state(model).state_dict()
    fp8pass.state(model).load_state_dict(saved)
    assert saved["matmul.input~1.scale"] > 1e5 * saved["matmul.input.scale"]
    other = Halves()
    fp8pass.state(other).load_state_dict(saved)
    with torch.no_grad():
        compiled(other)(x)
    again = fp8pass.state(other).state_dict()
    assert all(torch.equal(saved[k], again[k]) for k in saved)


@pytest.mark.compiled
def test_one_layer_at_two_lines_has_a_slot_for_each_input() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.fc(x)
            torch._dynamo.graph_break()
            return y, self.fc(x * 1e-6)

    model = Twice()
    check_both_halves(model)
    assert fp8pass.state(model).slots == [
        "fc.grad_output", "fc.grad_output~1", "fc.input", "fc.input~1", "fc.weight",
    ]  # fmt: skip


@pytest.mark.compiled
def test_two_recipes_on_one_model() -> None:
    model = make()
    for length in (4, 8):
        train(annotated(model, recipe=DelayedScaling(amax_history_len=length)), [1.0, 2.0])
    assert {len(s.tensors.amax_history) for s in registry.states() if s.owned_tensors()[0] is model.norm.weight} == {
        4,
        8,
    }


@pytest.mark.compiled
def test_two_models_in_one_function_that_share_a_layer() -> None:
    class Top(nn.Module):
        def __init__(self, bottom: nn.Module) -> None:
            super().__init__()
            self.bottom, self.fc = bottom, nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(self.bottom(x))
            return y

    bottom = nn.Linear(32, 32)
    a, b = Top(bottom), scaled(Top(bottom), "fc.weight", 1000.0)
    run = compiled(lambda x: a(x) + b(x))
    for _ in range(2):
        run(torch.randn(16, 32)).sum().backward()
    scales = [fp8pass.state(m).state_dict()["fc.weight.scale"] for m in (a, b)]
    assert scales[0] == pytest.approx(448 / float(a.fc.weight.detach().abs().max()), rel=1e-5)
    assert scales[1] == pytest.approx(448 / float(b.fc.weight.detach().abs().max()), rel=1e-5)


@pytest.mark.compiled
def test_one_model_in_several_threads() -> None:
    import threading

    model = make()
    run = compiled(model)
    train(run, [1.0])
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                run(torch.randn(16, 32)).square().sum().backward()
        except Exception as error:  # noqa: BLE001 - it is reported below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(fp8pass.state(model).slots) == 6


@pytest.mark.compiled
def test_state_is_freed_with_its_model() -> None:
    model = make()
    train(compiled(model), [1.0])
    mine = weakref.ref(model.up.weight)
    assert any(p() is mine() for s in registry.states() for p in s.owned)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert mine() is None
    assert all(s.alive() for s in registry.states())


# Saving and loading
@pytest.mark.compiled
def test_resuming_continues_bit_for_bit() -> None:
    model = make()
    run = compiled(model)
    train(run, [1.0, 2.0, 3.0])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "fp8": fp8pass.state(run).state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make(seed=5)
    resumed.load_state_dict(saved["model"])
    fp8pass.state(resumed).load_state_dict(saved["fp8"])  # before the first call
    assert fp8pass.state(resumed).state_dict().keys() == saved["fp8"].keys()
    again = compiled(resumed)
    model.zero_grad()
    for m, f in ((model, run), (resumed, again)):
        torch.manual_seed(7)
        train(f, [4.0, 1.0])
        assert m.up.weight.grad is not None
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
    mine, other = fp8pass.state(model).state_dict(), fp8pass.state(resumed).state_dict()
    assert all(torch.equal(mine[k], other[k]) for k in mine)


@pytest.mark.compiled
def test_loading_after_the_first_call_replaces_everything() -> None:
    model = make()
    run = compiled(model)
    train(run, [1.0, 2.0])
    saved = fp8pass.state(model).state_dict()
    train(run, [100.0, 100.0])
    fp8pass.state(model).load_state_dict(saved)
    restored = fp8pass.state(model).state_dict()
    assert all(torch.equal(saved[k], restored[k]) for k in saved)


@pytest.mark.compiled
@pytest.mark.parametrize("length", [2, 8])
def test_another_history_length_keeps_the_newest(length: int) -> None:
    model = Product()
    run = compiled(model, recipe=DelayedScaling(amax_history_len=4))
    for amax in (8.0, 1.0, 2.0, 3.0):
        run(data(amax)).sum().backward()
    assert entry(model, "weight.input") == (56.0, [2.0, 1.0, 8.0, 0.0], 3.0)
    other = Product()
    fp8pass.state(other).load_state_dict(fp8pass.state(model).state_dict())
    run = compiled(other, recipe=DelayedScaling(amax_history_len=length))
    with torch.no_grad():
        run(data(0.0))
    expected = (224.0, [2.0, 1.0], 3.0) if length == 2 else (56.0, [2.0, 1.0, 8.0] + [0.0] * 5, 3.0)
    assert entry(other, "weight.input") == expected


@pytest.mark.compiled
def test_what_does_not_fit_is_an_error_that_names_it() -> None:
    model = make()
    run = compiled(model)
    train(run, [1.0])
    state = fp8pass.state(model)
    saved = state.state_dict()
    missing = {k: v for k, v in saved.items() if not k.startswith("up.input.")}
    with pytest.raises(fp8pass.Fp8Error, match=r"Missing slots: \['up\.input'\]\. Unexpected slots: \[\]"):
        state.load_state_dict(missing)
    gone = {part: torch.zeros(4 if part == "amax_history" else ()) for part in PARTS}
    extra = {**saved, **{f"gone.weight.{part}": value for part, value in gone.items()}}
    with pytest.raises(fp8pass.Fp8Error, match=r"Missing slots: \[\]\. Unexpected slots: \['gone\.weight'\]"):
        state.load_state_dict(extra)
    with pytest.raises(fp8pass.Fp8Error, match="is not FP8 state: keys end in scale, amax_history, amax"):
        state.load_state_dict(model.state_dict())
    with pytest.raises(fp8pass.Fp8Error, match=r"slot 'up.input' lacks \['amax'\]"):
        state.load_state_dict({k: v for k, v in saved.items() if k != "up.input.amax"})
    with pytest.raises(
        fp8pass.Fp8Error, match=r"wrong sizes in the saved FP8 state: up.input.scale \[2\]; scale and amax"
    ):
        state.load_state_dict({**saved, "up.input.scale": torch.ones(2)})
    assert all(torch.equal(saved[k], v) for k, v in state.state_dict().items())
    with pytest.raises(TypeError, match="takes a module or a compiled module, not function"):
        fp8pass.state(lambda x: x)


@pytest.mark.compiled
def test_state_of_a_module_is_one_object() -> None:
    model = make()
    assert fp8pass.state(model) is fp8pass.state(torch.compile(model))
    assert fp8pass.state(model).state_dict() == {}


@pytest.mark.compiled
def test_loading_after_training_and_evaluation() -> None:
    model = make()
    run = compiled(model)

    def evaluate() -> None:
        with torch.no_grad():
            run(torch.randn(16, 32))

    train(run, [1.0, 2.0])
    evaluate()
    saved = fp8pass.state(model).state_dict()
    train(run, [100.0, 100.0])
    evaluate()
    fp8pass.state(model).load_state_dict(saved)
    evaluate()
    restored = fp8pass.state(model).state_dict()
    assert all(torch.equal(saved[k], restored[k]) for k in saved)
    train(run, [1.0])
    assert fp8pass.state(model).state_dict()["up.input.amax_history"][0] == saved["up.input.amax"]


@pytest.mark.compiled
def test_loading_after_evaluation_only() -> None:
    model, other = make(), make()
    train(compiled(model), [1.0, 2.0])
    saved = fp8pass.state(model).state_dict()
    run = compiled(other)
    with torch.no_grad():
        run(torch.randn(16, 32))
    fp8pass.state(other).load_state_dict(saved)
    assert fp8pass.state(other).state_dict().keys() == saved.keys()
    train(run, [1.0])
    assert fp8pass.state(other).state_dict()["down.grad_output.scale"] > 0


@pytest.mark.compiled
def test_loading_between_forward_and_backward() -> None:
    model = make()
    run = compiled(model)
    train(run, [1.0, 1.0])
    loss = run(torch.randn(16, 32)).square().sum()
    state = fp8pass.state(model)
    state.load_state_dict(state.state_dict())
    loss.backward()
    assert state.state_dict()["up.grad_output.amax"] > 0


@pytest.mark.compiled
@pytest.mark.parametrize("strict", [True, False])
def test_a_loaded_state_that_does_not_fit_is_noticed_at_the_first_call(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    names = {f"down.input.{part}": torch.zeros(4 if part == "amax_history" else ()) for part in PARTS}
    fp8pass.state(model).load_state_dict(names, strict=strict)
    if strict:
        with pytest.raises(
            fp8pass.Fp8Error, match=r"Missing slots: \['up.input', .*or the part that fits, with strict=False"
        ):
            train(compiled(model), [1.0])
        return
    train(compiled(model), [1.0])
    assert "the loaded FP8 state lacks up.input" in caplog.text


@pytest.mark.compiled
def test_slots_of_layers_that_the_model_lacks_are_an_error_before_the_first_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, state = make(), fp8pass.state(other := make())
    train(compiled(model), [1.0])
    saved = fp8pass.state(model).state_dict()
    wrong = {**saved, **{k.replace("up.input", "upp.input"): v for k, v in saved.items() if k.startswith("up.input.")}}
    with pytest.raises(
        fp8pass.Fp8Error, match=r"slots of layers that Block does not have: upp.input; did you mean 'up'\?"
    ):
        state.load_state_dict(wrong)
    state.load_state_dict(wrong, strict=False)
    assert "which are left out: upp.input" in caplog.text
    run = compiled(other, filter=["down"])
    train(run, [1.0])
    assert "the first step did not use" not in caplog.text
    train(run, [1.0])
    assert re.search(
        r"the first step did not use: down.grad_output, down.input, down.weight, upp.input\. ", caplog.text
    )


@functools.cache
def trained_state() -> dict[str, Tensor]:
    """Train two steps; return the state that they leave."""
    model = make()
    train(compiled(model), [1.0, 1.0])
    return fp8pass.state(model).state_dict()


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("up.input.scale", math.nan, "up.input.scale nan"),
        ("up.input.scale", -1.0, r"up.input.scale -1\.0"),
        ("up.weight.scale", math.inf, "up.weight.scale inf"),
        ("up.input.amax", -0.5, r"up.input.amax -0\.5"),
        ("up.input.amax", math.inf, "up.input.amax inf"),
        ("down.input.amax_history", math.nan, "down.input.amax_history nan"),
        ("down.input.amax_history", -1.0, r"down.input.amax_history -1\.0"),
        ("steps", -3, "steps -3"),
    ],
)
def test_numbers_that_no_training_leaves(key: str, value: float, told: str) -> None:
    saved = {k: v.clone() for k, v in trained_state().items()}
    saved[key].reshape(-1)[0] = value
    with pytest.raises(fp8pass.Fp8Error, match=f"wrong values in the saved FP8 state: {told}; "):
        fp8pass.state(make()).load_state_dict(saved)


@pytest.mark.compiled
def test_a_frozen_history_keeps_what_is_not_finite() -> None:
    model, other = Product(), Product()
    run = compiled(model, recipe=DelayedScaling(amax_history_len=4, on_nonfinite="freeze"))
    for amax in (1.0, math.nan, math.inf, math.inf):
        run(data(amax)).sum().backward()
    saved = fp8pass.state(model).state_dict()
    assert (
        saved["weight.input.amax"].isinf() and saved["weight.input.amax_history"][:2].isfinite().tolist() == [False] * 2
    )
    fp8pass.state(other).load_state_dict(saved)


@pytest.mark.compiled
def test_what_is_not_a_state() -> None:
    state = fp8pass.state(make())
    with pytest.raises(fp8pass.Fp8Error, match=r"is not a dict of tensors, but a list; pass what"):
        state.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(
        fp8pass.Fp8Error, match=r"is not a dict of tensors, but has a float as 'up.input.scale'; pass what"
    ):
        state.load_state_dict({"up.input.scale": 1.0})  # type: ignore[dict-item]


@pytest.mark.compiled
def test_steps_of_several_graphs() -> None:
    """Halves of a forward are one step; entry points count their own steps, and so does another recipe."""
    model = make(Parts)
    whole, half = annotated(model), annotated(model.part)
    other = annotated(model, recipe=DelayedScaling(margin=1))
    for done, run in enumerate((whole, half, half, whole, other, half, other), 1):
        run(torch.ones(16, 32)).sum().backward()
        assert fp8pass.state(model).steps == done
    with fp8pass.accumulate(model):
        for run in (whole, half, whole):
            run(torch.ones(16, 32)).sum().backward()
    assert fp8pass.state(model).steps == 8
    broken = make(AcrossABreak)
    run = annotated(broken)
    for _ in range(3):
        run(torch.ones(16, 32)).sum().backward()
    assert fp8pass.state(broken).steps == 3


@pytest.mark.compiled
def test_a_state_is_not_saved_as_an_object() -> None:
    model = make()
    for save in (copy.deepcopy, pickle.dumps, lambda state: torch.save(state, io.BytesIO())):
        with pytest.raises(TypeError, match=r"save fp8pass\.state\(model\)\.state_dict\(\), a dict of tensors"):
            save(fp8pass.state(model))


@pytest.mark.compiled
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "block by block"])
def test_a_copy_of_a_model_goes_on_as_the_model_does(parts: bool) -> None:
    model = nn.Sequential(make(seed=0), make(seed=1))
    for part in model if parts else [model]:
        part.compile(backend="fp8pass", options={"lowering": "eager"})
    train(model, [1.0, 2.0])
    twin = copy.deepcopy(model)
    assert all(map(torch.equal, fp8pass.state(model).state_dict().values(), fp8pass.state(twin).state_dict().values()))
    for part in twin if parts else [twin]:
        part.compile(backend="fp8pass", options={"lowering": "eager"})
    torch.manual_seed(2)
    x = torch.randn(16, 32) * 3
    assert torch.equal(model(x), twin(x)) and len(fp8pass.state(twin).slots) == 12


@pytest.mark.compiled
def test_a_pickled_model_says_what_it_lacks_and_needs_no_fp8pass() -> None:
    model = make()
    train(compiled(model), [1.0])
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="a Block is pickled without its FP8 state: save fp8pass.state"):
        pickled = pickle.dumps(model)
    assert b"fp8pass." not in pickled.replace(b"_fp8pass_state", b"")
    twin = pickle.loads(pickled)
    train(compiled(twin), [1.0])
    assert len(fp8pass.state(copy.deepcopy(twin)).slots) == 6


@pytest.mark.compiled
def test_without_strict_what_fits_is_loaded() -> None:
    model, other = make(), make()
    train(compiled(model), [1.0, 2.0])
    saved = fp8pass.state(model).state_dict()
    part = {k: v for k, v in saved.items() if not k.startswith("up.input.")}
    train(compiled(other), [50.0])
    before = fp8pass.state(other).state_dict()
    fp8pass.state(other).load_state_dict(
        {**part, "gone.scale": torch.zeros(()), "gone.amax": torch.zeros(()), "gone.amax_history": torch.zeros(4)},
        strict=False,
    )
    after = fp8pass.state(other).state_dict()
    for key in before:
        assert torch.equal(after[key], (before if key.startswith("up.input.") else saved)[key]), key


@pytest.mark.compiled
@pytest.mark.parametrize("first", ["load", "train"])
def test_a_state_of_another_recipe_names_both(first: str) -> None:
    model, other = make(), make()
    train(annotated(model, recipe=DelayedScaling(amax_history_len=4)), [1.0, 2.0])
    saved = fp8pass.state(model).state_dict()
    run = annotated(other, recipe=DelayedScaling(amax_history_len=8, fp8_format="e4m3", margin=1))
    both = (
        r"saved under DelayedScaling\(\), and this model is trained with DelayedScaling\(fp8_format='e4m3', margin=1\)"
    )
    state = fp8pass.state(other)
    if first == "train":
        train(run, [5.0])
        with pytest.raises(fp8pass.Fp8Error, match=both):
            state.load_state_dict(saved)
    else:
        state.load_state_dict(saved)
        with pytest.raises(fp8pass.Fp8Error, match=both):
            train(run, [5.0])
    state.load_state_dict(saved, strict=False)
    if first == "load":
        with torch.no_grad():
            run(torch.randn(16, 32))  # now a graph has these slots
    mine = state.state_dict()
    assert mine["up.input.amax_history"].tolist()[:4] == saved["up.input.amax_history"].tolist()
    expected = oracle.scale_of(float(saved["up.input.amax_history"].max()), "e4m3", margin=1)
    assert mine["up.input.scale"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.compiled
def test_everything_has_a_fixed_size_and_loads_with_weights_only() -> None:
    model = make()
    run = compiled(model, recipe=DelayedScaling(amax_history_len=4))
    train(run, [1.0])
    sizes = {k: (v.shape, v.dtype) for k, v in fp8pass.state(run).state_dict().items()}
    train(run, [1.0, 2.0, 3.0])
    saved = fp8pass.state(run).state_dict()
    assert {k: (v.shape, v.dtype) for k, v in saved.items()} == sizes
    assert sizes["recipe"] == (torch.Size([512]), torch.uint8)
    assert saved["steps"].item() == 4
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert all(torch.equal(saved[k], again[k]) for k in saved)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A state is Stateful: `save` and `load` take it as it is; `load` fills the slots that the model has by then."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    model, other = make(), make()
    run, again = compiled(model), compiled(other)
    train(run, [1.0, 2.0, 3.0])
    save({"fp8": fp8pass.state(run), "model": model.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    load({"fp8": fp8pass.state(other)}, checkpoint_id=tmp_path, no_dist=True)
    assert "call the model once, with gradients, before" in caplog.text
    again(torch.randn(16, 32))  # now it has its slots
    weights = other.state_dict()
    load({"fp8": fp8pass.state(other), "model": weights}, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(weights)
    for m in (model, other):
        m.zero_grad()
    for f in (run, again):
        torch.manual_seed(1)
        train(f, [4.0, 1.0])
    mine, theirs = fp8pass.state(model).state_dict(), fp8pass.state(other).state_dict()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


class Aux(nn.Module):
    """A model with a layer that is in two trained graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, aux: bool = False) -> Tensor:
        y: Tensor = self.a(x)
        return self.b(y) if aux else y


@pytest.mark.compiled
def test_slots_in_two_trained_graphs_resume() -> None:
    model, resumed = make(Aux), make(Aux)
    run, again = annotated(model), annotated(resumed)

    def steps(f: Callable[..., Tensor]) -> None:
        for aux in (False, True, False):
            f(torch.full((16, 32), 3.0), aux).sum().backward()

    steps(run)
    fp8pass.state(resumed).load_state_dict(fp8pass.state(model).state_dict())
    steps(run)
    steps(again)
    mine, other = fp8pass.state(model).state_dict(), fp8pass.state(resumed).state_dict()
    assert all(torch.equal(mine[k], other[k]) for k in mine)


@pytest.mark.compiled
@pytest.mark.parametrize("when", ["before", "after"])
def test_two_delayed_recipes_resume(when: str) -> None:
    recipe = {"up": DelayedScaling(amax_history_len=4, margin=1), "down": DelayedScaling(amax_history_len=4)}
    model, resumed = make(), make()
    run, again = compiled(model, recipe=recipe), compiled(resumed, recipe=recipe)
    train(run, [1.0, 2.0, 3.0])
    saved = fp8pass.state(model).state_dict()
    if when == "after":
        train(again, [9.0])
    fp8pass.state(resumed).load_state_dict(saved)
    for f in (run, again):
        torch.manual_seed(3)
        train(f, [4.0, 1.0])
    mine, other = fp8pass.state(model).state_dict(), fp8pass.state(resumed).state_dict()
    assert all(torch.equal(mine[k], other[k]) for k in mine)
    assert saved["recipe"].tolist() == mine["recipe"].tolist()


@pytest.mark.compiled
def test_states_whose_order_matters_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model, resumed = make(AcrossABreak), make(AcrossABreak)
    train(annotated(model), [1.0, 2.0])
    fp8pass.state(resumed).load_state_dict(fp8pass.state(model).state_dict())
    assert "fc.input" not in caplog.text
    train(annotated(resumed), [1.0])
    assert "fc.input, fc.grad_output: several graphs use these slot names" in caplog.text.replace(
        "fc.grad_output, fc.input", "fc.input, fc.grad_output"
    )


@pytest.mark.compiled
def test_what_is_loaded_is_not_shared() -> None:
    model, other = make(), make()
    train(compiled(model), [1.0])
    state = fp8pass.state(other)
    state.load_state_dict(fp8pass.state(model).state_dict())
    state.state_dict()["up.input.amax_history"].fill_(9.0)
    assert state.state_dict()["up.input.amax_history"].max() == 0


@pytest.mark.compiled
def test_a_use_without_gradients_beside_one_with(caplog: pytest.LogCaptureFixture) -> None:
    """A weight has one slot; a step does not wait for an input that never records."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.fc(x * 2).tanh()
            out: Tensor = self.fc(x) + target  # the target avoids cancellation
            return out

    model = make(Both)
    run = compiled(model, recipe=DelayedScaling(amax_history_len=4))
    for _ in range(6):
        x = torch.randn(16, 32)
        assert sqnr(model(x), run(x)) > 22
        run(x).square().sum().backward()
    assert [s for s in fp8pass.state(model).slots if "weight" in s] == ["fc.weight"]
    assert "compiling once more" not in caplog.text
    assert all(s.warm for s in registry.states() if s.owned_tensors()[0] is model.fc.weight)


class InParts(nn.Module):
    """breaks: Dynamo makes separate graphs of what is before and after the middle part."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(32, 32), Parts(), nn.Linear(32, 32, bias=False)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        y: Tensor = self.last(self.middle(x))
        return y


PART: dict[str, Any] = {"lowering": "eager", "recipe": DelayedScaling(amax_history_len=3)}


def part_wrapped() -> tuple[nn.Module, Any]:
    model = make(InParts)
    model.middle = torch.compile(model.middle, backend="fp8pass", options=PART)
    return model, compiled(model)


def part_in_a_graph_of_its_own() -> tuple[nn.Module, Any]:
    model = make(lambda: InParts(breaks=True))
    model.middle = torch.compile(model.middle, backend="fp8pass", options=PART)
    return model, compiled(model)


def part_in_place() -> tuple[nn.Module, Any]:
    model = make(lambda: InParts(breaks=True))
    model.middle.compile(backend="fp8pass", options=PART)
    return model, compiled(model)


def all_parts_wrapped() -> tuple[nn.Module, Any]:
    model = make(InParts)
    for name, part in list(model.named_children()):
        setattr(model, name, torch.compile(part, backend="fp8pass", options=PART))
    return model, model


@pytest.mark.compiled
@pytest.mark.parametrize(
    "way",
    [
        part_wrapped,
        part_in_a_graph_of_its_own,
        pytest.param(part_in_place, marks=pytest.mark.variant),
        all_parts_wrapped,
    ],
)
def test_compiled_parts_are_in_the_state_under_plain_names_and_resume(way: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, run = way()
    train(run, [1.0, 2.0, 3.0])
    saved = fp8pass.state(model).state_dict()
    roles = ("grad_output", "input", "weight")
    names = [f"{name}.{role}" for name in ("first", "last", "middle.a", "middle.b") for role in roles]
    assert fp8pass.state(model).slots == names
    assert fp8pass.state(run).state_dict().keys() == saved.keys()
    part = getattr(model.middle, "_orig_mod", model.middle)
    assert fp8pass.state(model.middle) is fp8pass.state(part)
    assert fp8pass.state(part).slots == [n.removeprefix("middle.") for n in names if n.startswith("middle.")]
    resumed, again = way()
    fp8pass.state(again).load_state_dict(saved)
    model.zero_grad()
    for f in (run, again):
        torch.manual_seed(3)
        train(f, [4.0, 1.0])
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))  # type: ignore[arg-type]
    mine, other = fp8pass.state(model).state_dict(), fp8pass.state(resumed).state_dict()
    assert mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)


@pytest.mark.compiled
def test_a_forward_that_hooks_have_replaced_leaves_the_names() -> None:
    """Hooks of accelerate do so: Dynamo finds the layers in the function's closure, and not in the module."""
    model = make(InParts)
    forward = model.middle.forward
    model.middle.forward = lambda x: forward(x * 1.0)
    with collect() as report:
        train(compiled(model), [1.0])
    assert {g.name for g in report.gemms} == {"first", "middle.a", "middle.b", "last"}
    assert {s.rpartition(".")[0] for s in fp8pass.state(model).slots} == {g.name for g in report.gemms}


SCHEDULES: list[dict[int, Any]] = [
    {0: DelayedScaling(amax_history_len=4), 4: DelayedScaling(amax_history_len=4, margin=1)},
    {0: {"a": None, "*": DelayedScaling(amax_history_len=4)}, 4: DelayedScaling(amax_history_len=4)},
    {0: None, 4: DelayedScaling(amax_history_len=4)},
]


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("schedule", "how"),
    [
        *((schedule, annotated) for schedule in SCHEDULES),
        *(pytest.param(schedule, compiled, marks=pytest.mark.variant) for schedule in SCHEDULES[:2]),
        (SCHEDULES[2], compiled),
    ],
)
def test_a_schedule_resumes_before_a_phase_that_has_not_begun(
    schedule: dict[int, Any], how: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, resumed = make(Parts), make(Parts)
    run, again = (how(m, recipe=fp8pass.recipes.Schedule(schedule)) for m in (model, resumed))
    train(run, [1.0, 2.0])
    fp8pass.state(resumed).load_state_dict(fp8pass.state(model).state_dict())
    assert "an empty FP8 state" not in caplog.text
    for f in (run, again):
        torch.manual_seed(2)
        train(f, [3.0, 4.0, 5.0, 6.0])
    mine, other = fp8pass.state(model).state_dict(), fp8pass.state(resumed).state_dict()
    assert all(torch.equal(mine[k], other[k]) for k in mine)


@pytest.mark.compiled
def test_many_recipes_are_recognised_after_a_cut() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
    recipe: Any = {f"{i}": DelayedScaling(amax_history_len=4, margin=i, on_nonfinite="freeze") for i in range(12)}
    run = annotated(model, recipe=recipe)
    train(run, [1.0, 2.0])
    state = fp8pass.state(model)
    saved = state.state_dict()
    state.load_state_dict(saved)
    assert all(torch.equal(saved[k], v) for k, v in state.state_dict().items())


@pytest.mark.inductor
@pytest.mark.parametrize(
    "how",
    [
        "lowered op by op",
        "lowered by Inductor",
        pytest.param("by a schedule", marks=pytest.mark.variant),
        "after an error in a backward",
    ],
)
def test_code_that_is_kept_keeps_neither_the_model_nor_the_batch_that_it_was_compiled_for(how: str) -> None:
    torch._dynamo.reset()  # otherwise the code may have been compiled for another test's model
    model, batches = make(), [torch.randn(8, 32, requires_grad=True) for _ in range(2)]
    options_of: dict[str, dict[str, Any]] = {
        "lowered by Inductor": {"lowering": "inductor"},
        "by a schedule": {"recipe": Schedule({0: None, 1: "delayed"})},
    }
    run = compiled(model, **options_of.get(how, {}))
    for x in batches:
        y = run(x)
        if how.startswith("after") and x is batches[1]:
            y.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                y.sum().backward()
        else:
            y.sum().backward()
    kept = [weakref.ref(x) for x in (*model.parameters(), *batches)]
    del model, batches, run, x, y
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert all(s.alive() for s in registry.states())


def fail(_: Tensor) -> None:
    raise ZeroDivisionError
