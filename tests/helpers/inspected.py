"""Factories that test_inspector.py inspects. Each returns a model and its inputs, or fails in its own way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import own_recipes
from tests.helpers.models import Block


def _input(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def linear() -> tuple[Any, ...]:
    """Return a layer from [512, 256] to [512, 1024], made in float32 and converted, as models usually are."""
    return nn.Linear(256, 1024, bias=False).bfloat16(), _input(512, 256)


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = nn.Linear(256, 32 * (heads + 2 * kv_heads), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(x).unflatten(-1, (-1, 32)).transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        )
        grouped = self.heads != self.kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def attention() -> tuple[Any, ...]:
    return Attention(8, 2).bfloat16(), _input(2, 128, 256)


def worthwhile() -> tuple[Any, ...]:
    """Return a layer so large that FP8 pays. The print must not be taken for the answer of the process."""
    print("not JSON")
    return nn.Linear(8192, 8192, bias=False).bfloat16(), _input(8192, 8192)


def six() -> tuple[Any, ...]:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False).bfloat16() for _ in range(6))), _input(512, 1024)


def large() -> tuple[Any, ...]:
    """Return a layer with a weight of 2 TB, which is built and compiled without memory."""
    return nn.Linear(1 << 20, 1 << 20, bias=False, dtype=torch.bfloat16), _input(16, 1 << 20)


def no_tuple() -> Any:
    return nn.Linear(16, 16)


def looks_at_a_value() -> tuple[Any, ...]:
    return nn.Linear(int(torch.ones(()).item()), 16), _input(16, 16)


def wrong_shape() -> tuple[Any, ...]:
    return nn.Linear(32, 16).bfloat16(), _input(16, 16)


not_a_factory = 1


def any_number_of_tokens() -> tuple[Any, ...]:
    """Return an MLP, and an input whose number of rows is symbolic."""
    model = nn.Sequential(nn.Linear(256, 1024, bias=False), nn.GELU(), nn.Linear(1024, 256)).bfloat16()
    x = _input(512, 256)
    torch._dynamo.mark_dynamic(x, 0)
    return model, x


def mlp() -> tuple[Any, ...]:
    """Return two layers with an activation between them. Recipes of tests have names here."""
    assert own_recipes.again().requantizes
    layers = nn.Linear(256, 1024, bias=False), nn.GELU(), nn.Linear(1024, 256, bias=False)
    return nn.Sequential(*layers).bfloat16(), _input(512, 256)


def equal_layers() -> tuple[Any, ...]:
    """Return three equal layers and their input."""
    return nn.Sequential(*(Block(256, 512) for _ in range(3))).bfloat16(), _input(512, 256)


class Adapted(nn.Module):
    """A frozen attention and MLP of FLUX's width, with adapters of rank 16 on query, key and value."""

    def __init__(self, width: int = 3072, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).requires_grad_(
            False
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            (base(x) + up(down(x))).unflatten(-1, (24, 128)).transpose(1, 2)
            for base, down, up in zip(self.base, self.down, self.up, strict=True)
        )
        return x + self.mlp(x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def adapted() -> tuple[Any, ...]:
    """Return such a layer, and one image of few tokens."""
    return Adapted().bfloat16(), _input(1, 768, 3072)
