"""Test gradients that ranks send in FP8: against float64 sums with the stated bound, and in training."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8pass
from fp8pass import ddp
from fp8pass.fsdp import enable_fp8_all_gather, enable_fp8_reduce_scatter
from fp8pass.quant.wire import GradientExchange, GradientFormat, groups_of
from tests.helpers.models import Block, Transformer, make
from tests.helpers.torchrun import COMPILES_FSDP_IN_A_STEP, collectives, on_ranks

pytestmark = pytest.mark.ranks

SCALES = ("own", "common", "delayed")
ULP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}
FLOOR = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
"""Half of the least number of each format."""
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
COUNT, BLOCK = 1000, 64
"""Gradients of a part, which are not a multiple of the block."""


GROWTH = (1.0, 1.0, 32.0)
"""The size of gradients in each step."""


def gradients(step: int, ranks: int, rank: int) -> Tensor:
    """Return the gradients f32[ranks, COUNT] of a rank, over many orders of magnitude, some of them 0."""
    exponents = 20 * torch.randn(COUNT, generator=torch.Generator().manual_seed(0)) - 20
    x = 1 - torch.rand(ranks, COUNT, generator=torch.Generator().manual_seed(100 * step + rank)) / 2
    x = torch.where(torch.arange(COUNT) % 3 == rank % 3, -x, x) * torch.exp2(exponents)
    x[:, :BLOCK] = 0
    return x * GROWTH[step]


def _everybody(x: Tensor) -> Tensor:
    """Return what all ranks have, one after the other."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return torch.stack(found)


def _summed_everywhere(node: int | None = None) -> Any:
    """Return {(dtype, scale): (means that this rank got, mean parts before the gather, messages)} of three steps."""
    groups = groups_of(dist.group.WORLD, node, torch.device("cpu"))  # type: ignore[arg-type]
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), {}
    for dtype in ULP:
        for scale in SCALES:
            exchange, again = (GradientExchange(GradientFormat(dtype, scale, BLOCK, node=node)) for _ in range(2))
            results = []
            for step in range(3):
                x = gradients(step, ranks, rank)
                before = collectives()
                part = exchange.reduce_scatter(x, groups, "a") / ranks
                whole = exchange.all_gather(part, groups)
                sent = collectives() - before
                repeated = again.all_gather(again.reduce_scatter(x, groups, "a") / ranks, groups)
                results.append((whole, _everybody(part), torch.equal(whole, repeated), sent))
            found[dtype, scale] = results, exchange.grown()
    return found


@on_ranks(2)
def summed_by_two() -> Any:
    return _summed_everywhere()


@on_ranks(4)
def summed_by_four() -> Any:
    return _summed_everywhere()


@on_ranks(4)
def summed_by_two_nodes() -> Any:
    return _summed_everywhere(node=2)


def floor_of(x: Tensor, dtype: str, scale: str) -> Tensor:
    """Return half of the least number of the format for each gradient of x f64[P, COUNT], by scales of 2**k."""
    if scale == "own":
        padded = F.pad(x, (0, -COUNT % BLOCK)).view(len(x), -1, BLOCK)
        amax = padded.abs().amax(2, keepdim=True).expand_as(padded).reshape(len(x), -1)[:, :COUNT]
    else:
        amax = x.abs().amax().expand_as(x)
    return torch.where(amax > 0, FLOOR[dtype] / torch.exp2(torch.floor(torch.log2(MAX[dtype] / amax))), 0)


@pytest.mark.parametrize("how", [summed_by_two, summed_by_four], ids=lambda f: f.name)
def test_the_error_is_within_its_bound(how: Any) -> None:
    runs = how()
    ranks, worst = len(runs), 0.0
    for (dtype, scale), (results, _) in runs[0].items():
        for step, (whole, parts, _, _) in enumerate(results):
            exact = torch.stack([gradients(step, ranks, rank).double() for rank in range(ranks)])
            of_all = exact.abs().amax().expand_as(exact[0])[:1]  # scales that ranks share are those of the largest amax
            contributions = torch.zeros_like(exact[0])
            for x in exact:
                floor = floor_of(x if scale == "own" else torch.cat([x, of_all]), dtype, scale)[:ranks]
                # a delayed scale is lowered by a power of two, and gradients may have become four times as large
                floor = floor * 2 if scale == "delayed" else floor
                contributions += torch.maximum(ULP[dtype] * x.abs(), floor) / ranks
            mean, rounding = exact.mean(0), ranks * 2.0**-23 * exact.abs().sum(0)
            assert ((parts.double() - mean).abs() <= contributions + rounding).all(), (dtype, scale, step)
            own = "own" if scale == "own" else scale
            by_part = [floor_of(p.double().unsqueeze(0), dtype, own) for p in parts]
            last = torch.maximum(ULP[dtype] * parts.double().abs(), torch.cat(by_part))
            assert ((whole.double() - parts.double()).abs() <= last).all(), (dtype, scale, step)
            bound = (1 + ULP[dtype]) * contributions + torch.maximum(ULP[dtype] * mean.abs(), torch.cat(by_part))
            error = (whole.double() - mean).abs()
            assert (error <= bound + rounding).all(), (dtype, scale, step)
            worst = max(worst, (error / bound.clamp(min=1e-300)).max().item())
    assert worst > 0.5  # a bound that is far from what happens would say little


