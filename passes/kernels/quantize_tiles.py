"""Quantize a tensor in both orientations by one kernel that reads it once, in tiles.

before   a: bf16[R]        = amax(abs(x: bf16[R, C]), -1);  amax: bf16[] = amax(a)
         x_q: f8[R, C]     = quantize(x)
         x_t: f8[C, R]     = clone(permute(x_q))
         b: bf16[C]        = sum(x, 0)                             the gradient of a bias, where there is one
after    v: bf16[k, R/k, C] = reshape(x)
         a: bf16[k, C]     = amax(abs(v), 1);  amax: bf16[] = amax(a)
         x_q               = reshape(quantize(v))
         x_t               = reshape(clone(permute(quantize(v), [2, 0, 1])))
         b                 = sum(sum(v, 1), 0)
changes  nothing: a maximum does not depend on order; a sum is in float32 either way

Inductor fuses the four into one kernel that walks down columns: each tile reads and writes whole sectors in either
orientation. With reductions along rows it would handle one row at a time, whose transposed bytes are R apart, and need
a second pass for the sum. Not done where `x` is computed from a reduction along rows, as by a norm: it is fused with
that reduction.

A cat is not materialized. Parts that have inputs in common, as the gradients of gate and up have, are quantized by one
kernel, each into its slice of the result; inputs joined along dimension 0, as the weights of siblings, are read where
they are.

Runs on the graphs of forward and backward, after the partitioner.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from fp8pass._torch import FORCE_STRIDE_ORDER
from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.pass_base import Context
from fp8pass.node_meta import MADE_BY, TILED, WITH_AMAX
from fp8pass.passes.common.patterns import (
    RESHAPES,
    VIEWS,
    as_node,
    aten,
    dtype_of,
    first,
    has_one_element,
    is_elementwise,
    prims,
    sources,
)
from fp8pass.quant.kernel_ops import CONCATENATED, JOINED, QUANTIZE, ROUNDED, WRITE
from fp8pass.scaling import FP8_DTYPES

ROWS, COLUMNS = 64, 24576
"""The least height of a tile, and about the number of columns in all: with 64 columns to a program that makes three
programs for each of 132 SMs."""
MAX_JOINED_WEIGHTS = 8
"""Most siblings in one kernel: Inductor does not join more of them elementwise."""


@dataclass(frozen=True)
class Match:
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
        """The scale, f32, one element."""
        return as_node(self.x_q.args[1])


def match(copy: fx.Node) -> Match | None:
    """Match `copy` if it is a transposed copy of a tensor that this graph quantizes; else return None."""
    if copy.target is not aten.clone.default or dtype_of(copy) not in FP8_DTYPES:
        return None
    if copy.meta.get(MADE_BY) == QuantizeTiles.name:
        return None
    moved = first(copy)
    if moved.target is not aten.permute.default or moved.args[1] != [1, 0]:
        return None
    matrix = x_q = first(moved)
    while x_q.target in RESHAPES:
        x_q = first(x_q)
    if x_q.target is not QUANTIZE or not has_one_element(as_node(x_q.args[1])):
        return None
    if not all(isinstance(size, int) for size in val(matrix).shape):
        return None
    rows, columns = val(matrix).shape
    return Match(x_q, copy, rows, columns)


def check(m: Match) -> bool:
    """Check that `x` can be viewed in tiles, and is not fused with a reduction along rows."""
    tiles = m.rows > 0 and m.rows % ROWS == 0
    return val(m.x).is_contiguous() and tiles and not _comes_of_row_reduction(m.x)


def _comes_of_row_reduction(x: fx.Node) -> bool:
    """Return whether `x` is computed from statistics of rows, one number per row, broadcast again: as norms do."""
    behind = sources(x, lambda n: is_elementwise(n) and not _is_column(n))
    return any(_is_column(n) and not has_one_element(n) for n in (x, *behind))


def _is_column(x: fx.Node) -> bool:
    return val(x).shape[-1:] == (1,)


class QuantizeTiles:
    """Rewrites all transposed copies of a graph."""

    name = "quantize_tiles"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Rewrite every match that passes `check`, move the others; return the number of matches."""
        found = [m for node in graph.nodes if (m := match(node)) is not None]
        if not found:
            return 0
        build = context.builder(graph, self.name)
        for m in found:
            if check(m):
                _rewrite(build, m)
            else:
                _move(build, m)
        graph.eliminate_dead_code()
        return len(found)


