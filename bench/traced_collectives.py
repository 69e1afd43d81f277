"""Run one training step of a small Llama, and count the collectives that it calls.

The process is one rank of a group whose other ranks do not exist: torch's fake process group completes every collective
at once, and does not change the numbers. The kinds and sizes of the collectives are those of this rank in a real group.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from blocks import LlamaBlock
from collectives import Collective, Layout, Llama, Way
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fp8pass.base._torch import TorchDispatchMode, pytree, ranks_of
from fp8pass.ddp import fp8_gradients
from fp8pass.fsdp import enable_fp8_all_gather, enable_fp8_reduce_scatter

WARM_UP = 1
"""Number of steps before the step that is counted; graphs are compiled in them."""


class Decoder(nn.Module):
    """A Llama that maps tokens to logits."""

    def __init__(self, sizes: Llama, length: int, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(
            LlamaBlock(sizes.width, sizes.hidden, sizes.heads, sizes.kv_heads, length) for _ in range(sizes.layers)
        )
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, vocab] of tokens i64[batch, length]."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def divide_block(
    block: nn.Module,
    mesh: DeviceMesh,
    by_rows: type[ColwiseParallel] = ColwiseParallel,
    by_columns: type[RowwiseParallel] = RowwiseParallel,
    whole: Callable[..., Any] = PrepareModuleOutput,
) -> None:
    """Apply tensor parallel with sequence parallel: each rank has norms and residuals of a part of the sequence."""
    divided = dict.fromkeys(("q", "k", "v", "mlp.gate", "mlp.up"), by_rows())
    summed = dict.fromkeys(("o", "mlp.down"), by_columns(output_layouts=Shard(1)))
    norms = ("norm", "mlp.norm")
    parallelize_module(block, mesh, divided | summed | dict.fromkeys(norms, SequenceParallel()))
    # a DTensor, so that the gradients of its readers are summed before they are scattered
    gathered = whole(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)
    parallelize_module(block, mesh, dict.fromkeys(norms, gathered))


def divide(model: Decoder, mesh: DeviceMesh) -> None:
    """Divide all blocks, and the layers around them."""
    for block in model.blocks:
        divide_block(block, mesh)
    outside: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outside)


def distributed(model: Decoder, mesh: DeviceMesh, way: Way, reduce_dtype: str, whole: bool) -> nn.Module:
    """Divide, compile block by block, and wrap a model over a mesh with the dimensions "data" and "tensor"."""
    if mesh["tensor"].size() > 1:
        divide(model, mesh["tensor"])
    if way.gathers_weights(Layout(mesh.size(0), mesh.size(1), whole=whole)):
        enable_fp8_all_gather(model, filter=["head", *(f"blocks.*.{name}" for name in way.left_out)])
    # eager: the same graphs without generated kernels; min_speedup: else matmuls this small would be declined
    options = {"lowering": "eager", "min_speedup": 0, "filter": list(way.left_out)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce_dtype))
    for block in model.blocks:
        if way.fp8:
            block.compile(backend="fp8pass", options=options)
        else:
            block.compile(backend="aot_eager")
        if not whole:
            fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    if whole:
        return _in_ddp(model, way)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    if way.fp8_gradients:
        enable_fp8_reduce_scatter(model)
    return model


def _in_ddp(model: Decoder, way: Way) -> DistributedDataParallel:
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    if way.fp8_gradients:
        # in this thread, where the collectives are counted; fake groups have no timeout
        no_timeout = mock.patch("fp8pass.ddp.timeout_of", return_value=None)
        with mock.patch("fp8pass.ddp.ThreadPoolExecutor") as executor, no_timeout:
            executor.return_value.submit = lambda function, *args: function(*args)
            fp8_gradients(parallel)
    return parallel


def traced(
    sizes: Llama, layout: Layout, way: Way, batch: int, length: int, reduce_dtype: str = "float32"
) -> Counter[Collective]:
    """Return how often one rank calls each collective in a step.

    With tensor parallel, `way` must have `fp8_wire` if it has `fp8`.
    """
    with _ranks(layout) as mesh:
        model = distributed(Decoder(sizes, length, layout.recompute), mesh, way, reduce_dtype, layout.whole)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.arange(batch * length).view(batch, length) % sizes.vocab
        for _ in range(WARM_UP + 1 + layout.whole):  # DDP makes its buckets anew in its second step
            counting = Counting(_names(mesh, layout))
            with counting:
                _step(model, optimizer, tokens, layout)
    return counting.found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, layout: Layout) -> None:
    with loss_parallel() if layout.tensor > 1 else contextlib.nullcontext():
        logits = model(tokens).flatten(0, 1)
        F.cross_entropy(logits.float(), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def _ranks(layout: Layout) -> Iterator[DeviceMesh]:
    """Within it, there is a mesh of fake ranks; their slots count as the same as this rank's."""
    torch._dynamo.reset()
    gc.collect()  # slots of a model that is still alive would be reduced together with those of the next
    dist.init_process_group("fake", rank=0, world_size=layout.ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        # no slot counts as cold, so that no graph of a first step runs, which computes scales from the tensors
        cold = mock.patch("fp8pass.states.slots.InstanceState.cold", return_value=[])
        with cold:
            yield init_device_mesh("cpu", (layout.data, layout.tensor), mesh_dim_names=("data", "tensor"))
    finally:
        dist.destroy_process_group()


def _names(mesh: DeviceMesh, layout: Layout) -> dict[tuple[int, ...], str]:
    """Return {ranks of a group: its name in the formulas}."""
    groups = {name: mesh[name].get_group() for name in ("data", "tensor") if layout.size(name) > 1}
    dimensions = {tuple(dist.get_process_group_ranks(group)): name for name, group in groups.items()}
    return {tuple(range(layout.ranks)): layout.everyone} | dimensions


KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
}
"""The kind of each collective op, of process groups and of graphs. Other ops count under their own names, which the
formulas do not have, so that they show as differences."""
SENDS_NOTHING = {"wait_tensor", "_wrap_tensor_autograd"}


