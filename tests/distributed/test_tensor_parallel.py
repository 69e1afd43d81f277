"""Test tensor and sequence parallel through DTensor, alone and with FSDP2: numbers and collectives."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, broadcast
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base.scaling import E4M3
from fp8pass.compiler.kernel_passes import KernelPasses
from fp8pass.quant.ops import Delayed, Dynamic
from fp8pass.recipes import DelayedScaling, DynamicScaling
from tests.helpers.harness import verdicts
from tests.helpers.models import Block, make
from tests.helpers.torchrun import on_ranks

pytestmark = pytest.mark.ranks

RECIPE = DelayedScaling(amax_history_len=4)
OPTIONS: dict[str, Any] = {"recipe": RECIPE, "lowering": "eager", "strict": True}
STEPS = 4


class Model(nn.Module):
    """A block whose layers are divided, between two that each rank has whole."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(32, 32), Block(32, 64), nn.Linear(32, 16)
        self.block.down = nn.Linear(64, 32, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.block(self.first(x)))
        return y


class Checkpointed(Model):
    """The model with its block in a region of activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(checkpoint(self.block, self.first(x), use_reentrant=False))
        return y


def parallel(model: Model, mesh: DeviceMesh, sequence: bool = False) -> Model:
    """Divide the block over a mesh of one dimension. sequence: divide also the rows between the divided layers."""
    if sequence:
        plan: dict[str, Any] = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        whole, rows = (Replicate(),), (Shard(1),)
        by_rows = PrepareModuleInput(input_layouts=whole, desired_input_layouts=rows, use_local_output=True)
        back = PrepareModuleOutput(output_layouts=rows, desired_output_layouts=whole)
        parallelize_module(model.block, mesh, by_rows)
        parallelize_module(model.block, mesh, back)
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.block, mesh, plan)
    return model


def data() -> list[Tensor]:
    return list(torch.randn(STEPS, 4, 8, 32, generator=torch.Generator().manual_seed(1)))


def trained(model: nn.Module, forward: Callable[..., Any], part: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """Train; return the losses, the whole weights and the state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    losses = []
    for x in data():
        mine = part(x)
        loss = F.mse_loss(forward(mine), mine[..., :16] * 0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {
        "losses": torch.stack(losses),
        "weights": {n: p.detach().clone() for n, p in whole.items()},
        "state": fp8pass.state(model).state_dict(),
    }


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fp8pass", fullgraph=True, options={**OPTIONS, **options})


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@on_ranks(2)
def alone() -> Any:
    """Train one process with each recipe, on the first rank."""
    if dist.get_rank():
        return None
    found = {}
    for recipe in (RECIPE, "dynamic"):
        model = make(Model)
        found[str(recipe)[:7]] = trained(model, compiled(model, reduce_amax=False, recipe=recipe))
    return found


@on_ranks(2)
def tensor_parallel() -> Any:
    model = parallel(make(Model), mesh())
    return trained(model, compiled(model))


@on_ranks(2)
def with_an_empty_part() -> list[Tensor]:
    """Return the scales of a tensor of which the second rank has no rows, and of one of which no rank has any."""
    groups = (mesh().get_group().group_name,)
    mine = torch.full((2, 4), 0.01)[dist.get_rank() * 2 :]
    quantizers = Dynamic(DynamicScaling(), E4M3, groups), Delayed(RECIPE, E4M3, 0, 0, True, True, groups)
    dynamic, delayed = quantizers
    return [s for x in (mine, mine[2:]) for s in (dynamic.scaled(x)[1], delayed.scaled(x, torch.zeros(1))[1])]


@on_ranks(2)
def tensor_parallel_dynamic() -> Any:
    model = parallel(make(Model), mesh())
    return trained(model, compiled(model, recipe="dynamic"))


def collectives_of(graphs: list[fx.Graph]) -> list[str]:
    """Return op, dtype and shape of each collective in the graphs of forward and backward."""
    found = []
    for graph in graphs:
        for n in graph.nodes:
            if str(n.target).startswith("_c10d_functional.") and "wait" not in str(n.target):
                name = str(n.target).split(".")[1]
                value = n.meta["val"]
                found.append(f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
    return found


@contextlib.contextmanager
def recorded() -> Iterator[list[fx.Graph]]:
    """Compile anew inside, and record the graphs as they are after all passes."""
    torch._dynamo.reset()
    graphs: list[fx.Graph] = []
    kept = KernelPasses.__call__

    def keep(self: Any, graph: fx.Graph) -> None:
        kept(self, graph)
        graphs.append(graph)

    KernelPasses.__call__ = keep  # type: ignore[method-assign]
    try:
        yield graphs
    finally:
        KernelPasses.__call__ = kept  # type: ignore[method-assign]


def traced(model: nn.Module, forward: Callable[..., Any], part: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """Train; return also the collectives of the graphs, and what the forward returns."""
    with recorded() as graphs, verdicts() as report:
        result = trained(model, forward, part)
    (outputs,) = graphs[0].find_nodes(op="output")
    values = [n.meta["val"] for n in outputs.all_input_nodes]
    saved = [f"{v.dtype}{list(v.shape)}".removeprefix("torch.") for v in values if isinstance(v, Tensor)]
    return {**result, "collectives": collectives_of(graphs), "notes": report.notes, "saved": saved}


@on_ranks(2)
def sequence_parallel() -> Any:
    model = parallel(make(Model), mesh(), sequence=True)
    return traced(model, compiled(model))


@on_ranks(2)
def sequence_parallel_in_a_region() -> Any:
    model = parallel(make(Checkpointed), mesh(), sequence=True)
    return traced(model, compiled(model))


@on_ranks(2)
def sequence_parallel_in_high_precision() -> Any:
    model = parallel(make(Model), mesh(), sequence=True)
    return traced(model, compiled(model, recipe=None))


@on_ranks(2)
def sequence_parallel_dynamic() -> Any:
    model = parallel(make(Model), mesh(), sequence=True)
    return traced(model, compiled(model, recipe="dynamic"))


@on_ranks(2, variant=True)
def sequence_parallel_through_inductor() -> Any:
    model = parallel(make(Model), mesh(), sequence=True)
    return trained(model, compiled(model, lowering="inductor"))


class Whole(nn.Module):
    """A linear layer that gathers its weight in its forward, within the graph, as SimpleFSDP does."""

    def __init__(self, layer: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(x, weight.full_tensor())


@on_ranks(2)
def gathered_weight() -> Any:
    """Train with gathered weights, on the same batch on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(Whole(nn.Linear(32, 32), mesh()), nn.GELU(), Whole(nn.Linear(32, 16), mesh()))
    return traced(model, compiled(model))


class Moved(nn.Module):
    """A model whose rows move between ranks, from one layer to the next."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.move = nn.Linear(32, 32, bias=False), nn.Linear(32, 16), move

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.move(self.first(x).flatten(0, 1)))
        return y.unflatten(0, x.shape[:2])


def exchange(x: Tensor) -> Tensor:
    return all_to_all_single_autograd(x, [16, 16], [16, 16], dist.group.WORLD)


def bring(x: Tensor) -> Tensor:
    result: Tensor = broadcast(x, 1, dist.group.WORLD)
    return result


@on_ranks(2)
def exchanged() -> Any:
    """Exchange rows within the graph, and between two graphs, where fp8pass sees nothing of it."""
    results = []
    for move in (exchange, torch.compiler.disable(exchange)):
        model = make(functools.partial(Moved, move))
        run = torch.compile(model, backend="fp8pass", options=OPTIONS)
        results.append(traced(model, run, lambda x: x + dist.get_rank()))
    return results


@on_ranks(2)
def brought() -> Any:
    """Broadcast as `exchanged` exchanges, without gradients, for a broadcast has no backward."""
    results = []
    for move in (bring, torch.compiler.disable(bring)):
        model = make(functools.partial(Moved, move))
        run = torch.compile(model, backend="fp8pass", options={**OPTIONS, "recipe": "dynamic"})
        with torch.no_grad(), recorded() as graphs:
            results.append((run(data()[0] + dist.get_rank()), collectives_of(graphs)))
    return results


@on_ranks(2, variant=True)
def exchanged_with_scales_of_rows() -> Any:
    """Exchange tokens without gradients, as `exchanged`, and in a training; return outputs, collectives and notes."""
    found: dict[str, Any] = {}
    for recipe in ("rowwise", "mxfp8"):
        for move in (exchange, torch.compiler.disable(exchange)):
            model = make(functools.partial(Moved, move))
            run = torch.compile(model, backend="fp8pass", options={**OPTIONS, "recipe": recipe, "strict": False})
            with torch.no_grad(), recorded() as graphs:
                y = run(data()[0] + dist.get_rank())
            found.setdefault(recipe, []).append((y, collectives_of(graphs)))
        with verdicts() as report:
            run = torch.compile(
                make(functools.partial(Moved, exchange)),
                backend="fp8pass",
                options={**OPTIONS, "recipe": recipe, "strict": False},
            )
            run(data()[0]).sum().backward()
        found[recipe].append(report.notes)
    return found


def _fully_sharded(model: Model, both: DeviceMesh) -> Any:
    model.block.compile(backend="fp8pass", options=OPTIONS)
    for layer in (model.block, model):
        fully_shard(layer, mesh=both["data"])
    row = both.get_local_rank("data")
    run = trained(model, model, lambda x: x.chunk(2)[row])
    dist.all_reduce(run["losses"])
    run["losses"] /= 4
    return run


@on_ranks(4)
def with_fsdp() -> Any:
    """Train on a mesh of two dimensions, with only the block compiled; and the same in one process, on rank 0."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallel(make(Model), both["tensor"])
    run = _fully_sharded(model, both)
    if dist.get_rank():
        return run, None
    reference = make(Model)
    reference.block.compile(backend="fp8pass", options={**OPTIONS, "reduce_amax": False})
    return run, trained(reference, reference)


@on_ranks(4)
def with_fsdp_in_fp8() -> Any:
    """Train the same with the block's weights gathered by FSDP in FP8."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallel(make(Model), both["tensor"])
    names = fp8pass.fsdp.enable_fp8_all_gather(model, filter=["first", "last"])
    run = _fully_sharded(model, both)
    group: Any = model.block._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    sent = [(str(x.dtype), x.numel()) for p in group.fsdp_params for x in p.all_gather_inputs]
    return run, names, fp8pass.state(model).slots, sent


@on_ranks(4)
def on_two_dimensions() -> Any:
    """Train with all parameters on one mesh of two dimensions, over which rows and the block's features are divided."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    features = {"block.up.weight": Shard(0), "block.up.bias": Shard(0), "block.down.weight": Shard(1)}
    model = make(Model)
    for name, p in list(model.named_parameters()):
        layer, _, of_layer = name.rpartition(".")
        part = distribute_tensor(p.detach(), both, [Replicate(), features.get(name, Replicate())])
        model.get_submodule(layer).register_parameter(of_layer, nn.Parameter(part))
    rows = Shard(0), Replicate()
    model.block.down.register_forward_hook(lambda layer, x, y: y.redistribute(placements=rows))
    run = compiled(model)
    return trained(model, lambda x: run(distribute_tensor(x, both, rows)).full_tensor())


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys() and first
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def like_alone(runs: list[Any], recipe: str = "Delayed") -> None:
    """Check against one process, up to float32's rounding of sums in another order, which changes no FP8 value here."""
    reference = alone()[0][recipe]
    for run in runs:
        torch.testing.assert_close(run["losses"], reference["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(run["weights"], reference["weights"], rtol=0, atol=1e-5)
        torch.testing.assert_close(run["state"], reference["state"], rtol=1e-4, atol=1e-30)
    for run in runs[1:]:
        same(run["state"], runs[0]["state"]) if runs[0]["state"] else None


def test_tensor_parallel_is_like_one_process_from_the_first_step_on() -> None:
    like_alone(tensor_parallel())


def test_parts_over_two_dimensions_of_a_mesh_have_one_scale() -> None:
    like_alone(on_two_dimensions())


def test_with_dynamic_scaling_the_parts_have_one_scale() -> None:
    like_alone(tensor_parallel_dynamic(), "dynamic")


def test_sequence_parallel_is_like_one_process() -> None:
    like_alone(sequence_parallel())
    like_alone(sequence_parallel_dynamic(), "dynamic")


@pytest.mark.variant
def test_sequence_parallel_through_inductor() -> None:
    like_alone(sequence_parallel_through_inductor())


def test_what_sequence_parallel_gathers_is_fp8() -> None:
    """These are activations in forward, e4m3, and gradients in backward, e5m2; sums stay in high precision."""
    before = Counter(sequence_parallel_in_high_precision()[0]["collectives"])
    run = sequence_parallel()[0]
    assert before == {"all_gather_into_tensor float32[8, 4, 32]": 4, "reduce_scatter_tensor float32[4, 4, 32]": 2}
    assert Counter(run["collectives"]) == {
        "all_gather_into_tensor uint8[8, 4, 32]": 4,
        "reduce_scatter_tensor float32[4, 4, 32]": 2,
        "all_reduce float32[32]": 2,  # gradients of the biases, which were sums over gathered gradients
    }
    assert run["notes"] == ["4 collectives send FP8, 0.0041 MB instead of 0.0164 MB"]


def test_a_region_gathers_again() -> None:
    """A tensor that is gathered in FP8 is not kept for the backward, as it is not in high precision."""
    like_alone(sequence_parallel_in_a_region())
    run, straight = sequence_parallel_in_a_region()[0], sequence_parallel()[0]
    whole, gather = "float8_e4m3fn[32, 32]", "all_gather_into_tensor uint8[8, 4, 32]"
    assert (straight["saved"].count(whole), run["saved"].count(whole)) == (5, 2), "only layers outside save theirs"
    assert (straight["collectives"].count(gather), run["collectives"].count(gather)) == (4, 5)


def test_a_part_without_elements_does_not_count() -> None:
    for scales in with_an_empty_part():
        assert [float(s) for s in scales] == pytest.approx([448 / 0.01, 448 / 0.01, 1, 1])


def test_a_dynamic_scale_takes_a_reduction_of_its_amax() -> None:
    found = Counter(sequence_parallel_dynamic()[0]["collectives"])
    assert found["all_gather_into_tensor uint8[8, 4, 32]"] == 4
    assert not any(c.startswith("all_gather_into_tensor float") for c in found)
    # one for the input and the weight of each divided layer, and for their gradients; a gathered gradient serves two
    assert found["all_reduce int32[]"] == 8


def test_gathered_weights_are_fp8() -> None:
    first, second = gathered_weight()
    same(first["state"], second["state"])
    assert first["collectives"] == ["all_gather_into_tensor uint8[32, 32]", "all_gather_into_tensor uint8[16, 32]"]


def test_rows_are_exchanged_in_fp8() -> None:
    """Rows move in both directions: the input of a layer in the forward, and a gradient in the backward."""
    runs = exchanged()
    for inside, between in runs:
        same(inside["state"], runs[0][0]["state"])
        assert inside["collectives"] == ["all_to_all_single uint8[32, 32]"] * 2 and not between["collectives"]
        torch.testing.assert_close(inside["losses"], between["losses"], rtol=1e-6, atol=0)
        torch.testing.assert_close(inside["weights"], between["weights"])


@pytest.mark.variant
def test_tokens_are_exchanged_with_their_scales() -> None:
    """No bit changes; where the gradient of a weight reads them too, they stay in high precision."""
    for found in exchanged_with_scales_of_rows():
        for (inside, collectives), (between, outside), notes in found.values():
            assert collectives == ["all_to_all_single float32[32, 1]", "all_to_all_single uint8[32, 32]"]
            assert torch.equal(inside, between) and not outside
            assert any("is quantized in 2 ways, along different dimensions" in note for note in notes)


def test_a_tensor_is_broadcast_in_fp8() -> None:
    runs = brought()
    for (inside, collectives), (between, outside) in runs:
        assert collectives == ["broadcast float32[]", "broadcast uint8[32, 32]"] and not outside
        assert torch.equal(inside, between) and torch.equal(inside, runs[0][0][0])


def test_with_fsdp_the_ranks_have_one_scale() -> None:
    runs = with_fsdp()
    reference = runs[0][1]
    for run, _ in runs:
        same(run["state"], runs[0][0]["state"])
        torch.testing.assert_close(run["losses"], reference["losses"], rtol=3e-3, atol=0)


def test_with_fsdp_divided_weights_travel_as_bytes() -> None:
    """A rank sends its quarter of each weight, [64, 32] and [32, 64], whose scale is its own from the first step."""
    plain = with_fsdp()[0][0]["losses"]
    runs = with_fsdp_in_fp8()
    for run, names, slots, sent in runs:
        assert names == ["block.up", "block.down"]
        assert sorted(name for name in slots if name.endswith("weight")) == []
        assert sorted(n for dtype, n in sent if dtype == "torch.uint8") == [512, 512]
        same(run["state"], runs[0][0]["state"])
        torch.testing.assert_close(run["losses"][:2], plain[:2], rtol=3e-3, atol=0)
        torch.testing.assert_close(run["losses"], plain, rtol=1e-2, atol=0)
