"""The collectives of one training step of a small Llama that is run: counted as they are called.

The process is one rank of a group whose others are not there: torch's fake process group takes part in every collective
at once, and leaves numbers as they are. What runs, and how large it is, is what runs on that rank among real ones.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fp8pass._torch import TorchDispatchMode, pytree
from fp8pass.fsdp import enable_fp8_all_gather

WARM_UP = 1
"""Steps before the one that is counted, in which graphs are compiled."""


class Decoder(nn.Module):
    """Tokens to logits."""

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
        """tokens: i64[batch, length]."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def divide(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor parallel, with sequence parallel: norms and residuals see parts of the sequence."""
    by_rows, by_columns = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    # a DTensor, so that its gradients are added up before they are scattered
    whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)
    layers: dict[str, Any] = {"q": by_rows, "k": by_rows, "v": by_rows, "o": by_columns}
    layers |= {"mlp.gate": by_rows, "mlp.up": by_rows, "mlp.down": by_columns}
    for block in model.blocks:
        parallelize_module(block, mesh, layers | {"norm": SequenceParallel(), "mlp.norm": SequenceParallel()})
        parallelize_module(block, mesh, {"norm": whole, "mlp.norm": whole})
    outside: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outside)


def distributed(model: Decoder, mesh: DeviceMesh, way: Way, reduce_dtype: str) -> Decoder:
    """The model compiled by block and wrapped, over a mesh of "data" and "tensor"."""
    if mesh["tensor"].size() > 1:
        divide(model, mesh["tensor"])
    if way.gathers_weights(Layout(mesh.size(0), mesh.size(1))):
        enable_fp8_all_gather(model, filter=["head", *(f"blocks.*.{name}" for name in way.left_out)])
    # eager: the same graphs without generated kernels; min_speedup: small matmuls do not pay
    options = {"lowering": "eager", "min_speedup": 0, "filter": list(way.left_out)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce_dtype))
    for block in model.blocks:
        if way.fp8:
            block.compile(backend="fp8pass", options=options)
        else:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    return model


def traced(
    sizes: Llama, layout: Layout, way: Way, batch: int, length: int, reduce_dtype: str = "float32"
) -> Counter[Collective]:
    """What one rank calls in a step. A layout with tensor parallel has no FP8 matmuls without FP8 on the wire."""
    with _ranks(layout) as mesh:
        model = distributed(Decoder(sizes, length, layout.recompute), mesh, way, reduce_dtype)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.arange(batch * length).view(batch, length) % sizes.vocab
        for _ in range(WARM_UP + 1):
            counting = _Counting(_names(mesh, layout))
            with counting:
                _step(model, optimizer, tokens, layout)
    return counting.found


def _step(model: Decoder, optimizer: torch.optim.Optimizer, tokens: Tensor, layout: Layout) -> None:
    with loss_parallel() if layout.tensor > 1 else contextlib.nullcontext():
        logits = model(tokens).flatten(0, 1)
        F.cross_entropy(logits.float(), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def _ranks(layout: Layout) -> Iterator[DeviceMesh]:
    """A mesh of ranks that are not there. They can't say which slots they have, which is taken to be the same."""
    torch._dynamo.reset()
    gc.collect()  # slots of a model that is alive are reduced with those of the next
    dist.init_process_group("fake", rank=0, world_size=layout.ranks, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        # without the graphs of a first step, whose scales come from the tensors themselves
        cold = mock.patch("fp8pass.states.slots.InstanceState.cold", return_value=[])
        with cold:
            yield init_device_mesh("cpu", (layout.data, layout.tensor), mesh_dim_names=("data", "tensor"))
    finally:
        dist.destroy_process_group()


def _names(mesh: DeviceMesh, layout: Layout) -> dict[str, str]:
    """Groups of ranks as formulas name them, by the names that torch has given them."""
    assert dist.group.WORLD is not None
    dimensions = {str(mesh[name].get_group().group_name): name for name in ("data", "tensor") if layout.size(name) > 1}
    return {str(dist.group.WORLD.group_name): layout.everyone} | dimensions


KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
}
"""Of ops of process groups and of graphs. Another one counts under its own name, which no formula has."""
SENDS_NOTHING = {"wait_tensor", "_wrap_tensor_autograd"}


class _Counting(TorchDispatchMode):
    """Counts collectives. names: of the groups, as formulas have them, by those of torch."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self.names = names
        self.found: Counter[Collective] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that compiled functions run, and not what they were compiled from."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # comes again, with what is done to its parts
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional") and name not in SENDS_NOTHING:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            _fill(given, result)
            self.found[self._collective(KINDS.get(name, name), given, result)] += 1
        return result

    def _collective(self, kind: str, given: dict[str, Any], result: Any) -> Collective:
        group = given.get("group_name") or dist.ProcessGroup.unbox(given["process_group"]).group_name
        tensors = [x for x in pytree.tree_leaves((given, result)) if isinstance(x, Tensor)]
        whole = max(tensors, key=Tensor.numel)  # of what goes in and what comes out
        return Collective(kind, str(whole.dtype).removeprefix("torch."), whole.numel(), self.names[group])


def _fill(given: dict[str, Any], result: Any) -> None:
    """As if all ranks had this one's numbers: memory that nobody writes may hold NaN, which changes the scaling."""
    source = given.get("input", given.get("input_tensor"))
    if source is not None:
        target = given.get("output_tensor", result).view(-1)
        target.copy_(source.flatten().repeat(-(-target.numel() // source.numel()))[: target.numel()])
