"""A tensor that is quantized in both orientations is read once, in tiles.

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

Inductor makes one kernel of the four, which walks down columns: a tile of it reads and writes whole sectors in either
orientation. With reductions along rows it has one row at a time, whose transposed bytes are R apart, and a second pass
for the sum. Not done where `x` comes out of a reduction along rows, a norm, with which it is fused.

Runs on the graphs of forward and backward, after they were cut apart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8pass._torch import FORCE_STRIDE_ORDER
from fp8pass.graph import MADE_BY, TILED, WITH_AMAX, Builder, is_tensor, val
from fp8pass.passes.patterns import CASTS, RESHAPES, VIEWS, aten, dtype_of, first, has_one_element, prims
from fp8pass.rewrite import Context
from fp8pass.scaling import FP8_DTYPES, quantize

ROWS, COLUMNS = 64, 24576
"""A tile's height at least; about how many columns in all: 64 to a program make three programs for each of 132 SMs."""


@dataclass(frozen=True)
class Quantize:
    """`x_q = quantize(x, scale)`, as `scaling.quantize` is traced."""

    x_q: fx.Node
    x: fx.Node
    scale: fx.Node


@dataclass(frozen=True)
class Match:
    """A quantized tensor with a transposed copy, seen as a matrix [rows, columns]."""

    quantize: Quantize
    copy: fx.Node
    rows: int
    columns: int


def match(copy: fx.Node) -> Match | None:
    """Whether `copy` is a transposed copy of a tensor that this graph quantizes."""
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
    found = _quantize(x_q)
    rows, columns = val(matrix).shape
    if found is None or not isinstance(rows, int) or not isinstance(columns, int):
        return None
    return Match(found, copy, rows, columns)


def _quantize(x_q: fx.Node) -> Quantize | None:
    """The steps of `scaling.quantize`, backwards."""
    node, limit = x_q, torch.finfo(val(x_q).dtype).max
    for target, args in (
        (prims.convert_element_type.default, (val(x_q).dtype,)),
        (aten.clamp_max.default, (limit,)),
        (aten.clamp_min.default, (-limit,)),
    ):
        if node.target is not target or node.args[1:] != args:
            return None
        node = first(node)
    scale = node.args[1] if node.target is aten.mul.Tensor and dtype_of(node) == torch.float32 else None
    if not is_tensor(scale) or not has_one_element(scale) or val(scale).dim() > 2:
        return None
    x = first(node)
    if x.target in CASTS and dtype_of(x) == torch.float32 and len(x.args) == 2:
        x = first(x)
    return Quantize(x_q, x, scale)


def check(m: Match) -> bool:
    """Whether `x` can be seen in tiles, and is not fused with a reduction along rows."""
    tiles = m.rows > 0 and m.rows % ROWS == 0
    return val(m.quantize.x).is_contiguous() and tiles and not _comes_of_row_reduction(m.quantize.x)


def _comes_of_row_reduction(x: fx.Node) -> bool:
    """Whether statistics of rows, one number for each, were spread over them again on the way to `x`: as norms do."""
    seen, todo = {x}, [x]
    while todo:
        node = todo.pop()
        if val(node).shape[-1:] == (1,):
            return True
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in VIEWS | CASTS:
            new = {n for n in node.all_input_nodes if is_tensor(n) and not has_one_element(n)} - seen
            seen |= new
            todo += new
    return False


