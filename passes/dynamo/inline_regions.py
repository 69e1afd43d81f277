"""Inline each call of a `torch.compiler.nested_compile_region`, with module names of the call.

before   y = invoke_subgraph(body, "subgraph_1", x, layers.1.w)[0]
         z = invoke_subgraph(body, "subgraph_1", y, layers.2.w)[0]
after    y = linear(x, layers.1.w)
         z = linear(y, layers.2.w)
changes  nothing: this is the graph of the same model without the decorator

Dynamo traces a region at its first call; later calls run the same body, whose nodes name the modules of the first call.
torch traces the backward of a body as a separate graph, which no pass over the joint graph sees. FP8 needs forward and
backward in one graph, and state for each layer. `find_layers` finds the equal calls again, so that they are compiled
once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from fp8pass.base._torch import INVOKE_SUBGRAPH
from fp8pass.base.names import Path, path_of, source_name, source_of_path
from fp8pass.graph.annotation import CHECKPOINT, copy_to_edit, graphs_of
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.passes.common.checkpoint_regions import graphs_of_call


class InlineRegions:
    """The pass over Dynamo's graph and all graphs in it."""

    name = "inline_regions"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Inline the calls of all regions; return the number of calls."""
        module = context.annotation.module
        sources = {p: source_name(p) for p in _inputs(module)}
        inliner = _Inliner()
        inliner.visit(module, graph.nodes, {p: path_of(source) for p, source in sources.items() if source})
        if inliner.count:  # otherwise code that walks module.modules() would still see the bodies
            module.delete_all_unused_submodules()
        return inliner.count


class _Inliner:
    def __init__(self) -> None:
        self.count = 0
        self.traced: dict[str, list[Path | None]] = {}
        """Name of a body: the path of the module that first called it, and the paths of that call's operands."""

    def visit(self, module: fx.GraphModule, nodes: Iterable[fx.Node], paths: Mapping[fx.Node, Path]) -> None:
        """Inline the regions that `nodes` of `module` call, in the order of tracing. paths: the paths of its inputs."""
        for node in list(nodes):
            if node.target is INVOKE_SUBGRAPH:
                self.visit(module, self._inline(module, node, paths), paths)
                continue
            for body in graphs_of_call(module, node):
                handed = zip(_inputs(body), _args(node)[1:], strict=True) if node.target is CHECKPOINT else ()
                self.visit(body, body.graph.nodes, {inner: paths[x] for inner, x in handed if x in paths})

    def _inline(self, module: fx.GraphModule, call: fx.Node, paths: Mapping[fx.Node, Path]) -> list[fx.Node]:
        """Replace the call with copies of the nodes of the body; return the copies."""
        self.count += 1
        holder, name, *operands = _args(call)
        body = getattr(module, holder.target)
        given: list[Path | None] = [_innermost(call), *(paths.get(x) for x in operands)]
        # the first call that has this body is the one that Dynamo traced: its modules are those in the body's metadata
        renames = _renames(self.traced.setdefault(name, given), given)
        copies: dict[fx.Node, Any] = dict(zip(_inputs(body), operands, strict=True))
        inner = [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]
        with module.graph.inserting_before(call):
            for node in inner:
                copies[node] = copy = module.graph.node_copy(node, copies.__getitem__)
                _rename(copy, renames, self.count)
                if node.op == "get_attr":  # each call gets a copy: passes edit it in place
                    copy.target = _add(module, getattr(body, str(node.target)), renames)
        results = fx.map_arg(_args(body.graph.output_node())[0], copies.__getitem__)
        for user in list(call.users):  # getitem
            user.replace_all_uses_with(results[_args(user)[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(call)
        if not holder.users:
            module.graph.erase_node(holder)
        return [copies[node] for node in inner]


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _args(node: fx.Node) -> Any:
    return node.args


def _add(module: fx.GraphModule, attribute: Any, renames: Mapping[Path, Path]) -> str:
    """Add an attribute to the module and return its name. A graph module is copied, and its nodes renamed."""
    name = next(name for i in itertools.count() if not hasattr(module, name := f"inlined_{i}"))
    if isinstance(attribute, fx.GraphModule):
        attribute = copy_to_edit(attribute)
        for node in (n for part in graphs_of(attribute) for n in part.graph.nodes):
            _rename(node, renames)
    setattr(module, name, attribute)
    return name


def _innermost(node: fx.Node) -> Path | None:
    """Return the path of the innermost module that the node is called in; None if it is unknown."""
    stack = node.meta.get("nn_module_stack")
    return path_of(list(stack.values())[-1][0]) if stack else None


def _renames(traced: Sequence[Path | None], given: Sequence[Path | None]) -> dict[Path, Path]:
    """Return {module path of the traced call: module path of this call}, from the paths of their operands.

    layers.1.up.weight and layers.2.up.weight give {layers.1: layers.2}: their common end lies inside the body.
    """
    renames: dict[Path, Path] = {}
    for old, new in zip(traced, given, strict=True):
        if old is None or new is None:
            continue
        while len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        renames.setdefault(old, new)
    return renames


def _rename(node: fx.Node, renames: Mapping[Path, Path], call: int = 0) -> None:
    """Replace module paths of the traced call in the node's `nn_module_stack` with those of this call.

    call: the number of this call, with which the keys of the stack tell it from others, as Dynamo's keys do.
    """
    stack = {}
    for key, (source, kind) in (node.meta.get("nn_module_stack") or {}).items():
        path = path_of(source)
        # the longest prefix that has a rename: that of the innermost module
        start = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in renames), None)
        if start is not None:
            key, source = f"{key}@inlined_{call}", source_of_path((*renames[start], *path[len(start) :]))
        stack[key] = source, kind
    node.meta["nn_module_stack"] = stack
