"""Random bits from counters, and stochastic rounding with them: the same values eagerly and compiled, on every rank.

The bits of an element are a hash of its index, of a number of its tensor, and of the number of the update. So a run
that resumes from a checkpoint goes on with the same bits, and nothing but one counter is saved. For a sharded tensor,
the index is that in the whole tensor, so that ranks do not repeat each other's bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

Key = Tensor | tuple[Tensor, Tensor]
"""A key of random bits, i32[]; for a part of a tensor, the key and the index of the part's first element, i32[]."""


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
    """Return keys i32[n] for `key_at`. updates: i32[1], the number of the update; seeds: i32[n], of tensors.

    If tensors are sharded, `seeds` is i32[n, 2], whose second column has the index in the whole tensor of
    the first element of this rank's part. The result then has this column, too.
    """
    if seeds.dim() == 1:
        return mixed(seeds ^ mixed(updates))
    return torch.stack([mixed(seeds[:, 0] ^ mixed(updates)), seeds[:, 1]], 1)


def key_at(keys: Tensor, index: int) -> Key:
    """Return the key of a tensor, for `bits_like`. keys: i32[n] or i32[n, 2], of `keys_of`."""
    return keys[index] if keys.dim() == 1 else (keys[index, 0], keys[index, 1])


def bits_like(x: Tensor, key: Key) -> Tensor:
    """Return 32 random bits for each element, i32 in the shape of `x`."""
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    if isinstance(key, tuple):
        key, first = key
        index = index + first
    return mixed(index ^ key)


def uniform(bits: Tensor) -> Tensor:
    """Return numbers f32 in [0, 1), multiples of 2**-24, from random bits i32."""
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24


@torch.no_grad()
def round_to_bfloat16(x: Tensor, key: Key) -> Tensor:
    """Round f32 to one of the two nearest bfloat16 numbers, so that the mean is `x`. Infinities and NaN stay.

    Adds 16 random bits to the 16 that bfloat16 lacks, and drops these.
    """
    rounded = (x.view(torch.int32) + (bits_like(x, key) & 0xFFFF)) & -0x10000
    return torch.where(x.abs() < torch.inf, rounded.view(torch.float32), x).to(torch.bfloat16)
