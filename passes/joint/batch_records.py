"""Merge all records of a graph into one update of its amax vector.

before   r0: f32[T] = record(amax: f32[T], amax_0: f32[], index=0, "evict")
         r1: f32[T] = record(r0, amax_1: f32[], index=1, "evict")
         ...
         copy_(amax, rT)
after    new: f32[T] = stack([amax_0, amax_1, ...])
         copy_(amax, merge_amax(amax, new, "evict"))
changes  nothing: entries are merged independently, so T launches become a few, whatever T is

The counts of the numerics monitor are merged in the same way: record_numerics(numerics: f32[T, 13], new: f32[13], i).

Also marks the values that the forward writes into the state as saved. The backward must read the values of its own
forward; recomputing them in the backward would start from buffers that were updated since.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.base.node_meta import RECORDED
from fp8pass.base.scaling import NOTHING, merge_amax
from fp8pass.graph.builder import Builder, erase_unused, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.passes.common.patterns import aten
from fp8pass.passes.joint.list_matmuls import backward_nodes
from fp8pass.quant import monitor_ops
from fp8pass.quant.monitor_ops import RECORD_NUMERICS
from fp8pass.quant.ops import RECORD


class BatchRecords:
    """Merges each chain of records into one update; forward and backward have one amax tensor and chain each."""

    name = "batch_records"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Merge every chain of records, mark the forward's results as saved; return the number of chains."""
        _drop_copies(graph)
        chains = _chains(graph)
        for chain in chains:
            _batch(context.builder(graph, self.name), chain)
        if chains:
            erase_unused(graph)
        _pin(graph)
        return len(chains)


def _is_record(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in (RECORD, RECORD_NUMERICS)


def _drop_copies(graph: fx.Graph) -> None:
    """Replace `copy(buffer, x)` between records by x: a copy would end the chain."""
    for node in graph.nodes:  # AOTAutograd's functionalization turns `buffer.copy_(x)` into `aten.copy`
        if node.target is aten.copy.default and _is_record(node.args[1]):
            node.replace_all_uses_with(node.args[1])


def _chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the records in order, one list per chain."""
    chains: dict[fx.Node, list[fx.Node]] = {}  # by the last record, which the next one reads
    for node in filter(_is_record, graph.nodes):
        previous = node.args[0]
        chain = chains.pop(previous, [])
        chains[node] = [*chain, node]
    return list(chains.values())


def _batch(build: Builder, chain: list[fx.Node]) -> None:
    """Replace a chain by one vector update; by several if slots are used more than once: see `_rounds`."""
    last = chain[-1]
    amax, _, _, *how = chain[0].args
    assert isinstance(amax, fx.Node)
    merged = functools.partial(merge_amax, on_nonfinite=str(how[0])) if how else monitor_ops.merge

    def update(amax: Any, *new: Any) -> Any:
        return merged(amax, torch.stack(new))

    rounds = _rounds(chain)
    for uses in rounds:
        new = [uses.get(i) or _nothing(build, last, amax) for i in range(val(amax).shape[0])]
        (amax,) = build.inline(last, update, amax, *new)
    if len(rounds) == 1 and how:
        amax.meta[RECORDED] = str(how[0])
    last.replace_all_uses_with(amax)


def _rounds(chain: list[fx.Node]) -> list[dict[int, fx.Node]]:
    """Return the new amaxes by slot index; a repeated index begins a new dict."""
    rounds: list[dict[int, fx.Node]] = [{}]
    for node in chain:
        new, index = node.args[1:3]
        assert isinstance(new, fx.Node) and isinstance(index, int)
        if index in rounds[-1]:
            rounds.append({})
        rounds[-1][index] = new
    return rounds


def _nothing(build: Builder, before: fx.Node, amax: fx.Node) -> fx.Node:
    """Emit a value that records nothing, for a slot that this graph only reads, for example under no_grad."""
    shape, value = ([], NOTHING) if val(amax).dim() == 1 else ([monitor_ops.N], 0.0)
    return build.emit(before, aten.full.default, shape, value, dtype=torch.float32, device=val(amax).device)


def _pin(graph: fx.Graph) -> None:
    """Mark values that the forward writes into its inputs, so that the backward does not recompute them."""
    backward = backward_nodes(graph)
    for node in graph.nodes:
        if node.target is aten.copy_.default and node not in backward:
            _must_save(node.args[1])
        elif node.target is aten.select.int and _is_scales_or_one(node.args[0]) and node.args[0] not in backward:
            _must_save(node.args[0])  # the scales of all slots: computed once, in the forward


def _is_scales_or_one(node: Any) -> bool:
    """Return whether `node` is the result of `ops.scales_or_one`."""
    if not isinstance(node, fx.Node) or node.target is not aten.where.self or val(node).dim() != 1:
        return False
    cold: Any = node.args[0]
    return cold.target is aten.eq.Scalar and cold.args == (node.args[2], 0)


def _must_save(node: Any) -> None:
    """Mark `node` as saved; for `copy(buffer, x)` also x, or the backward would recompute x from the buffer."""
    if isinstance(node, fx.Node) and node.op == "call_function":
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # torch's partitioner reads this tag
        if node.target is aten.copy.default:
            _must_save(node.args[1])
