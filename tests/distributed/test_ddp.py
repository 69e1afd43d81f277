"""Test delayed scaling on several ranks under DistributedDataParallel, against one process with the whole batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8pass
from fp8pass.recipes import DelayedScaling
from tests.helpers.functions import FunctionBlock
from tests.helpers.harness import verdicts
from tests.helpers.models import Block, Transformer, make
from tests.helpers.torchrun import collectives, on_ranks

pytestmark = pytest.mark.ranks

RECIPE = DelayedScaling(amax_history_len=4, margin=1)
OPTIONS: dict[str, Any] = {"recipe": RECIPE, "lowering": "eager", "strict": True}
STEPS = 5
BATCH = 4
"""Rows of a global batch, of all ranks together."""


class Model(Transformer):
    """A transformer of one layer, which compiles in half the time of two."""

    def __init__(self) -> None:
        super().__init__(layers=1)


def data(steps: int = STEPS) -> list[Tensor]:
    """Return the global batches."""
    return list(torch.randn(steps, BATCH, 8, 32, generator=torch.Generator().manual_seed(1)))


def part(x: Tensor) -> Tensor:
    """Return the rows of a global batch that belong to this rank."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


@functools.cache
def scales_to_begin_with() -> dict[str, Tensor]:
    """Return the scales of one process after a step; without them, each rank scales its first step by its own part."""
    model = make(Model)
    compiled(model, reduce_amax=False)(data()[-1]).square().mean().backward()
    return fp8pass.state(model).state_dict()


def trained(model: nn.Module, forward: Callable[..., Any], whole: bool = False, warm: bool = True) -> dict[str, Any]:
    """Train on this rank's part of each batch, or on the whole batch; return global losses, final state and weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if warm:
        fp8pass.state(model).load_state_dict(scales_to_begin_with())
    losses = []
    for x in data():
        mine = x if whole else part(x)
        loss = F.mse_loss(forward(mine), mine * 0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return results(model, losses, whole)


def results(model: nn.Module, losses: list[Tensor], whole: bool = False) -> dict[str, Any]:
    mean = torch.stack(losses)
    if not whole:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return {"losses": mean, "state": fp8pass.state(model).state_dict(), "weights": weights(model)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fp8pass", options={**OPTIONS, **options})


@on_ranks(2)
def alone() -> Any:
    """Train one process with the global batch; every rank does this for itself."""
    model = make(Model)
    return trained(model, compiled(model, reduce_amax=False), whole=True)


@on_ranks(2)
def ddp() -> Any:
    model = DistributedDataParallel(make(Model))
    return trained(model, compiled(model))


@on_ranks(2)
def ddp_around_compiled() -> Any:
    model = make(Model)
    return trained(model, DistributedDataParallel(compiled(model)))


@on_ranks(2)
def ddp_of_functions() -> Any:
    """Train layers that are `torch.autograd.Function`s, with one process beside."""
    first, model, other = (make(FunctionBlock) for _ in range(3))
    compiled(first, reduce_amax=False)(data()[-1]).square().mean().backward()
    for each in (model, other):
        fp8pass.state(each).load_state_dict(fp8pass.state(first).state_dict())
    run = trained(model, compiled(DistributedDataParallel(model)), warm=False)
    return run, trained(other, compiled(other, reduce_amax=False), whole=True, warm=False)


@contextlib.contextmanager
def small_buckets() -> Iterator[None]:
    """Make DDP's first bucket small: torch's default is larger than these models, and DDP would not split them."""
    with mock.patch("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", 1000):
        yield


@on_ranks(2)
def ddp_split() -> Any:
    """Train with the graph split into one part for each of DDP's buckets."""
    with small_buckets(), verdicts() as report:
        model = DistributedDataParallel(make(Model), bucket_cap_mb=0.03)
        result = trained(model, compiled(model))
    return {**result, "graphs": report.graphs, "rewritten": len(report.rewritten), "declined": len(report.declined)}


@on_ranks(2, variant=True)
def ddp_split_through_inductor() -> Any:
    """Return the results of both lowerings."""
    found = {}
    for lowering in ("eager", "inductor"):
        with small_buckets(), verdicts() as report:
            model = DistributedDataParallel(make(Block), bucket_cap_mb=0.001)
            found[lowering] = trained(model, compiled(model, lowering=lowering), warm=False)
        found[lowering]["graphs"] = report.graphs
    return found


@on_ranks(2, variant=True)
def ddp_of_equal_layers() -> Any:
    """Train two equal layers, compiled once, and in the graphs that DDPOptimizer makes."""
    found = {}
    for once in (True, False):
        with small_buckets(), verdicts() as report:
            model = DistributedDataParallel(make(Transformer), bucket_cap_mb=0.03)
            found[once] = trained(model, compiled(model, compile_once=once), warm=False)
        found[once] |= {"graphs": report.graphs, "rewritten": len(report.rewritten), "notes": report.notes}
    return found


