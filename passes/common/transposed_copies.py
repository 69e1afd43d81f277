"""Find tensors that are quantized in both orientations, and reduce them in tiles: for the passes that tile kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from fp8pass.base.node_meta import TILED
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import Builder, val
from fp8pass.passes.common.patterns import (
    RESHAPES,
    as_node,
    aten,
    dtype_of,
    first,
    has_one_element,
    is_elementwise,
    prims,
    sources,
)
from fp8pass.quant.kernel_ops import CONCATENATED, QUANTIZE, SATURATED

ROWS, COLUMNS = 64, 24576
"""The least height of a tile, and about the number of columns in all: with 64 columns to a program that makes three
programs for each of 132 SMs."""
MAX_JOINED_WEIGHTS = 8
"""Most siblings in one kernel: Inductor does not join more of them elementwise (`config.max_pointwise_cat_inputs`)."""


@dataclass(frozen=True)
class TransposedCopy:
    """A quantized tensor with a transposed copy, viewed as a matrix [rows, columns]."""

    x_q: fx.Node
    copy: fx.Node
    rows: int
    columns: int

    @property
    def x(self) -> fx.Node:
        """The tensor that is quantized."""
        return first(self.x_q)

    @property
    def scale(self) -> fx.Node:
        """The scale, f32: one number, or what broadcasts to the tensor."""
        return as_node(self.x_q.args[1])


def match(copy: fx.Node) -> TransposedCopy | None:
    """Match a transposed copy of a tensor that this graph quantizes with one scale; return None for any other node."""
    m = transposed(copy)
    return m if m is not None and has_one_element(m.scale) else None


def transposed(copy: fx.Node) -> TransposedCopy | None:
    """Match a transposed copy of a tensor that this graph quantizes, with any scales."""
    if copy.target is not aten.clone.default or dtype_of(copy) not in FP8_DTYPES:
        return None
    if any(TILED in user.meta for user in copy.users):  # `quantize_tiles` made it
        return None
    moved = first(copy)
    if moved.target is not aten.permute.default or moved.args[1] != [1, 0]:
        return None
    matrix = x_q = first(moved)
    while x_q.target in RESHAPES:
        x_q = first(x_q)
    if x_q.target is not QUANTIZE:
        return None
    if not all(isinstance(size, int) for size in val(matrix).shape):
        return None
    rows, columns = val(matrix).shape
    return TransposedCopy(x_q, copy, rows, columns)


def check(m: TransposedCopy) -> bool:
    """Check that `x` can be viewed in tiles, and is not fused with a reduction along rows."""
    tiles = m.rows > 0 and m.rows % ROWS == 0
    return val(m.x).is_contiguous() and tiles and not comes_of_row_reduction(m.x)


def comes_of_row_reduction(x: fx.Node) -> bool:
    """Return whether `x` is computed from statistics of rows that this graph takes, broadcast again: as norms do."""
    origins = sources(x, lambda n: is_elementwise(n) and not _is_column(n))
    return any(_is_column(n) and not has_one_element(n) and n.op != "placeholder" for n in (x, *origins))


def _is_column(x: fx.Node) -> bool:
    return val(x).shape[-1:] == (1,)


def each(emit: Callable[..., fx.Node], tiles: list[fx.Node], made: Callable[[fx.Node], fx.Node], dim: int) -> fx.Node:
    """Return `made(tiles)`; for several parts of a cat, the results of all parts concatenated along `dim`."""
    if len(tiles) == 1:
        return made(tiles[0])
    results = [made(part) for part in tiles]
    for result in results:
        result.meta[TILED] = "columns"
    return emit(CONCATENATED, results, dim)


def reduce_in_tiles(build: Builder, m: TransposedCopy, tiles: list[fx.Node]) -> bool:
    """Rewrite amaxes and column sums of `x` in this graph as reductions of tiles.

    Returns True if there is an amax from which the scale is not computed: then quantize need not wait for it.
    """
    taken = readers_nearby(m.x)
    for node in taken:
        if _is_column_sum(node, m):
            build.replace(node, _sum(build, node, tiles))
        elif is_count(node):
            build.replace(node, _count(build, node, tiles))
    amaxes = [node for node in taken if is_amax(node)]
    if not amaxes:
        return False
    emit = functools.partial(build.emit, min(amaxes))
    columns = each(emit, tiles, lambda part: emit(aten.amax.default, emit(aten.abs.default, part), [1]), 1)
    columns.meta[TILED] = "columns"
    waits = [is_made_of(m.scale, node) for node in amaxes]
    for node in amaxes:
        build.replace(node, build.emit(node, aten.amax.default, columns))
    return not all(waits)


def _sum(build: Builder, node: fx.Node, tiles: list[fx.Node]) -> fx.Node:
    """Emit the sum of each column by tiles, in float32 up to the final cast."""
    emit = functools.partial(build.emit, node)
    columns = each(emit, tiles, lambda part: emit(aten.sum.dim_IntList, part, [1], dtype=torch.float32), 1)
    columns.meta[TILED] = "columns"
    result = build.emit(node, aten.sum.dim_IntList, columns, [0])
    result = build.emit(node, aten.reshape.default, result, list(val(node).shape))
    if val(node).dtype == torch.float32:
        return result
    return build.emit(node, prims.convert_element_type.default, result, val(node).dtype)


def is_count(node: fx.Node) -> bool:
    """Return whether `node` is the number of the elements that a scale saturates, f32[]."""
    if node.target is not aten.sum.dim_IntList and node.target is not aten.sum.default:
        return False
    rows = first(node)
    whole = not val(node).shape and rows.target is aten.sum.dim_IntList and rows.args[1] == [-1]
    return whole and first(rows).target is SATURATED


def saturation_flag(x_q: fx.Node) -> fx.Node | None:
    """Return what says whether a quantize scales by its tensor's own amax, because it saturates; None of any other."""
    scale = x_q.args[1] if x_q.target is QUANTIZE else None
    if not isinstance(scale, fx.Node) or scale.target is not aten.where.self or not has_one_element(scale):
        return None
    flag = as_node(scale.args[0])
    return flag if flag.target is aten.gt.Scalar and is_count(first(flag)) else None


