"""Find layers that are equal, and note on each node to which piece of the graph it belongs.

before   y = layers.0(x);  z = layers.1(y);  loss = head(z)      calls of modules, as their nodes
after    the same nodes, each with the number of its piece: 0 for the nodes before the layers, 1 for those of layers.0,
         2 for those of layers.1, 3 for those of the head
changes  nothing: later passes keep the pieces apart, and outline_layers makes functions of them

A layer is the call of a module, or a region of activation checkpointing, that computes the same as another one from
other inputs: the same ops, shapes and constants, whatever the names of its class and of its parameters. Where a call
has no equal, the calls within it are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fp8pass.base._torch import (
    MODE_CHANGES,
    HigherOrderOperator,
    enter_autocast,
    exit_autocast,
    is_traceable_wrapper_subclass,
    pytree,
    set_grad_enabled,
)
from fp8pass.base.names import Names, module_path, source_of
from fp8pass.base.node_meta import PIECE
from fp8pass.graph.annotation import CHECKPOINT, FUNCTION
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.options.config import Config
from fp8pass.passes.common.checkpoint_regions import body_of, graphs_of_call
from fp8pass.passes.common.equal_structure import storage_of, structure
from fp8pass.passes.common.function_graphs import FunctionGraphs, function_graphs, graphs_in
from fp8pass.passes.common.matmul_calls import argument, mutates, signature_of
from fp8pass.passes.common.transforms import transforms
from fp8pass.recipes import DelayedScaling, DynamicScaling

SMALLEST = 2
"""The least number of matmuls of a layer: at each border kernels end, which costs small layers more than it saves."""


class FindLayers:
    """The pass over Dynamo's graph. Regions of activation checkpointing stay whole."""

    name = "find_layers"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Note the piece of each node in `node.meta[PIECE]`; return the number of layers."""
        if not context.config.compiles_once:
            return 0
        pieces = find(context.annotation.module, context.names, context.config, context.notes)
        if pieces:
            context.layers = _number(pieces)
            context.quantized_in = _place_quantizes(graph, context.layers)
        return len(context.layers)


def find(module: fx.GraphModule, names: Names, config: Config, notes: list[str]) -> list[Piece]:
    """Return the pieces of the graph, in order; [] if fewer than two are layers. notes: gets what `check` refuses."""
    pieces = _pieces(module.graph, match(module))
    for refusal in check(module, pieces, names, config) if len(pieces) > 1 else ():
        refused = [piece for piece in pieces[refusal.first : refusal.last + 1] if piece.layer]
        if refused:
            notes.append(f"{_listed([p.layer for p in refused])}: {refusal.reason}")
        for piece in refused:
            piece.layer = ""
    return pieces if sum(bool(p.layer) for p in pieces) > 1 else []


def _listed(layers: Sequence[str]) -> str:
    """Return the beginning of a sentence about layers that are refused."""
    if len(layers) == 1:
        return f"{layers[0]} is compiled in place, not once for all equal layers"
    return f"{len(layers)} layers, {layers[0]} to {layers[-1]}, are compiled in place, not once for all"


@dataclass
class Piece:
    """Nodes that run one after the other. layer: the path of the layer that they are; "" if they are not a layer."""

    nodes: list[fx.Node] = field(default_factory=list)
    layer: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why the pieces from `first` to `last` cannot be separate functions; completes a sentence."""

    first: int
    last: int
    reason: str


# ---------------------------------------------------------------------------------------------------------------------
# Pattern.


def match(module: fx.GraphModule) -> list[Piece]:
    """Return the outermost calls that have an equal, in graph order."""
    level, layers, depth = [Piece(_calls(module.graph))], list[Piece](), 0
    while level:
        inner = [call for piece in level for call in _within(piece.nodes, depth)]
        calls = [call for call in inner if _matmuls(module, call.nodes) >= SMALLEST]
        # one call alone, such as that of the whole model, has no equal
        keys = [structure(call.nodes, module).key for call in calls] if len(calls) > 1 else list(range(len(calls)))
        times = Counter(keys)
        layers += [call for call, key in zip(calls, keys, strict=True) if times[key] > 1]
        alone = [call for call, key in zip(calls, keys, strict=True) if times[key] == 1]
        level = [call for call in alone if call.nodes[0].target is not CHECKPOINT]  # regions stay whole
        depth += 1
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    return sorted(layers, key=lambda piece: order[piece.nodes[0]])


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def _within(nodes: Sequence[fx.Node], depth: int) -> Iterator[Piece]:
    """Yield the calls of modules at this depth of the module stack, and checkpointed regions outside of such calls."""
    current, key, loose = Piece(), None, list[fx.Node]()
    for node in nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).items())
        if not stack and node.target is not CHECKPOINT:
            loose.append(node)  # part of a call if that goes on after it
        elif len(stack) > depth and stack[depth][0] == key:
            current.nodes += [*loose, node]
            loose.clear()
        else:
            yield current
            current, key = Piece(), None
            loose.clear()
            if len(stack) > depth:
                key, (source, _) = stack[depth]
                current = Piece([node], module_path(source) or source)
            elif node.target is CHECKPOINT:
                results = [n for n in node.users if not n.meta.get("nn_module_stack")]  # getitem
                yield Piece([node, *results], f"the checkpointed region {node.name}")
    yield current


