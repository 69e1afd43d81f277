"""Make models of Megatron-Core's tensor-parallel layers, whose matmuls are in a `torch.autograd.Function`.

On one rank over gloo. What needs CUDA is left out: gradients that Apex adds to `main_grad`, and sequence parallel, whose
buffers are on a GPU.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.toys import VOCABULARY

WIDTH = 64


class _Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        how: Any = {"config": config, "init_method": _normal, "bias": True}
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **how)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=False, **how)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.up(self.norm(x))
        y: Tensor = self.down(F.gelu(hidden))[0]
        return x + y


class Layers(nn.Module):
    """An embedding, MLPs and a head. The embedding is torch's: Megatron's writes into a mask."""

    def __init__(self, layers: int = 2) -> None:
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        super().__init__()
        file = Path(tempfile.mkdtemp(), "ranks")
        dist.init_process_group("gloo", init_method=file.as_uri(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        config = ModelParallelConfig(params_dtype=torch.float32, use_cpu_initialization=True)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(_Mlp(config) for _ in range(layers)))
        self.head = ColumnParallelLinear(WIDTH, VOCABULARY, config=config, init_method=_normal, bias=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layers:
        """Copy it, but not the process group that each layer has, of which torch can't make a copy."""
        groups = [x for m in self.modules() for x in vars(m).values() if isinstance(x, dist.ProcessGroup)]
        memo.update((id(group), group) for group in groups)
        copied = memo[id(self)] = Layers.__new__(Layers)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.embedding(input_ids).transpose(0, 1)))[0]
        return y


def _normal(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.1)
