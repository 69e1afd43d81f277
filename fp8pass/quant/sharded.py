"""Tensors in parts on several ranks, DTensors: each rank quantizes its own part, by a scale that all parts share.

Under delayed scaling the scale comes from the slot, and is the same on all ranks. Where it follows from the tensor
itself, the amax is reduced over the ranks that have the other parts. Scales of rows and blocks are those of the part.
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
    """The dimensions of the mesh over which `x` is still to be summed up."""
    if not isinstance(x, DTensor):
        return []
    names = x.device_mesh.mesh_dim_names or [str(i) for i in range(x.device_mesh.ndim)]
    return [name for name, placement in zip(names, x.placements, strict=True) if isinstance(placement, Partial)]


def part_of(x: Tensor) -> Tensor:
    """What this rank has of `x`."""
    return x._local_tensor if isinstance(x, DTensor) else x


def on_part(function: Callable[[Tensor, tuple[str, ...]], Tensor], x: Tensor) -> Tensor:
    """`function` of this rank's part of `x`, and the groups of ranks that have the others; elementwise, to any dtype.

    Not differentiable. Of a sum that is not added up yet there are no parts: it is added up first.
    """
    if not isinstance(x, DTensor):
        return function(x, ())
    if partial_over(x):
        x = x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])
    mesh = x.device_mesh
    groups = tuple(mesh.get_group(i).group_name for i, p in enumerate(x.placements) if p.is_shard())
    result = function(part_of(x), groups)
    return DTensor.from_local(result, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def copy_of(x: Tensor) -> Tensor:
    """A copy; of a sum that is not added up yet one that is not either, which DTensor's own `clone` would do."""
    if not isinstance(x, DTensor):
        return x.clone()
    return DTensor.from_local(
        part_of(x).clone(), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def amax_over(amax: Tensor, groups: Sequence[str]) -> Tensor:
    """The largest of all ranks' `amax` f32[...], NaN if any is: see `amax_reduction.py` for why its bits travel."""
    bits = amax.abs().view(torch.int32)
    for group in groups:
        bits = all_reduce(bits, "max", group)
    return bits.view(torch.float32) if groups else amax


def add(y: Tensor, bias: Tensor) -> Tensor:
    """`y + bias`; where `y` is still to be summed up over ranks, without doing that now."""
    return _AddToPartial.apply(y, bias) if partial_over(y) else y + bias  # type: ignore[no-untyped-call]


class _AddToPartial(torch.autograd.Function):
    """`y` stands for the sum over ranks: so each adds its share of `bias`, f[N], which all have."""

    @staticmethod
    def forward(ctx: Any, y: DTensor, bias: DTensor) -> DTensor:
        ctx.bias_shape = bias.shape
        sizes = zip(y.device_mesh.shape, y.placements, strict=True)
        ranks = 1
        for size, placement in sizes:
            ranks *= size if isinstance(placement, Partial) else 1
        result = part_of(y) + part_of(bias) / ranks
        return DTensor.from_local(
            result, y.device_mesh, y.placements, run_check=False, shape=y.shape, stride=y.stride()
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad, grad.sum_to_size(ctx.bias_shape)
