"""Test that `fp8pass.bisect` finds planted faults where they were planted."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.compiler import order
from fp8pass.graph.pass_base import DynamoContext, JointContext
from fp8pass.inspect import cli, demo
from fp8pass.inspect.bisector import Bisection, _smallest, all_finite
from fp8pass.inspect.snapshot import Snapshot
from fp8pass.options.overrides import Unit, current, units_of
from fp8pass.recipes import DelayedScaling
from fp8pass.states.slots import registry
from tests.helpers.harness import aten, compiled
from tests.helpers.models import make


class Tied(nn.Module):
    """One layer, called twice on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(torch.tanh(self.fc(x)) * self.factor) / self.factor
        return y


class Once(Tied):
    """One layer, called once, so that there is little to compile."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x * self.factor) / self.factor
        return y


def outputs(model: nn.Module, run: Callable[..., Tensor], since: int = 2, large: float = 1e6) -> Tensor:
    """Return the outputs of four training steps; from step `since` on the factor is `large`."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(4):
        model.factor.fill_(large if i >= since else 1.0)
        y = run(torch.randn(16, 32, generator=generator))
        y.square().mean().backward()
        found.append(y.detach())
    return torch.stack(found)


def faulty(kind: Callable[[], nn.Module], lowering: str = "eager", max_runs: int = 100, **config: Any) -> Bisection:
    """Bisect the training of a model, which each run makes anew and compares with high precision."""

    def step() -> Tensor:
        model = make(kind)
        return outputs(model, compiled(model, lowering=lowering, **config))

    model = make(kind)
    wanted = outputs(model, model)
    return fp8pass.bisect(step, lambda y: float((y - wanted).abs().max()) < 0.1, max_runs=max_runs)


def for_cli() -> Tensor:
    model = make(Once)
    return outputs(model, compiled(model))


def never(y: Tensor) -> bool:
    return False


class Planted(nn.Module):
    """Three layers, of which a check says what is wrong with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Broken(Tied):
    """A layer in two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc(x))
        torch._dynamo.graph_break()
        y: Tensor = self.fc(x * self.factor) / self.factor
        return y


class Checkpointed(Tied):
    """A layer, and the same layer again in a region of activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc(x))
        y: Tensor = checkpoint(lambda x: self.fc(x * self.factor) / self.factor, x, use_reentrant=False)
        return y


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"{Path(inspect.getfile(function)).name}:{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.compiled
@pytest.mark.variant
@pytest.mark.parametrize(("layers", "matmuls"), [(1, 15), (2, 27)])
def test_a_divergence_of_the_demo(
    layers: int, matmuls: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One layer's activations grow a million times larger at step 50; the run is bisected from step 48.

    Every day, `test_one_of_two_calls_of_a_layer` bisects small models, and the state after a bisection is tested by
    `test_everything_is_as_it_was`.
    """
    for name, size in (("WIDTH", 32), ("LAYERS", layers), ("HEADS", 2), ("CONTEXT", 16), ("BATCH", 2)):
        monkeypatch.setattr(demo, name, size)
    torch.manual_seed(0)
    model, factor = demo.GPT(), torch.ones(())
    model.blocks[-1].down.register_forward_pre_hook(lambda _, args: (args[0] * factor,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    runs = {"fp8": compiled(model), "high precision": model}
    tokens = torch.randint(256, (2, 17))

    def step(first: int = 48, last: int = 51) -> list[float]:
        losses = []
        for i in range(first, last):
            factor.fill_(1e6 if i >= 50 else 1.0)
            loss = demo.loss_of(runs[kind], tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    kind = "fp8"
    step(0, 48)
    before, moments = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    kind = "high precision"
    wanted = step()
    model.load_state_dict(before)
    optimizer.load_state_dict(moments)
    kind = "fp8"
    with caplog.at_level(logging.INFO, "fp8pass.bisect"):
        found = fp8pass.bisect(step, lambda losses: max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 0.03)
    assert (found.verdict, found.matmuls, found.cured, found.repeated) == ("numbers", matmuls, True, True)
    ((culprit,),) = found.culprits
    name = f"blocks.{layers - 1}.down"
    assert (culprit.name, culprit.kind, culprit.scaling) == (name, "output", "delayed")
    assert culprit.source == f"demo.py:{inspect.getsourcelines(demo.Block.forward)[1] + 7}"
    assert (culprit.operands, culprit.better) == (["input"], {"input": "dynamic"})
    assert found.filter == [name] and found.remedy == {name: "dynamic"}
    assert len(found.runs) <= 18  # 3 to see what it is, 2 * log2(27) to find it, 6 to say what to do
    said = [r.message for r in caplog.records if r.name == "fp8pass.bisect"]
    assert said[:-1] == list(map(str, found.runs))
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items()), "bisect restores the weights"
    assert f"recipe={{'{name}': 'dynamic', '*': ...}}" in str(found)


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Tied, Broken, Checkpointed])
def test_one_of_two_calls_of_a_layer(kind: type[Tied], caplog: pytest.LogCaptureFixture) -> None:
    """The calls are on one line, in two graphs, or in a region: each of them is found by itself."""
    with caplog.at_level(logging.INFO, "fp8pass.bisect"):
        found = faulty(kind)
    ((culprit,),) = found.culprits
    assert (culprit.name, culprit.kind, culprit.operands) == ("fc", "output", ["input"])
    assert (culprit.source, culprit.unit.ordinal) == (line_of(kind, "self.factor) / self.factor"), int(kind is Tied))
    assert found.matmuls == 5 and found.repeated  # the first one has no grad_input
    assert (found.verdict, culprit.scaling, culprit.better) == ("numbers", "delayed", {"input": "dynamic"})
    assert found.cured and found.filter == ["fc"] and found.remedy == {"fc": "dynamic"}
    assert "recipe={'fc': 'dynamic', '*': ...}" in str(found)
    assert len(found.runs) <= 14  # 3 to see what it is, 2 * log2(5) to find it, 6 to say what to do
    said = [r.message for r in caplog.records if r.name == "fp8pass.bisect"]
    assert said[:-1] == list(map(str, found.runs))


