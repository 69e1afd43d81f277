"""Test what a step is: gradient accumulation, forwards that overlap, second backwards, activation checkpointing."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import CellType, FunctionType
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8pass
from fp8pass.recipes import DelayedScaling
from fp8pass.states.steps import CheckpointCall
from tests.helpers.harness import annotated, compiled, sqnr, verdicts
from tests.helpers.models import AcrossABreak, Attention, Block, Parts, Transformer, make

pytestmark = [pytest.mark.compiled, pytest.mark.shares_code]

RECIPE = DelayedScaling(amax_history_len=4)
HOWS = [pytest.param(annotated, id="annotated"), pytest.param(compiled, id="compiled")]
How = Callable[..., Callable[..., Any]]
LOWERINGS: dict[str, How] = {
    "annotated": annotated,
    "eager": compiled,
    "inductor": functools.partial(compiled, lowering="inductor"),
}


def scaled(amax: float, seed: int = 0) -> Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    return x * amax / x.abs().max()


def history(module: nn.Module, slot: str = "up.input") -> list[float]:
    values: list[float] = fp8pass.state(module).state_dict()[f"{slot}.amax_history"].tolist()
    return [round(value, 4) for value in values]


def running(module: nn.Module, slot: str) -> float:
    return float(fp8pass.state(module).state_dict()[f"{slot}.amax"])


class Plain(nn.Module):
    """A layer whose input is quantized as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


# Gradient accumulation


@pytest.mark.parametrize("how", HOWS)
def test_microbatches_merge_by_max_and_roll_once(how: How) -> None:
    model = make(Plain)
    run = how(model, recipe=RECIPE)
    for step in ([1.0, 5.0, 2.0], [0.5, 0.25], [3.0]):
        with fp8pass.accumulate(run):
            for amax in step:
                (run(scaled(amax)) * amax).sum().backward()
    assert history(model) == [0.5, 5.0, 0.0, 0.0]
    assert running(model, "up.input") == pytest.approx(3.0)
    assert history(model, "up.grad_output") == [0.5, 5.0, 0.0, 0.0]
    assert running(model, "up.grad_output") == 3.0
    assert fp8pass.state(model).steps == 3


@pytest.mark.parametrize("how", HOWS)
def test_all_microbatches_of_a_step_have_its_scales(how: How) -> None:
    model = make(Plain)
    run = how(model, recipe=RECIPE)
    for amax in (1.0, 1.0):
        run(scaled(amax)).sum().backward()
    with fp8pass.accumulate(model):
        first = run(scaled(1.0))
        run(scaled(100.0)).sum().backward()  # it saturates, for the scale is that of amax 1
        assert torch.equal(run(scaled(1.0)), first)
        scale = fp8pass.state(model).state_dict()["up.input.scale"]
    assert scale == 448.0
    run(scaled(1.0))
    assert fp8pass.state(model).state_dict()["up.input.scale"] == pytest.approx(4.48)


def test_without_accumulate_every_training_forward_is_a_step() -> None:
    model = make(Plain)
    run = compiled(model, recipe=RECIPE)
    for amax in (1.0, 2.0, 3.0):
        run(scaled(amax)).sum().backward()
    assert history(model) == [2.0, 1.0, 0.0, 0.0]


def test_accumulating_one_model_leaves_the_others_alone() -> None:
    model, other = make(Plain), make(Plain, seed=1)
    runs = compiled(model, recipe=RECIPE), compiled(other, recipe=RECIPE)
    with fp8pass.accumulate(model):
        for amax in (1.0, 2.0, 3.0):
            for run in runs:
                run(scaled(amax)).sum().backward()
    assert history(model) == [0.0] * 4
    assert history(other) == [2.0, 1.0, 0.0, 0.0]


