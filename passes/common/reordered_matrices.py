"""Find matrices that are computed from tensors in another order, as attention's heads and their rotation.

q: bf16[B, H, T, D]                                       what attention's backward returns, in memory
r = cat([q[..., D/2:] * sin, q[..., :D/2] * cos], -1)     any elementwise ops, views, joins and pads
x: bf16[B * T, H * D] = reshape(clone(permute(r)))        the matrix
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fp8pass.graph.builder import is_tensor, val
from fp8pass.passes.common.after_matmul import is_random
from fp8pass.passes.common.patterns import CASTS, CONSTANTS, RESHAPES, SPLITS, VIEWS, aten, first, reach, through

_MOVES = {
    *RESHAPES,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    *SPLITS,
    operator.getitem,
    aten.clone.default,
    aten.cat.default,
    aten.slice_scatter.default,
    aten.constant_pad_nd.default,
}
_SMALL = 4
"""Read an op's input, instead of computing it for each element again, if it has this many times fewer elements."""


@dataclass(frozen=True)
class Arranged:
    """The ops that compute a matrix from tensors in another order.

    nodes: the ops, in the graph's order. reads: each op, and a tensor that it reads. starts: the columns at which parts
    of the matrix start that are joined. heads: widths of rows that are flattened into one row of the matrix.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[tuple[fx.Node, fx.Node], ...]
    starts: tuple[int, ...]
    heads: frozenset[int]

    @property
    def tensors(self) -> list[fx.Node]:
        """Return the tensors that the ops read, in order."""
        return list(dict.fromkeys(tensor for _, tensor in self.reads))

    def is_large(self, tensor: fx.Node) -> bool:
        """Return whether a tensor has about as many elements as the matrix."""
        return _is_about_as_large(tensor, self.nodes[-1])


def arranged(x: fx.Node) -> Arranged | None:
    """Return how a matrix is computed from tensors in another order; None if it lies as it is computed."""
    joined = through(x, RESHAPES)
    if not _moves(joined) or not _is_sized(x):
        return None
    nodes = _computing(x)
    inside = set(nodes)
    reads = tuple((n, i) for n in nodes for i in n.all_input_nodes if i not in inside)
    if not all(is_tensor(i) and val(i).device == val(x).device for _, i in reads):
        return None
    heads = (val(n).shape[-1] for n in nodes if n.target is aten.permute.default)
    starts = tuple(_starts(joined)) if val(joined).shape[-1] == val(x).shape[-1] else ()
    return Arranged(tuple(nodes), reads, starts, frozenset(heads))


def _moves(node: fx.Node) -> bool:
    """Return whether an op changes the order of elements, or where they stand."""
    if node.target is aten.clone.default:
        return first(node).target in _MOVES - RESHAPES
    return node.target in (aten.cat.default, aten.slice_scatter.default, aten.constant_pad_nd.default)


def _computing(x: fx.Node) -> list[fx.Node]:
    """Return the ops that compute `x`, in order: without what others read, and what broadcasts."""
    inside = {x}
    near = reach([x], lambda n: n.all_input_nodes, lambda n: n is x or _is_computed(n))
    for node in sorted(near, reverse=True):  # all readers come first
        readers = [u for u in node.users if u in inside]
        if readers and (node.target in CONSTANTS or (_is_computed(node) and _is_ours(node, readers))):
            inside.add(node)
    return sorted(inside)


def _is_ours(node: fx.Node, readers: list[fx.Node]) -> bool:
    """Return whether an op is computed once: no others read it, and it is not broadcast."""
    alone = node.target in _MOVES or len(readers) == len(node.users)
    return alone and all(u.target is aten.cat.default or _is_about_as_large(node, u) for u in readers)


def _is_about_as_large(a: fx.Node, b: fx.Node) -> bool:
    return _value(a).numel() * _SMALL >= _value(b).numel()


def _value(node: fx.Node) -> torch.Tensor:
    """Return the value of a node; of a split, which has several, of what it splits."""
    return val(node) if is_tensor(node) else val(first(node))


def _is_computed(node: fx.Node) -> bool:
    if node.op != "call_function" or not (is_tensor(node) or node.target in SPLITS) or not _is_sized(node):
        return False
    if node.target is operator.getitem and first(node).target not in SPLITS:
        return False
    if node.target in VIEWS and node.target not in SPLITS:  # a view of what is in memory is read as it lies there
        return _is_computed(first(node))
    computes = node.target in CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return node.target in _MOVES or (computes and not is_random(node))


def _is_sized(node: fx.Node) -> bool:
    return all(isinstance(size, int) for size in (*_value(node).shape, *_value(node).stride()))


def _starts(joined: fx.Node) -> Iterator[int]:
    """Yield the columns at which the parts of a cat along the last dimension start."""
    if joined.target is not aten.cat.default or len(joined.args) < 2 or not is_tensor(joined):
        return
    if joined.args[1] not in (-1, val(joined).dim() - 1):
        return
    start = 0
    for part in joined.args[0]:  # type: ignore[union-attr]
        yield start
        start += val(part).shape[-1]
