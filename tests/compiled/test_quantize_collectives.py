"""Test what the quantize_collectives pass says of layers that read a gathered tensor in high precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module

import fp8pass
from fp8pass.options.config import Config
from tests.helpers.fake_ranks import RANKS
from tests.helpers.fake_ranks import groups as groups


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.q(x) * self.k(x) + self.v(x)
        return y


def test_layers_that_read_it_in_high_precision_are_named() -> None:
    """Small layers do so, for FP8 doesn't pay there; the rule is named, for users may want them in FP8 all the same."""
    mesh = init_device_mesh("cpu", (RANKS,))
    attention = parallelize_module(Attention(), mesh, dict.fromkeys("qkv", ColwiseParallel()))
    parallelize_module(attention, mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()))
    model = nn.Sequential(attention)
    report = fp8pass.explain(model, torch.randn(16, 32), config=Config(filter=["0.k", "0.v"]))
    (note,) = [n for n in report.notes if "the result of all_gather" in n and " in float32" in n]
    readers, _, what = note.split(": ", 1)[1].partition(" read ")
    assert readers == "0.k (filter) and 0.v (filter)" and what.startswith("the result of all_gather_into_tensor")
