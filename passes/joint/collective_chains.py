"""Capture of the ops that quantize a tensor after a collective, and of those that dequantize one before it.

after      x = wait_tensor(collective(x_local)), and all tensors made of x by movement alone. Their readers may be
           elementwise ops that end in a cast to FP8       the quantizes
           amax(abs(.)) of the whole tensor                their amaxes
           sum(.) over all gathered rows                   gradients of biases
before     elementwise ops and movement, from the collective's input back to an FP8 tensor

If `x` has any other reader, nothing is captured; if it is quantized as well, the refusal gives the reason.
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

from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.refusal import Reject
from fp8pass.graph.verdict import Gemm
from fp8pass.passes.common.patterns import (
    CASTS,
    COPIES,
    JOINS,
    MOVEMENT,
    RESHAPES,
    SPLITS,
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
    reach,
)

LIMITS = {
    "collectives": {
        "high precision, several": (
            "the tensor is also read in high precision, or is quantized in several ways",
            "nothing: it would be gathered twice",
        ),
        "part": (
            "the tensor is quantized by the amax of a part: uneven shards, whose padding is cut off",
            "sizes that the ranks divide",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

c10d = torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default

_OF_ALL = {*RESHAPES, *COPIES, aten.permute.default}
_OF_ROWS = {aten.view.default, aten.reshape.default, aten.cat.default, aten.clone.default, operator.getitem}
"""Movement that does not mix the last dimension with others if its size stays the same: no permute, which may swap
dimensions of one size."""


@dataclass(frozen=True)
class Quantize:
    """The elementwise ops that quantize `source`, a tensor after a collective; the last op is the cast to FP8."""

    source: fx.Node
    ops: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Gathered:
    """A tensor that is quantized after a collective, always by the same ops.

    moved: all tensors made of it by movement, `wait` included. amaxes: amaxes of the whole tensor, [] of any dtype.
    sums: sums over its rows, gradients of biases.
    """

    collective: fx.Node
    wait: fx.Node
    moved: frozenset[fx.Node]
    quantizes: tuple[Quantize, ...]
    amaxes: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Dequantized:
    """A tensor that is dequantized before a collective. ops: from the FP8 tensor `x_q` on, movement included."""

    collective: fx.Node
    wait: fx.Node
    x_q: fx.Node
    ops: tuple[fx.Node, ...]


def capture_gathered(collective: fx.Node, gemms: Mapping[fx.Node, Gemm]) -> Gathered | None:
    """Capture the quantizes of a collective's output; None if it is not quantized.

    Raises Reject if the output is also read in high precision, if an amax covers only a part of it, or if it is
    quantized in several ways.

    gemms: the verdicts on matmuls so far, to name the matmuls that read the output in high precision.
    """
    wait = captured_wait(collective)
    if wait is None:
        return None
    moved, readers = readers_of(wait)
    quantizes: list[Quantize] = []
    amaxes: list[fx.Node] = []
    sums: list[fx.Node] = []
    other_readers: list[fx.Node] = []
    parts: list[fx.Node] = []
    for source, reader in readers:
        if (amax := amax_from(reader)) is not None:
            (amaxes if _is_whole(source, wait) else parts).append(amax)
        elif (ops := quantize_from(reader, source)) is not None:
            quantizes.append(Quantize(source, ops))
        else:
            (sums if sums_rows(reader, wait, moved) else other_readers).append(reader)
    if not quantizes:
        return None
    check_readers(collective, wait, other_readers, gemms)
    if parts:
        raise Reject("part", f"{at(parts[0])} is not known to be the amax of the whole result of {at(collective)}")
    if (ways := ways_of(quantizes)) > 1:
        raise Reject("several", f"the result of {at(collective)} is quantized in {ways} ways")
    return Gathered(collective, wait, frozenset(moved), tuple(quantizes), tuple(amaxes), tuple(sums))


def check_readers(
    collective: fx.Node, wait: fx.Node, other_readers: list[fx.Node], gemms: Mapping[fx.Node, Gemm]
) -> None:
    """Raise Reject if there are `other_readers` of the result of a collective in high precision."""
    if other_readers:
        dtype = dtype_name(dtype_of(wait))
        read = "reads" if len(told := _told(other_readers, gemms)) == 1 else "read"
        raise Reject("high precision", f"{' and '.join(told)} {read} the result of {at(collective)} in {dtype}")


def _told(readers: list[fx.Node], gemms: Mapping[fx.Node, Gemm]) -> list[str]:
    """Return names of readers for a message: all matmuls with the rule that excludes them, and the first other op."""
    matmuls = {n: gemms[n] for n in readers if n in gemms and gemms[n].name}
    named = dict.fromkeys(f"{g.name} ({g.rule})" if g.rule else g.name for g in matmuls.values())
    return [*named, *[at(n) for n in readers if n not in matmuls][:1]]


def capture_dequantized(collective: fx.Node) -> Dequantized | None:
    """Capture the dequantize of a collective's input; None if elementwise ops and movement lead to no FP8 tensor."""
    wait = captured_wait(collective)
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


