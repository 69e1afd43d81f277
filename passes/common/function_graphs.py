"""Read the two graphs of a `torch.autograd.Function` in Dynamo's graph, and hand them state.

    y = autograd_function_apply(forward, backward, x, w, non_differentiable_idx=[], saved_for_backward_idx=[0, 1])

    forward(x, w)          returns ((y,), (x, w))     its results, and what it saves
    backward(grad, x, w)   returns (grad_x, grad_w)   takes the gradients of the results, then what was saved

torch runs both while it traces, the backward with autograd off, as a Function does. So all ops of both become ops of
the joint graph, and what the backward returns is taken for the gradient, whether it is or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fp8pass.base.names import Names
from fp8pass.graph.annotation import FUNCTION
from fp8pass.passes.common.checkpoint_regions import Part, Region, graphs_of_call, parts


@dataclass(frozen=True)
class FunctionGraphs:
    """The graphs of one call of a Function.

    operands: {input of the forward: the operand of the call}. gradients: the inputs of the backward that are gradients.
    saved: {input of the backward: the node of the forward that it is}.
    """

    operands: dict[fx.Node, fx.Node]
    forward: fx.GraphModule
    backward: fx.GraphModule
    gradients: tuple[fx.Node, ...]
    saved: dict[fx.Node, fx.Node]

    def positions(self, node: fx.Node) -> list[int]:
        """Return the positions of a node among what its graph hands over: what is saved, or the gradients."""
        handed = _saved(self.forward) if node.graph is self.forward.graph else _returned(self.backward)
        return [i for i, n in enumerate(handed) if n is node]


def function_graphs(module: fx.GraphModule, call: fx.Node) -> FunctionGraphs:
    """Return the graphs that a call of FUNCTION runs."""
    forward, backward = graphs_in(module, [call])
    inputs, handed = backward.graph.find_nodes(op="placeholder"), _saved(forward)
    first = len(inputs) - len(handed)
    operands = _nodes(forward.graph.find_nodes(op="placeholder"), call.args[2:])
    return FunctionGraphs(operands, forward, backward, tuple(inputs[:first]), _nodes(inputs[first:], handed))


def _nodes(inputs: Sequence[fx.Node], given: Sequence[Any]) -> dict[fx.Node, fx.Node]:
    return {inner: outer for inner, outer in zip(inputs, given, strict=True) if isinstance(outer, fx.Node)}


def named_graphs(module: fx.GraphModule, call: fx.Node, names: Names) -> FunctionGraphs:
    """Return `function_graphs`. names: gets their inputs as aliases of the call's operands."""
    graphs = function_graphs(module, call)
    for inner, outer in (*graphs.operands.items(), *graphs.saved.items()):
        names.alias(inner, outer)
    return graphs


def with_functions(found: Iterable[Part], names: Names) -> Iterator[Part]:
    """Yield parts of a graph, and after each the graphs of the Functions that it calls."""
    for part in found:
        yield part
        for call in part.module.graph.find_nodes(op="call_function", target=FUNCTION):
            graphs = named_graphs(part.module, call, names)
            for module in (graphs.forward, graphs.backward):
                yield from with_functions(parts(module, names, part.inside.get(call, ())), names)


def regions_of(outer: fx.GraphModule, call: fx.Node) -> tuple[Region, Region]:
    """Return the forward and the backward that a call of FUNCTION runs."""
    forward, backward = graphs_in(outer, [call])
    return ForwardRegion(outer.graph, call, forward, backward), BackwardRegion(forward.graph, call, backward)


def graphs_in(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> Iterator[fx.GraphModule]:
    """Yield the graphs of the Functions that `nodes` of a graph call."""
    for call in nodes:
        if call.target is FUNCTION:
            yield from graphs_of_call(module, call)


@dataclass(frozen=True)
class ForwardRegion(Region):
    """The forward of a Function, which gets its state with the operands of the call."""

    backward: fx.GraphModule

    def hand_in(self, nodes: Sequence[fx.Node]) -> None:
        """Pass further nodes to the call; the backward returns no gradient for them."""
        super().hand_in(nodes)
        (output,) = self.backward.graph.find_nodes(op="output")
        output.args = ((*_returned(self.backward), *[None] * len(nodes)),)


@dataclass(frozen=True)
class BackwardRegion(Region):
    """The backward of a Function, which gets its state from the forward, `outer`, as it gets what that saved."""

    def hand_in(self, nodes: Sequence[fx.Node]) -> None:
        """Let the forward save further nodes of its graph."""
        (output,) = self.outer.find_nodes(op="output")
        results, saved = output.args[0]
        output.args = ((results, (*saved, *nodes)),)


def _saved(forward: fx.GraphModule) -> tuple[Any, ...]:
    (output,) = forward.graph.find_nodes(op="output")
    return tuple(output.args[0][1])


def _returned(backward: fx.GraphModule) -> tuple[Any, ...]:
    (output,) = backward.graph.find_nodes(op="output")
    result = output.args[0]
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
