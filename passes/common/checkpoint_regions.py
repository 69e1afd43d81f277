"""Iterate over Dynamo's graph and the graphs within it that activation checkpointing runs: passes visit all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fp8pass.base._torch import enter_autocast, exit_autocast
from fp8pass.base.names import Names
from fp8pass.graph.annotation import CHECKPOINT, COND, STATE_INPUTS
from fp8pass.passes.common.transforms import Transform, transforms


@dataclass(frozen=True)
class Region:
    """A graph within a graph, such as a checkpointed region: `call`, in the graph `outer`, runs `body`."""

    outer: fx.Graph
    call: fx.Node
    body: fx.GraphModule

    def hand_in(self, nodes: Sequence[fx.Node]) -> None:
        """Pass further nodes of `outer` to the call, for inputs of state that the caller adds to `body`."""
        self.call.args = (*self.call.args, *nodes)
        self.body.meta[STATE_INPUTS] = self.body.meta.get(STATE_INPUTS, 0) + len(nodes)


@dataclass(frozen=True)
class Part:
    """Dynamo's graph, or a region's graph. inside: the function transforms around each node that is inside any."""

    module: fx.GraphModule
    inside: Mapping[fx.Node, tuple[Transform, ...]]


def parts(module: fx.GraphModule, names: Names, around: tuple[Transform, ...] = ()) -> Iterator[Part]:
    """Yield the graph, then the regions in it, each with autocast set as it will be when the graph runs.

    names: gets the inputs of regions as aliases of the tensors handed in. around: the transforms around the graph.
    """
    inside = transforms(module.graph, around)
    yield Part(module, inside)
    for node in in_its_modes(module.graph):
        if node.target is CHECKPOINT:
            yield from parts(named_body(module, node, names), names, inside.get(node, ()))


def branches_of(module: fx.GraphModule, call: fx.Node, names: Names) -> Iterator[fx.GraphModule]:
    """Yield the two graphs of which a call of `torch.cond` runs one.

    names: gets their inputs as aliases of the call's operands.
    """
    _, *holders, operands = call.args
    for holder in holders:
        assert isinstance(holder, fx.Node) and isinstance(operands, (list, tuple))
        branch: fx.GraphModule = getattr(module, str(holder.target))
        for inner, outer in zip(branch.graph.find_nodes(op="placeholder"), operands, strict=True):
            if isinstance(outer, fx.Node):
                names.alias(inner, outer)
        yield branch


def with_branches(module: fx.GraphModule, names: Names, around: tuple[Transform, ...] = ()) -> Iterator[Part]:
    """Yield what `parts` yields, and the branches of `torch.cond` in it."""
    for part in parts(module, names, around):
        yield part
        for node in part.module.graph.find_nodes(op="call_function", target=COND):
            for branch in branches_of(part.module, node, names):
                yield from with_branches(branch, names, part.inside.get(node, ()))


def graphs_of_call(module: fx.GraphModule, call: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order op runs, in the order of its arguments; [] for any other call."""
    holders = (x for x in call.all_input_nodes if x.op == "get_attr")
    graphs = (getattr(module, str(holder.target), None) for holder in holders)
    return [graph for graph in graphs if isinstance(graph, fx.GraphModule)]


def body_of(module: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    """Return the graph that a call of CHECKPOINT runs."""
    holder = call.args[0]
    assert isinstance(holder, fx.Node)
    body: fx.GraphModule = getattr(module, str(holder.target))
    return body


def named_body(module: fx.GraphModule, call: fx.Node, names: Names) -> fx.GraphModule:
    """Return the graph that a call of CHECKPOINT runs. names: gets its inputs as aliases of the call's operands."""
    body = body_of(module, call)
    for inner, outer in zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True):
        if isinstance(outer, fx.Node):
            names.alias(inner, outer)
    return body


def in_its_modes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes, each with autocast set as it will be when the node runs."""
    entered: dict[Any, Any] = {}
    try:
        for node in list(graph.nodes):  # callers edit the graph meanwhile
            if node.target is enter_autocast:
                entered[node] = enter_autocast(*node.args)
            elif node.target is exit_autocast:
                exit_autocast(entered.pop(node.args[0]))
            yield node
    finally:  # modes that are still entered if the caller stops early, or the graph does not leave them
        for mode in reversed(entered.values()):
            exit_autocast(mode)  # type: ignore[no-untyped-call]
