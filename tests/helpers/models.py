"""Models that tests train."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm MLP with a bias, an odd width and a residual. Smooth, so that gradients are never all zero."""

    def __init__(self, width: int = 32, hidden: int = 56) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + hidden


class Attention(nn.Module):
    """q, k and v from one input, and an output projection."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = self.o(y)
        return x + out


class Transformer(nn.Module):
    """Layers of attention and MLP."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Attention(width), Block(width)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Parts(nn.Module):
    """Two layers; `part` calls the first by itself, as a second entry point."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def part(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.part(x))
        return y


class AcrossABreak(nn.Module):
    """One layer, called before and after a graph break, on inputs of very different magnitude."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        torch._dynamo.graph_break()
        out: Tensor = self.fc(y * 1e-3)
        return out


class Experts(nn.Module):
    """Two layers of experts, as in torchtitan: weights [G, N, K], transposed for the call."""

    def __init__(self, groups: int = 4, width: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.up = nn.Parameter((torch.randn(groups, hidden, width) / 8).bfloat16())
        self.down = nn.Parameter((torch.randn(groups, width, hidden) / 8).bfloat16())

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        h = torch._grouped_mm(x, self.up.transpose(-2, -1), offs=offs)
        return torch._grouped_mm(h, self.down.transpose(-2, -1), offs=offs)


def make(kind: Callable[[], nn.Module] = Block, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a model with the weights that `seed` gives."""
    torch.manual_seed(seed)
    return kind().to(dtype)


def batches(steps: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return batches whose range grows and shrinks from step to step, so that delayed scaling has to follow it."""
    generator = torch.Generator().manual_seed(1)
    ranges = [1 + 0.5 * (i % 5) for i in range(steps)]
    return [(torch.randn(shape, generator=generator) * r).to(dtype) for r in ranges]


def wrapped(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a function without naming `self`, as libraries do."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32))

    @wrapped
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layers(x)) @ x.t()


class Modulated(nn.Module):
    """Two layers after norms whose shifts and scales are slices of one table, as in the blocks of Wan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.randn(1, 4, width)), nn.LayerNorm(width, elementwise_affine=False)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, next_shift, next_scale = self.table.chunk(4, 1)
        x = x + self.first(self.norm(x) * (1 + scale) + shift)
        return x + self.second(self.norm(x) * (1 + next_scale) + next_shift)


class ModulatedRows(nn.Module):
    """A layer after a scale and a shift that are slices of tables of columns and of rows."""

    def __init__(self, width: int, rows: int = 32768) -> None:
        super().__init__()
        self.table, self.rows = nn.Parameter(torch.randn(1, 2, width)), nn.Parameter(torch.randn(1, rows, 2))
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        (scale, shift), (of_row, shift_of_row) = self.table.chunk(2, 1), self.rows.chunk(2, 2)
        return self.layer(x * (scale + of_row) + shift + shift_of_row)
