"""Copy scales and biases of matmuls to addresses that are multiples of 16 bytes: cuBLASLt refuses others.

before   y   = _scaled_mm(a_q, b_q, select(scales: f32[T], 0, 3), s: f32[], bias[8:])
after    t   = fp8pass.aligned(scales)
         y   = _scaled_mm(a_q, b_q, select(t, 0, 3), fp8pass.aligned(s), fp8pass.rounded(bias[8:]))
changes  nothing: the copies are equal

A scale that is an input may be a view of a larger tensor, at another place in each call; one that is computed may be an
element of a vector, or Inductor writes it into the memory of such an element. The kernel that computes a scale writes
the copy instead, so only inputs are really copied. A bias is copied only if it is known to be at another address.

Runs on the joint graph, after scaled_mm. `batch_amaxes` later replaces these copies of scales that it joins to vectors.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.graph.builder import Builder, erase_unused, is_tensor, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.passes.common.patterns import CASTS, COPIES, RESHAPES, VIEWS, as_node, aten, first, through
from fp8pass.quant.kernel_ops import ALIGNED, ROUNDED


def match(scale: fx.Node) -> fx.Node | None:
    """Return the tensor to copy if `scale` is one number: the vector that it is an element of, otherwise the number.

    None if it is such a copy already.
    """
    viewed = through(scale, RESHAPES)
    is_element = viewed.target is aten.select.int and val(first(viewed)).dim() == 1
    original = first(viewed) if is_element else viewed
    return None if original.target is ALIGNED else original


def is_input(scales: fx.Node) -> bool:
    """Return whether `scales`, of rows or blocks, are an input: Inductor drops ops that lay an input out again."""
    base = through(scales, VIEWS | COPIES | CASTS | {FORCE_STRIDE_ORDER})
    return base.op == "placeholder" and val(base).dtype == val(scales).dtype


def is_unaligned(bias: fx.Node) -> bool:
    """Return whether `bias` is not known to begin at a multiple of 16 bytes."""
    x = val(bias)
    return not statically_known_true(x.storage_offset() * x.itemsize % 16 == 0)


class AlignArguments:
    """Rewrites scales and biases of all scaled matmuls."""

    name = "align_arguments"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Copy what begins elsewhere, or may do so; return the number of matmuls with such arguments."""
        rewriter, applied = _AlignedRewriter(context.builder(graph, self.name)), 0
        for matmul in graph.find_nodes(op="call_function", target=aten._scaled_mm.default):
            a, b, scale_a, scale_b, *rest = matmul.args
            scales = [rewriter.scale(matmul, as_node(scale)) for scale in (scale_a, scale_b)]
            before, matmul.args = matmul.args, (a, b, *scales, *(rewriter.bias(matmul, x) for x in rest[:1]), *rest[1:])
            applied += matmul.args != before
        erase_unused(graph)
        return applied


class _AlignedRewriter:
    def __init__(self, build: Builder) -> None:
        self.build = build
        self.aligned: dict[fx.Node, fx.Node] = {}

    def scale(self, matmul: fx.Node, scale: fx.Node) -> fx.Node:
        """Return the scale or a copy; the elements of a vector share one."""
        shape = list(val(scale).shape)
        if any(n != 1 for n in shape):
            return self._copied(matmul, ROUNDED, scale) if is_input(scale) else scale
        if (original := match(scale)) is None:
            return scale
        viewed, copy = through(scale, RESHAPES), self._copied(matmul, ALIGNED, original)
        if viewed is not original:
            copy = self.build.emit(matmul, aten.select.int, copy, *viewed.args[1:])
        return self.build.emit(matmul, aten.reshape.default, copy, shape) if list(val(copy).shape) != shape else copy

    def bias(self, matmul: fx.Node, bias: Any) -> Any:
        """Return the bias, which may be None, or a copy."""
        return self._copied(matmul, ROUNDED, bias) if is_tensor(bias) and is_unaligned(bias) else bias

    def _copied(self, matmul: fx.Node, op: Any, x: fx.Node) -> fx.Node:
        if x not in self.aligned:
            self.aligned[x] = self.build.emit(matmul, op, x)
        return self.aligned[x]
