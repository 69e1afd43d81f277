"""Compute an update in tiles, with the FP8 copies of the weight in both orientations: one kernel that reads it once.

before   new: f32[R, C]     = sub(weight, mul(step, lr));  copy_(weight, new)
         x_q: f8[R, C]      = quantize(new);  copy_(copy, x_q)
         x_t: f8[C, R]      = clone(permute(x_q));  copy_(transposed_copy, x_t)
         amax: f32[]        = amax(amax(abs(new), -1))
after    new: f32[k, R/k, C] = sub(reshape(weight), mul(reshape(step), lr));  write(weight, new)
         write(copy, quantize(new));  write(transposed_copy, quantize(new))
         amax: f32[]        = amax(amax(abs(new), 1))
changes  nothing: a maximum does not depend on order

The optimizer's other writes, of its moments, go into the same kernel. quantize_tiles.py, which runs next, quantizes all
other tensors that have a transposed copy.
"""

from __future__ import annotations

import functools

from torch import fx

from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.base.node_meta import TILED, WITH_AMAX
from fp8pass.graph.builder import Builder, erase_unused, is_tensor, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.patterns import VIEWS, as_node, aten, first, is_elementwise, sources
from fp8pass.passes.common.read_written import read_written
from fp8pass.passes.common.transposed_copies import (
    TransposedCopy,
    check,
    chunks_of,
    is_amax,
    is_amax_made_of,
    match,
    of_amax,
    reduce_in_tiles,
)
from fp8pass.quant.kernel_ops import QUANTIZE, ROUNDED, WRITE


