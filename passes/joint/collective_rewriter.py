"""Rewrite the collectives of a graph that `quantize_collectives` lets send FP8; see there."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base import scaling
from fp8pass.base._torch import hint_of, micro_pipelines
from fp8pass.graph.builder import Builder, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.graph.refusal import Reject
from fp8pass.graph.verdict import Gemm
from fp8pass.passes.common.patterns import (
    COLLECTIVES,
    MOVEMENT,
    as_node,
    at,
    aten,
    dtype_name,
    dtype_of,
    first,
    move_before,
    reach,
)
from fp8pass.passes.joint.check_shared_scales import (
    check_dequantized,
    check_gathered,
    group_of,
    uses_of_amaxes,
    without_nan,
)
from fp8pass.passes.joint.collective_chains import (
    WAIT,
    Dequantized,
    Gathered,
    between,
    c10d,
    capture_dequantized,
    capture_gathered,
    data_of,
    marked,
    quantized_by,
    scales_of,
    unmarked,
)
from fp8pass.passes.joint.collective_rows import (
    Rows,
    capture_rows,
    computed_from,
    cuts,
    local_scale,
    moved_amaxes,
    row_amaxes,
)
from fp8pass.quant import sharded


class _Rewriter:
    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.builder = Builder(graph, name)

    def gathered(self, gathered: Gathered) -> None:
        """Quantize before the collective."""
        at_, x = gathered.collective, first(gathered.collective)
        # first: a scale that follows from the amax of the output cannot be moved before the collective
        sets_nan = self._replace_amaxes(gathered)
        for old in gathered.sums:
            self._reduce_sum(old, x, at_)
        one = gathered.quantizes[0]
        move_before(at_, scales_of(one.ops))
        if sets_nan:
            (x,) = self.builder.inline(at_, marked, x)
        whole = self._sent(gathered, self._again(at_, one.ops, {one.source: x})[one.ops[-1]])
        for quantize in gathered.quantizes:
            old = quantize.ops[-1]
            path = between(gathered.wait, quantize.source, gathered.moved)
            x_q = self._again(old, path, {gathered.wait: whole})[quantize.source]
            old.replace_all_uses_with(self._laid_out(old, x_q, old))

    def rows(self, chain: Rows) -> None:
        """Quantize rows before the collective; send their amaxes beside them."""
        at_, x, width = chain.collective, first(chain.collective), val(chain.wait).shape[-1]
        for old in chain.sums:
            self._reduce_sum(old, x, at_)
        (own_amaxes,) = self.builder.inline(at_, functools.partial(row_amaxes, block=chain.block), x)
        sent = self.builder.emit(chain.wait, WAIT, self.builder.emit(at_, at_.target, own_amaxes, *at_.args[1:]))
        whole = self._sent(chain, self._quantized_rows(chain, x, own_amaxes))
        for quantize in chain.quantizes:
            old = quantize.ops[-1]
            path = between(chain.wait, quantize.source, chain.moved)
            x_q = self._again(old, path, {chain.wait: whole})[quantize.source]
            old.replace_all_uses_with(self._laid_out(old, x_q, old))
        for source, amax in chain.amaxes:
            new = self._moved_amaxes(amax, between(chain.wait, source, chain.moved), chain.wait, sent, width)
            amax.replace_all_uses_with(new)

    def _quantized_rows(self, chain: Rows, x: fx.Node, own_amaxes: fx.Node) -> fx.Node:
        """Quantize this rank's rows `x` by their amaxes [..., blocks], with the ops of the first quantize."""
        at_, one, shape = chain.collective, chain.quantizes[0], val(x).shape
        dtype = val(chain.amaxes[0][1]).dtype
        blocks, of_blocks = self.builder.inline(
            at_, lambda x, amax: (x.unflatten(-1, (-1, chain.block)), amax.unsqueeze(-1).to(dtype)), x, own_amaxes
        )
        new_of = {amax: of_blocks for _, amax in chain.amaxes}
        for scale in chain.scales:
            self._again(at_, [n for n in computed_from(scale, new_of) if n not in new_of and local_scale(n)], new_of)
        x_q = self._again(at_, one.ops, {**new_of, one.source: blocks})[one.ops[-1]]
        (result,) = self.builder.inline(at_, lambda x_q: x_q.reshape(shape), x_q)
        return result

    def _moved_amaxes(self, old: fx.Node, path: list[fx.Node], wait: fx.Node, sent: fx.Node, width: int) -> fx.Node:
        """Move amaxes [..., blocks] of all ranks as the rows were moved; return them in the form of `old`."""
        moved, blocks = {wait: sent}, val(sent).shape[-1]
        for op in path:
            if cuts(op, wait):
                moved[op] = moved[first(op)]
                continue
            args = fx.map_arg(moved_amaxes(op, blocks), lambda n: moved.get(n, n))
            moved[op] = self.builder.emit(old, op.target, *args, **op.kwargs)
        last = moved[path[-1]] if path else sent
        shape, dtype = val(old).shape, val(old).dtype
        (result,) = self.builder.inline(old, lambda amax: amax.reshape(shape).to(dtype), last)
        return result

    def dequantized(self, chain: Dequantized) -> None:
        """Dequantize after the collective."""
        at_, group = chain.collective, group_of(chain.collective)
        scales = {a: without_nan(a, group) for a in scales_of(chain.ops)}
        if any(new is not old for old, new in scales.items()):
            self._mark(chain.x_q)
        x_q = chain.x_q
        for op in chain.ops:  # movement stays before the collective: its sizes are those of this rank's tensor
            if op.target in MOVEMENT:
                x_q = self.builder.emit(at_, op.target, x_q, *op.args[1:], **op.kwargs)
        whole = self._sent(chain, x_q)
        for op in chain.ops:
            if op.target not in MOVEMENT:
                whole = self._again(chain.wait, [op], {**scales, as_node(data_of(op)): whole})[op]
        chain.wait.replace_all_uses_with(self._laid_out(chain.wait, whole, chain.wait))

    def _sent(self, chain: Gathered | Dequantized | Rows, x_q: fx.Node) -> fx.Node:
        """Send `x_q` through the collective; return the output as FP8."""
        at_, emit, dtype = chain.collective, self.builder.emit, val(x_q).dtype
        # some versions of torch refuse to gather or exchange what is not contiguous, as the input was
        x_q = self._laid_out(at_, x_q, first(at_))
        if micro_pipelines(group_of(at_)):  # Inductor's async TP matches a collective on FP8, and may fuse it away
            return emit(chain.wait, WAIT, emit(at_, at_.target, x_q, *at_.args[1:]))
        bits = emit(at_, aten.view.dtype, x_q, torch.uint8)  # Gloo raises for FP8
        sent = emit(at_, at_.target, bits, *at_.args[1:])
        return emit(chain.wait, aten.view.dtype, emit(chain.wait, WAIT, sent), dtype)

    def _again(self, before: fx.Node, ops: Iterable[fx.Node], new_of: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Emit `ops` again on the replacements in `new_of`; return `new_of`, to which the new nodes are added."""
        for op in ops:
            args, kwargs = fx.map_arg((op.args, op.kwargs), lambda n: new_of.get(n, n))
            new_of[op] = self.builder.emit(before, op.target, *args, **kwargs)
        return new_of

    def _laid_out(self, before: fx.Node, x: fx.Node, like: fx.Node) -> fx.Node:
        """Return `x`, or a clone, with the strides of `like`: elementwise ops copied what was sliced or expanded."""
        if _same_strides(x, like):
            return x
        x = self.builder.emit(before, aten.clone.default, x)  # keeps strides that have no gaps
        if not _same_strides(x, like):
            x = self.builder.emit(before, aten.clone.default, x, memory_format=torch.contiguous_format)
        assert _same_strides(x, like), (x, like, val(x).stride(), val(like).stride())
        return x

    def _replace_amaxes(self, gathered: Gathered) -> bool:
        """Replace the amax of the gathered tensor by this rank's amax, or by the reduced one, for each use.

        A use "nan" is removed: its `where` is replaced by the finite scale_inv. Returns True if there was one.
        """
        uses = uses_of_amaxes(gathered)
        amaxes: dict[tuple[str, torch.dtype], fx.Node] = {}
        for use in uses:
            if use.how == "nan":
                for where in list(use.user.users):
                    where.replace_all_uses_with(as_node(where.args[1]))
                continue
            key = use.how, val(use.amax).dtype
            if key not in amaxes:
                amaxes[key] = self._amax(gathered.collective, *key)
            use.user.replace_input_with(use.amax, amaxes[key])
        return any(use.how == "nan" for use in uses)

    def _amax(self, collective: fx.Node, ranks: str, dtype: torch.dtype) -> fx.Node:
        """Emit the amax of the collective's input. ranks: "part" for this rank's, "whole" for that of all ranks."""
        # A rank may send nothing, and then records NOTHING. If it refused the rewrite, its collective would differ
        # from that of the other ranks.
        may_be_empty = not statically_known_true(val(first(collective)).numel() > 0)

        def amax(x: Tensor) -> Tensor:
            # torch's amax raises for a dimension that has no elements
            rows = x.abs().amax(-1) if statically_known_true(x.shape[-1] > 0) else x.abs()
            if may_be_empty:
                rows = torch.cat([rows.flatten(), rows.new_full([1], scaling.NOTHING)])
            amax_of_rows = rows.amax().float()
            if collective.target is c10d.broadcast.default:  # the output is the source rank's input on all ranks
                amax_of_rows = c10d.wait_tensor(c10d.broadcast(amax_of_rows, *collective.args[1:]))
            elif ranks == "whole":
                amax_of_rows = sharded.amax_over(amax_of_rows, (group_of(collective),))
            return amax_of_rows.to(dtype)

        (amax_of_rows,) = self.builder.inline(collective, amax, first(collective))
        return amax_of_rows

    def _reduce_sum(self, old: fx.Node, local: fx.Node, collective: fx.Node) -> None:
        """Replace the sum over gathered rows by an all-reduce, in f32, of the ranks' sums."""
        shape, dtype, group = val(old).shape, val(old).dtype, group_of(collective)

        def of_rows(x: Tensor) -> Tensor:
            return x.float().sum(list(range(x.dim() - 1)))

        def as_before(x: Tensor) -> Tensor:
            return x.reshape(shape).to(dtype)

        (own_sums,) = self.builder.inline(collective, of_rows, local)
        emit = self.builder.emit
        total = emit(old, WAIT, emit(old, c10d.all_reduce.default, own_sums, "sum", group))
        (new,) = self.builder.inline(old, as_before, total)
        old.replace_all_uses_with(new)

    def _mark(self, x_q: fx.Node) -> None:
        """Let `x_q` be quantized from a `marked` tensor, if it is not already."""
        ops = quantized_by(x_q)
        assert ops is not None
        data = as_node(data_of(ops[0]))
        if unmarked(data) is data:
            (new,) = self.builder.inline(ops[0], marked, data)
            ops[0].replace_input_with(data, new)


def _same_strides(x: fx.Node, y: fx.Node) -> bool:
    return all(statically_known_true(m == n) for m, n in zip(val(x).stride(), val(y).stride(), strict=True))


def rewrite_all(graph: fx.Graph, context: JointContext, made_by: str) -> int:
    """Rewrite collectives; note why where one is refused. Return the number of rewritten collectives.

    made_by: the name of the pass.
    """
    applied = before = after = 0
    while True:  # collectives may follow each other: the rewrite of one can make that of the next possible
        applied_before = applied
        notes: list[str] = []  # of the last round only: a collective refused before may be rewritten now
        for node in [n for n in graph.nodes if n.target in COLLECTIVES]:
            numel = _numel(node)
            size = numel * val(node).element_size()
            try:
                sent = _rewrite(graph, node, context.gemms, made_by)
                if sent is not None:
                    applied, before, after = applied + 1, before + size, after + numel + sent
                    _erase(graph, node)
            except Reject as refusal:
                notes.append(f"{at(node)} sends {dtype_name(dtype_of(node))}: {refusal}")
        if applied == applied_before:
            break
    context.notes += notes
    if applied:
        sizes = f", {after / 1e6:.3g} MB instead of {before / 1e6:.3g} MB" if before else ""
        context.notes.append(f"{applied} collectives send FP8{sizes}")
    return applied


def _rewrite(graph: fx.Graph, node: fx.Node, gemms: Mapping[fx.Node, Gemm], made_by: str) -> int | None:
    """Rewrite one collective. Return the bytes of the amaxes that it sends too; None if there is no FP8."""
    rewriter, refusal = _Rewriter(graph, made_by), None
    try:
        if (rows := capture_rows(node, gemms)) is not None:
            rewriter.rows(rows)
            return rows.bytes_of_amaxes(_numel(node))
        if (gathered := capture_gathered(node, gemms)) is not None:
            check_gathered(gathered)
            rewriter.gathered(gathered)
            return 0
    except Reject as reason:
        refusal = reason  # the input may be dequantized FP8 all the same
    if (dequantized := capture_dequantized(node)) is not None:
        check_dequantized(dequantized)
        rewriter.dequantized(dequantized)
        return 0
    if refusal is not None:
        raise refusal
    return None


def _erase(graph: fx.Graph, collective: fx.Node) -> None:
    """Erase the collective, all nodes computed from its output, and inputs of these that nothing reads any more."""
    # not by eliminate_dead_code, which keeps every wait_tensor: torch registers it as having a side effect
    below = reach([collective], lambda n: n.users)
    inputs: dict[fx.Node, None] = {}
    for node in sorted(below, reverse=True):
        inputs.update(dict.fromkeys(node.all_input_nodes))
        graph.erase_node(node)
    todo = [n for n in inputs if n not in below]
    while todo:
        node = todo.pop()
        if not node._erased and not node.users and not node.is_impure():
            todo += node.all_input_nodes
            graph.erase_node(node)


def _numel(node: fx.Node) -> int:
    """Return the number of elements, with the traced sizes for dynamic ones; 0 if sizes depend on data."""
    sizes: Any = val(node).shape
    hinted = all(isinstance(n, int) or n.node.has_hint() for n in sizes)
    return math.prod(int(hint_of(n)) for n in sizes) if hinted else 0
