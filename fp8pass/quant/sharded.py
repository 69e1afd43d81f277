"""Quantize DTensors, whose parts are on several ranks: each rank quantizes its part, with a scale that all parts share.

Under delayed scaling the scale comes from the slot, and is the same on all ranks. If it is computed from the tensor
itself, the amax is reduced over the ranks that have the other parts. Scales of rows and blocks are computed from the
part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from fp8pass._torch import all_reduce


def partial_over(x: Tensor) -> list[str]:
    """Return the names of the mesh dimensions over which `x` is a partial sum."""
    if not isinstance(x, DTensor):
        return []
    names = x.device_mesh.mesh_dim_names or [str(i) for i in range(x.device_mesh.ndim)]
    return [name for name, placement in zip(names, x.placements, strict=True) if isinstance(placement, Partial)]


def part_of(x: Tensor) -> Tensor:
    """Return this rank's part of `x`."""
    return x._local_tensor if isinstance(x, DTensor) else x


def on_part(function: Callable[[Tensor, tuple[str, ...]], Tensor], x: Tensor) -> Tensor:
    """Apply `function` to this rank's part of `x` and the names of the groups of ranks that have the other parts.

    function: elementwise, to any dtype. Not differentiable. A partial sum is summed over ranks first.
    """
    if not isinstance(x, DTensor):
        return function(x, ())
    if partial_over(x):
        x = x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])
    return with_part(x, function(part_of(x), groups_of(x)))


def groups_of(x: Tensor) -> tuple[str, ...]:
    """Return the names of the groups of ranks that have the other parts of `x`; () for a plain tensor."""
    if not isinstance(x, DTensor):
        return ()
    return tuple(x.device_mesh.get_group(i).group_name for i, p in enumerate(x.placements) if p.is_shard())


def with_part(x: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is divided as `x` is, of which this rank has `part`; `part` itself if `x` is plain."""
    if not isinstance(x, DTensor):
        return part
    # shape and stride: without them `from_local` assumes that the tensor is evenly sharded
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def copy_of(x: Tensor) -> Tensor:
    """Return a copy. The copy of a partial sum is a partial sum; `DTensor.clone` would sum it over ranks."""
    return with_part(x, part_of(x).clone())


_WITHOUT_SIGN = 0x7FFFFFFF
"""All bits of a float32 except its sign."""


def amax_over(amax: Tensor, groups: Sequence[str]) -> Tensor:
    """Return the largest `amax` f32[...] of all ranks, NaN if any is NaN.

    The amaxes are reduced as integers with the same bits: see `amax_reduction.py`.
    """
    # without sign: a NaN with its sign bit set would be a negative integer, below all amaxes. `&` is last, not `view`:
    # from a collective of what `view` returns, Inductor makes wrong code, or fails
    bits = amax.view(torch.int32) & _WITHOUT_SIGN
    for group in groups:
        bits = all_reduce(bits, "max", group)
    return bits.view(torch.float32) if groups else amax


def recorded_over(amaxes: Tensor, group: str) -> Tensor:
    """Return the largest recorded amaxes f32[...] of all ranks of a group; -1, which stands for none, is below all."""
    # as in `amax_over`, except that -1 stays negative
    bits = amaxes.view(torch.int32)
    bits = torch.where(amaxes < 0, bits, bits & _WITHOUT_SIGN)
    return all_reduce(bits, "max", group).view(torch.float32)


def add(y: Tensor, bias: Tensor) -> Tensor:
    """Return `y + bias`; if `y` is a partial sum, so is the result."""
    return _AddToPartial.apply(y, bias) if partial_over(y) else y + bias  # type: ignore[no-untyped-call]


class _AddToPartial(torch.autograd.Function):
    """Adds `bias` f[N], which all ranks have, to a partial sum: each rank adds its share."""

    @staticmethod
    def forward(ctx: Any, y: DTensor, bias: DTensor) -> Tensor:
        ctx.bias_shape = bias.shape
        sizes = zip(y.device_mesh.shape, y.placements, strict=True)
        ranks = 1
        for size, placement in sizes:
            ranks *= size if isinstance(placement, Partial) else 1
        result = part_of(y) + part_of(bias) / ranks
        return with_part(y, result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad, grad.sum_to_size(ctx.bias_shape)
