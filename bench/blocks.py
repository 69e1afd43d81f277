"""Blocks of known models for `fp8pass inspect bench.blocks:llama_mlp`. Each factory returns a model and its input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8pass.recipes import DelayedScaling, register_recipe

TOKENS, WIDTH, DTYPE = 8192, 4096, torch.bfloat16


@register_recipe("requantize")
def requantize() -> DelayedScaling:
    """Return delayed scaling that answers saturation in the step, for `fp8pass inspect --recipe requantize`."""
    return DelayedScaling(on_saturation="requantize")


class LlamaMLP(nn.Module):
    """The MLP of Llama-3-8B: x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, width: int = WIDTH, hidden: int = 14336) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to the same shape."""
        y = self.norm(x)
        hidden: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + hidden


class LlamaBlock(nn.Module):
    """A layer of Llama-3-8B: attention with 32 heads and 8 for keys and values, rotary positions, then the MLP."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, width: int = WIDTH, hidden: int = 14336, heads: int = 32, kv_heads: int = 8, length: int = TOKENS
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.mlp = LlamaMLP(width, hidden)
        angles = torch.outer(torch.arange(length), 5e5 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotated(self, x: Tensor) -> Tensor:
        """Apply rotary positions to x [batch, heads, length, size], in float32."""
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, length, width] to the same shape."""
        y = self.norm(x)
        q, k, v = (linear(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = self.rotated(q), self.rotated(k)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.mlp(x + self.o(attended.transpose(1, 2).flatten(2)))
        return result


class GPT2MLP(nn.Module):
    """The MLP of GPT-2: x + proj(gelu(fc(norm(x)))), with biases."""

    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc, self.proj = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to the same shape."""
        hidden: Tensor = self.proj(F.gelu(self.fc(self.norm(x)), approximate="tanh"))
        return x + hidden


class SquaredMLP(nn.Module):
    """down(relu(up(x)) squared), without a residual, as in modded-nanogpt."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to the same shape."""
        result: Tensor = self.down(F.relu(self.up(x)).square())
        return result


def _typed(model: nn.Module) -> nn.Module:
    """Convert the parameters of a model to bfloat16, and return it; the tables of positions stay in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPE)
    return model


def _input(*batch: int) -> Tensor:
    return torch.randn(*batch, TOKENS, WIDTH, dtype=DTYPE, requires_grad=True)


def llama_mlp() -> tuple[Any, ...]:
    """Return the MLP of a layer of Llama-3-8B, and an input bf16[8192, 4096]."""
    return _typed(LlamaMLP()), _input()


def llama_block() -> tuple[Any, ...]:
    """Return a layer of Llama-3-8B, and an input bf16[1, 8192, 4096]."""
    return _typed(LlamaBlock()), _input(1)


def gpt2_mlp() -> tuple[Any, ...]:
    """Return the MLP of a layer like GPT-2's, and an input bf16[8192, 4096]."""
    return _typed(GPT2MLP()), _input()
