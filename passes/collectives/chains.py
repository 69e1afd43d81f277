"""Capture of what is quantized behind a collective, and of what is dequantized in front of one.

behind     x = wait_tensor(collective(x_local)), and all that is made of x by movement alone; of all that is read
           elementwise ops that end in a cast to FP8       the quantizes
           amax(abs(.)), of all of it                      their amaxes
           sum(.) over all rows that were gathered         gradients of biases
in front   elementwise ops and movement, back from what goes in, to an FP8 tensor

Of what is read otherwise, nothing is captured, with a reason if it is quantized as well.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.refusal import Reject
from fp8pass.graph.verdict import Gemm
from fp8pass.passes.common.patterns import (
    CASTS,
    COPIES,
    JOINS,
    MOVEMENT,
    RESHAPES,
    WIDE,
    as_node,
    at,
    aten,
    constant,
    dtype_name,
    dtype_of,
    first,
    has_one_element,
    is_wide_cast,
)
from fp8pass.scaling import FP8_DTYPES

c10d = torch.ops._c10d_functional
COLLECTIVES = {c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default, c10d.broadcast.default}
"""They move elements between ranks and change none."""
WAIT = c10d.wait_tensor.default

OF_ALL = {*RESHAPES, *COPIES, aten.permute.default}
"""Movement that leaves each element in the tensor, once."""
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
_OF_ROWS = {aten.view.default, aten.reshape.default, aten.cat.default, aten.clone.default, operator.getitem}
"""Movement that leaves the last dimension alone if its size stays the same."""


@dataclass(frozen=True)
class Quantize:
    """How `source`, behind a collective, becomes FP8: elementwise ops, of which the last is the cast."""

    source: fx.Node
    ops: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Gathered:
    """What is quantized behind a collective, in one way. moved: all that has been made of it by movement.

    amaxes: of all of it, [] of any dtype. sums: over its rows, gradients of biases.
    """

    collective: fx.Node
    wait: fx.Node
    moved: frozenset[fx.Node]
    quantizes: tuple[Quantize, ...]
    amaxes: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Dequantized:
    """What is dequantized in front of a collective. ops: from the FP8 tensor on, movement among them."""

    collective: fx.Node
    wait: fx.Node
    x_q: fx.Node
    ops: tuple[fx.Node, ...]


def capture_gathered(collective: fx.Node, gemms: Mapping[fx.Node, Gemm]) -> Gathered | None:
    """None if what comes out of the collective is not quantized. Raises Reject if not only that.

    gemms: the verdicts so far, of matmuls that may be what reads it in high precision.
    """
    wait = _wait(collective)
    if wait is None:
        return None
    moved, readers = _readers(wait)
    quantizes: list[Quantize] = []
    amaxes: list[fx.Node] = []
    sums: list[fx.Node] = []
    others: list[fx.Node] = []
    parts: list[fx.Node] = []
    for source, reader in readers:
        if (amax := amax_from(reader)) is not None:
            (amaxes if _is_whole(source, wait) else parts).append(amax)
        elif (ops := _quantize(reader, source)) is not None:
            quantizes.append(Quantize(source, ops))
        else:
            (sums if _sums_rows(reader, wait, moved) else others).append(reader)
    if not quantizes:
        return None
    if others:
        dtype = dtype_name(dtype_of(wait))
        read = "reads" if len(told := _told(others, gemms)) == 1 else "read"
        raise Reject("high precision", f"{' and '.join(told)} {read} what {at(collective)} brings in {dtype}")
    if parts:
        raise Reject("part", f"{at(parts[0])} is not known to be the amax of all that {at(collective)} brings")
    if (ways := _ways(quantizes)) > 1:
        raise Reject("several", f"what {at(collective)} brings is quantized in {ways} ways")
    return Gathered(collective, wait, frozenset(moved), tuple(quantizes), tuple(amaxes), tuple(sums))


def _told(readers: list[fx.Node], gemms: Mapping[fx.Node, Gemm]) -> list[str]:
    """Who reads: matmuls by their modules, with the rule by which they are not in FP8; and the first other op."""
    known = {n: gemms[n] for n in readers if n in gemms and gemms[n].name}
    named = dict.fromkeys(f"{g.name} ({g.rule})" if g.rule else g.name for g in known.values())
    return [*named, *[at(n) for n in readers if n not in known][:1]]


def capture_dequantized(collective: fx.Node) -> Dequantized | None:
    """None if what goes into the collective has not just been dequantized."""
    wait = _wait(collective)
    if wait is None:
        return None
    ops: list[fx.Node] = []
    node = first(collective)
    while val(node).dtype not in FP8_DTYPES:
        data = data_of(node)
        if data is None or not (node.target in MOVEMENT - JOINS or _is_elementwise(node)):
            return None
        ops.insert(0, node)
        node = data
    return Dequantized(collective, wait, node, tuple(ops))


def _wait(collective: fx.Node) -> fx.Node | None:
    """What waits for a collective that brings high precision, if nothing else does."""
    users = list(collective.users)
    known = len(users) == 1 and users[0].target is WAIT and not collective.kwargs
    return users[0] if known and val(users[0]).dtype in WIDE else None


def _readers(wait: fx.Node) -> tuple[set[fx.Node], list[tuple[fx.Node, fx.Node]]]:
    """What is made of `wait` by movement of its elements alone, and what reads that: what is read, and the reader."""
    found, todo = [], list(wait.users)
    moved, seen = {wait}, set()
    heapq.heapify(todo)
    while todo:  # in the order of the graph: all that a node is computed of comes before it
        node = heapq.heappop(todo)
        if node in seen:
            continue
        seen.add(node)
        if _only_moves(node, moved):
            moved.add(node)
            for user in node.users:
                heapq.heappush(todo, user)
        elif _mark_of(node) is None:  # or else what it marks reads it as well
            found += [(n, node) for n in node.all_input_nodes if n in moved]
    return moved, found


def _only_moves(node: fx.Node, moved: set[fx.Node]) -> bool:
    """Return whether `node` moves elements of these, and adds none: no padding, and nothing that is joined to them."""
    if node.target is aten.cat.default:
        return all(n in moved for n in node.args[0])  # type: ignore[union-attr]
    if node.target not in MOVEMENT - JOINS - {aten.constant_pad_nd.default}:
        return False
    return node.args[0] in moved and not any(n in moved for n in node.all_input_nodes if n is not node.args[0])


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise ops: one tensor that is quantized or dequantized, the data, and others that scale it.


def _is_elementwise(node: fx.Node) -> bool:
    """Not `where`, although it is tagged so: all that it takes is data, and there is no telling the scales."""
    if node.target in JOINS:
        return False
    return node.target in CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_computed(node: fx.Node) -> bool:
    """Return whether it follows from what it is computed of, and from nothing else."""
    moves = node.target in MOVEMENT or node.target is aten.view.dtype
    return node.op == "call_function" and (moves or _is_elementwise(node))


def data_of(node: fx.Node) -> fx.Node | None:
    """The tensor that an op moves, or scales: the first, or the second if that is scaled by the first."""
    x, *others = node.args or (None,)
    if node.target is aten.mul.Tensor and is_tensor(x) and is_tensor(others[0]):
        x = others[0] if has_one_element(x) and not has_one_element(others[0]) else x
    return x if is_tensor(x) and val(x).device == val(node).device else None


def scales_of(ops: Iterable[fx.Node]) -> list[fx.Node]:
    """The tensors that elementwise ops take beside their data."""
    found: list[fx.Node] = []
    for op in ops:
        if unmarked(op) is not op:
            found.append(as_node(op.args[1]))
        elif op.target not in MOVEMENT - JOINS:
            found += [n for n in op.all_input_nodes if n is not data_of(op)]
    return found


def _quantize(node: fx.Node, source: fx.Node) -> tuple[fx.Node, ...] | None:
    """From `node` on, elementwise ops on `source` that end in a cast to FP8; a mark, with all its ops, among them."""
    ops: list[fx.Node] = []
    while True:
        if unmarked(node) is source:
            condition = first(node)
            ops += [first(condition), condition]
        elif not _is_elementwise(node) or data_of(node) is not source:
            return None
        ops.append(node)
        if val(node).dtype in FP8_DTYPES:
            return tuple(ops)
        if len(node.users) != 1:
            return None
        source, node = node, next(iter(node.users))


def quantized_by(x_q: fx.Node) -> list[fx.Node] | None:
    """The elementwise ops that a tensor was quantized by, the first one first; None if they are not in the graph."""
    ops: list[fx.Node] = []
    node: fx.Node | None = x_q
    while node is not None and _is_elementwise(node) and data_of(node) is not None and not has_one_element(node):
        ops.insert(0, node)
        if node.target is aten.mul.Tensor or node.target is aten.div.Tensor:
            return ops
        node = data_of(node)
    return None


def _ways(quantizes: list[Quantize]) -> int:
    """In how many ways they do it: ops that are the same ops, on the same, are known to give the same."""
    keys: dict[str, str] = {}

    def key(node: fx.Node, known: dict[fx.Node, str]) -> str:
        if node not in known:
            inputs = {n: key(n, known) for n in node.all_input_nodes} if is_computed(node) else None
            args = inputs and fx.map_arg((node.args, node.kwargs), lambda n: inputs[n])
            text = f"{node.target} {args}" if inputs else node.name
            known[node] = keys.setdefault(text, f"%{len(keys)}")
        return known[node]

    return len({key(q.ops[-1], {q.source: "x"}) for q in quantizes})


# ---------------------------------------------------------------------------------------------------------------------
# Marks: what `quantize_collectives` makes of infinities, before it quantizes in front of a collective.


def marked(x: Tensor) -> Tensor:
    """`x` with NaN for infinities, which would be the largest number of FP8, like others."""
    return torch.where(x.abs() == float("inf"), float("nan"), x)


def unmarked(node: fx.Node) -> fx.Node:
    """The tensor that became `node` by `marked`, for another collective; `node` itself if none did."""
    if node.target is not aten.where.self or constant(node.args[1]) == constant(node.args[1]):
        return node
    condition, x = as_node(node.args[0]), as_node(node.args[2])
    is_mark = condition.target is aten.eq.Scalar and condition.args[1] == float("inf")
    return x if is_mark and first(condition).target is aten.abs.default and first(first(condition)) is x else node


def _mark_of(node: fx.Node) -> fx.Node | None:
    """What is `marked`, if `node` is the `abs` by which infinities are found for it."""
    if node.target is not aten.abs.default or len(node.users) != 1:
        return None
    (condition,) = node.users
    if len(condition.users) != 1:
        return None
    (mark,) = condition.users
    return mark if mark.args[0] is condition and unmarked(mark) is first(node) else None


# ---------------------------------------------------------------------------------------------------------------------
# Reductions of what a collective brings.


def amax_from(node: fx.Node) -> fx.Node | None:
    """The amax of all of a tensor, whose `abs` is `node`, or its cast to a wider type."""
    is_abs = False
    while True:
        if node.target is aten.amax.default and is_abs:
            if not val(node).dim():
                return node if val(node).dtype != torch.float64 else None
        elif node.target is aten.abs.default:
            is_abs = True
        elif not widens(node):
            return None
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))


def widens(node: fx.Node) -> bool:
    """Return whether it is a cast that is exact."""
    if not is_wide_cast(node):
        return False
    old, new = val(first(node)).dtype, val(node).dtype
    return torch.promote_types(old, new) == new


def _is_whole(node: fx.Node, wait: fx.Node) -> bool:
    """Whether it has each element of `wait` once: rearranged as a whole, or cut up and all pieces put together."""
    while node is not wait:
        if node.target is aten.cat.default:
            split = _split_into(node.args[0])
            if split is None:
                return False
            node = first(split)
        elif node.target in OF_ALL:
            node = first(node)
        else:
            return False
    return True


def _split_into(parts: Any) -> fx.Node | None:
    """The split that has these pieces, and no others."""
    if any(p.target is not operator.getitem for p in parts):
        return None
    split = first(parts[0])
    if split.target not in _SPLITS or {first(p) for p in parts} != {split}:
        return None
    return split if sorted(p.args[1] for p in parts) == list(range(len(split.meta["val"]))) else None


def _sums_rows(node: fx.Node, wait: fx.Node, moved: set[fx.Node]) -> bool:
    """Return whether it is the sum over all dimensions but the last, of what keeps to the last dimension of `wait`."""
    collective = first(wait)
    if node.target is not aten.sum.dim_IntList or collective.target is not c10d.all_gather_into_tensor.default:
        return False
    source, dims = first(node), node.args[1]
    rank, width = val(source).dim(), val(wait).shape[-1]
    wide = torch.float64 in (val(source).dtype, val(node).dtype)
    if wide or not isinstance(dims, (list, tuple)) or rank < 2 or val(first(collective)).dim() < 2:
        return False
    if {d % rank for d in dims} != set(range(rank - 1)) or not _is_whole(source, wait):  # type: ignore[operator]
        return False
    path = [n for n in between(wait, source, moved) if is_tensor(n)]
    return all(n.target in _OF_ROWS and statically_known_true(val(n).shape[-1] == width) for n in path)


def between(wait: fx.Node, node: fx.Node, moved: Collection[fx.Node]) -> list[fx.Node]:
    """The movement that makes `node` of `wait`, in order. moved: all that is made of it."""
    path: set[fx.Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n is not wait and n not in path:
            path.add(n)
            todo += [m for m in n.all_input_nodes if m in moved]
    return sorted(path)
