"""Quantize a tensor in both orientations by one kernel that reads it once, in tiles.

before   a: bf16[R]        = amax(abs(x: bf16[R, C]), -1);  amax: bf16[] = amax(a)
         x_q: f8[R, C]     = quantize(x)
         x_t: f8[C, R]     = clone(permute(x_q))
         b: bf16[C]        = sum(x, 0)                             the gradient of a bias, where there is one
after    v: bf16[k, R/k, C] = reshape(x)
         a: bf16[k, C]     = amax(abs(v), 1);  amax: bf16[] = amax(a)
         x_q               = reshape(quantize(v))
         x_t               = reshape(quantize(clone(permute(v, [2, 0, 1]))))
         b                 = sum(sum(v, 1), 0)
changes  nothing: a maximum does not depend on order; a sum is in float32 either way

Inductor fuses the four into one kernel that walks down columns: each tile reads and writes whole sectors in either
orientation. With reductions along rows it would handle one row at a time, whose transposed bytes are R apart, and need
a second pass for the sum. Not done where `x` is computed from a reduction along rows, as by a norm: it is fused with
that reduction.

A cat is not materialized. Parts that have inputs in common, as the gradients of gate and up have, are quantized by one
kernel, each into its slice of the result; inputs joined along dimension 0, as the weights of siblings, are read where
they are.

Runs on the graphs of forward and backward, after the partitioner. An update that quantizes the weight that it computes
is tiled as a whole before, by update_tiles.py.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable

import torch
from torch import fx

from fp8pass.base._torch import FORCE_STRIDE_ORDER, triton_kernel_wrapper_functional
from fp8pass.base.node_meta import TILED, WITH_AMAX
from fp8pass.graph.builder import Builder, erase_unused, is_tensor, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.patterns import JOINS, MOVEMENT, aten, has_one_element, is_elementwise, reach, sources
from fp8pass.passes.common.transposed_copies import (
    TransposedCopy,
    cat_of,
    check,
    chunks_of,
    each,
    is_amax,
    is_made_of,
    is_pile,
    match,
    readers_nearby,
    reduce_in_tiles,
)
from fp8pass.quant.kernel_ops import JOINED, QUANTIZE, REPEATED

MAX_OPS = 6
"""Most ops that Inductor surely computes again in each reader: it counts loads, casts and comparisons too."""


class QuantizeTiles:
    """Rewrites all transposed copies of a graph."""

    name = "quantize_tiles"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite every match that passes `check`, move the others; return the number of matches."""
        matches = [m for node in graph.nodes if (m := match(node)) is not None]
        if not matches:
            return 0
        build = context.builder(graph, self.name)
        for m in matches:
            if check(m):
                _rewrite(build, m)
            else:
                _move(build, m)
        erase_unused(graph)
        return len(matches)


def _move(build: Builder, m: TransposedCopy) -> None:
    """Make the transposed copy right after the tensor is quantized, so that one kernel writes both."""
    x_q, emit = m.x_q, functools.partial(build.emit, m.x_q.next)
    shape = val(x_q).shape
    if shape[-1] != m.columns:  # the copy transposes another matrix than that of the last dimension
        return
    turned = emit(aten.permute.default, x_q, [len(shape) - 1, *range(len(shape) - 1)])
    turned = _made_here(emit, emit(aten.clone.default, turned, memory_format=torch.contiguous_format), "rows")
    amaxes = [n for n in readers_nearby(m.x) if is_amax(n)]
    if any(not is_made_of(m.scale, n) for n in amaxes):
        turned.meta[WITH_AMAX] = True
    m.copy.replace_all_uses_with(emit(aten.reshape.default, turned, [m.columns, m.rows]))


def _made_here(emit: Callable[..., fx.Node], x: fx.Node, tiled: str) -> fx.Node:
    """Return `x` as a buffer at this position: without it Inductor computes `x` where it is read, late and unfused."""
    made = emit(FORCE_STRIDE_ORDER, x, list(val(x).stride()))
    made.meta[TILED] = tiled
    return made