def test_a_slot_in_two_graphs_rolls_once() -> None:
    """The graph of the whole and that of a part run in one step."""

    model = make(Parts)
    whole, half = compiled(model, recipe=RECIPE), compiled(model.part, recipe=RECIPE)
    for amax in (1.0, 7.0):
        with fp8pass.accumulate(model):
            for run in (whole, half, whole):
                run(scaled(amax)).sum().backward()
    assert history(model, "a.input") == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_a_first_step_of_many_microbatches_is_one_step(lowering: str, caplog: pytest.LogCaptureFixture) -> None:
    """It runs eagerly to its end, each tensor by its own amax; the next step is compiled, once."""
    model = make(Parts)
    run = compiled(model, recipe=RECIPE, lowering=lowering)
    for _ in range(2):
        with fp8pass.accumulate(model):
            for i in range(6):
                x = scaled(1.0, i)
                y = run(x)
                assert sqnr(model(x), y) > 25
                y.square().sum().backward()
    assert "compiling once more" not in caplog.text
    assert all(float(v) > 0 for k, v in fp8pass.state(model).state_dict().items() if k.endswith(".scale"))


def test_scale_states_accumulate_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s = fp8pass.ScaleState(amax_history_len=4)

        def forward(self, x: Tensor) -> Tensor:
            return fp8pass.in_qdq(x, self.s)

    model = Own()
    for amaxes in ([1.0, 4.0, 2.0], [3.0]):
        with fp8pass.accumulate(model):
            for amax in amaxes:
                model(scaled(amax).requires_grad_()).sum().backward()
    assert [round(h, 4) for h in model.s.amax_history.tolist()] == [4.0, 0.0, 0.0, 0.0]


def test_accumulations_within_one_another_are_the_outer_one() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.s = nn.Linear(32, 48, bias=False), fp8pass.ScaleState(amax_history_len=4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.up(fp8pass.qdq(x, 1.0, torch.float8_e4m3fn) * 0 + x)
            return y + fp8pass.in_qdq(x, self.s).sum()

    model = make(Own)
    run = compiled(model, recipe=RECIPE)
    with fp8pass.accumulate(model):
        for amax in (1.0, 5.0, 2.0):
            with fp8pass.accumulate(model):
                run(scaled(amax)).sum().backward()
    assert history(model) == [0.0] * 4
    assert model.s.amax_history.tolist() == [0.0] * 4
    for amax in (3.0, 4.0):
        run(scaled(amax)).sum().backward()
    assert history(model) == [3.0, 5.0, 0.0, 0.0]
    assert [round(h, 4) for h in model.s.amax_history.tolist()] == [3.0, 5.0, 0.0, 0.0]


def test_accumulating_a_part_holds_the_slots_of_that_part() -> None:
    model = nn.Sequential(make(Plain), nn.Linear(48, 32))
    run = compiled(model, recipe=RECIPE)
    with fp8pass.accumulate(model[0]):
        for amax in (1.0, 2.0, 3.0):
            run(scaled(amax)).sum().backward()
    assert history(model, "0.up.input") == [0.0] * 4
    assert sum(h > 0 for h in history(model, "1.input")) == 2
    assert fp8pass.state(model).steps == 3


def test_a_graph_break_in_an_accumulation_of_a_schedule() -> None:
    for accumulates in (False, True):
        model = make(AcrossABreak)
        run = annotated(model, recipe=fp8pass.recipes.Schedule({0: None, 2: RECIPE}))
        for _ in range(4):
            with fp8pass.accumulate(model) if accumulates else contextlib.nullcontext():
                run(scaled(1.0)).sum().backward()
        assert fp8pass.state(model).steps == 4
        assert "fc.input~1" in fp8pass.state(model).slots


def test_accumulate_takes_modules_only() -> None:
    with (
        pytest.raises(TypeError, match="takes a module or a compiled module, not function"),
        fp8pass.accumulate(lambda: 0),
    ):
        pass


# Overlapping forwards


SCHEDULES = ["FFBB", "FFB'B'", "FBFFBB"]
INTERLEAVED = [
    *(pytest.param(annotated, a, s, id=f"annotated-{a}-{s}") for a in (False, True) for s in SCHEDULES),
    *(pytest.param(compiled, s != "FFBB", s, id=f"compiled-{s}") for s in SCHEDULES),
]


@pytest.mark.parametrize(("how", "accumulates", "schedule"), INTERLEAVED)
def test_interleaved_forwards(how: How, accumulates: bool, schedule: str) -> None:
    """Every backward uses the scales of its own forward: gradients are as if forwards and backwards took turns."""

    def run_all(order: str) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = make()
        run = how(model, recipe=RECIPE)
        for _ in range(2):
            run(scaled(2.0)).square().sum().backward()
        model.zero_grad()
        grads, waiting = [], []
        context = fp8pass.accumulate(model) if accumulates else contextlib.nullcontext()
        with context:
            for i, what in enumerate(order.replace("'", "")):
                if what == "F":
                    x = scaled(1.0 + 3 * i, i).requires_grad_()
                    waiting.append((x, run(x).square().sum()))
                else:
                    x, loss = waiting.pop(-1 if "'" in order else 0)
                    loss.backward()
                    grads.append(x.grad)
        return [g for g in grads if g is not None], fp8pass.state(model).state_dict()

    grads, state = run_all(schedule)
    assert len(grads) == schedule.count("B")
    assert all(g.isfinite().all() for g in grads)
    if accumulates:  # one step: the order of its parts makes no difference
        again, other = run_all(schedule.replace("'", "").replace("FBFFBB", "FFFBBB"))
        del again
        assert history_of(state).keys() == history_of(other).keys()
    for key, value in state.items():
        if key.endswith(".amax") and "grad_output" in key:
            assert value > 0, key


def history_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if k.endswith("amax_history")}