def _matmuls(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> int:
    """Return the number of matmuls, including those in checkpointed regions and Functions."""
    bodies = [*(body_of(module, n) for n in nodes if n.target is CHECKPOINT), *graphs_in(module, nodes)]
    return sum(signature_of(n) is not None for n in nodes) + sum(_matmuls(b, list(b.graph.nodes)) for b in bodies)


def _pieces(graph: fx.Graph, layers: list[Piece]) -> list[Piece]:
    """Return all calls of the graph as pieces, in order: the layers, and those before, between and after them."""
    layer_of = {node: layer for layer in layers for node in layer.nodes}
    pieces = [Piece()]
    for node in _calls(graph):
        layer = layer_of.get(node)
        if layer is None:
            if pieces[-1].layer:
                pieces.append(Piece())
            pieces[-1].nodes.append(node)
        elif pieces[-1] is not layer:
            pieces.append(layer)
    return pieces


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


def check(module: fx.GraphModule, pieces: Sequence[Piece], names: Names, config: Config) -> Iterator[Refusal]:
    """Yield the reasons why pieces cannot be separate functions."""
    at = {node: i for i, piece in enumerate(pieces) for node in piece.nodes}
    last = len(pieces) - 1
    if any(free_unbacked_symbols(n.meta.get("example_value")) for n in at if _is_tensor_or_size(n)):
        yield Refusal(0, last, "sizes in the graph depend on values of tensors")
        return
    yield from _operands_shared(module, at, pieces, names, config)
    yield from _writes_shared(module, at, names)
    for node, i in at.items():
        readers = [at[user] for user in node.users if at.get(user, i) != i]
        if readers and not _is_tensor_or_size(node) and node.target is not enter_autocast:
            yield Refusal(i, max(readers), f"{_called(node, names)}, which others read, is not a tensor")
    yield from _modes_open(at, pieces)
    inside = [at[node] for node in transforms(module.graph) if node in at]
    if inside:
        yield Refusal(min(inside), max(inside), "it is inside of a transform of torch.func")


def _is_tensor_or_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (Tensor, torch.SymInt))


def _called(node: fx.Node, names: Names) -> str:
    """Return the path of a parameter; for another node, the name of its function and the user's line."""
    function = getattr(node.target, "__name__", str(node.target))
    return names.owned.get(node) or f"the result of {function} at {source_of(node) or 'an unknown line'}"


def _operands_shared(
    module: fx.GraphModule, at: dict[fx.Node, int], pieces: Sequence[Piece], names: Names, config: Config
) -> Iterator[Refusal]:
    """Yield a refusal for each tensor that is quantized once for matmuls of several pieces, and can't be handed over.

    Only one scale for the whole tensor is handed over. A layer does not quantize for others: it would not be equal to
    others then. So it can't read what is quantized after it. Nothing may write the tensor after it is quantized.
    """
    last_write = {s: i for node, i in at.items() for n in _written(module, node) for s in _storages(n)}
    hands_over = all(isinstance(recipe, (DelayedScaling, DynamicScaling)) for recipe in config.recipes)
    for operand, readers in _readers(at).items():
        is_plain = not is_traceable_wrapper_subclass(operand.meta.get("example_value"))
        is_cached = operand in names.owned and config.caches_weights
        in_layer = operand in at and bool(pieces[at[operand]].layer) and at[operand] in readers
        is_written = any(last_write.get(storage, 0) > at.get(operand, 0) for storage in _storages(operand))
        if hands_over and is_plain and not is_cached and not in_layer and not is_written:
            continue
        yield Refusal(min(readers), max(readers), f"{_called(operand, names)} is quantized once for all of them")


