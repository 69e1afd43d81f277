"""Test the all-reduce of amaxes: what it records in the slots, and which errors ranks raise that do not agree."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.compiler.faults import fall_back
from fp8pass.dump.writer import Dump
from fp8pass.graph.attempt import FIRST, Attempt
from fp8pass.options.config import make_config
from fp8pass.passes.joint.scaled_mm import ScaledMM
from fp8pass.recipes import DelayedScaling
from fp8pass.states.amax_reduction import _absent
from tests.helpers.models import Block, make
from tests.helpers.torchrun import collectives, on_ranks

pytestmark = pytest.mark.ranks

RECIPE = DelayedScaling(amax_history_len=4)
OPTIONS: dict[str, Any] = {"recipe": RECIPE, "lowering": "eager"}


class Layers(nn.Module):
    """Two linear layers, and nothing else to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 56), nn.Linear(56, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="fp8pass", options={**OPTIONS, **options})


def data(seed: int = 0) -> Tensor:
    """Return a batch whose values are larger on higher ranks."""
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) * (1 + dist.get_rank())


def error_of(run: Any, *args: Any, times: int = 1) -> str:
    """Return the message of the Fp8Error that some steps of training raise, "" if they raise none."""
    try:
        for _ in range(times):
            run(*args).square().mean().backward()
    except fp8pass.Fp8Error as error:
        return str(error)
    finally:
        gc.collect()
    return ""


def histories(model: nn.Module) -> dict[str, list[float]]:
    state = fp8pass.state(model).state_dict()
    return {k.removesuffix(".amax_history"): x.tolist() for k, x in state.items() if k.endswith("amax_history")}


@on_ranks(2)
def one_leaves_a_layer_out() -> str:
    return error_of(compiled(make(Layers), filter=["down"] if dist.get_rank() else None), data())


@on_ranks(2)
def one_has_no_slots() -> str:
    return error_of(compiled(make(Layers), filter=["*"] if dist.get_rank() == 0 else None), data())


@on_ranks(2)
def one_has_another_recipe() -> str:
    return error_of(compiled(make(Layers), recipe=DelayedScaling(amax_history_len=4 + dist.get_rank())), data())


@on_ranks(2)
def one_takes_another_branch_later() -> list[str]:
    """Give rank 1 one graph more from the second step on. The ranks notice it in the third step."""
    first, second = make(Layers), make(Layers)
    run, other = compiled(first), compiled(second)
    errors = [error_of(run, data())]
    errors.append(error_of(lambda x: run(x) + (other(x) if dist.get_rank() else 0), data()))
    errors.append(error_of(run, data()))
    return errors


@on_ranks(2)
def all_take_another_branch_later() -> Any:
    """Give all ranks another graph later, which is no error; then train a third model, after the first one is gone."""
    first, second = make(Layers), make(Layers)
    run, other = compiled(first), compiled(second)
    errors = [error_of(run, data(), times=2), error_of(other, data(), times=2)]
    del first, run
    third = make(Layers)
    errors.append(error_of(compiled(third), data(), times=3))
    return errors, histories(second), histories(third)


@on_ranks(2, variant=True)
def one_keeps_a_model() -> Any:
    """Keep the model that was trained before on rank 0 only; once in the middle of a step, which never ends."""
    found: list[Any] = []
    kept = []
    for ends in (True, False):
        before = nn.parallel.DistributedDataParallel(make(Layers))
        run = compiled(before)
        error_of(run, data(), times=2)
        with contextlib.nullcontext() if ends else before.no_sync():
            error_of(run, data())
        kept += [before] if dist.get_rank() == 0 else []
        del before, run
        torch._dynamo.reset()
        model = make(Layers)
        run = compiled(model)
        for i in range(3):
            error = error_of(run, data(i))
            for p in model.parameters():
                dist.all_reduce(p.grad)
        found.append((error, histories(model)))
        del run, model
    return found


