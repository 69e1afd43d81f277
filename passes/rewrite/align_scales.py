"""Copy scales of matmuls that may not begin at a multiple of 16 bytes, which cuBLASLt refuses.

before   y   = _scaled_mm(a_q, b_q, select(scales: f32[T], 0, 3), s: f32[])      scales and s are inputs of the graph
after    t   = fp8pass.aligned(scales)
         y   = _scaled_mm(a_q, b_q, select(t, 0, 3), fp8pass.aligned(s))
changes  nothing: the copies are equal

An input may be a view of a larger tensor, at another place in each call. A value that the graph computes has memory of
its own, which is aligned; but not every element of it is.

Runs on the joint graph, after scaled_mm. `batch_amaxes` aligns the scales that it joins to a vector later.
"""

from __future__ import annotations

from collections.abc import Container

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.builder import Builder, val
from fp8pass.graph.pass_base import Context
from fp8pass.passes.common.patterns import RESHAPES, VIEWS, as_node, aten, first
from fp8pass.quant.kernel_ops import ALIGNED, ALIGNED_STRIDE


def match(scale: fx.Node) -> fx.Node | None:
    """Return the tensor to copy if `scale`, one number, may begin at another address; None if it is aligned.

    That tensor is the vector that `scale` is an element of, or the tensor that `scale` is a view of.
    """
    if val(scale).numel() != 1:
        return None
    own = _through(scale, RESHAPES)
    base = _through(own, VIEWS)
    offset = val(own).storage_offset() - val(base).storage_offset()
    if base.op == "call_function" and statically_known_true(offset % ALIGNED_STRIDE == 0):
        return None
    return first(own) if own.target is aten.select.int and val(first(own)).dim() == 1 else own


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
