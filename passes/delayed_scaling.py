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
from fp8pass.rewrite import Context
from fp8pass.scaling import merge_amax


class DelayedScaling:
    """One chain of records per state tensor: one in forward, one in backward."""

    name = "delayed_scaling"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Batch every chain of records; pin the forward's results."""
        chains = _chains(graph)
        build = Builder(graph, self.name) if chains else None
        for chain in chains:
            assert build is not None
            _batch(build, chain)
        if chains:
            graph.eliminate_dead_code()
        _pin(graph, context.state_inputs)
        return len(chains)


def _chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """The record nodes, one list per amax tensor that they update, in order."""
    chains: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.fp8pass.record.default:
            chains.setdefault(_state_tensor(node.args[0]), []).append(node)
    return list(chains.values())


def _state_tensor(node: Any) -> fx.Node:
    """The graph input at the start of a chain of records."""
    while node.op != "placeholder":
        if node.target is aten.copy.default:
            node = node.args[1]
        elif node.target is operator.getitem and node.args[0].target is torch.ops.fp8pass.record.default:
            node = node.args[0].args[0]
        else:
            raise AssertionError(f"{node.name} = {node.target} is not expected between records of amax")
    assert isinstance(node, fx.Node)
    return node


def _batch(build: Builder, chain: list[fx.Node]) -> None:
    last = chain[-1]
    amax, stamp, step, _, _, on_nonfinite = chain[0].args
    assert isinstance(amax, fx.Node) and isinstance(stamp, fx.Node) and isinstance(step, fx.Node)
    new: dict[int, fx.Node] = {}
    for record in chain:
        value, index = record.args[3:5]
        assert isinstance(value, fx.Node) and isinstance(index, int)
        new[index] = build.emit(last, aten.maximum.default, new[index], value) if index in new else value
    for index in set(range(val(amax).shape[0])) - set(new):  # not recorded by this graph: under no_grad, say
        new[index] = build.emit(last, aten.full.default, [], -1.0, dtype=torch.float32, device=val(amax).device)

    def update(amax: Any, stamp: Any, step: Any, *values: Any) -> Any:
        return merge_amax(amax, stamp, step, torch.stack(values), str(on_nonfinite))

    results = build.inline(last, update, amax, stamp, step, *(new[i] for i in sorted(new)))
    for user in list(last.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]


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
