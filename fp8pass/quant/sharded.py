"""Quantize DTensors, whose parts are on several ranks: each rank quantizes its part, with a scale that all parts share.

Under delayed scaling the scale comes from the slot, and is the same on all ranks. If it is computed from the tensor
itself, the amax is reduced over the ranks that have the other parts. Scales of rows and blocks are computed from the
part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fp8pass.base._torch import all_reduce


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
    """Return a tensor sharded as `x` is, with `part` as this rank's shard; `part` itself if `x` is plain."""
    if not isinstance(x, DTensor):
        return part
    # shape and stride: without them `from_local` assumes that the tensor is evenly sharded
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


@dataclass(frozen=True, repr=False)
class Division:
    """How a tensor is sharded: what `with_part` takes from a DTensor, to make one where there is none."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __repr__(self) -> str:
        """Return Python code, because graphs print it among the arguments of ops."""
        return f"Division({list(self.shape)}, {str(self.placements)!r})"

    def __deepcopy__(self, _: Any) -> Division:
        """Return itself, for copies of a graph: a mesh is not copied."""
        return self

    def whole(self, part: Tensor) -> Tensor:
        """Return the DTensor of which this rank has `part`."""
        shape = torch.Size(self.shape)
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=shape, stride=self.stride)


def division_of(x: Tensor) -> Division | None:
    """Return how `x` is sharded; None for a plain tensor."""
    if not isinstance(x, DTensor):
        return None
    return Division(x.device_mesh, tuple(x.placements), tuple(x.shape), tuple(x.stride()))


def sizes_of_parts(x: Tensor) -> set[int]:
    """Return the numbers of elements that ranks' parts of `x` have, without 0: the same on all ranks.

    Raises ValueError if `x` is sharded over more than one dimension of the mesh.
    """
    if (division := _divided_by(x)) is None:
        return {x.numel()}
    rows, ranks, _ = division
    chunk = -(-rows // ranks)
    # only the last part may be smaller; ranks after it have none
    return {n * (x.numel() // rows) for n in (chunk, rows % max(chunk, 1)) if n}


def first_index(x: Tensor) -> int:
    """Return the number of elements of `x` in the parts of earlier ranks: the index of this part's first element.

    If dim 0 is sharded, this is its index in the whole tensor. Raises ValueError as `sizes_of_parts` does.
    """
    if (division := _divided_by(x)) is None:
        return 0
    rows, ranks, rank = division
    return min(-(-rows // ranks) * rank, rows) * (x.numel() // max(rows, 1))


def divided_several_times(x: Tensor) -> bool:
    """Return whether `x` is sharded over more than one dimension of a mesh, as by FSDP2 with tensor parallel."""
    return isinstance(x, DTensor) and sum(not p.is_replicate() for p in x.placements) > 1


def _divided_by(x: Tensor) -> tuple[int, int, int] | None:
    """Return (size of the sharded dimension, number of shards, index of this rank's); None if none is sharded."""
    if not isinstance(x, DTensor):
        return None
    if divided_several_times(x):
        raise ValueError(f"{x.placements} shards a tensor over more than one dimension of the mesh")
    for i, p in enumerate(x.placements):
        if isinstance(p, Shard):
            at = x.device_mesh.get_coordinate()
            assert at is not None, "a rank outside of the mesh has no part"
            return x.shape[p.dim], x.device_mesh.size(i), at[i]
    return None


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