@pytest.mark.parametrize("how", HOWS)
def test_backwards_in_another_order_record_the_same(how: How) -> None:
    """Gradients are as large as the microbatch; the running amax is the larger one, whichever came last."""
    for order in ((0, 1), (1, 0)):
        model = make(Plain)
        run = how(model, recipe=RECIPE)
        run(scaled(1.0)).sum().backward()
        with fp8pass.accumulate(model):
            losses = [(run(scaled(1.0)) * factor).sum() for factor in (5.0, 2.0)]
            for i in order:
                losses[i].backward()
        assert running(model, "up.grad_output") == 5.0


# A second backward


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_retain_graph(lowering: str) -> None:
    """Gradients are the same again, and the state is as after one backward."""
    with torch._functorch.config.patch(donated_buffer=False):  # torch's own condition for a second backward
        model = make()
        run = compiled(model, recipe=RECIPE, lowering=lowering)
        for _ in range(3):
            model.zero_grad()
            loss = run(scaled(2.0)).square().sum()
            loss.backward(retain_graph=True)
            once = {n: p.grad.clone() for n, p in model.named_parameters()}
            state = fp8pass.state(model).state_dict()
            model.zero_grad()
            loss.backward()
            assert all(torch.equal(once[n], p.grad) for n, p in model.named_parameters())
            after = fp8pass.state(model).state_dict()
            assert all(torch.equal(state[k], after[k]) for k in state)


# Activation checkpointing around compiled code


