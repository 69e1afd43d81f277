"""Test `fp8pass.enabled` and `fp8pass.autocast`: around calls of compiled code, and within it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.options.config import Config
from fp8pass.recipes import DelayedScaling, Schedule
from fp8pass.report.report import collect
from tests.helpers.harness import annotated, compiled, verdicts
from tests.helpers.models import Block, batches, make

pytestmark = pytest.mark.compiled

COUNTERS = torch._dynamo.utils.counters


def passed(model: nn.Module, run: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    """Run forward and backward; return the output and the gradients of the parameters."""
    model.zero_grad()
    y = run(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def close(a: list[Any], b: list[Any]) -> None:
    """Compare up to the last bit, in which graphs without gradients differ: they sum in another order."""
    for mine, expected in zip(a, b, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-8)


def state(model: nn.Module) -> list[Tensor]:
    return [x.clone() for _, x in sorted(fp8pass.state(model).state_dict().items()) if isinstance(x, Tensor)]


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_calls_in_high_precision_leave_no_trace(lowering: str) -> None:
    """They give what plain code gives, other calls give what they give without them, and Dynamo traces once."""
    model, other, plain = make(), make(), make()
    run, alone = compiled(model, lowering=lowering), compiled(other, lowering=lowering)
    high = compiled(plain, lowering=lowering, recipe=None)
    COUNTERS.clear()
    for i, x in enumerate(batches(6, 16, 32)):
        on = i not in (0, 3)  # also the first call, which compiles
        with fp8pass.enabled(on):
            found = passed(model, run, x)
        assert same(found, passed(*((other, alone) if on else (plain, high)), x)), i
    assert same(state(model), state(other)) and state(model)
    assert COUNTERS["stats"]["unique_graphs"] <= 2  # `plain` has other options; `model` and `other` share theirs


def test_each_setting_is_compiled_once() -> None:
    """A recipe that is given by another name for what is configured is not compiled again."""
    model = make()
    run, x = compiled(model), torch.randn(16, 32)
    reports = []
    for on, recipe in [(True, None), (False, None), (True, "rowwise"), (True, "delayed")] * 3:
        with collect() as report, fp8pass.autocast(on, recipe):
            passed(model, run, x)
        reports.append(len(report.gemms))
    assert [n > 0 for n in reports] == [True, True, True, *[False] * 9]


def test_contexts_nest_and_the_innermost_counts() -> None:
    model, dynamic, rowwise = make(), make(), make()
    run, x = compiled(model), torch.randn(16, 32)
    expected = {
        name: passed(m, compiled(m, recipe=name), x) for name, m in (("dynamic", dynamic), ("rowwise", rowwise))
    }
    with fp8pass.autocast(recipe="dynamic"):
        assert same(passed(model, run, x), expected["dynamic"])
        with fp8pass.enabled(False), fp8pass.enabled(True):  # keeps the recipe around it
            assert same(passed(model, run, x), expected["dynamic"])
        with fp8pass.autocast(recipe={"*": "rowwise"}):
            assert same(passed(model, run, x), expected["rowwise"])
        with pytest.raises(ZeroDivisionError), fp8pass.enabled(False):
            raise ZeroDivisionError
        assert same(passed(model, run, x), expected["dynamic"])
    assert not state(model)


def test_a_context_holds_for_its_thread() -> None:
    model, other = make(), make()
    run, x = compiled(model), torch.randn(16, 32)
    expected = passed(other, compiled(other), x)
    found: list[Tensor] = []
    with fp8pass.enabled(False):
        thread = threading.Thread(target=lambda: found.extend(passed(model, run, x)))
        thread.start()
        thread.join()
    assert same(found, expected)


class Checkpointed(nn.Module):
    """A block that is compiled by itself, and that activation checkpointing repeats."""

    def __init__(self, use_reentrant: bool | None, times: int = 1) -> None:
        super().__init__()
        self.block = make(Block)
        self.block.compile(backend="fp8pass", options={"lowering": "eager"})
        self.use_reentrant, self.times = use_reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        run = self.block
        for _ in range(0 if self.use_reentrant is None else self.times):
            run = self.checkpointed(run)
        return run(x)  # type: ignore[no-any-return]

    def checkpointed(self, run: Any) -> Any:
        return lambda x: checkpoint(run, x, use_reentrant=self.use_reentrant)


def backward(losses: list[Tensor], enabled: bool) -> None:
    with fp8pass.enabled(enabled):
        for loss in losses:
            loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_follows_its_forward(use_reentrant: bool) -> None:
    """Also where it repeats the forward, in a thread and a context that the forward did not run in."""
    plain, repeats = Checkpointed(None), Checkpointed(use_reentrant)
    for i, x in enumerate(batches(6, 16, 32)):
        x.requires_grad_()
        outputs = []
        for model in plain, repeats:
            model.zero_grad()
            with fp8pass.enabled(i % 3 != 1):
                outputs.append(model(x).square().mean())
        thread = threading.Thread(target=backward, args=(outputs, i % 3 == 1))
        thread.start()
        thread.join()
        close([p.grad for p in repeats.parameters()], [p.grad for p in plain.parameters()])
    assert state(plain)
    close(state(repeats), state(plain))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_nested_checkpoints_repeat_the_newest_forward(use_reentrant: bool) -> None:
    plain, repeats = Checkpointed(None), Checkpointed(use_reentrant, times=2)
    x = torch.randn(16, 32, requires_grad=True)
    for model in plain, repeats:
        passed(model, model, x)
    with fp8pass.enabled(False):
        expected = passed(plain, plain, x)
        model = repeats
        model.zero_grad()
        loss = model(x).square().mean()
    warns = pytest.warns(UserWarning, match="nested activation checkpoints with use_reentrant=True is repeated with")
    with warns if use_reentrant else contextlib.nullcontext():
        loss.backward()
    close([p.grad for p in model.parameters()], expected[1:])


def test_accumulated_microbatches_may_differ() -> None:
    """A step of one microbatch in FP8 and one in high precision records that of the first."""
    models = [make(), make()]
    runs = [compiled(model) for model in models]
    for x in batches(4, 16, 32):
        for model, run, n in zip(models, runs, (2, 1), strict=True):
            with fp8pass.accumulate(model):
                for i in range(n):
                    with fp8pass.enabled(i == 0):
                        passed(model, run, x * (1 + i))
    assert same(state(models[0]), state(models[1]))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="cached weights"),
        pytest.param({"optimizer_state": "fp8", "save_fp8": True}, id="all in FP8", marks=pytest.mark.variant),
        pytest.param({"recipe": Schedule({0: None, 2: "delayed"})}, id="schedule", marks=pytest.mark.variant),
        pytest.param({"monitor": True, "monitor_interval": 2}, id="monitor", marks=pytest.mark.variant),
    ],
)
def test_whole_steps_keep_cached_weights_up_to_date(options: dict[str, Any]) -> None:
    """A step in high precision updates the weights, and the FP8 step after it reads their new copies."""
    losses = []
    for more in options, {**options, "weight_cache": "off"}:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        @fp8pass.train_step(lowering="eager", **more)
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for i, x in enumerate(batches(7, 16, 32)):
            with fp8pass.enabled(i not in (0, 4)):
                losses.append(step(model, optimizer, x).clone())
        torch._dynamo.reset()
    assert same(losses[:7], losses[7:])


class Parts(nn.Module):
    """Two layers in contexts of the compiled code, and one outside of them."""

    def __init__(self, recipe: Any = "rowwise", enabled: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))
        self.recipe, self.enabled = recipe, enabled

    def forward(self, x: Tensor) -> Tensor:
        with fp8pass.enabled(self.enabled):
            x = self.a(x)
            with fp8pass.autocast(recipe=self.recipe):
                x = self.b(x)
        return self.c(x)  # type: ignore[no-any-return]


def test_in_compiled_code_it_applies_to_the_matmuls_inside() -> None:
    model, x = Parts(), torch.randn(16, 32)
    gemms = {(g.name, g.kind): g for g in fp8pass.explain(model, x).gemms}
    assert {g.scaling for (name, _), g in gemms.items() if name == "b"} == {"rowwise"}
    assert {g.scaling for (name, _), g in gemms.items() if name == "c"} == {"delayed"}
    assert gemms["a", "output"].status == gemms["a", "grad_weight"].status == "declined"
    assert gemms["a", "output"].reason == "it runs within fp8pass.enabled(False)"
    with fp8pass.enabled(False):  # the context in the code is the inner one
        report = fp8pass.explain(model, x)
    assert {g.name for g in report.rewritten} == {"b"}


def test_in_compiled_code_the_numbers_are_those_of_the_annotated_graph() -> None:
    models = [make(Parts), make(Parts)]
    ways = [annotated(models[0]), compiled(models[1], strict=True)]
    for x in batches(4, 16, 32):
        a, b = (passed(model, run, x) for model, run in zip(models, ways, strict=True))
        for mine, reference in zip(b, a, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


def test_in_compiled_code_an_unknown_recipe_is_an_error() -> None:
    with (
        pytest.raises(ValueError, match=r"unknown recipe 'row'.*did you mean 'rowwise'"),
        fp8pass.autocast(recipe="row"),
    ):
        pass
    with pytest.raises(BackendCompilerFailed, match=r"autocast\(recipe='row'\) in compiled code: unknown recipe 'row'"):
        compiled(Parts("row"))(torch.randn(16, 32))


def test_equal_layers_with_other_settings_are_not_compiled_as_one() -> None:
    model = nn.Sequential(*(make(Parts) for _ in range(3)))
    model[1].enabled = True  # type: ignore[assignment]
    report = fp8pass.explain(model, torch.randn(16, 32))
    assert {g.name for g in report.declined if g.kind == "output"} == {"0.a", "2.a"}


def test_calls_in_high_precision_do_not_change_what_is_exported(tmp_path: Path) -> None:
    model = make()
    run, x = compiled(model), torch.randn(16, 32)
    passed(model, run, x)
    with fp8pass.enabled(False):
        passed(model, run, x)
    assert set(fp8pass.export_fp8(model, tmp_path / "out").layers) == {"up", "down"}


def test_two_schedules_share_only_equal_phases() -> None:
    """What a step of one schedule runs is not that of the other, though both begin their phase at step 0."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    run = compiled(model, recipe=Schedule({0: None, 3: "dynamic"}), lowering="eager")
    for _ in range(5):
        run(x).sum().backward()
    with fp8pass.autocast(recipe=Schedule({0: "dynamic", 100: "rowwise"})):
        y = run(x)
    assert torch.equal(y, annotated(model, recipe="dynamic")(x))
    assert not torch.equal(y, model(x))