def _move(build: Builder, m: Match) -> None:
    """Make the transposed copy right after the tensor is quantized, so that one kernel writes both."""
    x_q, emit = m.x_q, functools.partial(build.emit, m.x_q.next)
    shape = val(x_q).shape
    if shape[-1] != m.columns:
        return
    turned = emit(aten.permute.default, x_q, [len(shape) - 1, *range(len(shape) - 1)])
    turned = _made_here(emit, emit(aten.clone.default, turned, memory_format=torch.contiguous_format), "rows")
    amaxes = [n for n in _readers_nearby(m.x) if _is_amax(n)]
    if any(not _is_made_of(m.scale, n) for n in amaxes):
        turned.meta[WITH_AMAX] = True
    m.copy.replace_all_uses_with(emit(aten.reshape.default, turned, [m.columns, m.rows]))


def _made_here(emit: Callable[..., fx.Node], x: fx.Node, tiled: str) -> fx.Node:
    """Return `x` as a buffer at this position: else Inductor would compute it where it is read, late and unfused."""
    made = emit(FORCE_STRIDE_ORDER, x, list(val(x).stride()))
    made.meta[TILED] = tiled
    return made


def _rewrite(build: Builder, m: Match) -> None:
    emit, dtype, into = functools.partial(build.emit, m.x_q), val(m.x_q).dtype, _destinations(m)
    if into:
        _compute_scales_once(build, m.scale)
    tiles = _tiles(build, m, into)
    with_amax = _reduce(build, m, tiles)

    def quantized(part: fx.Node) -> fx.Node:
        q = emit(QUANTIZE, part, m.scale, dtype)
        if with_amax:
            q.meta[WITH_AMAX] = True
        return q

    def transposed(part: fx.Node) -> fx.Node:
        return emit(
            aten.clone.default, emit(aten.permute.default, part, [2, 0, 1]), memory_format=torch.contiguous_format
        )

    # each result quantizes again: Inductor may put a node that reads the other's result into another kernel
    if into:
        for write, turned in zip(into, (True, False), strict=True):
            _write(build, write, quantized(tiles[0]), turned)
        return
    x_t = _made_here(emit, _each(emit, tiles, lambda part: transposed(quantized(part)), 0), "columns")
    x_q = _made_here(emit, _each(emit, tiles, quantized, 2), "columns")
    m.copy.replace_all_uses_with(emit(aten.reshape.default, x_t, [m.columns, m.rows]))
    m.x_q.replace_all_uses_with(emit(aten.reshape.default, x_q, list(val(m.x_q).shape)))


def _compute_scales_once(build: Builder, scale: fx.Node) -> None:
    """Materialize the vector of which `scale` is an element, which each kernel would compute again."""
    if scale.target is aten.select.int and first(scale).target is not FORCE_STRIDE_ORDER:
        vector = first(scale)
        made = build.emit(min(vector.users), FORCE_STRIDE_ORDER, vector, list(val(vector).stride()))
        vector.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _destinations(m: Match) -> list[fx.Node]:
    """Return the `copy_` of the transposed copy into an input, and the `copy_` of the tensor itself.

    An empty list if either tensor has another reader.
    """
    writes = [*map(_write_of, m.copy.users), *(_write_of(u) for u in m.x_q.users if u is not first(m.copy))]
    found = [w for w in writes if w is not None]
    alone = len(first(m.copy).users) == 1 and first(first(m.copy)) is m.x_q
    return found if alone and len(found) == len(writes) == 2 else []