def _readers(at: dict[fx.Node, int]) -> dict[fx.Node, set[int]]:
    """Return the tensors that matmuls of several pieces read, and these pieces."""
    readers: dict[fx.Node, set[int]] = {}
    for node, i in at.items():
        if (signature := signature_of(node)) is not None:
            # before the annotate pass: quantizes do not exist yet, so operands stand for them
            for operand in (argument(node, signature.a), argument(node, signature.b)):
                if isinstance(operand, fx.Node):
                    readers.setdefault(operand, set()).add(i)
    return {operand: pieces for operand, pieces in readers.items() if len(pieces) > 1}


def _writes_shared(module: fx.GraphModule, at: dict[fx.Node, int], names: Names) -> Iterator[Refusal]:
    """Yield a refusal for each tensor that a piece writes in place after an earlier piece has computed or read it."""
    touched: dict[int, list[int]] = {}
    for node, i in at.items():
        written = {s for n in _written(module, node) for s in _storages(n)}
        for storage in {s for n in (node, *node.all_input_nodes) for s in _storages(n)}:
            touching = touched.setdefault(storage, [])
            touching.append(i)
            if storage in written and touching[0] < i:
                yield Refusal(touching[0], i, f"{_called(node, names)} is written in place, and others use it")


def _written(module: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """Return the inputs that a call may write into."""
    if node.target is FUNCTION:
        return _written_by_function(function_graphs(module, node))
    if not _writes(module, node):
        return []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_operator = getattr(node.target, "__module__", "") == "_operator"  # setitem, iadd and others
    first = node.args[0] if node.args else None
    in_place = is_operator or (str(name).endswith("_") and node.kwargs.get("out") is None)
    return [first] if in_place and isinstance(first, fx.Node) else node.all_input_nodes


def _written_by_function(graphs: FunctionGraphs) -> list[fx.Node]:
    """Return the operands of a Function that its forward or its backward may write into."""
    bodies = graphs.forward, graphs.backward
    written = {s for body in bodies for n in body.graph.nodes for x in _written(body, n) for s in _storages(x)}
    written |= {s for inner, outer in graphs.saved.items() if written & {*_storages(inner)} for s in _storages(outer)}
    return [outer for inner, outer in graphs.operands.items() if written & {*_storages(inner)}]


def _storages(node: fx.Node) -> list[int]:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return [storage for leaf in leaves if (storage := storage_of(leaf)) is not None]


def _writes(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a call may write into one of its inputs; of an op with graphs, whether these do."""
    if not isinstance(node.target, HigherOrderOperator):
        return mutates(node)
    bodies = graphs_of_call(module, node)
    return not bodies or any(_writes(body, n) for body in bodies for n in body.graph.nodes)


def _modes_open(at: dict[fx.Node, int], pieces: Sequence[Piece]) -> Iterator[Refusal]:
    """Yield a refusal for a layer that enters or leaves a mode for the nodes after it.

    `outline_layers` repeats grad mode and autocast in each piece, but not other modes.
    """
    reason = "the nodes after it run in another grad or autocast mode than those before it"
    enabled = torch.is_grad_enabled()
    for i, piece in enumerate(pieces):
        at_start = enabled
        for node in piece.nodes:
            if node.target is set_grad_enabled:
                enabled = bool(node.args[0])
            elif node.target is exit_autocast:
                entered = at[node.args[0]]  # type: ignore[index]
                if entered != i and (piece.layer or pieces[entered].layer):
                    yield Refusal(entered, i, reason)
            elif node.target in MODE_CHANGES and node.target is not enter_autocast:
                yield Refusal(0, len(pieces) - 1, "the graph changes inference mode")
        if piece.layer and enabled != at_start:
            yield Refusal(i, i, reason)


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


def _number(pieces: Sequence[Piece]) -> dict[int, str]:
    """Set the piece of each node; return the layers by number. Pieces in a row that are not layers are one.

    Numbers are even: one between two pieces is for what is added there.
    """
    number, layers, is_layer = 0, dict[int, str](), False
    for i, piece in enumerate(pieces):
        number += 2 * (i > 0 and (is_layer or bool(piece.layer)))
        is_layer = bool(piece.layer)
        for node in piece.nodes:
            node.meta[PIECE] = number
        if is_layer:
            layers[number] = piece.layer
    return layers


def _place_quantizes(graph: fx.Graph, layers: Mapping[int, str]) -> dict[fx.Node, int]:
    """Return the number of the piece that quantizes each tensor that matmuls of several pieces read.

    It is the piece that computes the tensor, or 0; for the result of a layer, a new piece after the layer.
    """
    numbers = {node: node.meta[PIECE] for node in _calls(graph)}
    computed_in = {operand: numbers.get(operand, 0) for operand in _readers(numbers)}
    return {operand: number + (number in layers) for operand, number in computed_in.items()}
