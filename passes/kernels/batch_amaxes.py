"""Merge the last stages of amaxes that are needed at the same time into one reduction, and record its result.

before   amax_0: f32[] = amax(rows_0: bf16[R])             ... for every slot
         s_0: f32[]    = where(is_finite(amax_0), reciprocal(scale_0), nan)
         y             = _scaled_mm(x_q, w_q, s_0, s_1)
         copy_(amaxes: f32[F], merge_amax(before: f32[F], cat([amax_0, amax_1, ...])))
after    amax: f32[n]  = amax(fp8pass.rows([rows_0, rows_1, ...]), 1)
         s: f32[n]     = fp8pass.aligned(where(is_finite(amax), reciprocal(fp8pass.joined([scale_0, ...])), nan))
         y             = _scaled_mm(x_q, w_q, s[0], s[1])
         copy_(amaxes[:n], merge_amax(before[:n], amax))
changes  nothing

Each depth of the graph has a group: the operands of some matmuls, and of others that do not wait for these. A weight
is in the group of the tensor that it is multiplied with, so that not all weights of a model are quantized at its start.

Runs on the graphs of forward and backward, after the partitioner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.base.node_meta import RECORDED
from fp8pass.base.scaling import is_finite, merge_amax
from fp8pass.graph.builder import Builder, erase_unused, is_tensor, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.patterns import CASTS, as_node, aten, dtype_of, first, move_before
from fp8pass.quant.kernel_ops import ALIGNED, JOINED, ROWS

MAX_SLOTS_PER_KERNEL = 8
"""Most slots in one group: each program of its kernel compares its index with each slot's."""


@dataclass(eq=False)
class RecordSlot:
    """One record. index: its entry. whole: the amax; partial: the tensor it is reduced from. inverse: its scale_inv."""

    index: int
    whole: fx.Node
    partial: fx.Node
    inverse: fx.Node
    depth: int = 0

    @property
    def scale(self) -> fx.Node:
        """The slot's scale, f32[]."""
        return first(as_node(self.inverse.args[1]))


@dataclass(frozen=True)
class RecordsMatch:
    """The records that one `copy_` writes."""

    copy: fx.Node
    slots: list[RecordSlot]

    @property
    def before(self) -> fx.Node:
        """The running amaxes of the step that the new ones are merged into, f32[F]."""
        return first(as_node(self.copy.args[1]))

    @property
    def on_nonfinite(self) -> str:
        """The treatment of an amax that is NaN or infinite: see `merge_amax`."""
        return str(as_node(self.copy.args[1]).meta[RECORDED])


def match(copy: fx.Node) -> RecordsMatch | None:
    """Return the records that `copy` writes; None if a slot does not have the form above."""
    if copy.target is not aten.copy_.default or not is_tensor(copy.args[1]) or RECORDED not in copy.args[1].meta:
        return None
    merged = copy.args[1]
    if len(merged.args) < 2:  # the amaxes are constants, which torch has folded
        return None
    new = as_node(merged.args[1])
    # through merge_amax's `where` to the stack of the new amaxes, which is decomposed into a cat of unsqueezed ones
    while new.target is not aten.cat.default:
        sources = [a for a in new.args if is_tensor(a) and val(a).dim() == 1 and dtype_of(a) != torch.bool]
        if len(sources) != 1:
            return None
        new = as_node(sources[0])
    parts: Any = new.args[0]
    slots = [_slot(i, first(p)) if p.target is aten.unsqueeze.default else None for i, p in enumerate(parts)]
    complete = [s for s in slots if s is not None]
    return RecordsMatch(copy, complete) if len(complete) == len(slots) else None