class UpdateTiles:
    """Rewrites the updates whose weights have a copy in both orientations."""

    name = "update_tiles"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite every match that is written into graph inputs and passes `check`; return the number of matches.

        Before that, quantizes that wait for the amax of a new weight read it from memory: these count, too.
        """
        waiting = read_written(graph)
        matches = (m for node in graph.nodes if (m := match(node)) is not None)
        wanted = [(m, into) for m in matches if check(m) and (into := _destinations(m))]
        if not wanted:
            return waiting
        build = context.builder(graph, self.name)
        for m, into in wanted:
            _rewrite(build, m, into)
        erase_unused(graph)
        return waiting + len(wanted)


def _rewrite(build: Builder, m: TransposedCopy, into: list[fx.Node]) -> None:
    chunks = chunks_of(m.rows, m.columns)
    _compute_scales_once(build, m.scale)
    shape = [chunks, m.rows // chunks, m.columns]
    if m.x.target is aten.copy_.default:  # `read_written` has let it read the weight that another kernel writes
        tiles = build.emit(min(m.x.users), aten.reshape.default, m.x, shape)
    else:
        tiles = _update_in_tiles(build, m, shape, into)
    with_amax = reduce_in_tiles(build, m, [tiles])
    # each write quantizes again: Inductor may put a node that reads the other's result into another kernel
    for write, turned in zip(into, (True, False), strict=True):
        q = build.emit(m.x_q, QUANTIZE, tiles, m.scale, val(m.x_q).dtype)
        if with_amax:
            q.meta[WITH_AMAX] = True
        _write(build, write, q, turned)


def _compute_scales_once(build: Builder, scale: fx.Node) -> None:
    """Materialize the vector of which `scale` is an element, which each kernel would compute again."""
    if scale.target is aten.select.int and first(scale).target is not FORCE_STRIDE_ORDER:
        vector = first(scale)
        made = build.emit(min(vector.users), FORCE_STRIDE_ORDER, vector, list(val(vector).stride()))
        vector.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _destinations(m: TransposedCopy) -> list[fx.Node]:
    """Return the `copy_` of the transposed copy into an input, and the `copy_` of the tensor itself.

    An empty list if either tensor has another reader.
    """
    writes = [*map(_write_of, m.copy.users), *(_write_of(u) for u in m.x_q.users if u is not first(m.copy))]
    complete = [w for w in writes if w is not None]
    alone = len(first(m.copy).users) == 1 and first(first(m.copy)) is m.x_q
    return complete if alone and len(complete) == len(writes) == 2 else []


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
        # a view in the whole tensor's shape, as of a transpose, is not the same view of each tile
        if not _is_elementwise(x) or x.target in VIEWS or not all(map(is_tensor, x.all_input_nodes)):
            return False
        shapes = [val(a).shape for a in x.all_input_nodes]
        return all(s == self.shape or all(size == 1 for size in s[:-1]) for s in shapes)


def _update_in_tiles(build: Builder, m: TransposedCopy, tiles: list[int], computed: list[fx.Node]) -> fx.Node:
    """Emit `x`, which an update computes, in tiles, with the update's other writes: one kernel that reads once.

    These are all writes into graph inputs of the shape of `x` whose value is computed from the same large tensors.
    """
    in_tiles, made_of = _InTiles(build, m.x, tiles), _large_sources(m.x)

    def belongs(value: fx.Node) -> bool:
        same_shape = val(value).shape == val(m.x).shape and _is_elementwise(value)
        return same_shape and bool(made_of & _large_sources(value))

    copies = [n for n in build.graph.nodes if n.target is aten.copy_.default and n not in computed]
    writes = [n for n in copies if first(n).op == "placeholder" and belongs(as_node(n.args[1]))]
    amaxes = [n for n in build.graph.nodes if is_amax(n) and belongs(of_amax(n)) and of_amax(n) is not m.x]
    # before any write to an input that the emitted nodes may read
    first_write = min(n for n in build.graph.nodes if n.target in (aten.copy_.default, WRITE))
    new = first(m.x) if m.x.target is ROUNDED else m.x
    at = min([*m.x.users, first_write, *(n for n in amaxes if is_amax_made_of(n, new))])

    def take(node: fx.Node) -> None:
        magnitude = build.emit(node, aten.abs.default, in_tiles(node, of_amax(node)))
        columns = build.emit(node, aten.amax.default, magnitude, [1])
        columns.meta[TILED] = "columns"
        build.replace(node, build.emit(node, aten.amax.default, columns))

    early = [n for n in amaxes if n < at]  # some inputs of `x` may not be computed there yet
    for node in early:
        take(node)
    tile = in_tiles(at, new)
    # a buffer, which the writes and amaxes read: without it each of them would compute the update again
    in_tiles.of[new] = build.emit(at, FORCE_STRIDE_ORDER, tile, list(val(tile).stride()))
    for node in amaxes[len(early) :]:
        take(node)
    result = in_tiles(min(m.x.users), m.x)
    values = [in_tiles(first_write, as_node(node.args[1])) for node in writes]
    for node, value in zip(writes, values, strict=True):
        _write(build, node, value)
    return result


def _is_elementwise(x: fx.Node) -> bool:
    """Return whether `is_elementwise` holds, or `x` is the bits of numbers as integers, or the other way around."""
    return is_elementwise(x) or x.target is aten.view.dtype


def _large_sources(x: fx.Node) -> set[fx.Node]:
    """Return the graph inputs of its size that `x` is computed from elementwise: no scales, which weights share."""
    size = val(x).numel()
    return {n for n in {x, *sources(x, _is_elementwise)} if n.op == "placeholder" and val(n).numel() == size}


def _write(build: Builder, copy: fx.Node, tiles: fx.Node, turned: bool = False) -> None:
    """Write tiles into a graph input, transposed if `turned`, instead of the `copy_` of the whole tensor."""
    emit, shape = functools.partial(build.emit, copy), list(val(tiles).shape)
    into = val(first(copy))
    # those of a tile within the whole tensor, which is not contiguous in tiles if it is transposed
    strides = (into.t() if turned else into).view(shape).stride()
    write = emit(WRITE, emit(aten.as_strided.default, first(copy), shape, list(strides)), tiles)
    write.meta[TILED] = "columns"
    build.graph.erase_node(copy)