def run_steps(
    region: Callable[..., Tensor], module: nn.Module, steps: int = 4
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train some steps with different amaxes; return outputs and gradients, and the state after the last step."""
    found = []
    for i in range(steps):
        module.zero_grad()
        x = scaled([1.0, 4.0, 0.5, 2.0][i % 4], i).requires_grad_()
        y = region(x)
        y.square().sum().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
    return found, fp8pass.state(module).state_dict()


def same(a: tuple[list[Tensor], dict[str, Tensor]], b: tuple[list[Tensor], dict[str, Tensor]]) -> bool:
    states = all(torch.equal(v, b[1][k]) for k, v in a[1].items() if k != "steps")
    return states and all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


AROUND = [
    *((how, reentrant) for how in LOWERINGS if how != "inductor" for reentrant in (False, True)),
    pytest.param("inductor", True, marks=pytest.mark.variant),  # without reentrant: test_a_checkpointed_compiled_module
]


@pytest.mark.parametrize(("how", "reentrant"), AROUND)
def test_a_checkpoint_around_a_compiled_module_changes_nothing(how: str, reentrant: bool) -> None:
    model, twin = (make(Parts if how == "inductor" else Block) for _ in range(2))
    run, plain = (LOWERINGS[how](m, recipe=RECIPE) for m in (model, twin))
    region = functools.partial(checkpoint, run, use_reentrant=reentrant)
    checkpointed, straight = run_steps(region, model), run_steps(plain, twin)
    assert fp8pass.state(model).steps == fp8pass.state(twin).steps == 4
    if how == "annotated" or (how == "eager" and not reentrant):
        assert same(checkpointed, straight)
    else:  # evaluation and training are two compilations, which round differently
        assert all(sqnr(b, a) > 30 for a, b in zip(checkpointed[0], straight[0], strict=True))


def test_a_reentrant_checkpoint_around_a_compiled_module_resumes() -> None:
    """After a load, a forward without gradients comes first, by a graph that does not train, and it begins a step."""
    model, resumed = make(seed=1), make(seed=1)
    regions = {
        m: functools.partial(checkpoint, compiled(m, recipe=RECIPE), use_reentrant=True) for m in (model, resumed)
    }
    run_steps(regions[model], model)
    fp8pass.state(resumed).load_state_dict(fp8pass.state(model).state_dict())
    resumed.load_state_dict(model.state_dict())
    assert same(run_steps(regions[model], model), run_steps(regions[resumed], resumed))


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_compiled_modules_inside_an_eager_region(reentrant: bool) -> None:
    """After an eager op inputs are not recognized by identity. Calls of one module are told apart by their order.

    Several calls in a reentrant region are no steps: what the first records is known when the backward repeats it.
    """

    def build() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        a, b = make(Block, seed=0), make(Block, seed=1)
        run_a, run_b = annotated(a, recipe=RECIPE), annotated(b, recipe=RECIPE)
        if reentrant:
            return nn.ModuleList([a, b]), lambda x: run_b(run_a(x * 2) + 1)
        return nn.ModuleList([a, b]), lambda x: run_a(run_b(run_a(x * 2)) + 1)

    (model, f), (twin, g) = build(), build()
    region = functools.partial(checkpoint, f, use_reentrant=reentrant)
    assert same(run_steps(region, model), run_steps(g, twin))


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("backwards", [(0, 1, 2), (2, 1, 0)])
def test_checkpoints_of_several_forwards_under_way(reentrant: bool, backwards: tuple[int, ...]) -> None:
    """A pipeline has several: each repetition uses the scales of its own forward, whatever was recorded since."""

    def steps(wrap: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = make()
        run = annotated(model, recipe=RECIPE)
        region = functools.partial(checkpoint, run, use_reentrant=reentrant) if wrap else run
        for _ in range(2):
            region(scaled(1.0).requires_grad_()).square().sum().backward()
        model.zero_grad()
        xs = [scaled(amax, i).requires_grad_() for i, amax in enumerate((1.0, 40.0, 3.0))]
        losses = [region(x).square().sum() for x in xs]
        for i in backwards:
            losses[i].backward()
        return [x.grad for x in xs if x.grad is not None], fp8pass.state(model).state_dict()

    (grads, state), (expected, other) = steps(True), steps(False)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    if not reentrant:
        assert all(torch.equal(v, other[k]) for k, v in state.items())


def test_a_repetition_in_accumulation() -> None:
    def steps(wrap: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = make()
        run = compiled(model, recipe=RECIPE)
        region = functools.partial(checkpoint, run, use_reentrant=False) if wrap else run
        for _ in range(3):
            with fp8pass.accumulate(model):
                for i in range(3):
                    region(scaled(1.0 + i, i)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], fp8pass.state(model).state_dict()

    assert same(steps(True), steps(False))


def test_a_second_backward_through_a_checkpoint() -> None:
    with torch._functorch.config.patch(donated_buffer=False):
        model = make()
        run = compiled(model, recipe=RECIPE)
        run(scaled(1.0)).square().sum().backward()
        model.zero_grad()
        loss = checkpoint(run, scaled(3.0), use_reentrant=False).square().sum()
        loss.backward(retain_graph=True)
        once, state = [p.grad.clone() for p in model.parameters()], fp8pass.state(model).state_dict()
        model.zero_grad()
        loss.backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(once, model.parameters(), strict=True))
        after = fp8pass.state(model).state_dict()
        assert all(torch.equal(state[k], after[k]) for k in state)


# Activation checkpointing inside compiled code


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in matmuls else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_matmuls)
REGIONS: dict[str, dict[str, Any]] = {
    "hooks": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}


LARGE = Attention, Block
LINEAR = functools.partial(nn.Linear, 32, 32)


class Layers(nn.Module):
    """Two parts, each in its own region, or one region around the other."""

    def __init__(
        self, how: dict[str, Any] | None, nested: bool = False, parts: Sequence[Callable[[], nn.Module]] = LARGE
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (part() for part in parts)
        self.how, self.nested = how, nested

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(4, 4, 32)
        if self.nested:
            x = self._region(lambda y: self.second(self._region(self.first, y)), x)
        else:
            x = self._region(self.second, self._region(self.first, x) * 2)
        return x + 1

    def _region(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return f(x) if self.how is None else checkpoint(f, x, **self.how)


# Inductor gets the same graphs for both kinds of plain regions; nesting is resolved in an earlier graph, forward and
# backward are divided before, too. So only variants run Inductor, on cases that run op by op every day.
INSIDE = [
    pytest.param("annotated", False, LARGE, ["hooks", "reentrant", "selective"], id="annotated-two"),
    pytest.param("annotated", True, LARGE, ["hooks", "reentrant", "selective"], id="annotated-nested"),
    pytest.param("eager", False, (LINEAR, LINEAR), ["reentrant"], id="eager-two"),
    pytest.param("eager", True, (LINEAR, nn.Tanh), ["hooks", "selective"], id="eager-nested"),
    pytest.param("eager", False, LARGE, ["reentrant"], id="eager-two-large", marks=pytest.mark.variant),
    pytest.param("eager", True, LARGE, ["hooks", "selective"], id="eager-nested-large", marks=pytest.mark.variant),
    pytest.param("inductor", True, (LINEAR, LINEAR), ["selective"], id="inductor-nested", marks=pytest.mark.variant),
    pytest.param("inductor", True, (LINEAR, LINEAR), ["hooks"], id="inductor-nested-hooks", marks=pytest.mark.variant),
]


@pytest.mark.parametrize(("lowering", "nested", "parts", "regions"), INSIDE)
def test_a_checkpoint_inside_a_compiled_model_changes_nothing(
    lowering: str, nested: bool, parts: Sequence[Callable[[], nn.Module]], regions: list[str]
) -> None:
    twin = Layers(None, nested, parts)
    straight = run_steps(LOWERINGS[lowering](twin, recipe=RECIPE), twin)
    for how in regions:
        model = Layers(REGIONS[how], nested, parts)
        with verdicts() as report:
            checkpointed = run_steps(LOWERINGS[lowering](model, recipe=RECIPE), model)
        assert {g.reason for g in report.declined} <= {""}
        if lowering == "inductor":
            assert all(sqnr(b, a) > 60 for a, b in zip(checkpointed[0], straight[0], strict=True)), how
        else:
            assert same(checkpointed, straight), how


MATRIX, SEQUENCES = (16, 32), (2, 8, 32)
MATMULS = {"": 2, "selective": 2, "hooks": 3, "reentrant": 3}
"""The number of matmuls of the backward, by the kind of region that is around the forward."""
RECOMPUTED = [
    *(
        (None, SEQUENCES, MATMULS),
        ("dynamic", MATRIX, ("", "reentrant")),
        ("rowwise", SEQUENCES, ("selective", "hooks")),
    ),
    *(
        pytest.param(*of, MATMULS, marks=pytest.mark.variant)
        for of in (
            (None, MATRIX),
            ("dynamic", MATRIX),
            ("dynamic", SEQUENCES),
            ("rowwise", SEQUENCES),
            ("rowwise", MATRIX),
        )
    ),
]


class Calls(TorchDispatchMode):
    """Count the ops that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func] += not any(isinstance(a, FakeTensor) for a in args)  # passes look at shapes by fake tensors
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("recipe", "shape", "hows"), RECOMPUTED)
def test_a_region_is_recomputed(recipe: str | None, shape: tuple[int, ...], hows: Iterable[str]) -> None:
    """A region's matmuls are recomputed, as without a recipe; a policy that saves matmuls saves FP8 matmuls, too."""

    class CheckpointCall(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.inner, self.how = LINEAR(), how

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.inner, x, **REGIONS[self.how]) if self.how else self.inner(x)
            return y.sin()

    def matmuls_of_the_backward(how: str) -> int:
        run = compiled(CheckpointCall(how), recipe=recipe)
        y = run(scaled(1.0).view(shape).requires_grad_()).sum()
        with Calls() as calls:
            y.backward()
        kinds = torch.ops.aten._scaled_mm.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default
        return sum(calls.of[kind] for kind in kinds)  # some CPUs emulate FP8 matmuls

    for how in hows:
        assert matmuls_of_the_backward(how) == MATMULS[how], how