def _write_of(user: fx.Node) -> fx.Node | None:
    """Return the `copy_` that writes the input of `user` into a graph input; None if `user` has another purpose."""
    if user.target is aten.copy.default and len(user.users) == 1:  # adapts strides to those of the graph input
        (user,) = user.users
    into_input = user.target is aten.copy_.default and first(user).op == "placeholder"
    return user if into_input and not user.users else None


class _InTiles:
    """Emits elementwise computations on tensors of one shape again, on tiles of these tensors."""

    def __init__(self, build: Builder, x: fx.Node, tiles: list[int]) -> None:
        self.build = build
        self.last = first(x) if x.target is ROUNDED else x
        self.shape = val(x).shape
        self.tiles = tiles
        self.of: dict[fx.Node, fx.Node] = {}

    def __call__(self, at: fx.Node, x: fx.Node) -> fx.Node:
        """Emit `x` in tiles before `at`, with the nodes it is computed from."""
        if x in self.of:
            return self.of[x]
        if val(x).shape != self.shape:
            result = x
        elif x.op == "placeholder" or not self._fits(x):
            result = self.build.emit(at, aten.reshape.default, x, self.tiles)
        else:
            args = fx.map_arg((x.args, x.kwargs), lambda n: self(at, n))
            result = self.build.emit(at, x.target, *args[0], **args[1])
            if x is not self.last and sum(val(u).shape == self.shape for u in x.users if is_tensor(u)) > 1:
                # a buffer, so that all its readers can be fused with it; Inductor would compute it again in each
                result = self.build.emit(at, FORCE_STRIDE_ORDER, result, list(val(result).stride()))
        self.of[x] = result
        return result

    def _fits(self, x: fx.Node) -> bool:
        """Return whether `x` is not a view, and each input has the same shape or is the same for all rows."""
        if not is_elementwise(x) or x.target in VIEWS or not all(map(is_tensor, x.all_input_nodes)):
            return False
        shapes = [val(a).shape for a in x.all_input_nodes]
        return all(s == self.shape or all(size == 1 for size in s[:-1]) for s in shapes)


def _update_in_tiles(build: Builder, m: Match, tiles: list[int], known: list[fx.Node]) -> fx.Node:
    """Emit `x`, which an update computes, in tiles, with the update's other writes: one kernel that reads once.

    These are all writes into graph inputs of the shape of `x` whose value is computed from the same large tensors.
    """
    in_tiles, made_of = _InTiles(build, m.x, tiles), _large_sources(m.x)

    def belongs(value: fx.Node) -> bool:
        alike = val(value).shape == val(m.x).shape and is_elementwise(value)
        return alike and bool(made_of & _large_sources(value))

    copies = [n for n in build.graph.nodes if n.target is aten.copy_.default and n not in known]
    writes = [n for n in copies if first(n).op == "placeholder" and belongs(as_node(n.args[1]))]
    amaxes = [n for n in build.graph.nodes if _is_amax(n) and belongs(_of_amax(n)) and _of_amax(n) is not m.x]
    # before any write to an input that the emitted nodes may read
    first_write = min(n for n in build.graph.nodes if n.target in (aten.copy_.default, WRITE))
    new = first(m.x) if m.x.target is ROUNDED else m.x
    at = min([*m.x.users, first_write, *(n for n in amaxes if _is_amax_made_of(n, new))])

    def take(node: fx.Node) -> None:
        magnitude = build.emit(node, aten.abs.default, in_tiles(node, _of_amax(node)))
        columns = build.emit(node, aten.amax.default, magnitude, [1])
        columns.meta[TILED] = "columns"
        build.replace(node, build.emit(node, aten.amax.default, columns))

    early = [n for n in amaxes if n < at]  # some inputs of `x` may not be computed there yet
    for node in early:
        take(node)
    tile = in_tiles(at, new)
    in_tiles.of[new] = build.emit(at, FORCE_STRIDE_ORDER, tile, list(val(tile).stride()))
    for node in amaxes[len(early) :]:
        take(node)
    result = in_tiles(min(m.x.users), m.x)
    values = [in_tiles(first_write, as_node(node.args[1])) for node in writes]
    for node, value in zip(writes, values, strict=True):
        _write(build, node, value)
    return result