def captured_wait(collective: fx.Node) -> fx.Node | None:
    """Return the `wait_tensor` of a collective if its output is high precision and has no other user; None if not."""
    users = list(collective.users)
    # no kwargs: group_of reads the group's name from the last positional argument
    is_captured = len(users) == 1 and users[0].target is WAIT and not collective.kwargs
    return users[0] if is_captured and val(users[0]).dtype in WIDE else None


def readers_of(wait: fx.Node) -> tuple[set[fx.Node], list[tuple[fx.Node, fx.Node]]]:
    """Return the tensors made of `wait` by movement alone, and a pair (tensor, reader) for each read of one."""
    readers, todo = [], list(wait.users)
    moved, seen = {wait}, set()
    heapq.heapify(todo)
    while todo:  # in the order of the graph, so that all inputs of a node come before it
        node = heapq.heappop(todo)
        if node in seen:
            continue
        seen.add(node)
        if _only_moves(node, moved):
            moved.add(node)
            for user in node.users:
                heapq.heappush(todo, user)
        elif _mark_of(node) is None:  # the `abs` of a mark is skipped: the mark's `where` is a reader itself
            readers += [(n, node) for n in node.all_input_nodes if n in moved]
    return moved, readers


def _only_moves(node: fx.Node, moved: set[fx.Node]) -> bool:
    """Return whether `node` only moves elements of `moved`: no padding, and no other tensor joined to them."""
    if node.target is aten.cat.default:
        return all(n in moved for n in node.args[0])  # type: ignore[union-attr]
    if node.target not in MOVEMENT - JOINS - {aten.constant_pad_nd.default}:
        return False
    # an index made of the gathered elements reads them, and does not only move them
    return node.args[0] in moved and not any(n in moved for n in node.all_input_nodes if n is not node.args[0])


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise ops: they quantize or dequantize one tensor, the data; their other tensors are scales.


def _is_elementwise(node: fx.Node) -> bool:
    """Return whether `node` is a cast or tagged pointwise, other than `where`.

    `aten.where` is tagged pointwise, but its inputs cannot be split into data and scale.
    """
    if node.target in JOINS:
        return False
    return node.target in CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ())


def moves_all(node: fx.Node) -> bool:
    """Return whether `node` moves its input, and its result holds each element exactly once."""
    return node.target in _OF_ALL or is_whole_slice(node)


def is_whole_slice(node: fx.Node) -> bool:
    """Return whether `node` is a slice of all: DTensors of torch 2.13 end a gather of more than 256 rows with one."""
    if node.target is not aten.slice.Tensor:
        return False
    sizes = zip(val(node).shape, val(first(node)).shape, strict=True)
    return all(statically_known_true(new == old) for new, old in sizes)


def is_computed(node: fx.Node) -> bool:
    """Return whether the value of `node` depends on its inputs alone: it is elementwise or movement."""
    moves = node.target in MOVEMENT or node.target is aten.view.dtype
    return node.op == "call_function" and (moves or _is_elementwise(node))


