"""Copy the scales of matmuls to addresses that are multiples of 16 bytes: cuBLASLt refuses others.

before   y   = _scaled_mm(a_q, b_q, select(scales: f32[T], 0, 3), s: f32[])
after    t   = fp8pass.aligned(scales)
         y   = _scaled_mm(a_q, b_q, select(t, 0, 3), fp8pass.aligned(s))
changes  nothing: the copies are equal

A scale that is an input may be a view of a larger tensor, at another place in each call; one that is computed may be an
element of a vector, or Inductor writes it into the memory of such an element. The kernel that computes a scale writes
the copy instead, so only inputs are really copied.

Runs on the joint graph, after scaled_mm. `batch_amaxes` later replaces these copies of scales that it joins to vectors.
"""

from __future__ import annotations

from collections.abc import Container

from torch import fx

from fp8pass.graph.builder import Builder, val
from fp8pass.graph.pass_base import Context
from fp8pass.passes.common.patterns import RESHAPES, as_node, aten, first
from fp8pass.quant.kernel_ops import ALIGNED


def match(scale: fx.Node) -> fx.Node | None:
    """Return the tensor to copy: the vector that `scale` is an element of, or else `scale` before any reshape.

    None if it is such a copy already, or has a number for each row or block: those have memory of their own.
    """
    own = _through(scale, RESHAPES)
    is_element = own.target is aten.select.int and val(first(own)).dim() == 1
    original = first(own) if is_element else own
    return None if val(scale).numel() != 1 or original.target is ALIGNED else original


def _through(node: fx.Node, views: Container[object]) -> fx.Node:
    while node.target in views:
        node = first(node)
    return node


class AlignScales:
    """Rewrites the scales of all scaled matmuls."""

    name = "align_scales"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Copy every tensor that `match` finds, once; return the number of copies."""
        build, aligned = context.builder(graph, self.name), dict[fx.Node, fx.Node]()
        for matmul in graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
            scales = [_rewrite(build, matmul, as_node(scale), aligned) for scale in matmul.args[2:4]]
            matmul.args = (*matmul.args[:2], *scales, *matmul.args[4:])
        graph.eliminate_dead_code()
        return len(aligned)


def _rewrite(build: Builder, matmul: fx.Node, scale: fx.Node, aligned: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the scale, or its copy. aligned: copies that exist."""
    if (original := match(scale)) is None:
        return scale
    if original not in aligned:
        aligned[original] = build.emit(matmul, ALIGNED, original)
    own, copy = _through(scale, RESHAPES), aligned[original]
    if own is not original:
        copy = build.emit(matmul, aten.select.int, copy, *own.args[1:])
    shape = list(val(scale).shape)
    return build.emit(matmul, aten.reshape.default, copy, shape) if list(val(copy).shape) != shape else copy
