"""Test `train_step` with tensor parallel models: against one process, and against torch.compile with a loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp8pass
from fp8pass.quant.sharded import recorded_over
from fp8pass.recipes import DelayedScaling
from fp8pass.weights.weight_cache import weights_of
from tests.helpers.models import Block, make
from tests.helpers.torchrun import on_ranks

pytestmark = pytest.mark.ranks

OPTIONS: dict[str, Any] = {"recipe": DelayedScaling(amax_history_len=2), "lowering": "eager", "strict": True}
STEPS = 4


class Net(nn.Module):
    """A block, a norm and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.block, self.norm = Block(width, 2 * width), nn.RMSNorm(width)
        self.head = nn.Linear(width, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.block(x)))
        return y


def by_rows(model: Net, mesh: DeviceMesh) -> Net:
    """Divide all layers, and the rows between them: all parameters are DTensors."""
    whole, rows = (Replicate(),), (Shard(1),)
    begin = PrepareModuleInput(input_layouts=whole, desired_input_layouts=rows, use_local_output=True)
    plan = {
        "block.norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, begin)
    parallelize_module(model, mesh, plan)
    return model


def by_columns(model: Net, mesh: DeviceMesh) -> Net:
    """Divide the block's layers alone: norms and the head are plain parameters, whole on each rank."""
    parallelize_module(model.block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def data(steps: int = STEPS, width: int = 32) -> list[Tensor]:
    return list(torch.randn(steps, 4, 8, width, generator=torch.Generator().manual_seed(1)))


def adam(model: nn.Module, foreach: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)


def step_of(
    model: Callable[..., Any], parameters: Any, optimizer: torch.optim.Optimizer, clip: bool, parts: int = 1
) -> Callable[[Tensor], Tensor]:
    """Return an ordinary step. parts: microbatches of each."""

    def step(x: Tensor) -> Tensor:
        losses = []
        for part in x.chunk(parts):
            loss = F.mse_loss(model(part), part[..., :16] * 0.5) / parts
            loss.backward()
            losses.append(loss.detach())
        if clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def result_of(model: nn.Module, losses: list[Tensor]) -> dict[str, Any]:
    return {
        "losses": torch.stack(losses),
        "weights": {n: whole(p) for n, p in model.named_parameters()},
        "state": fp8pass.state(model).state_dict(),
    }


def trained(
    divide: Callable[[Net, DeviceMesh], Net] | None = by_rows,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    clip: bool = True,
    parts: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Train a model by `train_step`; divide: None for one process."""
    options = {**OPTIONS, **options} if divide is not None else {**OPTIONS, **options, "reduce_amax": False}
    torch._dynamo.reset()  # all steps have the same code, which Dynamo would compile anew only a few times
    model = make(Net)
    if divide is not None:
        divide(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    run = fp8pass.train_step(**options)(
        step_of(model, list(model.parameters()), make_optimizer(model), clip, parts=parts)
    )
    found = result_of(model, [run(x) for x in data()])
    copies = weights_of(list(model.parameters()))
    found["requantized"] = [w.requantized - w.expected for w in copies]
    found["report"] = run.report
    return found


@on_ranks(2)
def alone() -> Any:
    return None if dist.get_rank() else trained(None)


@on_ranks(2)
def in_a_step() -> Any:
    """Train, and then do a step with a NaN among the rows of the last rank alone; return whether that changed a weight."""
    model = by_rows(make(Net), init_device_mesh("cpu", (2,)))
    run = fp8pass.train_step(**OPTIONS, skip_nonfinite=True)(
        step_of(model, list(model.parameters()), adam(model), clip=True)
    )
    found = result_of(model, [run(x) for x in data()])
    copies = weights_of(list(model.parameters()))
    x = data()[0].clone()
    x[:, -1, 0] = torch.nan if dist.get_rank() else 1.0
    run(x)
    unchanged = all(torch.equal(found["weights"][n], whole(p)) for n, p in model.named_parameters())
    copied = [(w.is_divided, w.requantized - w.expected) for w in copies]
    return found, str(run.report), copied, run.skipped, unchanged


@on_ranks(2)
def recorded() -> Tensor:
    """Return the largest amaxes of two ranks: of none, of a number, and of a NaN with its sign bit set."""
    mine = torch.tensor([[-1.0, 1.0, -1.0, 4.0], [-1.0, 2.0, 3.0, -math.nan]])[dist.get_rank()]
    return recorded_over(mine, dist.group.WORLD.group_name).clone()  # waits for the collective, as pickle does not


@on_ranks(2, variant=True)
def ways() -> Any:
    """Train in several ways; those with "off" in their name keep no FP8 copies of weights."""
    found: dict[str, Any] = {}
    for name, options in {
        "straight": {},
        "off": {"weight_cache": "off"},
        "microbatches": {"parts": 2},
        "microbatches, off": {"parts": 2, "weight_cache": "off"},
        "interval": {"reduce_amax_interval": 2},
        "interval, off": {"reduce_amax_interval": 2, "weight_cache": "off"},
        "early": {"clip": False, "update_in_backward": True, "update_bucket_bytes": 1},
        "late": {"clip": False},
    }.items():
        found[name] = trained(**options)
    return found


@on_ranks(2, variant=True)
def like_others() -> Any:
    """Train in steps and, on the first rank, in one process: dynamically, by Inductor, with microbatches, and with some
    plain parameters.
    """
    cases: list[dict[str, Any]] = [
        {"recipe": "dynamic"},
        {"lowering": "inductor"},
        {"parts": 2},
        {"divide": by_columns, "make_optimizer": sgd, "clip": False},
        {"divide": by_columns, "make_optimizer": lambda model: adam(model, foreach=False), "clip": False},
    ]
    found = []
    for case in cases:
        mine = trained(**case)
        found.append((mine, None if dist.get_rank() else trained(**{**case, "divide": None})))
    return found


@on_ranks(2, variant=True)
def in_a_loop() -> Any:
    """Train by `train_step`, and by torch.compile with an ordinary loop."""
    stepped = trained(make_optimizer=sgd, clip=False)
    model = by_rows(make(Net), init_device_mesh("cpu", (2,)))
    compiled = torch.compile(model, backend="fp8pass", options=OPTIONS)
    run = step_of(compiled, list(model.parameters()), sgd(model), clip=False)
    return stepped, result_of(model, [run(x) for x in data()])


@on_ranks(2, variant=True)
def in_8_bits() -> Any:
    """Train a wider model in bfloat16 with moments in FP8, in parts and, on the first rank, whole."""

    def trained_by(divide: bool) -> tuple[Tensor, str]:
        torch._dynamo.reset()
        model = make(functools.partial(Net, 64)).bfloat16()
        if divide:
            by_rows(model, init_device_mesh("cpu", (2,)))
        options = {**OPTIONS, "optimizer_state": "fp8", "update_rounding": "stochastic", "reduce_amax": divide}
        run = fp8pass.train_step(**options)(step_of(model, list(model.parameters()), adam(model), clip=False))
        return torch.stack([run(x.bfloat16()) for x in data(width=64)]), str(run.report)

    return trained_by(True), None if dist.get_rank() else trained_by(False)


@on_ranks(2, variant=True)
def resumed() -> Any:
    """Train half of the steps, load what was saved into another model, and train the others."""
    mesh = init_device_mesh("cpu", (2,))
    saved: Any = None
    losses = list[Tensor]()
    for half in (data()[:2], data()[2:]):
        model = by_rows(make(Net, seed=len(losses)), mesh)
        optimizer = adam(model)
        run = fp8pass.train_step(**OPTIONS)(step_of(model, list(model.parameters()), optimizer, clip=True))
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            fp8pass.state(model).load_state_dict(saved["fp8"])
        losses += [run(x) for x in half]
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved["fp8"] = fp8pass.state(model).state_dict()
    return result_of(model, losses)


class Layers(nn.Module):
    """Two equal blocks, which are compiled once, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(32, 64), Block(32, 64))
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x))
        return y


