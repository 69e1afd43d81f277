"""Gradients in FP8 on the wire: ranks exchange bytes, and each sums what it receives in float32.

A message is u8[P, C + 4 B], with a part for each of P ranks: C gradients in FP8, then the scale_inv f32 of each of B
blocks of them. Scales are powers of two, so that dequantizing is exact. As scales travel with the gradients, each rank
has its own.

    reduce_scatter   each rank quantizes its gradients x[P, C] and sends part p to rank p, which dequantizes the parts
                     of all ranks and adds them in the order of ranks
    all_gather       each rank quantizes its part of the sum, and sends it to all

In FP8 no sum is computed: it would saturate, and its error would grow with the number of ranks.

With `node`, the ranks of each node exchange first, and then those of different nodes exchange the sums of nodes, so
that network cards carry the gradients of a node once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base._torch import all_gather_single, timeout_of
from fp8pass.base.errors import Fp8Error
from fp8pass.base.fields import Checked, names, whole
from fp8pass.quant.sharded import amax_over

FORMATS = {"e4m3": scaling.E4M3, "e5m2": scaling.E5M2}
AT_ONCE = 8
"""Parts that are dequantized at once, in float32, before they are added."""
LARGEST_SCALE = 2.0**126
"""The largest power of two whose reciprocal GPUs don't flush to 0."""
_SCALE_BYTES = 4