@on_ranks(2)
def one_runs_another_model() -> Any:
    """Run another model on rank 0 alone, with gradients, before steps 1 and 2; rank 0 keeps one of the two."""
    model, others = make(Layers), []
    run, errors = compiled(model), []
    for i in range(3):
        if dist.get_rank() == 0 and i < 2:
            others.append(make(Block))
            compiled(others[-1])(data())
            others = others[:1]
        errors.append(error_of(run, data(i)))
    return errors, histories(model)


@on_ranks(2)
def one_has_no_slots_later() -> Any:
    """Give rank 0 in the second step a batch of one row, whose matmuls are declined."""
    model = make(Layers)
    run, before = compiled(model), collectives()
    for i in range(4):
        x = data(i)[:1] if i == 1 and dist.get_rank() == 0 else data(i)
        run(x).square().mean().backward()
    return histories(model), collectives() - before


@on_ranks(2)
def one_runs_forwards_alone() -> Any:
    """Run forwards on rank 0 alone, with gradients, before the first step and after the others."""
    model = make(Layers)
    run, before = compiled(model), collectives()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for i in range(3):
        for j in range(3) if dist.get_rank() == 0 else ():
            run(data(10 + j) * 5)
        run(data(i)).square().mean().backward()
        found.append(fp8pass.state(model).state_dict())
        if dist.get_rank() == 0:
            run(data(20))
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    return found, collectives() - before


@on_ranks(2)
def frozen() -> Any:
    """Run forwards with gradients enabled, of a model none of whose parameters requires one: no backward will come."""
    model = make(Layers).requires_grad_(False)
    run = compiled(model)
    for i in range(3):
        run(data(i))
    return histories(model)


@on_ranks(2)
def joining() -> str:
    """Train under `DDP.join` with more batches on one rank than on the other."""
    parallel = nn.parallel.DistributedDataParallel(make(Layers))
    run = compiled(parallel)
    try:
        with parallel.join():
            for i in range(2 + dist.get_rank()):
                run(data(i)).square().mean().backward()
    except fp8pass.Fp8Error as error:
        return str(error)
    return ""


@on_ranks(2, variant=True)
def with_other_groups_before() -> Any:
    """Train rank 0 alone in its own group first; then both, in the group of all ranks under its several names."""
    one, both = dist.new_group([0]), dist.new_group([0, 1])
    other, model = make(Layers), make(Layers)
    if dist.get_rank() == 0:
        compiled(other, amax_group=one)(data()).square().mean().backward()
    for group in (both, dist.group.WORLD, None):
        model = make(Layers)
        run = compiled(model, amax_group=group)
        for i in range(2):
            run(data(i)).square().mean().backward()
    return histories(model)