def test_slots_in_a_region_are_named_as_outside() -> None:
    names = []
    for how in (None, REGIONS["hooks"]):
        model = Layers(how)
        annotated(model, recipe=RECIPE)(scaled(1.0)).sum().backward()
        names.append(fp8pass.state(model).slots)
    assert names[0] == names[1]


def test_a_wrapped_module_has_the_names_of_what_is_wrapped() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(make(Plain)), nn.Linear(48, 32))
    annotated(model, recipe=RECIPE)(scaled(1.0)).sum().backward()
    assert fp8pass.state(model).slots == [f"{n}.{r}" for n in ("0.up", "1") for r in ("grad_output", "input", "weight")]


# Schedules


@pytest.mark.parametrize("how", [HOWS[0], pytest.param(compiled, id="compiled", marks=pytest.mark.variant)])
def test_a_schedule_switches_and_keeps_the_state(how: How) -> None:
    """`test_a_schedule_goes_on_where_it_was_saved` compiles a schedule every day."""
    schedule = fp8pass.recipes.Schedule({0: None, 2: RECIPE, 4: None, 5: {"b": None, "*": RECIPE}})
    model = make(Parts)
    run = how(model, recipe=schedule)
    used, states = [], []
    for i in range(7):
        model.zero_grad()
        x = scaled(1.0 + i, i)
        y = run(x)
        used.append(sqnr(model(x), y) < 60)
        y.square().sum().backward()
        states.append(fp8pass.state(model).state_dict())
        with torch.no_grad():  # evaluation uses the recipe of the step before it
            assert (sqnr(model(x), run(x)) < 60) == used[-1]
    assert used == [False, False, True, True, False, True, True]
    assert [int(s["steps"]) for s in states] == [1, 2, 3, 4, 5, 6, 7]
    slots = [{k for k in s if k.endswith(".scale")} for s in states]
    assert slots[0] == slots[1] == set()
    assert len(slots[2]) == 6
    for key in (k for k in states[3] if k not in ("steps", "recipe", "target")):
        assert torch.equal(states[3][key], states[4][key]), key  # unchanged while not used
    assert torch.equal(states[6]["b.input.amax_history"], states[4]["b.input.amax_history"])
    assert states[6]["a.input.amax_history"].count_nonzero() == 3