@pytest.mark.compiled
def test_calls_of_a_layer_in_one_line_are_counted() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = '  File "model.py", line 3, in forward\n    self.fc(self.fc(self.fc(x)))'
    calls: Counter[Any] = Counter()
    assert [units_of(node, "fc", calls)["output"].ordinal for _ in range(3)] == [0, 1, 2]
    assert units_of(node, "other", calls)["output"].ordinal == 0


def step_of(model: nn.Module) -> Callable[[], set[tuple[str, str]]]:
    """Return a step that returns which matmuls run in FP8. One forward shows this of all matmuls of a layer."""
    run = compiled(model)

    def step() -> set[tuple[str, str]]:
        run(torch.randn(16, 32))
        trial = current()
        assert trial is not None
        return {(u.name, u.kind) for u in trial.seen if trial.has(u)}

    return step


def judged(bad: Callable[[set[tuple[str, str]]], bool]) -> Bisection:
    """Bisect by a check that knows which matmuls ran in FP8."""
    return fp8pass.bisect(step_of(make(Planted)), lambda in_fp8: not bad(in_fp8))


@pytest.mark.compiled
def test_two_that_only_fail_together() -> None:
    a, b = ("layers.0", "grad_weight"), ("layers.2", "output")
    found = judged(lambda in_fp8: {a, b} <= in_fp8)
    assert [{(c.name, c.kind) for c in together} for together in found.culprits] == [{a, b}]
    assert found.filter == ["layers.0", "layers.2"] and found.cured
    assert "the cause, only together:" in str(found)


@pytest.mark.compiled
def test_two_that_each_fail() -> None:
    a, b = ("layers.0", "grad_weight"), ("layers.2", "output")
    found = judged(lambda in_fp8: bool({a, b} & in_fp8))
    assert [[(c.name, c.kind) for c in together] for together in found.culprits] == [[a], [b]]
    assert found.filter == ["layers.0", "layers.2"] and found.cured


@pytest.mark.compiled
def test_no_more_runs_than_allowed() -> None:
    with pytest.raises(ValueError, match="max_runs=2: the first two runs only show"):
        fp8pass.bisect(lambda: None, max_runs=2)
    model = make(Once)
    found = fp8pass.bisect(lambda: outputs(model, compiled(model)), lambda y: False, max_runs=3)
    assert found.verdict == "not fp8" and len(found.runs) == 2


class Doubles:
    """A wrong pass, which doubles the output of each layer."""

    name = "doubles"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        nodes = [n for n in graph.nodes if n.target is aten._scaled_mm.default]
        for node in nodes:
            with graph.inserting_after(node):
                twice = graph.call_function(aten.mul.Scalar, (node, 2.0))
            twice.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)
        return len(nodes)