def _large_sources(x: fx.Node) -> set[fx.Node]:
    """Return the graph inputs of its size that `x` is computed from elementwise: no scales, which weights share."""
    size = val(x).numel()
    return {n for n in {x, *sources(x, is_elementwise)} if n.op == "placeholder" and val(n).numel() == size}


def _write(build: Builder, copy: fx.Node, tiles: fx.Node, turned: bool = False) -> None:
    """Write tiles into a graph input, transposed if `turned`, instead of the `copy_` of the whole tensor."""
    emit, shape = functools.partial(build.emit, copy), list(val(tiles).shape)
    into = val(first(copy))
    strides = (into.t() if turned else into).view(shape).stride()
    write = emit(WRITE, emit(aten.as_strided.default, first(copy), shape, list(strides)), tiles)
    write.meta[TILED] = "columns"
    build.graph.erase_node(copy)


def _each(emit: Callable[..., fx.Node], tiles: list[fx.Node], made: Callable[[fx.Node], fx.Node], dim: int) -> fx.Node:
    """Return `made(tiles)`; for several parts of a cat, the results of all parts concatenated along `dim`."""
    if len(tiles) == 1:
        return made(tiles[0])
    results = [made(part) for part in tiles]
    for result in results:
        result.meta[TILED] = "columns"
    return emit(CONCATENATED, results, dim)