def test_between_nodes_the_error_is_that_of_one_more_rounding() -> None:
    runs = summed_by_two_nodes()
    for (dtype, scale), (results, _) in runs[0].items():
        if scale == "own":
            for step, (whole, *_) in enumerate(results):
                exact = torch.stack([gradients(step, 4, rank).double() for rank in range(4)])
                u = ULP[dtype]
                floors = torch.stack([floor_of(x, dtype, "own") for x in exact])
                # the blocks of the sums of two nodes and of their mean are others: with the largest floor of all
                later = 2 * 2 * floors.amax() + 4 * floors.amax()
                bound = ((1 + u) ** 3 - 1) * exact.abs().sum(0) / 4 + (1 + u) ** 2 * (floors.sum(0) + later) / 4
                error = (whole.double() - exact.mean(0)).abs()
                assert (error <= bound).all()
                size = exact.abs().mean(0)
                large = size > 1e3 * floors.amax()
                assert large.any() and (error[large] / size[large]).mean() < u


@pytest.mark.parametrize("how", [summed_by_two, summed_by_four, summed_by_two_nodes], ids=lambda f: f.name)
def test_all_ranks_have_the_same_bits_again_and_again(how: Any) -> None:
    first, *others = how()
    for other in others:
        for key, (results, _) in first.items():
            for mine, its in zip(results, other[key][0], strict=True):
                assert torch.equal(mine[0], its[0]) and mine[2] and its[2], key


def test_collectives_are_those_of_the_scales() -> None:
    for found in summed_by_two():
        for (_, scale), (results, grown) in found.items():
            assert [sent for *_, sent in results] == [2 + (scale != "own")] * 3
            assert grown == (1 if scale == "delayed" else 0)


@on_ranks(2)
def nonfinite() -> Any:
    """Return the sums when rank 1 has an infinity or a NaN, and those of the step after."""
    found, groups = {}, groups_of(dist.group.WORLD, None, torch.device("cpu"))  # type: ignore[arg-type]
    for dtype in ULP:
        for scale in SCALES:
            for value in (float("inf"), -float("inf"), float("nan")):
                exchange, results = GradientExchange(GradientFormat(dtype, scale, BLOCK)), []
                for step in range(3):
                    x = torch.ones(2, COUNT)
                    if step == 1 and dist.get_rank() == 1:
                        x[0, 3] = value
                    results.append(exchange.all_gather(exchange.reduce_scatter(x, groups), groups))
                found[dtype, scale, value] = results
    return found


def test_what_is_not_finite_reaches_all_ranks_and_passes() -> None:
    for found in nonfinite():
        for (_, scale, _), (before, bad, after) in found.items():
            assert torch.equal(before, torch.full_like(before, 2)) and torch.equal(after, before)
            assert bad[0, 3].isnan()
            # "own": the block of part 0; else a scale of a whole rank
            finite = ~bad.isnan()
            assert finite[1].all() == (scale == "own") and finite[0, BLOCK:].all() == (scale == "own")
            assert (bad[finite] == 2).all()


def batches(steps: int = 5) -> list[Tensor]:
    return list(torch.randn(steps, 4, 8, 32, generator=torch.Generator().manual_seed(1)))


def part(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def trained(model: nn.Module, forward: Callable[..., Any]) -> dict[str, Any]:
    """Train; return the mean losses of all ranks, and the weights on all ranks."""
    update = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x in batches():
        loss = F.mse_loss(forward(part(x)).float(), part(x) * 0.5)
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.detach())
    mean = _everybody(torch.stack(losses)).mean(0)
    weights = torch.cat([w.flatten() for p in model.parameters() for w in [getattr(p, "full_tensor", p.detach)()]])
    return {"losses": mean, "weights": _everybody(weights.detach())}


