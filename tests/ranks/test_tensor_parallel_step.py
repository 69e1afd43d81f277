"""Test `train_step` with tensor parallel models: against one process, and against torch.compile with a loop."""

from __future__ import annotations

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
from fp8pass.recipes import DelayedScaling
from fp8pass.runtime.weight_cache import weights_of
from tests.helpers.models import Block, make
from tests.helpers.torchrun import on_ranks

OPTIONS: dict[str, Any] = {"recipe": DelayedScaling(amax_history_len=2), "lowering": "eager", "strict": True}
STEPS = 4


class Net(nn.Module):
    """A block, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.head = Block(32, 64), nn.RMSNorm(32), nn.Linear(32, 16, bias=False)

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


def data(steps: int = STEPS) -> list[Tensor]:
    return list(torch.randn(steps, 4, 8, 32, generator=torch.Generator().manual_seed(1)))


def adam(model: nn.Module, foreach: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)


def step_of(
    model: Callable[..., Any], parameters: Any, optimizer: torch.optim.Optimizer, clip: bool, parts: int = 1
) -> Callable[[Tensor], Tensor]:
    """Return an ordinary step. parts: microbatches of each."""

    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), x[..., :16] * 0.5)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def accumulated(x: Tensor) -> Tensor:
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

    return step if parts == 1 else accumulated


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