class Counting(TorchDispatchMode):
    """Counts collectives. names: {ranks of a group: its name in the formulas}."""

    def __init__(self, names: dict[tuple[int, ...], str]) -> None:
        super().__init__()
        self.names = names
        self.found: Counter[Collective] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions, not their original functions, run within this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor then calls ops on its local tensors, which come here again
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional") and name not in SENDS_NOTHING:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            _fill(name, given, result)
            self.found[self._collective(KINDS.get(name, name), given, result)] += 1
        return result

    def _collective(self, kind: str, given: dict[str, Any], result: Any) -> Collective:
        group = given.get("group_name") or dist.ProcessGroup.unbox(given["process_group"]).group_name
        tensors = [x for x in pytree.tree_leaves((given, result)) if isinstance(x, Tensor)]
        whole = max(tensors, key=Tensor.numel)  # the largest of inputs and outputs is the whole tensor
        return Collective(
            kind, str(whole.dtype).removeprefix("torch."), whole.numel(), self.names[tuple(ranks_of(group))]
        )


def _fill(name: str, given: dict[str, Any], result: Any) -> None:
    """Fill the output as if all ranks had this rank's numbers, or sent random ones; a vote is 1.

    The fake process group does not write it, and uninitialized memory may hold NaN, which would change the scaling.
    """
    source = given.get("input", given.get("input_tensor"))
    if name == "recv_":
        (x,) = given["tensors"]
        x.normal_() if x.is_floating_point() else x.fill_(1)
    elif source is not None:
        target = given.get("output_tensor", given.get("output", result)).view(-1)
        target.copy_(source.flatten().repeat(-(-target.numel() // source.numel()))[: target.numel()])
