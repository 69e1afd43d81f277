"""Test moments in FP8 and stochastic rounding of parameters that FSDP2 shards, against one process and from checkpoints.

Gradients are given, and equal on all ranks, so that one process computes the same update. One parameter has rows that
two ranks can't share evenly, the other a single row. Neither part of the first has as many elements as `MIN_ELEMENTS`.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import fp8pass
from fp8pass.fsdp import enable_fp8_all_gather
from fp8pass.quant.moments import Fp8Moment, Moments, moment_of
from fp8pass.quant.sharded import part_of
from fp8pass.weights.update_count import KEY
from tests.helpers.harness import BF16, F32
from tests.helpers.models import Block, make
from tests.helpers.torchrun import COMPILES_FSDP_IN_A_STEP, collectives, on_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not COMPILES_FSDP_IN_A_STEP, reason="torch 2.11 itself fails: docs/versions.md"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # when one process loads
]
SHAPES = {"odd": (65, 64), "few": (1, 4096)}
BAD = 2
"""The step whose gradient is infinite, in the last rank's part alone."""
BLOCKS = Moments(block=64)
BOTH: dict[str, Any] = {"update_rounding": "stochastic", "optimizer_state": BLOCKS}
ALL: dict[str, Any] = {**BOTH, "skip_nonfinite": True}
FOLDER = "FP8PASS_TEST_SHARDED_UPDATES"
"""The environment variable that says where ranks write their checkpoints."""
os.environ.setdefault(FOLDER, tempfile.mkdtemp())


class Products(nn.Module):
    """A model whose parameters have its inputs as gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 1.0, dtype=dtype)))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([(p * grads[name]).sum() for name, p in self.named_parameters()]).sum()


def gradients(i: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of step i. In the second one, all rows but the first are 0, so one rank's part has none."""
    generator = torch.Generator().manual_seed(i)
    found = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    if i == 1:
        return {name: torch.cat([x[:1], torch.zeros_like(x[1:])]) for name, x in found.items()}
    if i == BAD:
        found["odd"][-1, -1] = math.inf
    return found


