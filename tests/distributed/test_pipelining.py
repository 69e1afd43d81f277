"""Test schedules of torch.distributed.pipelining, against one process that runs the same microbatches in one step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base._torch import pipeline_call
from fp8pass.recipes import DelayedScaling
from fp8pass.report.report import collect
from fp8pass.states.amax_reduction import Reducer
from tests.helpers.models import Block, make
from tests.helpers.torchrun import on_ranks

pytestmark = pytest.mark.ranks

RECIPE = DelayedScaling(amax_history_len=4)
OPTIONS: dict[str, Any] = {"recipe": RECIPE, "lowering": "eager", "strict": True}
STEPS = 3
MICROBATCHES = 4
SINGLE: list[Any] = [ScheduleGPipe, Schedule1F1B]
DIVIDES_COMPILED_BACKWARDS = not torch.__version__.startswith("2.11.")
LOOPED: list[Any] = [ScheduleInterleaved1F1B, ScheduleLoopedBFS]


class Stage(nn.Sequential):
    """The module of a stage: equal layers, which are compiled once."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())


class Checkpointed(nn.Module):
    """A layer that is run again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return result


def data(replica: int = 0) -> list[Tensor]:
    """Return batches in which each microbatch has another largest value."""
    size = 8 * MICROBATCHES
    batches = torch.randn(STEPS, size, 32, generator=torch.Generator().manual_seed(replica))
    return list(batches * torch.linspace(1, 3, size).view(1, -1, 1))


def compiled(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(backend="fp8pass", options={**OPTIONS, **options})
    return module


def stage_modules(count: int) -> list[nn.Module]:
    """Return the modules of all stages."""
    return list(make(lambda: nn.Sequential(*(Stage() for _ in range(count)))))


def states(modules: dict[int, Any]) -> dict[int, Any]:
    """Return state and number of steps for each stage."""
    found = {i: fp8pass.state(m) for i, m in modules.items()}
    return {i: ({k.removeprefix("layer."): v for k, v in s.state_dict().items()}, s.steps) for i, s in found.items()}


def one_process(count: int, replicas: int = 1, split: int = MICROBATCHES, rate: float = 0.05) -> dict[str, Any]:
    """Train one process on the microbatches of all replicas in turn, each stage compiled in one piece.

    Several replicas learn nothing: see `trained`.
    """
    modules = {i: compiled(m, reduce_amax=False, compile_once=False) for i, m in enumerate(stage_modules(count))}
    model = nn.Sequential(*modules.values())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate if replicas == 1 else 0)
    losses, seen = [], []
    for batches in zip(*map(data, range(replicas)), strict=True):
        with fp8pass.accumulate(model):
            for x in (x for batch in batches for x in batch.chunk(split)):
                loss = F.mse_loss(model(x), x * 0.5)
                loss.backward()
                losses.append(loss.detach())
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= split
        optimizer.step()
        optimizer.zero_grad()
        seen.append(states(modules))
    return {"losses": losses, "states": seen}


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Count the all-reduces of amaxes; torch needs some others to set a pipeline up."""
    with mock.patch.object(Reducer, "_send", autospec=True, side_effect=Reducer._send) as send:
        counts = [0]
        yield counts
        counts[0] = send.call_count