def test_a_schedule_goes_on_where_it_was_saved() -> None:
    schedule = fp8pass.recipes.Schedule({0: None, 3: "dynamic"})
    model, resumed = make(Plain), make(Plain)
    run = compiled(model, recipe=schedule)
    for i in range(2):
        run(scaled(1.0, i)).square().sum().backward()
    fp8pass.state(resumed).load_state_dict(fp8pass.state(model).state_dict())
    again = compiled(resumed, recipe=schedule)
    used = []
    for i in range(3):
        x = scaled(1.0, i)
        y = again(x)
        used.append(sqnr(resumed(x), y) < 60)
    assert used == [False, True, True]
    assert fp8pass.state(resumed).steps == 5


def test_a_step_of_a_schedule_may_have_microbatches() -> None:
    schedule = fp8pass.recipes.Schedule({0: None, 1: "dynamic"})
    model = make(Plain)
    run = compiled(model, recipe=schedule)
    used = []
    for _ in range(2):
        with fp8pass.accumulate(model):
            for i in range(3):
                x = scaled(1.0, i)
                y = run(x)
                used.append(sqnr(model(x), y) < 60)
                y.sum().backward()
    assert used == [False] * 3 + [True] * 3


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_a_schedule_and_checkpoints(reentrant: bool) -> None:
    schedule = fp8pass.recipes.Schedule({0: None, 2: RECIPE})
    model, twin = make(), make()
    run, plain = annotated(model, recipe=schedule), annotated(twin, recipe=schedule)
    region = functools.partial(checkpoint, run, use_reentrant=reentrant)
    assert same(run_steps(region, model), run_steps(plain, twin))
    assert fp8pass.state(model).steps == fp8pass.state(twin).steps == 4