@dataclass(frozen=True)
class GradientFormat(Checked):
    """How gradients are quantized for the wire; see `fp8pass.ddp.fp8_gradients` for the fields."""

    dtype: str = field(default="e4m3", metadata=names(*FORMATS).field)
    scale: str = field(default="own", metadata=names("own", "common", "delayed").field)
    block: int = field(default=1024, metadata=whole(16, "a number of gradients that share a scale, 16 or more").field)
    margin: int = field(default=1, metadata=whole(0, "a whole number of powers of two, 0 or more").field)
    node: int | None = field(default=None, metadata=(whole(1, "a number of ranks, 1 or more, or None") | None).field)

    def part(self, count: int) -> tuple[int, int]:
        """Return (C, B): the size to which a part of `count` gradients is padded, and its number of blocks."""
        block = min(self.block, max(16, -(-count // 16) * 16))
        size = -(-count // block) * block
        return size, (size // block if self.scale == "own" else 1)

    def message(self, count: int) -> int:
        """Return the bytes of a part of `count` gradients on the wire."""
        size, blocks = self.part(count)
        return size + _SCALE_BYTES * blocks


class Groups(NamedTuple):
    """The groups that exchange one after the other: the ranks of a node, and those with one position in their nodes."""

    whole: dist.ProcessGroup
    stages: tuple[dist.ProcessGroup, ...]


def groups_of(group: dist.ProcessGroup, node: int | None, device: torch.device) -> Groups:
    """Return the groups in which the ranks of a group exchange gradients on a device. All of its ranks call it.

    Raises Fp8Error if `node` ranks do not divide the group.
    """
    ranks = dist.get_process_group_ranks(group)
    if node is None or node in (1, len(ranks)):
        return Groups(group, (group,))
    if len(ranks) % node:
        raise Fp8Error(f"node={node} does not divide the {len(ranks)} ranks that exchange gradients")
    begin, position = group.rank() // node * node, group.rank() % node
    parts = ranks[begin : begin + node], ranks[position::node]
    timeout = timeout_of(group, device)
    return Groups(group, tuple(dist.new_group(p, timeout, use_local_synchronization=True) for p in parts))


class GradientExchange:
    """Sums the gradients of all ranks of a group through FP8, and remembers amaxes where scales are delayed."""

    def __init__(self, how: GradientFormat) -> None:
        self.how = how
        self._amaxes: dict[Any, tuple[Any, Tensor]] = {}
        """{key of a bucket: the reduction of its last amax, and the amax as bits i32[]}."""
        self._grown: Tensor | None = None

    def grown(self) -> int:
        """Return how often this rank's gradients outgrew a delayed scale, so that it used its own. Syncs the device."""
        return 0 if self._grown is None else int(self._grown)

    @torch.no_grad()
    def reduce_scatter(self, x: Tensor, groups: Groups, key: Any = None) -> Tensor:
        """Return the sum f32[C] over ranks of their parts for this rank.

        x: floating [P, C], the gradients of this rank, with a part for each of the P ranks. key: names the bucket,
        whose amax is remembered.
        """
        if len(groups.stages) == 1:
            return self._reduce_scatter(x, groups.whole, key)
        near, far = groups.stages
        # Rank r has position r % node in node r // node. Within a node, the rank at a position gets the parts for that
        # position in all nodes, next to each other, so that the second exchange can split them by node.
        for_node = x.view(far.size(), near.size(), -1).transpose(0, 1).reshape(near.size(), -1)
        of_node = self._reduce_scatter(for_node, near, key)
        return self._reduce_scatter(of_node.view(far.size(), -1), far, (key, "of nodes"))

    def _reduce_scatter(self, x: Tensor, group: dist.ProcessGroup, key: Any) -> Tensor:
        count, (size, blocks) = x.shape[1], self.how.part(x.shape[1])
        if size != count:
            x = F.pad(x, (0, size - count))
        parts = x.reshape(len(x), blocks, -1)
        sent = self.packed(parts, *self._scale(parts, group, key))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        total = torch.zeros(size, device=x.device)
        for some in torch.split(received, AT_ONCE):
            for part in self.unpacked(some, blocks):
                total += part
        return total[:count]

    @torch.no_grad()
    def all_gather(self, x: Tensor, groups: Groups) -> Tensor:
        """Return f32[P, C], the parts of all ranks. x: floating [C], the part of this rank."""
        count, (size, blocks) = len(x), self.how.part(len(x))
        parts = F.pad(x, (0, size - count)).reshape(1, blocks, -1)
        sent = self.packed(parts, *self.own_scale(parts))
        message = sent.flatten()
        for group in reversed(groups.stages):  # from other nodes first: then each rank of a node has another part
            message, own_message = message.new_empty(group.size() * len(message)), message
            all_gather_single(message, own_message, group=group)
        if len(groups.stages) == 2:
            near, far = (group.size() for group in groups.stages)
            message = message.view(near, far, -1).transpose(0, 1)
        return self.unpacked(message.reshape(-1, sent.shape[1]), blocks)[:, :count]

    def packed(self, parts: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
        """Return the message u8[P, C + 4 B]. parts: [P, B, C / B]. scale, amax: f32, which broadcast to [P, B, 1]."""
        x_q = scaling.quantize(parts, scale, FORMATS[self.how.dtype]).view(torch.uint8)
        # NaN where this rank has an infinity or NaN: through the sum and the gather all ranks get it
        scale_inv = scaling.inverse_unless_nonfinite(scale, amax).expand(*parts.shape[:2], 1).contiguous()
        return torch.cat([x_q.flatten(1), scale_inv.view(torch.uint8).flatten(1)], 1)

    def unpacked(self, message: Tensor, blocks: int) -> Tensor:
        """Return the gradients f32[P, C] of a message."""
        size = message.shape[1] - _SCALE_BYTES * blocks
        # not by view: the rows of the message are longer
        x_q = message[:, :size].view(FORMATS[self.how.dtype]).reshape(len(message), blocks, -1)
        scale_inv = message[:, size:].contiguous().view(torch.float32)
        return scaling.dequantize(x_q, scale_inv.unsqueeze(-1), torch.float32).flatten(1)

    def _scale(self, parts: Tensor, group: dist.ProcessGroup, key: Any) -> tuple[Tensor, Tensor]:
        """Return scale and amax, f32, by which this rank quantizes parts [P, B, C / B]."""
        if self.how.scale == "own":
            return self.own_scale(parts)
        amax = scaling.amax(parts)
        if self.how.scale == "common":
            amax = amax_over(amax, [group.group_name])
            return self.scale_of(amax), amax
        return self._delayed_scale(amax, group, key), amax

    def own_scale(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and amax f32[P, B, 1] of parts [P, B, C / B], by the amax of each block."""
        amax = scaling.amax_along(parts, (2,))
        return self.scale_of(amax), amax

    def _delayed_scale(self, amax: Tensor, group: dist.ProcessGroup, key: Any) -> Tensor:
        """Return the scale by the largest amax of the last step; this rank's own if there is none or it is exceeded."""
        work, bits = self._amaxes.pop(key, (None, torch.zeros((), dtype=torch.int32, device=amax.device)))
        if work is not None:
            work.wait()  # with NCCL the stream waits, not the host
        # abs: a NaN with its sign bit set would be a negative int32, below all amaxes
        last, now = bits.view(torch.float32), amax.abs().view(torch.int32)
        # as bits, which sort as the floats do, NaN above all; async: only the next step reads it
        self._amaxes[key] = dist.all_reduce(now, dist.ReduceOp.MAX, group=group, async_op=True), now
        delayed = self.scale_of(last, self.how.margin)
        has_last = (last > 0) & scaling.is_finite(last)
        fits = amax * delayed <= scaling.fp8_max(FORMATS[self.how.dtype])
        grown = (has_last & ~fits).to(torch.int64)  # counted on the device: reading it here would synchronize
        self._grown = grown if self._grown is None else self._grown + grown
        return torch.where(has_last & fits, delayed, self.scale_of(amax))

    def scale_of(self, amax: Tensor, margin: int = 0) -> Tensor:
        """Return the scale of an amax, elementwise: a power of two, at most `LARGEST_SCALE`."""
        scale = scaling.scale_from_amax(amax, scaling.fp8_max(FORMATS[self.how.dtype]), 1.0, margin)
        return scaling.floor_to_power_of_2(scale).clamp(max=LARGEST_SCALE)