@pytest.mark.compiled
def test_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = list(order.JOINT)
    ours.insert([p.name for p in ours].index("use_transposes"), Doubles())
    monkeypatch.setattr(order, "JOINT", tuple(ours))
    found = faulty(Once, recipe="dynamic")
    assert (found.verdict, found.pass_name) == ("pass", "doubles")
    assert "The pass doubles is the cause, not FP8 precision" in str(found)
    assert "Please report that the pass doubles is wrong" in str(found)
    assert not found.notes, "the step passes without that pass"
    assert found.culprits and not found.culprits[0][0].operands, "no operand is the cause"


class WritesWrongMatmuls:
    """A wrong pass on Dynamo's graph, which doubles the output of each layer."""

    name = "write_matmuls"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        calls = [n for n in graph.nodes if n.target is torch._C._nn.linear]
        for node in calls:
            with graph.inserting_after(node):
                twice = graph.call_function(torch.mul, (node, 2.0))
            twice.meta = dict(node.meta)
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)
        return len(calls)


@pytest.mark.compiled
def test_a_pass_on_dynamos_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The annotated graph has the pass's wrong numbers, so that the step fails, too, when it runs eagerly."""
    ours = tuple(WritesWrongMatmuls() if p.name == "write_matmuls" else p for p in order.DYNAMO)
    monkeypatch.setattr(order, "DYNAMO", ours)
    found = faulty(Once, recipe="dynamic")
    assert (found.verdict, found.pass_name, found.culprits) == ("pass", "write_matmuls", [])
    assert "Please report that the pass write_matmuls is wrong" in str(found)


@pytest.mark.compiled
def test_not_fp8() -> None:
    model = make(Once)
    found = fp8pass.bisect(lambda: outputs(model, compiled(model)) / 0)
    assert (found.verdict, found.culprits, len(found.runs)) == ("not fp8", [], 2)
    assert str(found).startswith("The check fails without fp8pass too: FP8 is not the cause.")


@pytest.mark.compiled
def test_nothing_to_find() -> None:
    model = make(Once)
    found = fp8pass.bisect(lambda: outputs(model, compiled(model)))
    assert (found.verdict, len(found.runs)) == ("passes", 1)
    with pytest.raises(fp8pass.Fp8Error, match="bisect: the step compiled nothing with fp8pass"):
        fp8pass.bisect(lambda: outputs(model, model))


@pytest.mark.compiled
def test_a_step_that_raises() -> None:
    """As configured, the step raises one exception; another one in a later run decides nothing."""
    matmuls_in_fp8 = step_of(make(Planted))

    def step() -> None:
        in_fp8, trial = matmuls_in_fp8(), current()
        assert trial is not None
        if trial.way == "reference" or len(in_fp8) == 4:
            raise KeyError("something else")
        if ("layers.2", "output") in in_fp8:
            raise FloatingPointError("loss is NaN")

    found = fp8pass.bisect(step)
    assert (
        found.verdict == "unclear"
        and "Could not tell whether FP8 precision, a pass or Inductor is the cause" in str(found)
    )
    assert [(c.name, c.kind) for c in found.culprits[0]] == [("layers.2", "output")]
    assert {r.outcome for r in found.runs if "KeyError" in r.detail} == {"unclear"}
    assert found.runs[0].detail == "FloatingPointError: loss is NaN"


@pytest.mark.compiled
def test_a_check_that_raises() -> None:
    model = make(Once)
    with pytest.raises(TypeError, match="of the check"):
        fp8pass.bisect(lambda: outputs(model, compiled(model)), lambda y: raises(TypeError("of the check")))
    assert current() is None


def raises(error: Exception) -> bool:
    raise error


@pytest.mark.compiled
def test_everything_is_as_it_was() -> None:
    """Each run begins from the same state of all that the step changes, and the training goes on from it afterwards."""
    model = make(Once)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    generator = torch.Generator().manual_seed(3)
    model.calls = 0
    options: dict[str, Any] = {"recipe": DelayedScaling(amax_history_len=4), "lowering": "eager", "monitor": True}
    train = fp8pass.train_step(**options)(one_step(model, optimizer))
    seen = []

    def step() -> float:
        model.calls += 1
        seen.append((model.calls, random.random(), torch.rand(()).item(), optimizer.param_groups[0]["lr"]))
        losses = [float(train(torch.randn(16, 32, generator=generator))) for _ in range(2)]
        scheduler.step()
        return losses[-1]

    for _ in range(2):
        step()
    before = snapshot(model, optimizer, scheduler, generator)
    found = fp8pass.bisect(step, lambda loss: False, max_runs=3)
    assert found.verdict == "not fp8"
    assert len(set(seen[2:])) == 1, "all runs began alike"
    assert snapshot(model, optimizer, scheduler, generator) == before