@on_ranks(2)
def one_comes_late() -> str:
    """Let rank 1 come to the reduction after rank 0 has given up waiting for it."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank():
        time.sleep(4)
    error = error_of(compiled(make(Layers), amax_group=group), data())
    dist.barrier()
    return error


@on_ranks(2)
def in_two_backwards() -> Any:
    """Run two backwards of reentrant regions: the second repeats a forward while the reduction after the first runs."""
    model, other = make(Layers), make(Layers)
    run, run_other = compiled(model), compiled(other)
    for i in range(3):
        x = data(i).requires_grad_()
        y, z = checkpoint(run, x, use_reentrant=True), run_other(x)
        z.square().mean().backward()
        y.square().mean().backward()
    return histories(model)


@on_ranks(2)
def one_does_not_come() -> str:
    group = dist.new_group(timeout=timedelta(seconds=3))
    error = error_of(compiled(make(Layers), amax_group=group), data()) if dist.get_rank() == 0 else ""
    dist.barrier()
    return error


@on_ranks(2)
def after_a_fault() -> Any:
    """Plant a fault into a pass that FP8 needs, on all ranks or on rank 1 alone; then into a graph with collectives."""
    run, group = ScaledMM.run, dist.new_group(timeout=timedelta(seconds=2))
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ranks in ((0, 1), (1,)):
            torch._dynamo.reset()  # otherwise the second model would use the code of the first
            ScaledMM.run = fail if dist.get_rank() in ranks else run  # type: ignore[assignment, method-assign]
            found.append(error_of(compiled(make(Layers), on_fault="warn"), data(), times=2))
        ScaledMM.run = run  # type: ignore[method-assign]
        for ranks, waiting in (((0, 1), None), ((1,), group)):

            def compile_with(attempt: Attempt, dump: Dump, ranks: tuple[int, ...] = ranks) -> int:
                return 1 // (attempt != FIRST or dist.get_rank() not in ranks)

            config = make_config({"on_fault": "warn", "amax_group": waiting})
            try:
                fall_back(compile_with, config, lambda *_: Dump(), has_collectives=lambda: True)
                found.append("")
            except fp8pass.Fp8Error as error:
                found.append(str(error))
    dist.barrier()
    return found


def fail(*_: Any) -> int:
    """Raise; stand in for the `run` of a pass."""
    raise ZeroDivisionError("planted")


@on_ranks(2)
def with_nan() -> Any:
    """Train three steps; the batch of rank 0 in the second one has a NaN."""
    model = make(Layers)
    run = compiled(model, recipe=DelayedScaling(amax_history_len=4, on_nonfinite="freeze"))
    for i in range(3):
        x = data()
        if i == 1 and dist.get_rank() == 0:
            x[0, 0] = math.nan
        run(x).square().mean().backward()
    return fp8pass.state(model).state_dict()


@on_ranks(2)
def with_a_nan_below_zero() -> Any:
    """Set an amax of rank 0 to NaN with its sign bit set, which is a negative number where its bits are compared."""
    model = make(Layers)
    run = compiled(model)
    y = run(data())
    if dist.get_rank() == 0:
        (state,) = fp8pass.state(model)._states()
        state.tensors.amax_forward.fill_(math.nan).view(torch.int32).bitwise_or_(-(2**31))
    y.square().mean().backward()
    run(data())
    return histories(model)["up.input"]


@on_ranks(2)
def without_backward() -> Any:
    """Run two forwards in each of two steps, and the backward of the second one only."""
    model = make(Layers)
    run = compiled(model)
    for i in range(2):
        run(data(2 * i))
        run(data(2 * i + 1)).square().mean().backward()
    return histories(model)


@on_ranks(2)
def checkpointed() -> Any:
    """Train under a checkpoint, whose backward repeats the forward, in both variants of torch."""
    found = {}
    for reentrant in (False, True):
        model = make(Layers)
        run = functools.partial(checkpoint, compiled(model), use_reentrant=reentrant)
        for i in range(3):
            run(data(i).requires_grad_()).square().mean().backward()
        found[reentrant] = histories(model)
    return found


@on_ranks(2)
def updated_in_a_step() -> Any:
    """Train four steps with FP8 copies of weights and `skip_nonfinite`; rank 1 has an infinity in the second one."""
    model = make(Layers)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @fp8pass.train_step(**OPTIONS, skip_nonfinite=True)
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        parallel(x).square().mean().backward()
        optimizer.step()

    found = []
    for i in range(4):
        x = data(i)
        if i == 1 and dist.get_rank():
            x[0, 0] = math.inf
        step(x)
        found.append(({k: p.detach().clone() for k, p in model.named_parameters()}, fp8pass.state(model).state_dict()))
    return found, step.skipped


@on_ranks(4)
def in_rows_of_a_mesh() -> Any:
    """Train two models, each on two ranks, for which the default group would be wrong, and so would the whole mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    found = []
    for group in (mesh["data"], mesh):
        model = make(Layers)
        run = compiled(model, amax_group=group)
        for i in range(2):
            run(data(i)).square().mean().backward()
        found.append(histories(model))
    return found