def test_the_whole_transformer_under_accumulation_and_checkpoints() -> None:
    def steps(wrap: bool) -> list[Tensor]:
        model = make(Transformer)
        for layer in model.layers:
            layer.compile(backend="fp8pass", options={"lowering": "eager", "recipe": RECIPE})
        for step in range(3):
            model.zero_grad()
            with fp8pass.accumulate(model):
                for i in range(2):
                    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(10 * step + i)).requires_grad_()
                    y = x
                    for layer in model.layers:
                        y = checkpoint(layer, y, use_reentrant=False) if wrap else layer(y)
                    y.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(steps(True), steps(False), strict=True))


# Calls inside a region besides its forward; first steps, hooks, and several recipes


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_evaluating_a_region_changes_nothing(reentrant: bool) -> None:
    for recipe in (RECIPE, fp8pass.recipes.Schedule({0: RECIPE})):
        model = make(Plain)
        run = compiled(model, recipe=recipe)
        for _ in range(2):
            run(scaled(1.0)).sum().backward()
        before = fp8pass.state(model).state_dict()
        with torch.no_grad():
            for _ in range(2):
                checkpoint(run, scaled(9.0).requires_grad_(), use_reentrant=reentrant)
        after = fp8pass.state(model).state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_call_without_gradients_in_a_region_is_evaluation() -> None:
    model = make(Plain)
    run = compiled(model, recipe=RECIPE)

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = run(x * 100).abs().amax() * 0
        out: Tensor = run(x) + scale
        return out

    for amax in (1.0, 2.0, 3.0):
        checkpoint(region, scaled(amax), use_reentrant=False).square().sum().backward()
    assert history(model) == [2.0, 1.0, 0.0, 0.0]
    assert fp8pass.state(model).steps == 3


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(False, True), (True, False), *(pytest.param(of, of, marks=pytest.mark.variant) for of in (False, True))],
    ids=lambda reentrant: "reentrant" if reentrant else "hooks",
)
def test_a_region_within_a_region(outer: bool, inner: bool) -> None:
    def steps(wrap: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        a, b = make(Block, seed=0), make(Block, seed=1)
        run_a, run_b = annotated(a, recipe=RECIPE), annotated(b, recipe=RECIPE)
        if not wrap:
            return run_steps(lambda x: run_b(run_a(x)), nn.ModuleList([a, b]))

        def region(x: Tensor) -> Tensor:
            y: Tensor = run_b(checkpoint(run_a, x, use_reentrant=inner))
            return y

        return run_steps(functools.partial(checkpoint, region, use_reentrant=outer), nn.ModuleList([a, b]))

    assert same(steps(True), steps(False))


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_a_reentrant_repetition_draws_the_same_random_numbers(lowering: str) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5))
    run, outputs = compiled(model, recipe=RECIPE, lowering=lowering), []

    def region(x: Tensor) -> Tensor:
        outputs.append(run(x))
        return outputs[-1]

    for i in range(3):
        outputs.clear()
        checkpoint(region, scaled(1.0, i).requires_grad_(), use_reentrant=True).sum().backward()
        assert sqnr(outputs[0], outputs[1]) > 40


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_the_very_first_step_in_microbatches_and_regions(reentrant: bool) -> None:
    model = make(Plain)
    run = annotated(model, recipe=RECIPE)
    with fp8pass.accumulate(model):
        for amax in (1.0, 2.0, 3.0):
            checkpoint(run, scaled(amax).requires_grad_(), use_reentrant=reentrant).sum().backward()
    state = fp8pass.state(model)
    for slot in ("up.input", "up.grad_output"):
        assert history(model, slot) == [0.0] * 4
    assert running(model, "up.input") == pytest.approx(3.0)
    assert state.steps == 1