@on_ranks(2)
def not_reduced() -> Any:
    model = make(Block)
    return trained(model, DistributedDataParallel(compiled(model, reduce_amax=False)), warm=False)


@on_ranks(2)
def every_second_step() -> Any:
    """Return the state of one slot after each step."""
    model = make(Block)
    forward = DistributedDataParallel(compiled(model, reduce_amax_interval=2))
    seen = []
    for x in data(6):
        forward(part(x)).square().mean().backward()
        state = fp8pass.state(model).state_dict()
        seen.append({k: v for k, v in state.items() if k.startswith("up.input")})
    return seen


@on_ranks(2)
def microbatches() -> Any:
    """Train on steps of two microbatches, the first under `no_sync`; the same within `accumulate`; and undivided."""
    found = {}
    for how in ("no_sync", "accumulate", "whole"):
        model = make(Model)
        forward = DistributedDataParallel(compiled(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        counts = []
        for x in data():
            first, second = part(x).chunk(2)
            before = collectives()
            if how == "whole":
                F.mse_loss(forward(part(x)), part(x) * 0.5).backward()
            elif how == "no_sync":
                with forward.no_sync():
                    (F.mse_loss(forward(first), first * 0.5) / 2).backward()
                (F.mse_loss(forward(second), second * 0.5) / 2).backward()
            else:
                with fp8pass.accumulate(model):
                    with forward.no_sync():
                        (F.mse_loss(forward(first), first * 0.5) / 2).backward()
                    (F.mse_loss(forward(second), second * 0.5) / 2).backward()
            counts.append(collectives() - before)
            optimizer.step()
            optimizer.zero_grad()
        state = fp8pass.state(model)
        found[how] = {"state": state.state_dict(), "steps": state.steps, "weights": weights(model), "counts": counts}
    return found


@on_ranks(2)
def in_a_train_step() -> Any:
    model = make(Model)
    parallel = DistributedDataParallel(model)
    fp8pass.state(model).load_state_dict(scales_to_begin_with())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    @fp8pass.train_step(**OPTIONS)
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(parallel(x), x * 0.5)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return results(model, [step(part(x)) for x in data()])


@on_ranks(2, variant=True)
def loops() -> Any:
    """Train on two microbatches with one reduction of gradients; the step calls the model itself, or in a function."""
    found = {}
    for how in ("in the step", "in a function"):
        model = make(Block)
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def loss_of(x: Tensor, parallel: Any = parallel) -> Tensor:
            return F.mse_loss(parallel(x), x * 0.5) / 2

        @fp8pass.train_step(**OPTIONS)
        def step(x: Tensor, parallel: Any = parallel, optimizer: Any = optimizer, inlined: bool = False) -> Tensor:
            optimizer.zero_grad()
            micros = x.chunk(2)
            for i, micro in enumerate(micros):
                with contextlib.ExitStack() as stack:
                    if i < len(micros) - 1:
                        stack.enter_context(parallel.no_sync())
                    loss = F.mse_loss(parallel(micro), micro * 0.5) / 2 if inlined else loss_of(micro)
                    loss.backward()
            optimizer.step()
            return loss.detach()

        losses, counts = [], []
        for x in data(3):
            before = collectives()
            losses.append(step(part(x), inlined=how == "in the step"))
            counts.append(collectives() - before)
        found[how] = {**results(model, losses), "counts": counts, "summary": step.report.summary()}
        found[how]["steps"] = fp8pass.state(model).steps
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys() and first
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def like_alone(run: dict[str, Any], reference: dict[str, Any]) -> None:
    """Check that losses, weights and scales are those of one process with the global batch, `reference`.

    The gradients that a rank sees are those of the mean over its own part: larger by the number of ranks, a power of
    two here, which changes no bit of an FP8 value. Sums are in another order, though, which pushes some values over
    the border to the next one of FP8: at first none, then more in each step.
    """
    torch.testing.assert_close(run["losses"][:2], reference["losses"][:2], rtol=1e-5, atol=0)
    torch.testing.assert_close(run["losses"], reference["losses"], rtol=3e-3, atol=0)
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=0, atol=2e-3, msg=name)
    for key, value in reference["state"].items():
        if key.endswith("amax_history"):  # the newest is first, and the oldest of four is that of the first step
            of_gradient = ".grad_output." in key
            expected = value * 2 if of_gradient else value
            torch.testing.assert_close(run["state"][key][-1], expected[-1], rtol=1e-4, atol=0, msg=key)
            torch.testing.assert_close(run["state"][key], expected, rtol=0.2 if of_gradient else 0.05, atol=0, msg=key)


@pytest.mark.parametrize("how", [ddp, ddp_around_compiled, ddp_split, in_a_train_step], ids=lambda f: f.name)
def test_losses_and_scales_are_those_of_one_process_with_the_global_batch(how: Any) -> None:
    first, second = how()
    same(first["state"], second["state"])
    same(first["weights"], second["weights"])
    like_alone(first, alone()[0])


def test_functions_have_one_scale_on_all_ranks() -> None:
    (first, reference), (second, _) = ddp_of_functions()
    same(first["state"], second["state"])
    same(first["weights"], second["weights"])
    like_alone(first, reference)


def test_ddp_splits_the_graph_and_all_of_it_is_rewritten() -> None:
    for run in ddp_split():
        assert run["graphs"] == 2
        assert run["rewritten"] == 3 * 6 - 3 and not run["declined"]


@pytest.mark.variant
def test_ddp_does_not_split_a_graph_whose_layers_are_compiled_once() -> None:
    first, second = ddp_of_equal_layers()
    same(first[True]["weights"], second[True]["weights"])
    for run in (first, second):
        whole, split = run[True], run[False]
        assert whole["graphs"] == 1 and whole["notes"] == [
            "2 equal layers, layers.0.1 to layers.1.1, are compiled once"
        ]
        assert split["graphs"] == 3 and split["notes"] == []
        assert whole["rewritten"] == split["rewritten"] == 2 * 18 - 3
        torch.testing.assert_close(whole["losses"], split["losses"], rtol=1e-5, atol=0)
        assert whole["state"].keys() == split["state"].keys()


@pytest.mark.variant
def test_a_split_graph_runs_through_inductor() -> None:
    for run in ddp_split_through_inductor():
        eager, inductor = run["eager"], run["inductor"]
        assert eager["graphs"] == inductor["graphs"] > 2
        torch.testing.assert_close(eager["losses"], inductor["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(eager["state"], inductor["state"], rtol=0.02, atol=0)


def test_without_reduction_the_ranks_have_different_scales() -> None:
    first, second = not_reduced()
    different = [k for k in first["state"] if k.endswith(".scale") and first["state"][k] != second["state"][k]]
    assert len(different) == 4 and not any(k.endswith("weight.scale") for k in different)


def test_with_an_interval_the_ranks_agree_in_one_of_so_many_steps() -> None:
    first, second = every_second_step()
    equal = [
        all(torch.equal(a[k], b[k]) for k in a if k.endswith(("amax", "amax_history")))
        for a, b in zip(first, second, strict=True)
    ]
    assert equal == [False, True, False, True, False, True]


def test_microbatches_under_no_sync_are_one_step() -> None:
    first, second = microbatches()
    for how in first:
        same(first[how]["state"], second[how]["state"])
        assert first[how]["steps"] == STEPS, how
    same(first["no_sync"]["state"], first["accumulate"]["state"])
    same(first["no_sync"]["weights"], first["accumulate"]["weights"])
    for key, value in first["whole"]["state"].items():
        if key.endswith("amax_history") and ".grad_output" not in key:
            torch.testing.assert_close(first["no_sync"]["state"][key], value, rtol=0.05, atol=0, msg=key)


@pytest.mark.variant
def test_a_loop_over_microbatches_in_a_train_step() -> None:
    """Where torch runs the loop op by op, the model still runs in FP8, and all microbatches are one step."""
    for run in loops():
        in_step, in_function = run["in the step"], run["in a function"]
        same(in_step["state"], in_function["state"])
        same(in_step["weights"], in_function["weights"])
        assert in_step["summary"].startswith("6 of 6 matmuls in FP8")
        assert (in_step["steps"], in_step["counts"][-1]) == (3, 2)  # DDP's one bucket, and the amaxes


def test_amaxes_are_reduced_once_per_step() -> None:
    for run in microbatches():
        for how, found in run.items():  # the amaxes, and DDP's bucket: one from the second step on
            assert found["counts"][2:] == [2, 2, 2], how


@on_ranks(2, variant=True)
def with_frozen_weights() -> Any:
    """Train the second projection of a block on the frozen first one; return weights, gradients and FP8 bytes."""
    found = {}
    for how in "option", "freeze":
        model: Any = make(Block, seed=dist.get_rank())  # DDP hands rank 0's to the others
        model.up.requires_grad_(False)
        if how == "option":
            run = compiled(DistributedDataParallel(model), frozen="fp8")
        else:
            ddp = DistributedDataParallel(model)
            fp8pass.freeze(model)
            run = compiled(ddp)
        for x in data():
            run(part(x)).square().mean().backward()
        found[how] = model.up.weight._x_q.view(torch.uint8), model.down.weight.grad
    return found


@pytest.mark.variant
def test_frozen_weights_are_those_of_all_ranks() -> None:
    first, second = with_frozen_weights()
    for how in "option", "freeze":
        same(dict(enumerate(first[how])), dict(enumerate(second[how])))
        same(dict(enumerate(first[how])), dict(enumerate(first["option"])))


@on_ranks(2)
def updated_in_the_backward() -> str:
    model = DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @fp8pass.train_step(update_in_backward=True)
    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(fp8pass.Fp8Error) as error:
        step(torch.ones(16, 32))
    return str(error.value)


def test_gradients_must_be_reduced_before_an_update() -> None:
    for message in updated_in_the_backward():
        assert "DistributedDataParallel reduces gradients among ranks only afterwards. Use FSDP2" in message