@pytest.mark.compiled
def test_no_state_is_left_of_a_model_that_was_restored() -> None:
    """Python reuses ids: a model made later would take over the scales of a state that counts as alive."""
    model, x = make(Once), torch.randn(16, 32)
    run = compiled(model)
    run(x).sum().backward()
    Snapshot([model]).restore()
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert all(None not in state.owned_tensors() for state in registry.states())


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def snapshot(model: nn.Module, optimizer: Any, scheduler: Any, generator: torch.Generator) -> str:
    torch.set_printoptions(precision=10, threshold=10**9)
    try:
        state = fp8pass.state(model).state_dict()
        saved = model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), state, model.calls
        monitored = fp8pass.stats(model).to_dicts()
        return repr((saved, generator.get_state(), torch.get_rng_state(), random.getstate(), monitored))
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.compiled
def test_moments() -> None:
    """The moments that an optimizer keeps in FP8 may be the cause, too."""
    model = make(lambda: nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    options: dict[str, Any] = {"optimizer_state": "fp8", "lowering": "eager", "min_speedup": 0}
    train = fp8pass.train_step(**options)(one_step(model, optimizer))

    def step() -> list[str]:
        train(torch.randn(16, 64))
        return [type(x).__name__ for of in optimizer.state.values() for x in of.values()]

    found = fp8pass.bisect(step, lambda kinds: "Fp8Moment" not in kinds)
    ((culprit,),) = found.culprits
    assert (culprit.kind, str(culprit), found.filter) == ("moments", "the optimizer's moments", [])
    assert "To go on: optimizer_state='off'." in str(found)


@pytest.mark.compiled
@pytest.mark.parametrize("culprits", [{3}, {0}, {99}, {3, 4}, {0, 50, 99}])
def test_how_many_runs(culprits: set[int]) -> None:
    """Each culprit takes about 2 log2(n) runs."""
    units, runs = [Unit("output", str(i)) for i in range(100)], []

    def fails(some: list[Unit]) -> bool:
        runs.append(some)
        return culprits <= {int(u.name) for u in some}

    assert {int(u.name) for u in _smallest(units, fails)} == culprits
    assert len(runs) <= 15 * len(culprits)


@pytest.mark.compiled
def test_errors_that_cancel_each_other() -> None:
    """Two matmuls together are fine, and each of them alone is not."""
    units = [Unit("output", str(i)) for i in range(8)]
    found = _smallest(units, lambda some: len({"2", "5"} & {u.name for u in some}) == 1 or len(some) == 8)
    assert [u.name for u in found] in (["2"], ["5"])


@pytest.mark.compiled
def test_all_finite() -> None:
    assert all_finite(None) and all_finite({"loss": [1.0, 2], "y": torch.zeros(2), "n": torch.tensor(3)})
    assert not all_finite([1.0, float("nan")]) and not all_finite((torch.tensor([1.0, float("inf")]),))
    assert not all_finite(torch.tensor(float("nan"), dtype=torch.float8_e4m3fn))


@pytest.mark.compiled
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bisect", "tests.inspect.test_bisector:for_cli"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("The check passes with everything in FP8") and "run 1" in err
    assert cli.main(["bisect", "tests.inspect.test_bisector:for_cli", "tests.inspect.test_bisector:never"]) == 1
    assert capsys.readouterr().out.startswith("The check fails without fp8pass too")
    assert cli.main(["bisect", f"{__name__}:nothing"]) == 2
    assert "can't be imported" in capsys.readouterr().err
    logging.getLogger("fp8pass.bisect").handlers.clear()


@pytest.mark.inductor
@pytest.mark.parametrize("max_runs", [3, pytest.param(100, marks=pytest.mark.variant)])
def test_compiled_by_inductor(max_runs: int) -> None:
    """Inductor compiles the first run. With more runs allowed, the last one repeats the culprit alone in Inductor."""
    found = faulty(Once, lowering="inductor", max_runs=max_runs)
    assert (found.verdict, found.repeated) == ("numbers", None if max_runs == 3 else True)
    assert [run.outcome for run in found.runs[:3]] == ["fails", "passes", "fails"]