class Run:
    """`Products` in training, on all ranks together or in each process alone."""

    def __init__(self, dtype: torch.dtype, shard: bool, policies: Any = None, **config: Any) -> None:
        self.dtype = dtype
        self.model = Products(dtype)
        if shard:
            fully_shard(self.model, **(policies or {}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2.0**-8, foreach=dtype == BF16)

        @fp8pass.train_step(**{"lowering": "eager", "recipe": None, **config})
        def step(grads: dict[str, Tensor]) -> None:
            self.model(grads).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.step = step

    def go_on(self, *steps: int) -> dict[str, Tensor]:
        """Do these steps; return all parameters and moments, whole."""
        for i in steps:
            self.step(gradients(i, self.dtype))
        return self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        names = [n for n, _ in self.model.named_parameters()]
        found = {n: whole(p) for n, p in self.model.named_parameters()}
        for i, state in self.optimizer.state_dict()["state"].items():
            assert not any(moment_of(x) for x in state.values() if isinstance(x, Tensor))
            found |= {f"{names[i]}.{key}": whole(x) for key, x in state.items()}
        return found

    def in_fp8(self) -> list[str]:
        """Return the names of the moments that this rank stores in FP8."""
        of = {n: self.optimizer.state[p] for n, p in self.model.named_parameters()}
        return [f"{n}.{key}" for n, state in of.items() for key, x in state.items() if moment_of(x) is not None]

    def count(self) -> int:
        """Return the number of updates in the optimizer's state dict."""
        return int(self.optimizer.state_dict()["param_groups"][0][KEY])

    def save(self, name: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=Path(os.environ[FOLDER]) / name)

    def load(self, name: str) -> None:
        self.optimizer.param_groups[0].setdefault(KEY, 0)  # DCP loads what has a place in the state dict
        model, optimizer = get_state_dict(self.model, self.optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=Path(os.environ[FOLDER]) / name)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def whole(x: Tensor) -> Tensor:
    detached: Any = x.detach()
    return detached.full_tensor() if isinstance(x, DTensor) else detached.clone()  # type: ignore[no-any-return]


def like_alone(dtype: torch.dtype, policies: Any = None, **config: Any) -> Any:
    """Return the names of the moments in FP8, and the tensors after three steps, of all ranks together and of one."""
    run, alone = Run(dtype, True, policies, **config), Run(dtype, False, **config)
    found = run.go_on(0, 1, 3), alone.go_on(0, 1, 3)
    return run.in_fp8(), *found


@functools.cache
def alone() -> Run:
    """Return a run of this process, after three steps of which one is skipped."""
    torch._dynamo.reset()
    run = Run(BF16, False, **ALL)
    run.go_on(0, 1, BAD)
    return run


@on_ranks(2)
def rounded() -> Any:
    """Train with all options, and save; go on, and also from the checkpoint; return the tensors at each point."""
    run = Run(BF16, True, **ALL)
    together = run.go_on(0, 1, BAD)
    run.save("rounded")
    before = collectives()
    wanted = run.go_on(3)
    count = collectives() - before
    found = {
        "tensors": together,
        "in FP8": run.in_fp8(),
        "skipped": run.step.skipped,
        "collectives": count,
        "bytes": run.step.bytes_per_parameter().steady,
        "report": str(run.step.report),
    }
    run.load("rounded")
    return {**found, "loaded": run.tensors(), "resumed": (wanted, run.go_on(3)), "count": run.count()}


@on_ranks(2)
def what_other_code_sees() -> Any:
    """Return how a moment behaves: its type, a sum, the whole, its copy, what `zero_` leaves, and the error of `mul_`."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(1.0, 6.0).repeat_interleave(2).view(5, 2)
    divided: Any = torch.distributed.tensor.distribute_tensor(x, mesh, [Shard(0)])
    moment = Fp8Moment.of(Moments().format("first", divided), divided.to_local())
    made = DTensor.from_local(moment, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())
    added: Any = made + 0
    found = [type(made.to_local()).__name__, added.full_tensor(), made.full_tensor()]
    copied = copy.deepcopy(made)
    found.append(type(copied._local_tensor).__name__)
    made.zero_()
    found += [made.full_tensor(), copied.full_tensor()]
    with pytest.raises(fp8pass.Fp8Error) as error:
        made.mul_(2)
    return [*found, str(error.value)]


# ---------------------------------------------------------------------------------------------------------------------
# Variants


@on_ranks(2, variant=True)
def losses() -> Any:
    """Train with scales for tensors and clipping; return the losses of all ranks together, and of one process."""
    found = []
    for shard in (True, False):
        model = make(functools.partial(Block, 64, 128))
        if shard:
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

        @fp8pass.train_step(lowering="eager", optimizer_state="fp8", min_speedup=0)
        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), x * 0.5)  # noqa: B023
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # noqa: B023
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        batches = torch.randn(20, 32, 64, generator=torch.Generator().manual_seed(1))
        mine = [x.chunk(2)[dist.get_rank()] if shard else x for x in batches]
        of = torch.stack([step(x) for x in mine])
        if shard:
            dist.all_reduce(of)
            of /= 2
        stored = [moment_of(x) for state in optimizer.state.values() for x in state.values()]
        found.append((of, sum(m is not None for m in stored), len(step.report.rewritten)))
    return found


@on_ranks(2, variant=True)
def resumed() -> Any:
    """Return the tensors of a new run that loads the checkpoint of `rounded`, and those after its next step."""
    run = Run(BF16, True, **ALL)
    run.load("rounded")
    return run.tensors(), run.go_on(3)


@on_ranks(2, variant=True)
def from_a_state_dict() -> Any:
    """Return the tensors after five steps of one run, and of one that loads its state dicts after three."""
    run, other = Run(F32, True, optimizer_state="fp8"), Run(F32, True, optimizer_state="fp8")
    run.go_on(0, 1, 3)
    states = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
    wanted = run.go_on(4, 5)
    other.model.load_state_dict(states[0])
    other.optimizer.load_state_dict(states[1])
    return wanted, other.go_on(4, 5)


@on_ranks(2, variant=True)
def in_float32() -> Any:
    return like_alone(F32, optimizer_state=Moments(block=64, expand=True, second="e4m3"))


@on_ranks(2, variant=True)
def through_inductor() -> Any:
    return like_alone(BF16, lowering="inductor", **BOTH)


@on_ranks(2, variant=True)
def offloaded() -> Any:
    return like_alone(BF16, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, **BOTH)


@on_ranks(2, variant=True)
def in_the_backward() -> Any:
    return like_alone(BF16, update_in_backward=True, update_bucket_bytes=1, **BOTH)


@on_ranks(2, variant=True)
def gathered_in_fp8() -> Any:
    """Return the losses of bfloat16 layers whose weights are gathered in FP8 or not, with the number of FP8 moments."""
    found = []
    for fp8 in (True, False):
        model = make(functools.partial(Block, 64, 128)).to(BF16)
        if fp8:
            enable_fp8_all_gather(model)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

        @fp8pass.train_step(lowering="eager", min_speedup=0, **BOTH)
        def step(x: Tensor) -> Tensor:
            loss = F.mse_loss(model(x).float(), x.float() * 0.5)  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        batches = torch.randn(6, 32, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
        of = torch.stack([step(x) for x in batches])
        stored = [moment_of(x) for state in optimizer.state.values() for x in state.values()]
        found.append((of, sum(m is not None for m in stored), type(part_of(model.up.weight)).__name__))
    return found


@on_ranks(2, variant=True)
def in_float16() -> Any:
    """Scales are those of parts, so numbers are not those of one process."""
    run = Run(F32, True, optimizer_state="fp8+float16")
    tensors = run.go_on(0, 1, 3)
    return run.in_fp8(), tensors


@on_ranks(4, variant=True)
def in_two_dimensions() -> Any:
    """Replicate over one dimension of the mesh, and shard over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return like_alone(BF16, {"mesh": mesh}, **BOTH)


# ---------------------------------------------------------------------------------------------------------------------
# Tests


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys() and first
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def stored_on(rank: int) -> list[str]:
    """The second rank has no part of the single row."""
    return [f"{n}.{key}" for n in SHAPES if rank == 0 or n != "few" for key in ("exp_avg", "exp_avg_sq")]


def test_two_ranks_compute_the_update_of_one() -> None:
    """Bits are those of the element's index in the whole tensor, and blocks divide the parts."""
    for rank, run in enumerate(rounded()):
        same(run["tensors"], alone().tensors())
        assert len(run["tensors"]) == len(SHAPES) * (1 + 3)
        assert run["in FP8"] == stored_on(rank) and alone().in_fp8() == stored_on(0)


def test_all_ranks_skip_a_step_that_one_can_not_do() -> None:
    assert [run["skipped"] for run in rounded()] == [1, 1] and alone().step.skipped == 1


def test_resumes_bit_for_bit_on_as_many_ranks() -> None:
    for run in rounded():
        same(run["loaded"], run["tensors"])
        same(*run["resumed"])
        assert run["count"] == 3  # the skipped step is none


@pytest.mark.variant
def test_a_new_run_resumes_bit_for_bit() -> None:
    for first, (loaded, later) in zip(rounded(), resumed(), strict=True):
        same(loaded, first["tensors"])
        same(later, first["resumed"][0])


def test_ranks_call_as_many_collectives() -> None:
    """One of them has no part of a parameter, and so another update."""
    first, second = rounded()
    assert first["collectives"] == second["collectives"] > 0


def test_one_process_loads_what_two_ranks_have_saved() -> None:
    """The checkpoint has plain tensors of the stored values."""
    first, _ = rounded()
    run = Run(BF16, False, **ALL)
    run.load("rounded")
    same(run.tensors(), first["tensors"])


@pytest.mark.variant
def test_one_process_goes_on_from_two_ranks() -> None:
    """FP8 stores the loaded values again without an error."""
    first, _ = rounded()
    run = Run(BF16, False, **ALL)
    run.load("rounded")
    same(run.go_on(3), first["resumed"][0])


def test_bytes_are_those_of_the_parts() -> None:
    for n, run in zip((33 * 64 + 4096, 32 * 64), rounded(), strict=True):
        assert run["bytes"]["exp_avg"] == run["bytes"]["exp_avg_sq"] == n
        assert f"{len(run['in FP8'])} moments of optimizers are in FP8" in run["report"]


@pytest.mark.variant
def test_losses_are_near_those_of_one_process() -> None:
    """Each rank's part of a moment has its own scale, a power of two that may differ from that of the whole, so stored
    moments differ by up to their last bit, 6% of a first moment. In the mean over elements this is small.
    """
    runs = losses()
    for (together, in_fp8, matmuls), (of_one, as_many, same_matmuls) in runs:
        assert torch.equal(together, runs[0][0][0])
        assert in_fp8 == as_many == 4 and matmuls == same_matmuls > 0
        torch.testing.assert_close(together[:2], of_one[:2], rtol=1e-3, atol=0)
        torch.testing.assert_close(together, of_one, rtol=1e-2, atol=0)
        assert together[-1] < 0.8 * together[0]


@pytest.mark.variant
def test_resumes_bit_for_bit_from_state_dicts() -> None:
    for wanted, found in from_a_state_dict():
        same(wanted, found)


def test_other_code_reads_a_divided_moment_as_its_values() -> None:
    x = torch.arange(1.0, 6.0).repeat_interleave(2).view(5, 2)  # which e4m3 holds
    for kind, plus_0, all_of_it, copied, zeros, of_copy, error in what_other_code_sees():
        assert kind == copied == "Fp8Moment"
        assert torch.equal(plus_0, x) and torch.equal(all_of_it, x) and torch.equal(of_copy, x)
        assert torch.equal(zeros, torch.zeros(5, 2))
        assert "let train_step compile it" in error


@pytest.mark.variant
@pytest.mark.parametrize("how", [in_float32, through_inductor, offloaded, in_the_backward, in_two_dimensions])
def test_other_ways_compute_the_update_of_one(how: Any) -> None:
    for rank, (in_fp8, together, alone) in enumerate(how()):
        same(together, alone)
        assert in_fp8 == stored_on(rank % 2)


@pytest.mark.variant
def test_weights_may_be_gathered_in_fp8() -> None:
    """Each rank trains on the same batch. Weights in e4m3 differ by up to 6%, the recipe's copies as well."""
    for (fp8, stored, shard), (plain, as_many, _) in gathered_in_fp8():
        assert shard == "Fp8Shard" and stored == as_many == 4
        torch.testing.assert_close(fp8, plain, rtol=2e-2, atol=0)
        assert fp8[-1] < fp8[0]


@pytest.mark.variant
def test_moments_in_float16() -> None:
    for rank, (in_fp8, tensors) in enumerate(in_float16()):
        assert in_fp8 == stored_on(rank) and all(x.isfinite().all() for x in tensors.values())