def _with_ddp(**options: Any) -> dict[str, Any]:
    model = make(lambda: Transformer(layers=2))
    # torch's default for the first bucket is larger than this model
    with mock.patch("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", 1000):
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.03)
        if options:
            ddp.fp8_gradients(parallel, **options)
        return trained(model, parallel)


@on_ranks(2)
def under_ddp() -> Any:
    return {"": _with_ddp()} | {scale: _with_ddp(scale=scale) for scale in SCALES}


@on_ranks(4)
def under_ddp_of_four() -> Any:
    return {"": _with_ddp(), "own": _with_ddp(scale="own"), "nodes": _with_ddp(scale="own", node=2)}


def _with_fsdp(scale: str = "", weights: bool = False, node: int | None = None, **policy: Any) -> dict[str, Any]:
    model = make(lambda: Transformer(layers=2))
    if weights:
        enable_fp8_all_gather(model)
    for layer in model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    if scale:
        assert enable_fp8_reduce_scatter(model, scale=scale, node=node) == ["", "layers.0", "layers.1"]
    return trained(model, model)


@on_ranks(2)
def under_fsdp() -> Any:
    """Return the trainings with each choice of scales, with FP8 weights, in float16, offloaded."""
    return {
        **{scale: _with_fsdp(scale) for scale in ("", "own", "common")},
        "weights, too": _with_fsdp("delayed", weights=True),
        "float16": _with_fsdp("own", mp_policy=MixedPrecisionPolicy(torch.float16)),
        "offloaded": _with_fsdp("own", offload_policy=CPUOffloadPolicy(pin_memory=False)),
    }


@on_ranks(4)
def replicated_shards() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    nodes = {"own": _with_fsdp("own", node=2), "delayed": _with_fsdp("delayed", node=2)}
    return {"": _with_fsdp(mesh=mesh), "replicated": _with_fsdp("own", mesh=mesh), **nodes}


@pytest.mark.parametrize(
    "how", [under_ddp, under_ddp_of_four, under_fsdp, replicated_shards], ids=lambda f: f.name.rpartition(".")[2]
)
def test_training_is_like_that_with_gradients_in_float32(how: Any) -> None:
    runs = how()[0]
    plain = runs.pop("")
    for name, run in runs.items():
        torch.testing.assert_close(run["losses"], plain["losses"], rtol=0.02, atol=0)
        assert run["losses"][-1] < 0.95 * run["losses"][0], name
        assert not torch.equal(run["weights"][0], plain["weights"][0])  # FP8 was there
        for weights in run["weights"]:
            assert torch.equal(weights, run["weights"][0]), name


def test_offloaded_gradients_are_the_same() -> None:
    for runs in under_fsdp():
        assert torch.equal(runs["offloaded"]["weights"], runs["own"]["weights"])