def _count(build: Builder, node: fx.Node, tiles: list[fx.Node]) -> fx.Node:
    """Emit the number of saturated elements by tiles."""
    emit = functools.partial(build.emit, node)
    how = first(first(node)).args[1:]
    columns = each(emit, tiles, lambda part: emit(aten.sum.dim_IntList, emit(SATURATED, part, *how), [1]), 1)
    columns.meta[TILED] = "columns"
    return emit(aten.sum.default, columns)


def readers_nearby(x: fx.Node) -> list[fx.Node]:
    """Return the readers of `x`, their readers, and the readers of these."""
    readers, near = [], [x]
    for _ in range(3):  # the longest chain that is looked for: `abs`, the amax of rows, their amax
        near = [user for node in near for user in node.users]
        readers += near
    return list(dict.fromkeys(readers))


def is_amax(node: fx.Node) -> bool:
    """Return whether `node` is the final reduction of `scaling.amax`."""
    if node.target is not aten.amax.default or val(node).shape:
        return False
    rows = first(node)
    return rows.target is aten.amax.default and rows.args[1] == [-1] and first(rows).target is aten.abs.default


def of_amax(node: fx.Node) -> fx.Node:
    """Return the tensor that an amax is taken of."""
    return first(first(first(node)))


def is_amax_made_of(node: fx.Node, x: fx.Node) -> bool:
    """Return whether `node` is the amax of `x`, or of a tensor that is computed from it elementwise."""
    measured = of_amax(node)
    return measured is x or x in sources(measured, lambda n: n is not x and is_elementwise(n))


def is_made_of(scale: fx.Node, amax: fx.Node) -> bool:
    """Return whether `scale` is computed from `amax`, so that one kernel cannot both take the amax and quantize."""
    return amax in sources(scale, lambda n: has_one_element(n) and n is not amax)


def _is_column_sum(node: fx.Node, m: TransposedCopy) -> bool:
    """Return whether `node` sums the matrix over its rows, in less than float64."""
    if node.target is not aten.sum.dim_IntList or len(node.args) < 2 or val(node).numel() != m.columns:
        return False
    if val(node).dtype == torch.float64:
        return False
    x, dims = first(node), node.args[1] or ()
    leading = list(range(val(x).dim() - 1))
    is_matrix = x is m.x or (x.target in RESHAPES and first(x) is m.x)
    return is_matrix and val(x).shape[-1] == m.columns and sorted(dims) == leading  # type: ignore[arg-type]


def chunks_of(rows: int, columns: int) -> int:
    """Return into how many chunks to cut the rows: the fewest that give enough programs, in multiples of ROWS rows."""
    possible = [k for k in range(1, rows // ROWS + 1) if rows % k == 0 and rows // k % ROWS == 0]
    return next((k for k in possible if k * columns >= COLUMNS), possible[-1])


def cat_of(x: fx.Node) -> tuple[list[fx.Node], int]:
    """Return the contiguous parts of a cat, and its dimension; no parts if `x` is not a cat of such."""
    if x.target is not aten.cat.default or not is_launched(x):
        return [], 0
    parts: list[fx.Node] = list(x.args[0])  # type: ignore[arg-type]
    dim: int = x.args[1] if len(x.args) > 1 else 0  # type: ignore[assignment]
    is_plain = all(val(p).is_contiguous() and val(p).dim() == val(x).dim() for p in parts)
    return (parts, dim % val(x).dim()) if is_plain else ([], 0)


def is_pile(x: fx.Node) -> bool:
    """Return whether `x` is a cat along dimension 0 of a few graph inputs: the weights of siblings."""
    parts, dim = cat_of(x)
    return dim == 0 and 0 < len(parts) <= MAX_JOINED_WEIGHTS and all(p.op == "placeholder" for p in parts)


def is_launched(x: fx.Node) -> bool:
    """Return whether `x` is not on a CPU, where Inductor would copy the parts of a cat."""
    return val(x).device.type != "cpu"