class QuantizeTiles:
    """All copies of a graph."""

    name = "quantize_tiles"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Rewrite what `match` finds and `check` has nothing against."""
        found = [m for node in graph.nodes if (m := match(node)) is not None]
        if not found:
            return 0
        build = Builder(graph, self.name)
        rewriters = [_Rewriter(build, m) for m in found]
        for rewriter in rewriters:
            (rewriter.rewrite if check(rewriter.m) else rewriter.move)()
        for node in [q for r in rewriters if r.has_amax for q in r.quantized]:
            node.meta[WITH_AMAX] = True
        graph.eliminate_dead_code()
        return len(found)


class _Rewriter:
    def __init__(self, build: Builder, m: Match) -> None:
        self.m = m
        self.build = build
        self.has_amax = False
        self.quantized: list[fx.Node] = []

    def rewrite(self) -> None:
        m, q = self.m, self.m.quantize
        chunks = _chunks(m.rows, m.columns)
        shape = [chunks, m.rows // chunks, m.columns]
        at = _earliest(q.x.users)
        tiles = self.build.emit(at, aten.reshape.default, q.x, shape)
        if q.x.op != "placeholder" and len(q.x.users) > 2:
            tiles = self.build.emit(at, FORCE_STRIDE_ORDER, tiles, list(val(tiles).stride()))
        self._reduce(tiles)
        turned = self._emit(aten.permute.default, self._quantize(tiles), [2, 0, 1])
        turned = self._made_here(self._emit(aten.clone.default, turned, memory_format=torch.contiguous_format))
        m.copy.replace_all_uses_with(self._emit(aten.reshape.default, turned, [m.columns, m.rows]))
        again = self._made_here(self._quantize(tiles))
        q.x_q.replace_all_uses_with(self._emit(aten.reshape.default, again, list(val(q.x_q).shape)))

    def move(self) -> None:
        """Make the copy where the tensor is quantized, so that both are in one kernel."""
        x_q, emit = self.m.quantize.x_q, functools.partial(self.build.emit, self.m.quantize.x_q.next)
        shape = val(x_q).shape
        if shape[-1] != self.m.columns:
            return
        turned = emit(aten.permute.default, x_q, [len(shape) - 1, *range(len(shape) - 1)])
        turned = emit(aten.clone.default, turned, memory_format=torch.contiguous_format)
        turned = emit(FORCE_STRIDE_ORDER, turned, list(val(turned).stride()))
        turned.meta[TILED] = "rows"
        self.m.copy.replace_all_uses_with(emit(aten.reshape.default, turned, [self.m.columns, self.m.rows]))

    def _made_here(self, x: fx.Node) -> fx.Node:
        """`x` as a buffer that stands here: what is read late, Inductor would make late, and fuse with nothing."""
        made = self._emit(FORCE_STRIDE_ORDER, x, list(val(x).stride()))
        made.meta[TILED] = "columns"
        return made

    def _quantize(self, tiles: fx.Node) -> fx.Node:
        """Each time anew: what reads another's result, Inductor may put into another kernel."""
        q, dtype = self.m.quantize, val(self.m.quantize.x_q).dtype
        (node,) = self.build.inline(q.x_q, lambda x, scale: quantize(x, scale, dtype), tiles, q.scale)
        self.quantized.append(node)
        return node

    def _reduce(self, tiles: fx.Node) -> None:
        """The amax of `x`, and the sums of its columns, where this graph takes them."""
        for node in [u for user in self.m.quantize.x.users for u in (user, *user.users, *_users_of(user.users))]:
            if _is_amax(node):
                self.has_amax |= not _is_made_of(self.m.quantize.scale, node)
                columns = self.build.emit(node, aten.amax.default, self.build.emit(node, aten.abs.default, tiles), [1])
                columns.meta[TILED] = "columns"
                self.build.replace(node, self.build.emit(node, aten.amax.default, columns))
            elif _is_column_sum(node, self.m):
                self.build.replace(node, self._sum(node, tiles))

    def _sum(self, node: fx.Node, tiles: fx.Node) -> fx.Node:
        """Of each column, in float32 up to the end."""
        columns = self.build.emit(node, aten.sum.dim_IntList, tiles, [1], dtype=torch.float32)
        columns.meta[TILED] = "columns"
        result = self.build.emit(node, aten.sum.dim_IntList, columns, [0])
        result = self.build.emit(node, aten.reshape.default, result, list(val(node).shape))
        if val(node).dtype == torch.float32:
            return result
        return self.build.emit(node, prims.convert_element_type.default, result, val(node).dtype)

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.build.emit(self.m.quantize.x_q, target, *args, **kwargs)


def _users_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [user for node in nodes for user in node.users]


def _earliest(nodes: Iterable[fx.Node]) -> fx.Node:
    return min(nodes)  # nodes of one graph are ordered as they stand in it


def _is_amax(node: fx.Node) -> bool:
    """Whether this is the second half of `scaling.amax`."""
    if node.target is not aten.amax.default or val(node).shape:
        return False
    rows = first(node)
    return rows.target is aten.amax.default and rows.args[1] == [-1] and first(rows).target is aten.abs.default


def _is_made_of(scale: fx.Node, amax: fx.Node) -> bool:
    """Whether `scale` is that of the tensor's own amax, which so can't be in one kernel with what it scales."""
    seen, todo = {scale}, [scale]
    while todo:
        node = todo.pop()
        if node is amax:
            return True
        new = {n for n in node.all_input_nodes if is_tensor(n) and has_one_element(n)} - seen
        seen |= new
        todo += new
    return False


def _is_column_sum(node: fx.Node, m: Match) -> bool:
    """Whether `node` sums the matrix over its rows."""
    if node.target is not aten.sum.dim_IntList or len(node.args) < 2 or val(node).numel() != m.columns:
        return False
    if val(node).dtype == torch.float64:
        return False
    x, dims = first(node), node.args[1] or ()
    leading = list(range(val(x).dim() - 1))
    is_matrix = x is m.quantize.x or (x.target in RESHAPES and first(x) is m.quantize.x)
    return is_matrix and val(x).shape[-1] == m.columns and sorted(dims) == leading  # type: ignore[arg-type]


def _chunks(rows: int, columns: int) -> int:
    """Into how many the rows are cut: as few as make enough programs, each of at least a tile's height."""
    possible = [k for k in range(1, rows // ROWS + 1) if rows % k == 0 and rows // k % ROWS == 0]
    return next((k for k in possible if k * columns >= COLUMNS), possible[-1])
