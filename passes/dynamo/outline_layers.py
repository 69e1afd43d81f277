"""Make functions of the pieces of Dynamo's graph, one for all pieces that are equal.

before   scales = begin_step(...);  scales_1, scales_2 = split_with_sizes(scales, [7, 7])
         ... the nodes of piece 1, which read x, layers.0.up.weight, scales_1 ...
         ... the nodes of piece 2, which read y, layers.1.up.weight, scales_2 ...
after    scales, = piece_0(...);  scales_1, scales_2 = split_with_sizes(scales, [7, 7])
         y, = piece_1(x, layers.0.up.weight, scales_1)
         z, = piece_1(y, layers.1.up.weight, scales_2)
changes  nothing: grad mode and autocast of the nodes around a piece are repeated in its function

Runs last on Dynamo's graph, when the verdicts of the annotate pass are known: layers of which the filter leaves out one
are not equal. Pieces without an equal are one function where they follow each other.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fp8pass.base._torch import enter_autocast, exit_autocast, set_grad_enabled
from fp8pass.base.node_meta import PIECE
from fp8pass.graph.annotation import Body, MatmulChoice
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.passes.common.divide_state import FIRST_PIECE
from fp8pass.passes.common.equal_structure import Structure, structure
from fp8pass.passes.common.outlining import choices_of, input_of, verdict_key


class OutlineLayers:
    """The pass over Dynamo's annotated graph."""

    name = "outline_layers"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Replace the pieces by calls of functions, if some are equal; return the number of these."""
        pieces = match(context.annotation.module, context.annotation.choices)
        times = Counter(piece.structure.key for piece in pieces)
        if all(n == 1 for n in times.values()):
            return 0
        pieces = list(_joined(pieces, times, context.annotation.module))
        context.annotation.bodies = _Outliner(context, pieces).rewrite()
        for body in context.annotation.bodies.values():
            if len(body.layers) > 1:
                comma = "," if "," in body.title else ""
                context.notes.append(f"{body.title}{comma} are compiled once")
        return sum(n for n in times.values() if n > 1)


@dataclass(frozen=True)
class Modes:
    """The modes that are on where a piece begins: grad mode, and the calls that entered the autocasts, outer first."""

    grad_enabled: bool
    autocasts: tuple[fx.Node, ...]

    def key(self) -> Hashable:
        """Return a key that is equal for equal modes."""
        return self.grad_enabled, tuple(node.args for node in self.autocasts)

    def after(self, nodes: Sequence[fx.Node]) -> Modes:
        """Return the modes after some nodes."""
        enabled, autocasts = self.grad_enabled, list(self.autocasts)
        for node in nodes:
            if node.target is set_grad_enabled:
                enabled = bool(node.args[0])
            elif node.target is enter_autocast:
                autocasts.append(node)
            elif node.target is exit_autocast:
                autocasts.remove(node.args[0])  # type: ignore[arg-type]
        return Modes(enabled, tuple(autocasts))


@dataclass(frozen=True)
class FunctionMatch:
    """Nodes that become one function. number: of the first of them. choices: indices of their matmuls' choices."""

    number: int
    nodes: list[fx.Node]
    modes: Modes
    choices: tuple[int, ...]
    structure: Structure


# ---------------------------------------------------------------------------------------------------------------------
# Pattern.


