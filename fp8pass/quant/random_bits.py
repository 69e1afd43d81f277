"""Random bits from counters, and stochastic rounding with them: the same numbers eagerly and compiled, on every rank.

The bits of an element are a hash of its index, of a number of its tensor, and of the number of the update. So a run
that resumes from a checkpoint goes on with the same bits, and nothing but one counter is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mixed(x: Tensor) -> Tensor:
    """Return a hash of each i32 element: a bijection, each bit of which depends on all bits of the element.

    These are the steps of `lowbias32` (Wellons), with the second factor as a negative number. Products wrap around.
    The masks make the arithmetic shifts of i32 logical ones.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


@torch.no_grad()
def keys_of(updates: Tensor, seeds: Tensor) -> Tensor:
    """Return keys i32[n] for `bits_like`. updates: i32[1], the number of the update; seeds: i32[n], of tensors."""
    return mixed(seeds ^ mixed(updates))


def bits_like(x: Tensor, key: Tensor) -> Tensor:
    """Return 32 random bits for each element, i32 in the shape of `x`. key: i32[]."""
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    return mixed(index ^ key)


def uniform(bits: Tensor) -> Tensor:
    """Return numbers f32 in [0, 1), multiples of 2**-24, from random bits i32."""
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24


@torch.no_grad()
def round_to_bfloat16(x: Tensor, key: Tensor) -> Tensor:
    """Round f32 to one of the two nearest bfloat16 numbers, so that the mean is `x`. Infinities and NaN stay.

    Adds 16 random bits to the 16 that bfloat16 lacks, and drops these. key: i32[].
    """
    rounded = (x.view(torch.int32) + (bits_like(x, key) & 0xFFFF)) & -0x10000
    return torch.where(x.abs() < torch.inf, rounded.view(torch.float32), x).to(torch.bfloat16)