def data_of(node: fx.Node) -> fx.Node | None:
    """Return the tensor that an op moves or scales: the first; the second if the first is its one-element scale."""
    x, *rest = node.args or (None,)
    if node.target is aten.mul.Tensor and is_tensor(x) and is_tensor(rest[0]):
        x = rest[0] if has_one_element(x) and not has_one_element(rest[0]) else x
    # not a copy to another device: moved before the collective, it would have the collective run there
    return x if is_tensor(x) and val(x).device == val(node).device else None


def scales_of(ops: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the tensor inputs of elementwise ops other than their data."""
    scales: list[fx.Node] = []
    for op in ops:
        if unmarked(op) is not op:
            scales.append(as_node(op.args[1]))
        elif op.target not in MOVEMENT - JOINS:
            scales += [n for n in op.all_input_nodes if n is not data_of(op)]
    return scales


def quantize_from(node: fx.Node, source: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return the elementwise ops on `source`, from `node` to a cast to FP8, including those of a mark; None if not."""
    ops: list[fx.Node] = []
    while True:
        if unmarked(node) is source:
            condition = first(node)
            ops += [first(condition), condition]  # the mark's `abs` and `eq`; `where` follows below
        elif not _is_elementwise(node) or data_of(node) is not source:
            return None
        ops.append(node)
        if val(node).dtype in FP8_DTYPES:
            return tuple(ops)
        if len(node.users) != 1:
            return None  # another reader would lose the intermediate result, which the rewrite erases
        source, node = node, next(iter(node.users))


def quantized_by(x_q: fx.Node) -> list[fx.Node] | None:
    """Return the elementwise ops that quantize into `x_q`, in order; None if they are not in the graph."""
    ops: list[fx.Node] = []
    node: fx.Node | None = x_q
    while node is not None and _is_elementwise(node) and data_of(node) is not None and not has_one_element(node):
        ops.insert(0, node)
        if node.target is aten.mul.Tensor or node.target is aten.div.Tensor:
            return ops
        node = data_of(node)
    return None


class Structures:
    """Tells which nodes are computed by the same ops from the same nodes, by equal texts."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def of(self, node: fx.Node, structures: dict[fx.Node, str]) -> str:
        """Return the structure of `node`. structures: those known so far, to which those of its inputs are added."""
        if node not in structures:
            inputs = {n: self.of(n, structures) for n in node.all_input_nodes} if is_computed(node) else None
            args = inputs and fx.map_arg((node.args, node.kwargs), lambda n: inputs[n])
            text = f"{node.target} {args}" if inputs else _text_of(node)
            structures[node] = self._texts.setdefault(text, f"%{len(self._texts)}")
        return structures[node]


def _text_of(node: fx.Node) -> str:
    """Return the text of a constant, equal for equal constants; otherwise the name of the node."""
    number = constant(node)
    return node.name if number is None else f"{number} of {dtype_of(node)}{list(val(node).shape)}"


def ways_of(quantizes: list[Quantize], amaxes: Iterable[fx.Node] = ()) -> int:
    """Return the number of distinct quantizations. Chains with equal ops and inputs count once.

    amaxes: nodes that count as one.
    """
    structures, equal = Structures(), dict.fromkeys(amaxes, "amax")
    return len({structures.of(q.ops[-1], {**equal, q.source: "x"}) for q in quantizes})


# ---------------------------------------------------------------------------------------------------------------------
# Marks: NaN, with which `quantize_collectives` replaces infinities before it quantizes before a collective.


def marked(x: Tensor) -> Tensor:
    """Return `x` with NaN for infinities, which the clamp of quantize would turn into the largest FP8 number."""
    return torch.where(x.abs() == float("inf"), float("nan"), x)


def unmarked(node: fx.Node) -> fx.Node:
    """Return the `x` of `node = marked(x)`, from the rewrite of another collective; otherwise `node` itself."""
    if node.target is not aten.where.self or constant(node.args[1]) == constant(node.args[1]):
        return node  # the constant is not NaN: only NaN differs from itself
    condition, x = as_node(node.args[0]), as_node(node.args[2])
    is_mark = condition.target is aten.eq.Scalar and condition.args[1] == float("inf")
    return x if is_mark and first(condition).target is aten.abs.default and first(first(condition)) is x else node


def _mark_of(node: fx.Node) -> fx.Node | None:
    """Return the result of `marked` that finds infinities with `node`, an `abs`; None if there is none."""
    if node.target is not aten.abs.default or len(node.users) != 1:
        return None
    (condition,) = node.users
    if len(condition.users) != 1:
        return None
    (mark,) = condition.users
    return mark if mark.args[0] is condition and unmarked(mark) is first(node) else None


# ---------------------------------------------------------------------------------------------------------------------
# Reductions of a collective's output.


def amax_from(node: fx.Node, rows: bool = False) -> fx.Node | None:
    """Return the amax of a whole tensor, given the first op of it: `abs` or a widening cast; None if there is none.

    rows: True for the amaxes of parts of the tensor instead, with the reduced dimensions kept.
    """
    is_abs = False
    while True:
        if node.target is aten.amax.default and is_abs:
            if rows:
                return node if val(node).dim() and node.args[2:] == (True,) else None
            if not val(node).dim():
                return node if val(node).dtype != torch.float64 else None  # the rewrite takes amaxes in float32
        elif node.target is aten.abs.default:
            is_abs = True
        elif not widens(node):
            return None
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))


def widens(node: fx.Node) -> bool:
    """Return whether `node` is a cast to a type that holds all values of the old one."""
    if not is_wide_cast(node):
        return False
    old, new = val(first(node)).dtype, val(node).dtype
    return torch.promote_types(old, new) == new


def _is_whole(node: fx.Node, wait: fx.Node) -> bool:
    """Return whether `node` holds each element of `wait` once: moved as a whole, or split and fully joined again."""
    while node is not wait:
        if node.target is aten.cat.default:
            split = _split_into(node.args[0])
            if split is None:
                return False
            node = first(split)
        elif moves_all(node):
            node = first(node)
        else:
            return False
    return True


def _split_into(parts: Any) -> fx.Node | None:
    """Return the split whose pieces are exactly these; None if there is none."""
    if any(p.target is not operator.getitem for p in parts):
        return None
    split = first(parts[0])
    if split.target not in SPLITS or {first(p) for p in parts} != {split}:
        return None
    return split if sorted(p.args[1] for p in parts) == list(range(len(split.meta["val"]))) else None


def sums_rows(node: fx.Node, wait: fx.Node, moved: set[fx.Node]) -> bool:
    """Return whether `node` sums gathered rows: over all dimensions but the last, which is that of `wait`."""
    collective = first(wait)
    # only after an all-gather is the sum that of all ranks' sums: an all-to-all leaves each rank other rows, and a
    # broadcast the same rows on all ranks
    if node.target is not aten.sum.dim_IntList or collective.target is not c10d.all_gather_into_tensor.default:
        return False
    source, dims = first(node), node.args[1]
    rank, width = val(source).dim(), val(wait).shape[-1]
    wide = torch.float64 in (val(source).dtype, val(node).dtype)  # the rewrite adds up in float32
    # a 1-D input has no rows: all dimensions but the last are none, and torch's sum takes [] for all dimensions
    if wide or not isinstance(dims, (list, tuple)) or rank < 2 or val(first(collective)).dim() < 2:
        return False
    if {d % rank for d in dims} != set(range(rank - 1)) or not _is_whole(source, wait):  # type: ignore[operator]
        return False
    path = [n for n in between(wait, source, moved) if is_tensor(n)]
    moves_rows = (n.target in _OF_ROWS or is_whole_slice(n) for n in path)
    return all(moves_rows) and all(statically_known_true(val(n).shape[-1] == width) for n in path)


def between(wait: fx.Node, node: fx.Node, moved: Collection[fx.Node]) -> list[fx.Node]:
    """Return the movement ops from `wait` to `node`, in order. moved: all tensors made of `wait`."""
    path = reach([node], lambda n: (m for m in n.all_input_nodes if m in moved))
    path.pop(wait, None)
    return sorted(path)
