"""Compare parts of Dynamo's graph: two parts with equal keys compute the same, each from its own inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from fp8pass.base._torch import FakeTensor, is_traceable_wrapper_subclass
from fp8pass.base.node_meta import ENABLED, GATHERED, RECIPE, SAVED_FP8, SAVED_RESULT

_NOTES = ("fp8pass_kind", ENABLED, RECIPE, GATHERED, SAVED_FP8, SAVED_RESULT)
"""Keys in `node.meta["custom"]` that passes read, and in which equal calls may differ."""


@dataclass(frozen=True)
class Structure:
    """A part of a graph, as a function. key: equal for parts that compute the same from their inputs.

    inputs: the nodes outside of the part that it reads, in the order of their first use, and the sizes that their
    shapes contain. outputs: the nodes of the part that others read, in graph order.
    """

    key: Hashable
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def structure(nodes: Sequence[fx.Node], module: fx.GraphModule, extra: Hashable = ()) -> Structure:
    """Return the structure of nodes in the graph of `module` that run one after the other.

    extra: anything else that must be equal.
    """
    positions = {node: i for i, node in enumerate(nodes)}
    inputs: dict[fx.Node, int] = {}

    def of_node(node: fx.Node) -> Hashable:
        if node in positions:
            return "node", positions[node]
        if node.op == "get_attr":
            return _of_attribute(module, node)
        return "input", inputs.setdefault(node, len(inputs))

    rows = tuple(_row(node, of_node) for node in nodes)
    outputs = tuple(n for n in nodes if any(user not in positions for user in n.users))
    values = [node.meta.get("example_value") for node in inputs]
    key = rows, tuple(positions[n] for n in outputs), tuple(map(described, values)), _aliases(values), extra
    return Structure(key, (*inputs, *_sizes(module, inputs, values)), outputs)


def _row(node: fx.Node, of_node: Callable[[fx.Node], Hashable]) -> Hashable:
    custom = node.meta.get("custom") or {}
    notes = tuple((key, custom[key]) for key in _NOTES if key in custom)
    return node.op, node.target, frozen(node.args, of_node), frozen(node.kwargs, of_node), notes


def frozen(value: Any, of_node: Callable[[fx.Node], Hashable]) -> Hashable:
    """Return a hashable key of an argument of a call. of_node: returns the key of a node."""
    if isinstance(value, fx.Node):
        return of_node(value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *(frozen(v, of_node) for v in value)
    if isinstance(value, Mapping):
        return "dict", *((key, frozen(v, of_node)) for key, v in value.items())
    if isinstance(value, slice):
        return "slice", *(frozen(v, of_node) for v in (value.start, value.stop, value.step))
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return type(value).__name__, repr(value)  # to Python, 1, 1.0 and True are equal, and so are 0.0 and -0.0
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return "symbol", str(value)
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    key: Hashable = value
    return key


def _of_attribute(module: fx.GraphModule, node: fx.Node) -> Hashable:
    """Return a key of an attribute of a graph's module; two graphs in it are compared node by node."""
    value = getattr(module, str(node.target), None)
    if not isinstance(value, fx.GraphModule):
        return "attribute", id(value)
    positions = {n: i for i, n in enumerate(value.graph.nodes)}

    def of_node(inner: fx.Node) -> Hashable:
        return _of_attribute(value, inner) if inner.op == "get_attr" else ("node", positions[inner])

    # the names of inputs, and of the graphs that are read as attributes, do not matter
    rows = (_row(n, of_node) for n in positions if n.op not in ("placeholder", "get_attr"))
    return "graph", tuple(rows), frozen({str(key): value.meta[key] for key in value.meta}, of_node)


def described(value: Any) -> Hashable:
    """Return a key of a value of Dynamo's; for a tensor, of everything that compiled code is specialized to."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(described, value)
    return _described_tensor(value) if isinstance(value, Tensor) else frozen(value, id)


def _described_tensor(value: Any) -> Hashable:
    key: list[Hashable] = [isinstance(value, torch.nn.Parameter), value.dtype, value.device, value.layout]
    # as text: a comparison of symbolic sizes would add a guard, and they can't be hashed
    key += [value.requires_grad, str(tuple(value.shape))]
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        key += [type(value), repr(context), *(described(getattr(value, name)) for name in names)]
    elif _is_plain(value):
        key += [str(value.stride()), str(value.storage_offset())]
    return tuple(key)


def storage_of(value: Any) -> int | None:
    """Return a number that is equal for tensors that share storage; None if the value is not one plain tensor."""
    return value.untyped_storage()._cdata if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    # not the tensors of torch.func's transforms, which have no storage
    return isinstance(value, FakeTensor) and value.layout is torch.strided


def _aliases(values: Sequence[Any]) -> Hashable:
    """Return for each value the position of the first one with which it shares storage."""
    first: dict[int | None, int] = {}
    storages = map(storage_of, values)
    return tuple(i if storage is None else first.setdefault(storage, i) for i, storage in enumerate(storages))


def _sizes(module: fx.GraphModule, inputs: Mapping[fx.Node, int], values: Sequence[Any]) -> list[fx.Node]:
    """Return further inputs of the graph: the sizes of which the shapes of `values` are computed."""
    wanted = {symbol for value in values if isinstance(value, Tensor) for symbol in free_symbols(value)}
    sizes = (
        n for n in module.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("example_value"), torch.SymInt)
    )
    return [n for n in sizes if n not in inputs and wanted & free_symbols(n.meta["example_value"])] if wanted else []