@on_ranks(4)
def in_a_part_of_two_dimensions() -> str:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipeline", "data", "tensor"))
    make_config({"amax_group": mesh})
    make_config({"amax_group": mesh["data", "tensor"]._flatten()})
    try:
        make_config({"amax_group": mesh["data", "tensor"]})
    except ValueError as error:
        return str(error)
    return ""


@on_ranks(4)
def outside_of_the_group() -> str:
    try:
        make_config({"amax_group": dist.new_group([0, 1])})
    except ValueError as error:
        return str(error)
    return ""


def test_a_slot_that_one_rank_lacks_is_an_error_on_all() -> None:
    expected = (
        "ranks have different FP8 slots, so their amaxes can't be reduced: 'down.input' only on rank 0; "
        "'down.weight' only on rank 0; 'down.grad_output' only on rank 0. Compile the same model with the same options "
        "on all ranks. Where their batches differ in size, a rank may decline a matmul for its own few rows: use equal "
        "batches, or set reduce_amax=False"
    )
    assert one_leaves_a_layer_out() == [expected, expected]


def test_a_rank_without_slots_is_an_error_on_all() -> None:
    for error in one_has_no_slots():
        assert "'up.input' only on rank 1" in error and "; and 1 more." in error


def test_another_recipe_is_an_error_on_all() -> None:
    for error in one_has_another_recipe():
        assert error.startswith("the FP8 slots from 'up.input' on are under DelayedScaling(")
        assert "amax_history_len=4" in error and "amax_history_len=5" in error and "on rank 1." in error


def test_a_graph_that_one_rank_gets_later_is_an_error_on_all() -> None:
    for first, second, third in one_takes_another_branch_later():
        assert first == second == ""
        assert third.startswith(
            "ranks have different numbers of graphs with FP8 slots (1, 2), the last with 'up.input'"
        )


def test_graphs_that_all_ranks_get_later_are_reduced_too() -> None:
    (errors, *first), (_, *second) = all_take_another_branch_later()
    assert errors == ["", "", ""] and first == second
    assert len([x for x in first[1]["up.input"] if x > 0]) == 2


@pytest.mark.variant
def test_a_model_that_one_rank_keeps_does_not_matter_to_the_next() -> None:
    first, second = one_keeps_a_model()
    assert first == second
    for error, history in first:
        assert error == "" and [x > 0 for x in history["up.input"]] == [True, True, False, False]


def test_another_model_that_one_rank_runs_does_not_matter() -> None:
    first, second = one_runs_another_model()
    assert first == second and first[0] == ["", "", ""]
    assert [x > 0 for x in first[1]["up.input"]] == [True, True, False, False]


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says() -> None:
    error, _ = one_does_not_come()
    assert "rank 0 has waited 3 s for rank 1 to say which FP8 slots they have" in error
    assert "pass their group or mesh as amax_group, or reduce_amax=False" in error


def test_ranks_go_on_after_the_same_fault_and_no_rank_by_itself() -> None:
    (all_, other, together, rank0), (all_1, alone, together_1, rank1) = after_a_fault()
    assert all_ == all_1 == together == together_1 == ""
    for error in (other, alone):
        assert error.startswith("ranks have different ") and "'up.input'" in error
    assert "On rank 1: fp8pass failed in its pass scaled_mm on graph" in alone
    assert rank0 == ""
    assert "on this rank and not on others, which would wait for collectives that do not come" in rank1


def test_nan_reaches_all_ranks() -> None:
    first, second = with_nan()
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    history = first["up.input.amax_history"]
    assert history[0].isnan() and history[1] > 0 and history[2:].eq(0).all()


def test_a_nan_with_a_sign_reaches_all_ranks() -> None:
    for newest, *_ in with_a_nan_below_zero():
        assert math.isnan(newest)


def test_what_a_forward_without_backward_has_recorded_goes_with_the_next_step() -> None:
    first, second = without_backward()
    assert first == second
    assert [x > 0 for x in first["down.input"]] == [True, False, False, False]