@on_ranks(2)
def while_the_backward_goes_on() -> Any:
    """Hold back the exchange of the first bucket until the backward has reached the first layer."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.005, gradient_as_bucket_view=True)
    ddp.fp8_gradients(parallel)
    reached, waited = threading.Event(), []
    exchange = ddp._Hook._exchange

    def late(self: Any, *args: Any) -> None:
        waited.append(reached.wait(20))
        exchange(self, *args)

    ddp._Hook._exchange = late  # type: ignore[assignment,method-assign]
    try:
        for _ in range(2):  # DDP makes its buckets anew after the first backward
            reached.clear()
            x = part(batches()[0]).requires_grad_()
            x.register_hook(lambda _: reached.set())
            parallel(x).square().mean().backward()
    finally:
        ddp._Hook._exchange = exchange  # type: ignore[method-assign]
    return waited, _everybody(torch.cat([p.grad.flatten() for p in model.parameters()]))


def test_the_backward_goes_on_while_a_bucket_is_exchanged() -> None:
    for waited, gradients in while_the_backward_goes_on():
        assert len(waited) > 4 and all(waited)
        assert torch.equal(gradients[0], gradients[1]) and gradients.abs().amax() > 0


@on_ranks(2)
def in_a_train_step() -> Any:
    """Rank 1 has an infinite input in the third step; return the losses and weights after each step."""
    model = make(Block)
    parallel = DistributedDataParallel(model)
    ddp.fp8_gradients(parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    @fp8pass.train_step(lowering="eager", skip_nonfinite=True)
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(parallel(x), x * 0.5)
        loss.backward()
        optimizer.step()
        return loss.detach()

    weights = []
    for i, x in enumerate(batches()):
        x = part(x).clone()
        if i == 2 and dist.get_rank() == 1:
            x[0, 0, 0] = float("inf")
        step(x)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.stack(weights)


def test_a_train_step_skips_what_is_not_finite_on_one_rank() -> None:
    first, second = in_a_train_step()
    assert torch.equal(first, second) and first.isfinite().all()
    assert [torch.equal(a, b) for a, b in itertools.pairwise(first)] == [False, True, False, False]


@on_ranks(2)
def with_a_loss_scaler() -> Any:
    model = nn.Linear(32, 32)
    parallel = DistributedDataParallel(model)
    ddp.fp8_gradients(parallel)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), lr=0.05)
    scales = []
    for i in range(2):
        loss = parallel(part(batches()[0])).square().mean()
        scaler.scale(loss * (float("inf") if i == 0 and dist.get_rank() else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def test_a_loss_scaler_sees_infinities_of_other_ranks() -> None:
    assert with_a_loss_scaler() == [[2.0, 2.0]] * 2


@on_ranks(2, variant=True)
def sharded_in_a_train_step() -> Any:
    if not COMPILES_FSDP_IN_A_STEP:
        return None
    found = []
    for fp8 in (False, True):
        model = make(Block)
        enable_fp8_all_gather(model)
        fully_shard(model)
        if fp8:
            enable_fp8_reduce_scatter(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        @fp8pass.train_step(lowering="eager")
        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x * 0.5)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = torch.stack([step(part(x)) for x in batches()])
        found.append(_everybody(losses).mean(0))
    return found


@pytest.mark.variant
@pytest.mark.skipif(
    not COMPILES_FSDP_IN_A_STEP, reason="torch 2.11 itself fails, also with aot_eager: docs/versions.md"
)
def test_a_train_step_trains_a_sharded_model() -> None:
    for plain, fp8 in sharded_in_a_train_step():
        torch.testing.assert_close(fp8, plain, rtol=0.02, atol=0)
        assert not torch.equal(fp8[1:], plain[1:]) and fp8[2] < fp8[0]


@on_ranks(2)
def refused() -> list[str]:
    errors = []
    with pytest.raises(TypeError) as error:
        ddp.fp8_gradients(nn.Linear(2, 2))  # type: ignore[arg-type]
    errors.append(str(error.value))
    sparse = DistributedDataParallel(nn.Embedding(8, 4, sparse=True))
    ddp.fp8_gradients(sparse)
    with pytest.raises(fp8pass.Fp8Error) as refusal:
        sparse(torch.tensor([1])).sum().backward()
    errors.append(str(refusal.value))
    model = fully_shard(nn.Linear(8, 8))
    enable_fp8_reduce_scatter(model)
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(fp8pass.Fp8Error) as refusal:
        model(torch.ones(2, 8)).sum().backward()
    return [*errors, str(refusal.value)]


def test_unsupported_uses_are_refused() -> None:
    for wrapped, sparse, divided in refused():
        assert wrapped == "fp8_gradients() takes a DistributedDataParallel, not Linear: wrap it first"
        assert sparse == "fp8_gradients: a gradient is sparse, and FP8 is for dense ones: use sparse=False"
        assert divided.startswith("enable_fp8_reduce_scatter computes sums and means: after set_gradient_divide_factor")


def test_invalid_options_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        fp8pass.Fp8Error, match="no module is sharded: call enable_fp8_reduce_scatter after fully_shard"
    ):
        enable_fp8_reduce_scatter(model)
    with pytest.raises(TypeError, match="takes a module, not int"):
        enable_fp8_reduce_scatter(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown scale 'mine': choose one of 'own', 'common', 'delayed'"):
        enable_fp8_reduce_scatter(model, scale="mine")
    with pytest.raises(ValueError, match="block=8: a number of gradients that share a scale, 16 or more"):
        enable_fp8_reduce_scatter(model, block=8)


def test_bytes_of_a_message() -> None:
    assert GradientFormat().part(5000) == (5120, 5) and GradientFormat().message(5000) == 5120 + 4 * 5
    assert GradientFormat(scale="common").message(5000) == 5120 + 4
    assert GradientFormat().part(100) == (112, 1)  # few gradients share one scale, with little padding