def test_a_repeated_forward_after_one_without_slots() -> None:
    """The no-grad forward of a reentrant region has no slots here: cold slots of its repetition scale by their amax."""
    torch.manual_seed(0)
    model, x, grad = nn.Linear(64, 64, bias=False), torch.randn(32, 64, requires_grad=True), torch.randn(32, 64) * 1e-9
    recipe = DelayedScaling(high_precision=("output",))
    run = compiled(model, recipe=Schedule({0: recipe, 100: None}), lowering="eager")
    (checkpoint(run, x, use_reentrant=True) * grad).sum().backward()
    exact = grad.T @ x.detach()
    assert model.weight.grad is not None
    assert 0 < (model.weight.grad - exact).norm() < 0.1 * exact.norm()


def test_a_schedule_splits_sizes_for_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options get their GPU once, before the sizes of all phases are split, and the phases are compiled for the same."""
    asked: list[Config] = []
    split: list[Config] = []

    def with_gpu(config: Config, device: torch.device | None) -> Config:
        asked.append(config)
        return replace(config, target="h100")

    monkeypatch.setattr("fp8pass.backend.on_machine", with_gpu)
    monkeypatch.setattr("fp8pass.backend.split_for_all_phases", lambda _, config: split.append(config))
    model, schedule = nn.Linear(64, 64), Schedule({0: "delayed", 2: "dynamic"})
    run = compiled(model, recipe=schedule, lowering="eager", min_speedup=0)
    with verdicts() as report:
        for _ in range(3):
            run(torch.randn(32, 64)).sum().backward()
    assert [config.recipe for config in asked] == [schedule]
    assert [config.target for config in split] == ["h100"]
    assert {gemm.scaling for gemm in report.gemms} == {"delayed", "dynamic"}