def trained(
    make_schedule: Any,
    count: int,
    mesh: DeviceMesh | None = None,
    wrap: Callable[[nn.Module], nn.Module] = compiled,
    split: int = MICROBATCHES,
    step: Callable[..., Any] | None = None,
    updates: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train this rank's stages under a schedule. Losses are those of the last stage's rank.

    mesh: that of pipeline and data parallel; then the model learns nothing, for gradients are not averaged. Without it,
    one pipeline spans all ranks. step: runs instead of the schedule's. kwargs: arguments of the stages.
    """
    group = dist.group.WORLD if mesh is None else mesh.get_group("pipeline")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    modules = {i: wrap(m) for i, m in enumerate(stage_modules(count)) if i % ranks == rank}
    device = torch.device("cpu")
    stages = [PipelineStage(m, i, count, device, group=group, **kwargs) for i, m in modules.items()]
    single = make_schedule in SINGLE
    schedule = make_schedule(stages[0] if single else stages, split, loss_fn=F.mse_loss)
    parameters = [p for m in modules.values() for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05 if mesh is None else 0)
    losses: list[Tensor] = []
    seen = []
    with counted_collectives() as counts:
        for x in data(0 if mesh is None else mesh.get_local_rank("data")):
            found: list[Tensor] = []
            run = schedule.step if step is None else functools.partial(step, schedule)
            run(*([x] if rank == 0 else []), target=x * 0.5, losses=found)
            if updates:
                optimizer.step()
            optimizer.zero_grad()
            losses += [loss.detach() for loss in found]
            seen.append(states({stage.stage_index: stage for stage in stages}))
    return {"losses": losses, "states": seen, "collectives": counts[0]}


def like_one_process(by_rank: list[dict[str, Any]], reference: dict[str, Any], *parts: str) -> None:
    """Check that the state is the same after each step, bit by bit: of each slot all of it, or these parts."""
    assert len(reference["states"]) == STEPS
    for step, expected in enumerate(reference["states"]):
        found = [(i, state) for run in by_rank for i, state in run["states"][step].items()]
        assert {i for i, _ in found} == expected.keys()
        for i, (state, steps) in found:
            reference_state, reference_steps = expected[i]
            assert steps == reference_steps == step + 1
            assert state.keys() == reference_state.keys() and "1.down.grad_output.scale" in state
            for key, value in state.items():
                if key.endswith(parts or ""):
                    assert torch.equal(value, reference_state[key]), (step, i, key)


def same_losses(by_rank: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """Check that the losses of all microbatches are the same, bit by bit."""
    losses = next(run["losses"] for run in by_rank if run["losses"])
    assert torch.equal(torch.stack(losses), torch.stack(reference["losses"]))


@on_ranks(2)
def alone() -> Any:
    """Train one process, on the first rank."""
    if dist.get_rank():
        return None
    return {
        "single": one_process(2),
        "looped": one_process(4),
        "undivided": one_process(2, split=1),
        "constant": one_process(2, rate=0),
    }


@on_ranks(2)
def single_stages() -> Any:
    return [trained(schedule, 2) for schedule in SINGLE]


@on_ranks(2)
def looped_stages() -> Any:
    return [trained(schedule, 4) for schedule in LOOPED]


@on_ranks(2)
def compiled_modules() -> Any:
    """Train modules as `torch.compile` returns them; return also what the report says of their layers."""
    with collect() as report:
        run = trained(Schedule1F1B, 2, wrap=lambda m: torch.compile(m, backend="fp8pass", options=OPTIONS))  # type: ignore[return-value]
    return {**run, "notes": report.notes}


@on_ranks(2)
def accumulated() -> Any:
    """Train with each step of the schedule within `accumulate`, which changes nothing."""

    def step(schedule: Any, *args: Any, **kwargs: Any) -> None:
        with fp8pass.accumulate(schedule._stage):
            schedule.step(*args, **kwargs)

    return trained(Schedule1F1B, 2, step=step)


@on_ranks(2)
def accumulated_steps() -> Any:
    """Train with each batch in two steps of the schedule, without updates."""

    def step(schedule: Any, *args: Tensor, target: Tensor, losses: list[Tensor]) -> None:
        inputs = zip(*(x.chunk(2) for x in args), strict=True) if args else ((), ())
        with fp8pass.accumulate(schedule._stage):
            for mine, expected in zip(inputs, target.chunk(2), strict=True):
                found: list[Tensor] = []
                schedule.step(*mine, target=expected, losses=found)
                losses += found

    return trained(Schedule1F1B, 2, split=MICROBATCHES // 2, step=step, updates=False)


@on_ranks(2)
def one_microbatch() -> Any:
    return trained(ScheduleGPipe, 2, split=1)


@on_ranks(2)
def checkpointed() -> Any:
    return trained(Schedule1F1B, 2, wrap=lambda module: Checkpointed(compiled(module)))


@on_ranks(2)
def evaluated() -> Any:
    """Run a batch without gradients between the steps."""
    seen = 0

    def step(schedule: Any, *args: Any, target: Tensor, losses: list[Tensor]) -> None:
        nonlocal seen
        if seen:
            with torch.no_grad():
                schedule.eval(*args, target=target)
        seen += 1
        schedule.step(*args, target=target, losses=losses)

    return trained(Schedule1F1B, 2, step=step)


@on_ranks(2)
def zero_bubble() -> Any:
    """Train under a schedule that divides the backward: it runs the whole backward of each compiled graph twice."""
    if not DIVIDES_COMPILED_BACKWARDS:
        return None
    with functorch_config.patch(donated_buffer=False):
        return trained(ScheduleInterleavedZeroBubble, 4)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))


@on_ranks(4)
def alone_with_both_batches() -> Any:
    if dist.get_rank():
        return None
    return {"single": one_process(2, replicas=2), "looped": one_process(4, replicas=2)}


def train_replicas(schedule: Any, count: int) -> Any:
    pipeline = mesh()
    return trained(schedule, count, pipeline, functools.partial(compiled, amax_group=pipeline.get_group("data")))


@on_ranks(4)
def replicated() -> Any:
    return {"single": train_replicas(Schedule1F1B, 2), "looped": train_replicas(ScheduleInterleaved1F1B, 4)}


@on_ranks(4)
def replicated_by_ddp() -> Any:
    """Train replicas in DDP, with all forwards under `no_sync`, for DDP is not made for schedules.

    There is no optimizer that would begin the reduction, and shapes are given, for DDP can't run the forwards that find
    them out.
    """
    pipeline = mesh()
    group = pipeline.get_group("data")

    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(compiled(module, amax_group=group), process_group=group)

    example = torch.zeros(8, 32)
    shapes = {"input_args": example.clone().requires_grad_(), "output_args": example.clone().requires_grad_()}
    return trained(ScheduleGPipe, 2, pipeline, wrap, updates=False, **shapes)


@on_ranks(4)
def without_a_group() -> str:
    try:
        trained(Schedule1F1B, 2, mesh())
    except fp8pass.Fp8Error as error:
        return str(error)
    return ""


@pytest.mark.parametrize("i", range(2), ids=[s.__name__ for s in SINGLE])
def test_a_step_of_a_schedule_is_one_step(i: int) -> None:
    runs = [run[i] for run in single_stages()]
    like_one_process(runs, alone()[0]["single"])
    same_losses(runs, alone()[0]["single"])


@pytest.mark.parametrize("i", range(2), ids=[s.__name__ for s in LOOPED])
def test_a_step_of_a_schedule_of_several_stages_per_rank_is_one_step(i: int) -> None:
    runs = [run[i] for run in looped_stages()]
    like_one_process(runs, alone()[0]["looped"])
    same_losses(runs, alone()[0]["looped"])


@pytest.mark.parametrize("how", [compiled_modules, accumulated, checkpointed, evaluated], ids=lambda f: f.name)
def test_stages_are_trained_alike(how: Any) -> None:
    like_one_process(how(), alone()[0]["single"])
    same_losses(how(), alone()[0]["single"])


def test_equal_layers_of_a_stage_are_compiled_once() -> None:
    """In the first stage they need not be equal: whether the input of its first layer needs a gradient is torch's choice."""
    _, last = compiled_modules()
    assert last["notes"] == ["2 equal layers, 0 to 1, are compiled once"]


def test_several_steps_of_a_schedule_within_accumulate_are_one() -> None:
    like_one_process(accumulated_steps(), alone()[0]["constant"])
    same_losses(accumulated_steps(), alone()[0]["constant"])


def test_a_step_of_one_microbatch_is_one_step() -> None:
    like_one_process(one_microbatch(), alone()[0]["undivided"])


@pytest.mark.skipif(not DIVIDES_COMPILED_BACKWARDS, reason="torch 2.11 itself fails")
def test_a_schedule_that_divides_the_backward_is_trained_alike() -> None:
    like_one_process(zero_bubble(), alone()[0]["looped"])
    same_losses(zero_bubble(), alone()[0]["looped"])


def test_a_stage_that_no_other_rank_has_needs_no_collective() -> None:
    assert [run["collectives"] for both in single_stages() for run in both] == [0] * 4


@pytest.mark.parametrize("kind", ["single", "looped"])
def test_replicas_of_a_stage_have_the_same_scales_by_one_collective_per_step(kind: str) -> None:
    runs = [run[kind] for run in replicated()]
    like_one_process(runs, alone_with_both_batches()[0][kind])
    assert [run["collectives"] for run in runs] == [STEPS] * 4


def test_replicas_in_ddp_reduce_when_the_next_step_begins() -> None:
    runs = replicated_by_ddp()
    like_one_process(runs, alone_with_both_batches()[0]["single"], "scale", "amax_history")
    assert [run["collectives"] for run in runs] == [STEPS - 1] * 4


def test_ranks_of_different_stages_are_told_to_name_their_group() -> None:
    expected = (
        "ranks have different stages of a pipeline, whose amaxes can't be reduced together: stage 0 only on ranks 0, 1; "
        "stage 1 only on ranks 2, 3. Pass the group or mesh of the ranks that share a stage as amax_group, data and "
        "tensor parallel, or set reduce_amax=False"
    )
    assert without_a_group() == [expected] * 4


def test_code_that_has_no_hash_is_looked_at() -> None:
    """Dynamo makes such code to resume a function, with a dict among its constants."""
    code = compile("found = pipeline_call()", "resumed", "exec")
    names: dict[str, Any] = {"pipeline_call": pipeline_call}
    exec(code.replace(co_consts=(*code.co_consts, {})), names)
    assert names["found"] is None
