"""Async tensor parallel: Inductor fuses a matmul and its collective into one op in FP8 as it does in BF16.

The ops exist on CUDA alone, so nothing is run: the tests read the graphs after Inductor's pass, forward and backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.graph import GraphLowering
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.helpers.harness import verdicts

pytestmark = pytest.mark.inductor


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # type: ignore[no-untyped-call]
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((64, 128), (64, 128), (128, 64)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """The second half of a transformer's block, in sequence parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


def parallel(mesh: DeviceMesh, dim: int) -> nn.Module:
    """Return a parallelized `Block` whose sequence, dimension `dim` of its input, is sharded."""
    plan = {
        "norm": SequenceParallel(sequence_dim=dim),
        "mlp": PrepareModuleInput(input_layouts=(Shard(dim),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(dim), use_local_output=False),
    }
    return parallelize_module(Block().bfloat16(), mesh, plan)  # type: ignore[arg-type]


def fused(mesh: DeviceMesh, dim: int, **how: Any) -> list[list[str]]:
    """Return, for forward and backward, the collectives that are left and the ops that contain one."""
    graphs: list[list[str]] = []

    def look(graph: fx.Graph) -> None:
        names = (str(n.target).removesuffix(".default") for n in graph.nodes if n.op == "call_function")
        sent = ("symm_mem.", "_c10d_functional.all_gather", "_c10d_functional.reduce_scatter")
        graphs.append([name.rpartition(".")[2] for name in names if name.startswith(sent)])

    torch._dynamo.reset()
    model = parallel(mesh, dim)
    x = DTensor.from_local(torch.randn(16, 16, 64).bfloat16(), mesh, [Shard(dim)]).requires_grad_()
    settings = {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": look, "fx_graph_cache": False}
    ahead = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
    patches = torch._inductor.config.patch(settings), torch._functorch.config.patch(ahead)
    # the code can't run on a CPU, so none is generated: compiling C++ would take most of the time
    lowered = mock.patch.object(GraphLowering, "compile_to_module", nothing_generated)
    with _test_mode(), patches[0], patches[1], lowered, suppress(NotRun):
        torch.compile(model, fullgraph=True, **how)(x)
    return graphs


def nothing_generated(lowering: GraphLowering) -> Any:
    lowering.scheduler = SimpleNamespace(nodes=[])  # type: ignore[assignment]
    return SimpleNamespace(call=not_run)


class NotRun(Exception):
    """Raised instead of running a graph."""


def not_run(*_: Any) -> NoReturn:
    raise NotRun


@functools.cache
def plain(mesh: DeviceMesh, dim: int) -> list[list[str]]:
    return fused(mesh, dim, backend="inductor")


@pytest.mark.parametrize(("recipe", "dim"), [("delayed", 0), ("delayed", 1), ("dynamic", 1)])
def test_one_op_with_the_collective(mesh: DeviceMesh, dim: int, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 has all of BF16's fusions: gathers with the matmuls after them, and a matmul with the scatter of its sum."""
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("fp8pass.passes.kernels.emulate_matmuls.why_emulated", lambda *_: "")
    assert plain(mesh, dim) == [
        ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"],
        ["fused_all_gather_matmul", "reduce_scatter_tensor"],
    ]
    with verdicts() as found:
        got = fused(mesh, dim, backend="fp8pass", options={"recipe": recipe, "reduce_amax": True})
    assert all(g.status == "rewritten" for g in found.gemms)
    assert got == [[name.replace("_matmul", "_scaled_matmul") for name in names] for names in plain(mesh, dim)]
