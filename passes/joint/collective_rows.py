"""Capture of rows that are quantized after a collective, with a scale for each row, or for each block of one.

before   x: bf16[n M, K] = wait_tensor(all_gather_into_tensor(x_local: bf16[M, K]))
         amax: bf16[n M, 1] = amax(abs(x), [1], True)                     for blocks of x: bf16[n M, 1, K / 128, 128]
         x_q: f8[n M, K] = to(clamp(x * scale(amax), -448, 448), f8)
after    amax_local: bf16[M, 1], q_local: f8[M, K]                        by the same ops, on x_local
         x_q = view(wait_tensor(all_gather_into_tensor(view(q_local, u8))), f8)
         amax = wait_tensor(all_gather_into_tensor(amax_local))           from which scale and scale_inv are computed

A rank has whole rows, so their scales are those without FP8 on the wire: no number changes, not even where a row is not
finite. Rows may be reordered after the collective, as for experts; their elements may not. Scales along the other
dimension, which the backward takes for the gradient of a weight, need the rows of all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.refusal import Reject
from fp8pass.graph.verdict import Gemm
from fp8pass.passes.common.patterns import CASTS, as_node, at, aten, constant, first
from fp8pass.passes.joint.check_shared_scales import group_of, is_shared
from fp8pass.passes.joint.collective_chains import (
    Quantize,
    Structures,
    amax_from,
    between,
    captured_wait,
    check_readers,
    is_computed,
    is_whole_slice,
    quantize_from,
    readers_of,
    scales_of,
    sums_rows,
    ways_of,
)

_KEEP_ROWS = {
    aten.view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.alias.default,
    aten.cat.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    operator.getitem,
}
"""Movement that keeps rows whole if the last dimension keeps its size."""
_ROW_INDICES = {aten.index.Tensor, aten._unsafe_index.Tensor}
_RESIZING = {aten.view.default, aten.reshape.default}
_OF_ANY_SHAPE = {aten.where.self, aten.view.dtype, aten.alias.default, aten.clone.default, *CASTS}


@dataclass(frozen=True)
class Rows:
    """A tensor whose rows are quantized after a collective, always by the same ops.

    block: the elements of a row that share a scale: all of them, or a part. moved: all tensors made of `wait` by
    movement. amaxes: (the tensor, its amaxes [..., 1]). sums: over rows, gradients of biases.
    """

    collective: fx.Node
    wait: fx.Node
    moved: frozenset[fx.Node]
    block: int
    amaxes: tuple[tuple[fx.Node, fx.Node], ...]
    quantizes: tuple[Quantize, ...]
    sums: tuple[fx.Node, ...]

    @property
    def scales(self) -> list[fx.Node]:
        """The scales of the first quantize; those of the others are equal."""
        return scales_of(self.quantizes[0].ops)

    def bytes_of_amaxes(self, numel: int) -> int:
        """Return the bytes that the amaxes of so many elements take on the wire."""
        return numel // self.block * val(self.wait).element_size()


def capture_rows(collective: fx.Node, gemms: Mapping[fx.Node, Gemm]) -> Rows | None:
    """Capture the quantizes of a collective's output with scales of rows or blocks; None if there are none.

    Raises Reject if the output is also read in high precision, if it is quantized in several ways, or if a scale is
    made of more than the amax of its row. gemms: as for `capture_gathered`.
    """
    wait = captured_wait(collective)
    if wait is None:
        return None
    moved, readers = readers_of(wait)
    amaxes: list[tuple[fx.Node, fx.Node]] = []
    quantizes: list[Quantize] = []
    sums: list[fx.Node] = []
    other_readers: list[fx.Node] = []
    for source, reader in readers:
        if (amax := amax_from(reader, rows=True)) is not None:
            amaxes.append((source, amax))
        elif (ops := quantize_from(reader, source)) is not None:
            quantizes.append(Quantize(source, ops))
        else:
            (sums if sums_rows(reader, wait, moved) else other_readers).append(reader)
    if not amaxes or not quantizes:
        return None
    check_readers(collective, wait, other_readers, gemms)
    block = _block_of(collective, wait, moved, amaxes, quantizes)
    rows = Rows(collective, wait, frozenset(moved), block, tuple(amaxes), tuple(quantizes), tuple(sums))
    structures, source_of = Structures(), {amax: source for source, amax in amaxes}
    for quantize in quantizes:
        for scale in scales_of(quantize.ops):
            for amax in _check_scale(scale, source_of, collective):
                same = {structures.of(x, {wait: "x"}) for x in (source_of[amax], quantize.source)}
                if len(same) > 1:
                    raise Reject("scale", f"the scale {scale.name} after {at(collective)} is that of other rows")
    return rows


def _block_of(
    collective: fx.Node,
    wait: fx.Node,
    moved: set[fx.Node],
    amaxes: list[tuple[fx.Node, fx.Node]],
    quantizes: list[Quantize],
) -> int:
    """Return the number of elements of a row that share a scale. Raises Reject if there is no one such number."""
    blocks = {_elements(source, amax, wait, moved) for source, amax in amaxes}
    blocks |= {None for q in quantizes if not _has_rows(q.source, wait, moved)}
    ways = max(len(blocks), ways_of(quantizes, [amax for _, amax in amaxes]))
    if ways > 1:
        raise Reject(
            "several",
            f"the result of {at(collective)} is quantized in {ways} ways, along different dimensions: sent once for "
            f"each it takes more than {ways} bytes per element, and 2 in bfloat16",
        )
    (block,) = blocks
    if block is None:
        raise Reject("scale", f"the result of {at(collective)} has scales of which each needs elements of all ranks")
    return block


def _elements(source: fx.Node, amax: fx.Node, wait: fx.Node, moved: set[fx.Node]) -> int | None:
    """Return the elements of a row of `wait` that each of these amaxes is of; None if they are not of one row."""
    x = val(source)
    dims: Any = amax.args[1]
    reduced = {d % x.dim() for d in dims if not statically_known_true(x.shape[d] == 1)}
    size = x.shape[-1]
    if reduced != {x.dim() - 1} or not isinstance(size, int) or not _has_rows(source, wait, moved):
        return None
    return size


def _has_rows(source: fx.Node, wait: fx.Node, moved: set[fx.Node]) -> bool:
    """Return whether the last dimension of `source` is a row of `wait`, or a part of one, in order."""
    path = [n for n in between(wait, source, moved) if is_tensor(n)]
    # without its rank's part in the first dimension, a row would be divided among ranks
    return val(wait).dim() > 1 and all(_keeps_rows(n, wait) or (n is source and _cuts_rows(n, wait)) for n in path)


def _keeps_rows(node: fx.Node, wait: fx.Node) -> bool:
    x = val(node)
    if not x.dim() or not statically_known_true(x.shape[-1] == val(wait).shape[-1]):
        return False
    if node.target is aten.permute.default:
        return bool(node.args[1][-1] % x.dim() == x.dim() - 1)  # type: ignore[index,operator]
    if node.target in _ROW_INDICES:
        indices: Any = node.args[1]
        return len(indices) < val(first(node)).dim() or indices[-1] is None
    return node.target in _KEEP_ROWS or is_whole_slice(node)


def _cuts_rows(node: fx.Node, wait: fx.Node) -> bool:
    """Return whether a view cuts each row into blocks: [..., K / b, b]."""
    x, width = val(node), val(wait).shape[-1]
    return (
        node.target in _RESIZING
        and x.dim() > 1
        and statically_known_true(x.shape[-1] * x.shape[-2] == width)
        and statically_known_true(val(first(node)).shape[-1] == width)
    )


def _check_scale(scale: fx.Node, amaxes: Mapping[fx.Node, fx.Node], collective: fx.Node) -> list[fx.Node]:
    """Return the amaxes of which a scale is made. Raises Reject if it is made of more than these and constants.

    Something that all ranks have may be part of it, if it is there before the collective.
    """
    sources = computed_from(scale, amaxes)
    for node in sources:
        if node in amaxes or constant(node) is not None:
            continue
        if is_tensor(node) and not is_computed(node):
            if not is_shared(node, group_of(collective)) or node > collective:
                raise Reject("scale", f"the scale {scale.name} after {at(collective)} may differ between ranks")
        elif node.target not in _OF_ANY_SHAPE and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            raise Reject("scale", f"{at(node)} moves scales of the result of {at(collective)}")
    return [node for node in sources if node in amaxes]


def computed_from(scale: fx.Node, amaxes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes from which `scale` is computed, in the order of the graph, beginning with amaxes."""
    sources, todo, ends = {scale}, [scale], set(amaxes)
    while todo:
        node = todo.pop()
        if node in ends or (is_tensor(node) and not is_computed(node) and constant(node) is None):
            continue
        for n in node.all_input_nodes:
            if n not in sources:
                sources.add(n)
                todo.append(n)
    return sorted(sources)


def row_amaxes(x: Tensor, block: int) -> Tensor:
    """Return the amax of each block of the rows of `x` [..., K]: [..., K / block]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block).abs().amax(-1)


def moved_amaxes(op: fx.Node, blocks: int) -> tuple[Any, ...]:
    """Return the arguments with which `op`, which moves rows, moves their amaxes [..., blocks]."""
    if op.target in _RESIZING:
        x, size = op.args
        return x, [*size[:-1], blocks]  # type: ignore[index,misc]
    return op.args


def cuts(op: fx.Node, wait: fx.Node) -> bool:
    """Return whether `op` cuts rows into blocks, so that it is not applied to amaxes of blocks."""
    return not _keeps_rows(op, wait) if is_tensor(op) else False


def local_scale(node: fx.Node) -> bool:
    """Return whether a node from which a scale is computed is computed again before the collective."""
    return is_computed(node) or constant(as_node(node)) is not None