def _slot(index: int, amax: fx.Node) -> RecordSlot | None:
    whole = amax
    if whole.target in CASTS:  # `scaling.amax` casts to float32, which leaves no node if it is float32 already
        whole = first(whole)
    if whole.target is not aten.amax.default or val(whole).dim() or len(whole.args) > 1:
        return None
    # `inverse_unless_nonfinite` as it is traced: where(amax < inf, reciprocal(scale), nan)
    finite = [u for u in amax.users if u.target is aten.lt.Scalar and u.args[1] == math.inf]
    inverses = [
        u for comparison in finite for u in comparison.users if u.target is aten.where.self and u.args[0] is comparison
    ]
    inverses = [u for u in inverses if as_node(u.args[1]).target is aten.reciprocal.default]
    is_static = all(isinstance(size, int) for size in val(first(whole)).shape)
    return RecordSlot(index, amax, first(whole), inverses[0]) if len(inverses) == 1 and is_static else None


class BatchAmaxes:
    """Rewrites all records of a graph."""

    name = "batch_amaxes"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite every match; return the number of groups, and of scales that were reshaped for matmuls."""
        applied = 0
        for node in list(graph.nodes):
            if (records := match(node)) is not None and records.slots:
                _undo_align_arguments(records.slots)
                groups = _groups(graph, records.slots)
                _RecordsRewriter(context.builder(graph, self.name), records).rewrite(groups)
                applied += len(groups)
        applied += _all_as_matrices(graph, context)
        if applied:
            erase_unused(graph)
        return applied


def _undo_align_arguments(slots: list[RecordSlot]) -> None:
    """Let the readers of a copy of a scale_inv read the scale_inv, which becomes an element of an aligned vector."""
    for slot in slots:
        for copy in [u for u in slot.inverse.users if u.target is ALIGNED]:
            copy.replace_all_uses_with(slot.inverse)
            copy.graph.erase_node(copy)


def _groups(graph: fx.Graph, slots: list[RecordSlot]) -> list[list[RecordSlot]]:
    """Group slots by depth: the slot's own, or that of the first reader of its scale_inv if that is deeper.

    So every reader of a group's elements is at the group's depth or deeper, and no input of the group is.
    """
    by_inverse = {s.inverse: s for s in slots}
    depths: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depths[node] = max((depths[n] for n in node.all_input_nodes), default=0) + (node in by_inverse)
    for slot in slots:
        slot.depth = depths[slot.inverse]
    needed = {slot: max(slot.depth, min(depths[user] for user in slot.inverse.users)) for slot in slots}
    groups = []
    for depth in sorted(set(needed.values())):
        group = [s for s in slots if needed[s] == depth]
        groups += [group[i : i + MAX_SLOTS_PER_KERNEL] for i in range(0, len(group), MAX_SLOTS_PER_KERNEL)]
    return groups


class _RecordsRewriter:
    def __init__(self, build: Builder, m: RecordsMatch) -> None:
        self.m = m
        self.build = build

    def rewrite(self, groups: list[list[RecordSlot]]) -> None:
        for group in groups[1:]:  # the vector of the first group would take one launch more (test_traffic.py)
            self._scales(group)
        amaxes = [self._last_stage(group) for group in groups]
        # if each group's slots are consecutive, it writes its own slice, and need not wait for the other groups
        if all(group[-1].index + 1 - group[0].index == len(group) for group in groups):
            for group, amax in zip(groups, amaxes, strict=True):
                self._record(group, amax)
        else:
            self._record_at_once(groups, amaxes)
        self.m.copy.graph.erase_node(self.m.copy)

    def _scales(self, group: list[RecordSlot]) -> None:
        """Give a group a vector of its scales, so that the kernels of equal layers are equal, and compiled once.

        An index into the scales of all slots would be a number in the code of each kernel. Does nothing where a scale
        is computed from an amax of this step: all others would wait for that amax.
        """
        scales = list(dict.fromkeys(slot.scale for slot in group))
        if any(scale.target is not aten.select.int for scale in scales):
            return
        users = {user for scale in scales for user in scale.users if user.op != "output"}
        at = move_before(min(users), scales)
        vector = self.build.emit(at, JOINED, scales)
        vector = self.build.emit(at, FORCE_STRIDE_ORDER, vector, [1])  # Inductor then makes it a buffer
        for i, scale in enumerate(scales):
            element = self.build.emit(at, aten.select.int, vector, 0, i)
            # `users` were listed before the vector was emitted: the vector itself goes on reading the scales
            scale.replace_all_uses_with(element, delete_user_cb=users.__contains__)

    def _last_stage(self, group: list[RecordSlot]) -> fx.Node:
        """Emit the amaxes of a group, f32[n], and let readers of each scale_inv read elements of one vector.

        The nodes stand at the end of the graph if only the backward reads the scale_invs.
        """
        at = min([self.m.copy, *(user for slot in group for user in slot.inverse.users)])
        sources = [slot.partial for slot in group], [slot.scale for slot in group]
        at = move_before(at, [*sources[0], *sources[1]])
        amax, scale_inv = self.build.inline(at, _last_stage, *sources[0], *sources[1])
        elements = [self.build.emit(at, aten.select.int, scale_inv, 0, i) for i in range(len(group))]
        for slot, element in zip(group, elements, strict=True):
            slot.inverse.replace_all_uses_with(element)
        return amax

    def _record(self, group: list[RecordSlot], amax: fx.Node) -> None:
        """Write the amaxes of a group of consecutive slots into their part of the buffer."""
        copy = self.m.copy
        part = group[0].index, group[-1].index + 1
        old, into = (self.build.emit(copy, aten.slice.Tensor, x, 0, *part) for x in (self.m.before, first(copy)))
        self.build.emit(copy, aten.copy_.default, into, self._merged(old, amax))

    def _record_at_once(self, groups: list[list[RecordSlot]], amaxes: list[fx.Node]) -> None:
        """Write the amaxes of all groups, whose slots alternate, in one kernel at the end.

        The merge is emitted again, since the old one may stand before matmuls that need a scale, and so before the
        amaxes.
        """
        copy, elements = self.m.copy, {}
        for group, amax in zip(groups, amaxes, strict=True):
            for i, slot in enumerate(group):
                elements[slot.index] = self.build.emit(copy, aten.select.int, amax, 0, i)
        in_order = [elements[slot.index] for slot in self.m.slots]
        self.build.emit(copy, aten.copy_.default, first(copy), self._merged(self.m.before, *in_order))

    def _merged(self, before: fx.Node, *amaxes: fx.Node) -> fx.Node:
        """Emit the running amaxes f32[n] of the step, merged with new ones: a vector f32[n], or n of f32[]."""

        def merge(before: Tensor, *new: Tensor) -> Tensor:
            return merge_amax(before, torch.stack(new) if new[0].dim() == 0 else new[0], self.m.on_nonfinite)

        (value,) = self.build.inline(self.m.copy, merge, before, *amaxes)
        return value


def _all_as_matrices(graph: fx.Graph, context: KernelsContext) -> int:
    """Give matmuls their scales as f32[1, 1], if they are elements of a vector.

    Inductor's Triton template unsqueezes a 0-d scale, and takes a 0-d view for the whole vector that it is a view of.
    """
    matrices: dict[fx.Node, fx.Node] = {}
    matmuls = [n for n in graph.nodes if n.target is aten._scaled_mm.default]
    for matmul in matmuls:
        scales = [as_node(a) for a in matmul.args[2:4]]
        if all(s.target is not aten.select.int for s in scales):
            continue
        for scale in scales:
            if val(scale).dim() == 0 and scale not in matrices:
                build = context.builder(graph, BatchAmaxes.name)
                at = min(user for user in scale.users if user.target is aten._scaled_mm.default)
                matrices[scale] = build.emit(at, aten.reshape.default, scale, [1, 1])
        matmul.args = (*matmul.args[:2], *(matrices.get(s, s) for s in scales), *matmul.args[4:])
    return len(matrices)


def _last_stage(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the amax of each partial, f32[n], and 1 / scale for matmuls, NaN where the amax is not finite.

    inputs: n partials, then n scales.
    """
    partials, scales = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
    amax = ROWS(partials).amax(1)
    return amax, ALIGNED(torch.where(is_finite(amax), JOINED(scales).reciprocal(), float("nan")))