def test_hooks_of_any_kind() -> None:
    model = make()
    run = compiled(model, recipe=RECIPE)

    captured = torch.ones(())
    of_cell = lambda x: x * captured  # noqa: E731
    empty = FunctionType(of_cell.__code__, {"__builtins__": {}}, closure=(CellType(),))
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(empty, lambda x: x), hooks(lambda x: x, lambda x: x):
        run(scaled(1.0)).square().sum().backward()
    with hooks(empty, lambda x: x), pytest.raises(NameError, match="captured"):  # torch's own call of it, not ours
        run(scaled(1.0))
    for pack in (functools.partial(torch.clone, memory_format=torch.preserve_format), torch.clone):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run(scaled(1.0)).square().sum().backward()


def test_static_and_delayed_in_a_region() -> None:
    model = make()
    scales = fp8pass.calibrate(model, [scaled(1.0)])
    recipe = {"up": fp8pass.recipes.StaticScaling(scales), "down": RECIPE}
    twin = make()
    run, plain = annotated(model, recipe=recipe), annotated(twin, recipe=recipe)
    region = functools.partial(checkpoint, run, use_reentrant=False)
    assert same(run_steps(region, model), run_steps(plain, twin))


@pytest.mark.parametrize(
    ("how", "recipes"),
    [
        pytest.param(annotated, [None, RECIPE], id="annotated"),
        pytest.param(compiled, [RECIPE], id="compiled"),
        pytest.param(compiled, [None], id="compiled-alone", marks=pytest.mark.variant),
    ],
)
def test_scale_states_in_a_region(how: How, recipes: list[Any]) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 32))
            self.x, self.w, self.g = (fp8pass.ScaleState(amax_history_len=4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = fp8pass.in_qdq(x, self.x) @ fp8pass.in_qdq(self.weight, self.w).t()
            return fp8pass.out_qdq(y, self.g)

    for recipe in recipes:
        model, twin = make(Own), make(Own)
        run, plain = how(model, recipe=recipe), how(twin, recipe=recipe)
        region = functools.partial(checkpoint, run, use_reentrant=False)
        checkpointed, straight = run_steps(region, model), run_steps(plain, twin)
        assert all(torch.equal(a, b) for a, b in zip(checkpointed[0], straight[0], strict=True))
        for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(a, b), name


def test_a_schedule_switches_between_forwards_under_way() -> None:
    def steps(wrap: bool) -> list[Tensor]:
        model = make()
        run = annotated(model, recipe=fp8pass.recipes.Schedule({0: None, 1: RECIPE}))
        xs = [scaled(1.0 + i, i).requires_grad_() for i in range(3)]
        region = functools.partial(checkpoint, run, use_reentrant=False) if wrap else run
        losses = [region(x).square().sum() for x in xs]
        for loss in losses:
            loss.backward()
        return [x.grad for x in xs if x.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(steps(True), steps(False), strict=True))


def test_every_backward_of_a_region_repeats_its_forwards_from_the_first_on() -> None:
    """With retain_graph=True there may be several."""
    region, x, found = CheckpointCall(), torch.ones(1, requires_grad=True), []
    for forward in ("first", "second"):
        region.remember("key", forward)
    y = x * 2
    y.register_hook(lambda _: found.append([region.next_forward("key") for _ in range(3)]))  # type: ignore[no-untyped-call]
    for _ in range(2):
        y.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert found == [["first", "second", None]] * 2