def _rewrite(build: Builder, m: TransposedCopy) -> None:
    emit, dtype = functools.partial(build.emit, m.x_q), val(m.x_q).dtype
    tiles = _tiles(build, m)
    with_amax = reduce_in_tiles(build, m, tiles)

    def quantized(part: fx.Node) -> fx.Node:
        q = emit(QUANTIZE, part, m.scale, dtype)
        if with_amax:
            q.meta[WITH_AMAX] = True
        return q

    def transposed(part: fx.Node) -> fx.Node:
        return emit(
            aten.clone.default, emit(aten.permute.default, part, [2, 0, 1]), memory_format=torch.contiguous_format
        )

    # Each result quantizes again: Inductor may put a node that reads the other's result into another kernel. And the
    # transposed one is arranged before it is quantized: what takes more than 100 ops gets a buffer as it is.
    x_t = _made_here(emit, each(emit, tiles, lambda part: quantized(transposed(part)), 0), "columns")
    x_q = _made_here(emit, each(emit, tiles, quantized, 2), "columns")
    for part in filter(_is_long, tiles):
        _repeat(build, part)
    m.copy.replace_all_uses_with(emit(aten.reshape.default, x_t, [m.columns, m.rows]))
    m.x_q.replace_all_uses_with(emit(aten.reshape.default, x_q, list(val(m.x_q).shape)))


def _tiles(build: Builder, m: TransposedCopy) -> list[fx.Node]:
    """Emit the tiles [k, R/k, C] of `x`, or of each part if it is a cat."""
    at, shared = min(m.x.users), len(m.x.users) > 2
    xs = _parts(m.x)
    chunks = chunks_of(m.rows, max(val(p).shape[-1] for p in xs))
    shapes = [[chunks, m.rows // chunks, val(p).shape[-1]] for p in xs]
    # `joined` is an elementwise op, which torch 2.11, too, fuses in any order of loops; `cat` is not
    xs = [build.emit(at, JOINED, p.args[0]) if is_pile(p) else p for p in xs]
    parts = [build.emit(at, aten.reshape.default, *each) for each in zip(xs, shapes, strict=True)]
    # one buffer for all that read more of `x` than its amax and its quantize; otherwise they cost another pass over it
    if len(parts) == 1 and m.x.op != "placeholder" and shared:
        made = build.emit(at, FORCE_STRIDE_ORDER, parts[0], list(val(parts[0]).stride()))
        for reader in [u for u in m.x.users if u.target is triton_kernel_wrapper_functional]:
            # `requantize_saturated` reads the tensor: without this buffer another kernel would compute it once more
            reader.replace_input_with(m.x, build.emit(reader, aten.reshape.default, made, list(val(m.x).shape)))
        return [made]
    return parts


def _is_long(x: fx.Node) -> bool:
    """Return whether `x` is the result of more than MAX_OPS ops in a row, moves of elements not counted."""
    met = reach([x], lambda n: filter(is_tensor, n.all_input_nodes), lambda n: is_elementwise(n) or n.target in JOINS)
    return sum(n.op == "call_function" and n.target not in MOVEMENT for n in met) > MAX_OPS


def _repeat(build: Builder, x: fx.Node) -> None:
    """Let each reader of `x` read another copy, so that Inductor does not write `x` to memory for them."""
    readers = [u for u in x.users if u.target is not aten.reshape.default]  # for a kernel that reads it in memory
    copies = build.emit(min(readers), REPEATED, x, len(readers))
    for i, reader in enumerate(readers):
        reader.replace_input_with(x, build.emit(min(readers), operator.getitem, copies, i))


def _parts(x: fx.Node) -> list[fx.Node]:
    """Return the parts of `x = cat(parts, -1)` if two of them read one tensor, or one takes many ops; otherwise `[x]`.

    Each part then gets its own computation. Where Inductor computes a cat element by element, it reads a common tensor
    once for each part, and computes all parts for every element.
    """
    parts, dim = cat_of(x)
    read = Counter(n for p in parts for n in {p, *sources(p, is_elementwise)} if not has_one_element(n))
    apart = any(times > 1 for times in read.values()) or any(map(_is_long, parts))
    return parts if dim == val(x).dim() - 1 and apart else [x]