def test_where_there_is_no_backward_the_next_forward_reduces() -> None:
    first, second = frozen()
    assert first == second
    assert [x > 0 for x in first["down.input"]] == [True, True, False, False]


def test_a_rank_whose_graph_has_no_slots_in_some_step_takes_part() -> None:
    (first, count), (second, other_count) = one_has_no_slots_later()
    assert first == second and count == other_count
    assert [x > 0 for x in first["up.input"]] == [True, True, True, False]


def test_forwards_of_one_rank_alone_start_no_collective_and_all_scales_stay_the_same() -> None:
    (first, count), (second, other_count) = one_runs_forwards_alone()
    assert count == other_count
    for step, other_step in zip(first, second, strict=True):
        torch.testing.assert_close(step, other_step, rtol=0, atol=0)
    assert first[-1]["up.input.amax_history"].count_nonzero() == 2


def test_join_is_refused() -> None:
    for error in joining():
        assert error.startswith("under DistributedDataParallel.join() a rank may end before the others")


@pytest.mark.variant
def test_what_ranks_have_done_in_other_groups_does_not_matter() -> None:
    first, second = with_other_groups_before()
    assert first == second and first["up.input"][0] > 0


def test_a_rank_that_comes_late_is_told() -> None:
    waited, late = one_comes_late()
    assert "rank 0 has waited 2 s for rank 1 to say which FP8 slots they have" in waited
    assert "rank 0 has waited for rank 1 to say which FP8 slots it has, and has given up" in late


def test_a_reduction_on_its_way_does_not_undo_what_a_repeated_forward_records() -> None:
    first, second = in_two_backwards()
    assert first == second
    assert [x > 0 for x in first["up.input"]] == [True, True, False, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_forwards_are_reduced_once(reentrant: bool) -> None:
    first, second = (run[reentrant] for run in checkpointed())
    assert first == second
    assert [x > 0 for x in first["up.input"]] == [True, True, False, False]


def test_a_skipped_step_is_skipped_everywhere() -> None:
    (first, skipped), (second, _) = updated_in_a_step()
    assert skipped == 1
    for (weights, state), (others, other) in zip(first, second, strict=True):
        torch.testing.assert_close(weights, others, rtol=0, atol=0)
        torch.testing.assert_close(state, other, rtol=0, atol=0)
    before, after = first[0], first[1]
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)


def test_amaxes_are_reduced_over_the_group_or_mesh() -> None:
    by_rank = in_rows_of_a_mesh()
    assert by_rank[0][0] == by_rank[1][0] and by_rank[2][0] == by_rank[3][0]
    assert by_rank[0][0]["down.grad_output"] != by_rank[2][0]["down.grad_output"]
    assert by_rank[0][1] == by_rank[1][1] == by_rank[2][1] == by_rank[3][1]


def test_a_rank_outside_of_the_group_is_told() -> None:
    error = "this rank is not in amax_group: pass the group of the ranks that train the same model"
    assert outside_of_the_group() == ["", "", error, error]


def test_a_mesh_whose_group_not_all_ranks_would_make_is_refused() -> None:
    for error in in_a_part_of_two_dimensions():
        assert error.startswith("amax_group is a mesh of 2 dimensions and 2 of 4 ranks: ")
        assert error.endswith("Pass mesh._flatten(), made before")


def test_a_group_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"amax_group=\[0, 1\]: a torch.distributed.ProcessGroup"):
        make_config({"amax_group": [0, 1]})
    with pytest.raises(ValueError, match="reduce_amax_interval=0: a number"):
        make_config({"reduce_amax_interval": 0})


def test_ranks_that_have_not_come_are_found_with_few_questions() -> None:
    """Each rank that waits asks the one server, which could not answer a thousand ranks about a thousand each."""
    store = mock.Mock(wraps=HashStore())
    for rank in set(range(1000)) - {17, 900}:
        store.set(f"here/{rank}", "")
    assert list(_absent(store, range(1000))) == [17, 900]
    assert store.check.call_count < 50