def _tiles(build: Builder, m: Match, into: list[fx.Node]) -> list[fx.Node]:
    """Emit the tiles [k, R/k, C] of `x`, or of each part if it is a cat. into: see `_destinations`."""
    at, shared = min(m.x.users), len(m.x.users) > 2
    xs = [m.x] if into else _parts(m.x)
    chunks = _chunks(m.rows, max(val(p).shape[-1] for p in xs))
    shapes = [[chunks, m.rows // chunks, val(p).shape[-1]] for p in xs]
    # `joined` is an elementwise op, which torch 2.11, too, fuses in any order of loops; `cat` is not
    xs = [build.emit(at, JOINED, p.args[0]) if _is_pile(p) else p for p in xs]
    if into:
        return [_update_in_tiles(build, m, shapes[0], into)]
    parts = [build.emit(at, aten.reshape.default, *each) for each in zip(xs, shapes, strict=True)]
    if len(parts) == 1 and m.x.op != "placeholder" and shared:
        return [build.emit(at, FORCE_STRIDE_ORDER, parts[0], list(val(parts[0]).stride()))]
    return parts


def _cat_of(x: fx.Node) -> tuple[list[fx.Node], int]:
    """Return the contiguous parts of a cat, and its dimension; no parts if `x` is not a cat of such."""
    if x.target is not aten.cat.default or not is_launched(x):
        return [], 0
    parts: list[fx.Node] = list(x.args[0])  # type: ignore[arg-type]
    dim: int = x.args[1] if len(x.args) > 1 else 0  # type: ignore[assignment]
    alike = all(val(p).is_contiguous() and val(p).dim() == val(x).dim() for p in parts)
    return (parts, dim % val(x).dim()) if alike else ([], 0)


def _parts(x: fx.Node) -> list[fx.Node]:
    """Return the parts of `x = cat(parts, -1)` if two of them read one tensor; else `[x]`.

    Each part then gets its own computation. Where Inductor computes a cat element by element, it reads such a tensor
    once for each part.
    """
    parts, dim = _cat_of(x)
    read = Counter(n for p in parts for n in {p, *sources(p, is_elementwise)} if not has_one_element(n))
    return parts if dim == val(x).dim() - 1 and any(times > 1 for times in read.values()) else [x]


def _is_pile(x: fx.Node) -> bool:
    """Return whether `x` is a cat along dimension 0 of a few graph inputs: the weights of siblings."""
    parts, dim = _cat_of(x)
    return dim == 0 and 0 < len(parts) <= MAX_JOINED_WEIGHTS and all(p.op == "placeholder" for p in parts)


def is_launched(x: fx.Node) -> bool:
    """Return whether `x` is not on a CPU, where Inductor would copy the parts of a cat."""
    return val(x).device.type != "cpu"


def _reduce(build: Builder, m: Match, tiles: list[fx.Node]) -> bool:
    """Rewrite amaxes and column sums of `x` in this graph as reductions of tiles.

    Returns True if there is an amax from which the scale is not computed: then quantize need not wait for it.
    """
    taken = _readers_nearby(m.x)
    for node in taken:
        if _is_column_sum(node, m):
            build.replace(node, _sum(build, node, tiles))
    amaxes = [node for node in taken if _is_amax(node)]
    if not amaxes:
        return False
    emit = functools.partial(build.emit, min(amaxes))
    columns = _each(emit, tiles, lambda part: emit(aten.amax.default, emit(aten.abs.default, part), [1]), 1)
    columns.meta[TILED] = "columns"
    waits = [_is_made_of(m.scale, node) for node in amaxes]
    for node in amaxes:
        build.replace(node, build.emit(node, aten.amax.default, columns))
    return not all(waits)


def _sum(build: Builder, node: fx.Node, tiles: list[fx.Node]) -> fx.Node:
    """Emit the sum of each column by tiles, in float32 up to the final cast."""
    emit = functools.partial(build.emit, node)
    columns = _each(emit, tiles, lambda part: emit(aten.sum.dim_IntList, part, [1], dtype=torch.float32), 1)
    columns.meta[TILED] = "columns"
    result = build.emit(node, aten.sum.dim_IntList, columns, [0])
    result = build.emit(node, aten.reshape.default, result, list(val(node).shape))
    if val(node).dtype == torch.float32:
        return result
    return build.emit(node, prims.convert_element_type.default, result, val(node).dtype)


def _readers_nearby(x: fx.Node) -> list[fx.Node]:
    """Return the readers of `x`, their readers, and the readers of these."""
    found, near = [], [x]
    for _ in range(3):
        near = [user for node in near for user in node.users]
        found += near
    return list(dict.fromkeys(found))


def _is_amax(node: fx.Node) -> bool:
    """Return whether `node` is the final reduction of `scaling.amax`."""
    if node.target is not aten.amax.default or val(node).shape:
        return False
    rows = first(node)
    return rows.target is aten.amax.default and rows.args[1] == [-1] and first(rows).target is aten.abs.default


def _of_amax(node: fx.Node) -> fx.Node:
    """Return the tensor that an amax is taken of."""
    return first(first(first(node)))


def _is_amax_made_of(node: fx.Node, x: fx.Node) -> bool:
    """Return whether `node` is the amax of `x`, or of a tensor that is computed from it elementwise."""
    of = _of_amax(node)
    return of is x or x in sources(of, lambda n: n is not x and is_elementwise(n))


def _is_made_of(scale: fx.Node, amax: fx.Node) -> bool:
    """Return whether `scale` is computed from `amax`, so that one kernel cannot both take the amax and quantize."""
    return amax in sources(scale, lambda n: has_one_element(n) and n is not amax)


def _is_column_sum(node: fx.Node, m: Match) -> bool:
    """Return whether `node` sums the matrix over its rows, in less than float64."""
    if node.target is not aten.sum.dim_IntList or len(node.args) < 2 or val(node).numel() != m.columns:
        return False
    if val(node).dtype == torch.float64:
        return False
    x, dims = first(node), node.args[1] or ()
    leading = list(range(val(x).dim() - 1))
    is_matrix = x is m.x or (x.target in RESHAPES and first(x) is m.x)
    return is_matrix and val(x).shape[-1] == m.columns and sorted(dims) == leading  # type: ignore[arg-type]


def _chunks(rows: int, columns: int) -> int:
    """Return into how many chunks to cut the rows: the fewest that give enough programs, in multiples of ROWS rows."""
    possible = [k for k in range(1, rows // ROWS + 1) if rows % k == 0 and rows // k % ROWS == 0]
    return next((k for k in possible if k * columns >= COLUMNS), possible[-1])