@on_ranks(2, variant=True)
def compiled_once() -> Any:
    found = []
    for once in (True, False):
        model, mesh = make(Layers), init_device_mesh("cpu", (2,))
        rows = (Shard(1),)
        begin = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=rows, use_local_output=True)
        parallelize_module(model.blocks, mesh, begin)
        parallelize_module(model, mesh, {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
        for block in model.blocks:
            plan: dict[str, Any] = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, plan)
        run = fp8pass.train_step(**OPTIONS, compile_once=once)(
            step_of(model, list(model.parameters()), adam(model), clip=True)
        )
        found.append((result_of(model, [run(x) for x in data()]), run.report.notes))
    return found


@on_ranks(4, variant=True)
def on_two_dimensions() -> Any:
    """Train on a mesh of two dimensions, each row of which has half of a batch; and, on rank 0, with two microbatches."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found: list[Any] = []
    for in_fp8 in (False, True):
        model = by_rows(make(Net), both["tensor"])
        if in_fp8:
            fp8pass.fsdp.enable_fp8_all_gather(model, filter=["head"])
        for part in (model.block, model):
            fully_shard(part, mesh=both["data"])
        run = fp8pass.train_step(**OPTIONS, skip_nonfinite=True)(
            step_of(model, list(model.parameters()), adam(model), clip=True)
        )
        losses = torch.stack([run(x.chunk(2)[both.get_local_rank("data")]) for x in data()])
        dist.all_reduce(losses)
        found.append((result_of(model, list(losses / 4)), len(run.report.rewritten)))
    return *found, None if dist.get_rank() else trained(None, parts=2)


def same(first: Any, second: Any) -> None:
    """Check that weights and FP8 state are the same to the bit."""
    for key in ("weights", "state"):
        mine, theirs = first[key], second[key]
        assert mine.keys() == theirs.keys() and mine
        assert [n for n, x in mine.items() if isinstance(x, Tensor) and not torch.equal(x, theirs[n])] == []


def like(mine: Any, reference: Any) -> None:
    """Check up to float32's rounding of sums in another order, which changes no FP8 value here."""
    torch.testing.assert_close(mine["losses"], reference["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(mine["weights"], reference["weights"], rtol=0, atol=1e-5)
    torch.testing.assert_close(mine["state"], reference["state"], rtol=1e-4, atol=1e-30)


def test_a_step_is_like_that_of_one_process() -> None:
    """All matmuls and gathers are in FP8, and updates write the copies of all weights but in the first step."""
    runs, reference = in_a_step(), alone()[0]
    for found, report, copies, skipped, unchanged in runs:
        same(found, runs[0][0])
        like(found, reference)
        assert copies == [(True, 0)] * 3
        assert "9 of 9 matmuls in FP8" in report and "3 collectives send FP8" in report
        assert report.count("block.up") == 3 and "module_calls.py" not in report
        assert skipped == 1 and unchanged
    assert reference["losses"][-1] < reference["losses"][0]


def test_the_largest_amaxes_of_ranks() -> None:
    for largest in recorded():
        torch.testing.assert_close(largest, torch.tensor([-1.0, 2.0, 3.0, math.nan]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.variant
def test_copies_change_no_number() -> None:
    for found in ways():
        same(found["straight"], found["off"])
        same(found["microbatches"], found["microbatches, off"])
        same(found["interval"], found["interval, off"])
        same(found["early"], found["late"])
        for name in ("straight", "microbatches", "early", "late"):
            assert found[name]["requantized"] == [0, 0, 0], name
        assert found["interval"]["requantized"] == [3, 3, 3]
        assert "because ranks share amaxes only once in several steps" in str(found["interval"]["report"])


@pytest.mark.variant
def test_other_steps_are_like_those_of_one_process() -> None:
    (first, second) = like_others()
    for (mine, reference), (theirs, _) in zip(first, second, strict=True):
        like(mine, reference)
        like(theirs, reference)


@pytest.mark.variant
def test_a_step_has_the_numbers_of_a_compiled_model_in_a_loop() -> None:
    for stepped, looped in in_a_loop():
        same(stepped, looped)


@pytest.mark.variant
def test_moments_in_fp8_and_parameters_in_bfloat16() -> None:
    """bfloat16 rounds the losses to 8 bits; the parts of a moment have scales of their own."""
    runs = in_8_bits()
    reference, _ = runs[0][1]
    for (losses, report), _ in runs:
        assert "4 moments of optimizers are in FP8" in report
        torch.testing.assert_close(losses, reference, rtol=2**-6, atol=0)
        assert losses[-1] < losses[0]


@pytest.mark.variant
def test_a_step_resumes_bit_for_bit() -> None:
    for found, run in zip(resumed(), in_a_step(), strict=True):
        assert torch.equal(found["losses"], run[0]["losses"])
        same(found, run[0])


@pytest.mark.variant
def test_layers_that_are_compiled_once_gather_in_fp8() -> None:
    for (once, notes), (each, others) in compiled_once():
        same(once, each)
        (gathers,) = [note for note in notes if "collectives send FP8" in note]
        assert gathers.startswith("5 collectives send FP8") and gathers in others


@pytest.mark.variant
def test_on_two_dimensions_rows_of_ranks_are_like_microbatches() -> None:
    runs = on_two_dimensions()
    reference = runs[0][2]
    for (plain, matmuls), (in_fp8, _), _ in runs:
        assert matmuls == 9
        same(plain, runs[0][0][0])
        torch.testing.assert_close(plain["losses"], reference["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(plain["weights"], reference["weights"], rtol=0, atol=1e-5)
        torch.testing.assert_close(in_fp8["losses"], reference["losses"], rtol=1e-2, atol=0)
