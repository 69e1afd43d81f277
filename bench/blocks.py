"""Blocks of known models to inspect: `fp8pass inspect bench.blocks:llama_mlp`. Each returns a model and its input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, WIDTH = 8192, 4096


class LlamaMLP(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))), as in Llama-3-8B: bf16[TOKENS, 4096]."""

    def __init__(self, width: int = WIDTH, hidden: int = 14336) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: bf16[..., width]."""
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LlamaBlock(nn.Module):
    """A layer of Llama-3-8B: grouped-query attention with rotary positions, then the MLP: bf16[batch, length, 4096]."""

    def __init__(self, width: int = WIDTH, hidden: int = 14336, heads: int = 32, kv_heads: int = 8, length: int = 8192, variant="") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.variant=variant
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.mlp = LlamaMLP(width, hidden)
        angles = torch.outer(torch.arange(length), 5e5 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def _rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * self.cos + torch.cat([-x[..., half:], x[..., :half]], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        """x: bf16[batch, length, width]."""
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (self._rotated(t).to(x.dtype) for t in (q, k))
        if "noattn" in self.variant: a = q*k*v
        else: a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.mlp(x + self.o(a.transpose(1, 2).flatten(2)))


class GPT2MLP(nn.Module):
    """x + proj(gelu(fc(norm(x)))), with biases, as in GPT-2: bf16[TOKENS, 4096]."""

    def __init__(self, width: int = WIDTH, hidden: int = 16384) -> None:
        super().__init__()
        self.norm, self.fc, self.proj = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: bf16[..., width]."""
        return x + self.proj(F.gelu(self.fc(self.norm(x)), approximate="tanh"))


def _with_input(model: nn.Module, *shape: int) -> tuple[Any, ...]:
    return model.bfloat16(), torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def llama_mlp() -> tuple[Any, ...]:
    """The MLP of a layer of Llama-3-8B."""
    return _with_input(LlamaMLP(), TOKENS, WIDTH)


def llama_block() -> tuple[Any, ...]:
    """A layer of Llama-3-8B."""
    return _with_input(LlamaBlock(), 1, TOKENS, WIDTH)

def llama_block_mha() -> tuple[Any, ...]:
    return _with_input(LlamaBlock(kv_heads=32), 1, TOKENS, WIDTH)
def llama_block_b4() -> tuple[Any, ...]:
    return _with_input(LlamaBlock(length=2048), 4, 2048, WIDTH)
def llama_block_b4_mha() -> tuple[Any, ...]:
    return _with_input(LlamaBlock(length=2048,kv_heads=32), 4, 2048, WIDTH)


def gpt2_mlp() -> tuple[Any, ...]:
    """An MLP as GPT-2's, four times as wide as its input."""
    return _with_input(GPT2MLP(), TOKENS, WIDTH)