def match(module: fx.GraphModule, choices: Sequence[MatmulChoice]) -> list[FunctionMatch]:
    """Return the pieces of the graph, in order; [] if it has none."""
    calls = [n for n in module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    if not any(PIECE in node.meta for node in calls):
        return []
    numbered: dict[int, list[fx.Node]] = {}
    number = FIRST_PIECE
    for node in calls:
        if node.meta.get(PIECE, number) is not None:  # None: a part of the state, which no piece computes
            earlier, number = number, node.meta.get(PIECE, number)
            assert earlier <= number, f"{node} of piece {number} comes after nodes of piece {earlier}"
            numbered.setdefault(number, []).append(node)
    pieces, modes = [], Modes(torch.is_grad_enabled(), ())
    for number, nodes in numbered.items():
        pieces.append(_piece(number, nodes, modes, module, choices))
        modes = modes.after(nodes)
    return pieces


def _piece(
    number: int, nodes: list[fx.Node], modes: Modes, module: fx.GraphModule, choices: Sequence[MatmulChoice]
) -> FunctionMatch:
    indices = tuple(choices_of(module, nodes))
    verdicts = tuple(verdict_key(choices[i]) for i in indices)
    return FunctionMatch(number, nodes, modes, indices, structure(nodes, module, (modes.key(), verdicts)))


def _joined(
    pieces: list[FunctionMatch], times: Mapping[Hashable, int], module: fx.GraphModule
) -> Iterator[FunctionMatch]:
    """Yield the pieces; those without an equal are one piece where they follow each other."""
    alone: list[FunctionMatch] = []
    for piece in [*pieces, None]:
        if piece is not None and times[piece.structure.key] == 1 and piece.number != FIRST_PIECE:
            alone.append(piece)
            continue
        if alone:
            nodes = [node for match in alone for node in match.nodes]
            choices = tuple(i for match in alone for i in match.choices)
            yield FunctionMatch(alone[0].number, nodes, alone[0].modes, choices, structure(nodes, module))
            alone = []
        if piece is not None:
            yield piece


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


class _Outliner:
    def __init__(self, context: DynamoContext, pieces: list[FunctionMatch]) -> None:
        self.module = context.annotation.module
        self.layers = context.layers
        self.pieces = pieces
        self.own = {node for piece in pieces for node in piece.nodes}
        self.results: dict[fx.Node, fx.Node] = {}
        """For each output of a piece, the node that replaces it outside of the functions."""

    def rewrite(self) -> dict[str, Body]:
        """Replace the nodes of each piece with a call; return the functions by the names of their graphs."""
        equal: dict[Hashable, list[FunctionMatch]] = {}
        for piece in self.pieces:
            equal.setdefault(piece.structure.key, []).append(piece)
        names = {key: f"piece_{i}" for i, key in enumerate(equal)}
        for key, pieces in equal.items():
            setattr(self.module, names[key], function_of(pieces[0], self.module, is_shared=len(pieces) > 1))
        for piece in self.pieces:
            self._call(names[piece.structure.key], piece)
        for node in reversed([n for n in self.module.graph.nodes if n in self.own]):  # readers first
            self.module.graph.erase_node(node)
        for node in self.module.graph.find_nodes(op="get_attr"):
            if not node.users:
                self.module.graph.erase_node(node)
        self.module.delete_all_unused_submodules()
        return {names[key]: self._body(pieces) for key, pieces in equal.items()}

    def _call(self, name: str, piece: FunctionMatch) -> None:
        graph = self.module.graph
        with graph.inserting_before(piece.nodes[0]):
            call = graph.call_module(name, tuple(self.results.get(n, n) for n in _inputs(piece)))
            for i, node in enumerate(_outputs(piece)):
                self.results[node] = result = graph.call_function(operator.getitem, (call, i))
                result.meta = {key: value for key, value in node.meta.items() if key != "custom"}
                for user in [user for user in node.users if user not in self.own]:
                    user.replace_input_with(node, result)

    def _body(self, pieces: Sequence[FunctionMatch]) -> Body:
        return Body([self.layers.get(p.number, "") for p in pieces], [p.choices for p in pieces])


def _inputs(piece: FunctionMatch) -> list[fx.Node]:
    # a call that enters autocast is repeated in the function, and is not handed in
    return [n for n in piece.structure.inputs if n.target is not enter_autocast]


def _outputs(piece: FunctionMatch) -> list[fx.Node]:
    return [n for n in piece.structure.outputs if n.target is not enter_autocast]


def function_of(piece: FunctionMatch, module: fx.GraphModule, is_shared: bool) -> fx.GraphModule:
    """Return the graph of a piece. is_shared: True if it is called with the parameters of several layers."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    root = torch.nn.Module()

    def new_node(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in copies:
            setattr(root, str(node.target), getattr(module, str(node.target)))
            copies[node] = graph.get_attr(str(node.target))
        return copies[node]

    for node in _inputs(piece):
        copies[node] = input_of(graph, node, is_shared)
    start, end = piece.modes, piece.modes.after(piece.nodes)
    outside = torch.is_grad_enabled()
    if start.grad_enabled != outside:
        graph.call_function(set_grad_enabled, (start.grad_enabled,))
    for node in start.autocasts:
        copies[node] = graph.node_copy(node)
    for node in piece.nodes:
        copies[node] = graph.node_copy(node, new_node)
    for node in reversed(end.autocasts):
        graph.call_function(exit_autocast, (copies[node],))
    if end.grad_enabled != outside:
        graph.call_function(set_grad_enabled, (outside,))
    graph.output(tuple(copies[node] for node in _outputs(piece)))
    function = fx.GraphModule(root, graph)
    function.meta = dict(module.meta)
    # by this attribute AOTAutograd recognizes a graph of Dynamo's, whose inputs have sources (frontend_utils.py)
    function._param_name_to_source = {}  # type: ignore[assignment]
    return function
