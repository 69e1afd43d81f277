"""All the records of a graph become one update of its amax vector.

before   r0 = record(amax: f32[T], stamp: i64[T], step: i64[], amax_0: f32[], index=0, "evict")
         r1 = record(r0[0], r0[1], step, amax_1: f32[], index=1, "evict")
         ...
         copy_(amax, rT[0]); copy_(stamp, rT[1])
after    new: f32[T] = stack([amax_0, amax_1, ...])
         amax_: f32[T], stamp_: i64[T] = merge_amax(amax, stamp, step, new, "evict")
         copy_(amax, amax_); copy_(stamp, stamp_)
changes  nothing: entries are merged independently, so T launches become a few whatever T is

Also pins what the forward writes into the state: the backward must read the values of its own forward, and recomputing
them there would start from buffers that have moved on.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from fp8pass.passes.matmuls import backward_nodes
from fp8pass.passes.patterns import aten
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8pass.graph import Builder, val
from fp8pass.ops import RECORD
from fp8pass.rewrite import Context
from fp8pass.scaling import merge_amax


class DelayedScaling:
    """One chain of records per state tensor: one in forward, one in backward."""

    name = "delayed_scaling"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Batch every chain of records; pin the forward's results. Returns how many chains there were."""
        _drop_copies(graph)
        chains = _chains(graph)
        build = Builder(graph, self.name) if chains else None
        for chain in chains:
            assert build is not None
            _batch(build, chain)
        if chains:
            graph.eliminate_dead_code()
        _pin(graph, context.state_inputs)
        return len(chains)


def _drop_copies(graph: fx.Graph) -> None:
    """`copy(buffer, x)` between records is x: what functionalization leaves of `buffer.copy_(x)`."""
    for node in graph.nodes:
        if node.target is aten.copy.default and _is_record(node.args[1]):
            node.replace_all_uses_with(node.args[1])


def _is_record(node: Any) -> bool:
    return node.target is operator.getitem and node.args[0].target is RECORD


def _chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """The record nodes, one list per amax tensor that they update, in order."""
    chains: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is RECORD:
            chains.setdefault(_first_input(node.args[0]), []).append(node)
    return list(chains.values())


def _first_input(amax: Any) -> fx.Node:
    """The tensor at the start of the chain that `amax` is a link of."""
    while _is_record(amax):
        amax = amax.args[0].args[0]
    assert isinstance(amax, fx.Node)
    return amax


def _batch(build: Builder, chain: list[fx.Node]) -> None:
    """Replace the chain by one vector update per use of the same slot: nearly always one."""
    last = chain[-1]
    amax, stamp, step, _, _, on_nonfinite = chain[0].args
    assert isinstance(amax, fx.Node) and isinstance(stamp, fx.Node) and isinstance(step, fx.Node)

    def update(amax: Any, stamp: Any, step: Any, *new: Any) -> Any:
        return merge_amax(amax, stamp, step, torch.stack(new), str(on_nonfinite))

    for uses in _rounds(chain):
        new = [uses.get(i) or _nothing(build, last, amax) for i in range(val(amax).shape[0])]
        amax, stamp = build.inline(last, update, amax, stamp, step, *new)
    for user in list(last.users):
        user.replace_all_uses_with((amax, stamp)[user.args[1]])  # type: ignore[index]


def _rounds(chain: list[fx.Node]) -> list[dict[int, fx.Node]]:
    """The amaxes by index, a new dict whenever an index comes again: merging is not the same as taking the larger."""
    rounds: list[dict[int, fx.Node]] = [{}]
    for node in chain:
        new, index = node.args[3:5]
        assert isinstance(new, fx.Node) and isinstance(index, int)
        if index in rounds[-1]:
            rounds.append({})
        rounds[-1][index] = new
    return rounds


def _nothing(build: Builder, before: fx.Node, amax: fx.Node) -> fx.Node:
    """The amax that records nothing, for a slot that this graph only reads: under no_grad, say."""
    return build.emit(before, aten.full.default, [], -1.0, dtype=torch.float32, device=val(amax).device)


def _pin(graph: fx.Graph, state_inputs: frozenset[str]) -> None:
    backward = backward_nodes(graph)
    for node in graph.nodes:
        if node.target is aten.copy_.default and node.args[0].name in state_inputs and node not in backward:
            _must_save(node.args[1])


def _must_save(node: fx.Node) -> None:
    """`copy(buffer, x)` is x: pin both, or the backward would take the one from the buffer again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if node.target is aten.copy.default:
        assert isinstance(node.args[1], fx.Node)
        _must_save(node.args[1])
