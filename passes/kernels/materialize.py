"""Materialize values that several kernels read, so that Inductor does not recompute them in each.

before   amax: f32[T] = cat([amax_forward: f32[F], amax_backward: f32[T - F]])
         scale: f32[T] = where(...);  copy_(scale_buffer, scale)
after    amax          = fp8pass.joined([amax_forward, amax_backward])
         scale         = force_stride_order(where(...));  copy_(scale_buffer, scale)
before   x_q: f8[M, K]      = quantize(x);  y = _scaled_mm(x_q, ...);  z = _scaled_mm(x_q, ...)
after    x_q                = force_stride_order(quantize(x))
changes  nothing

Inductor would quantize again for each matmul, whose operands must have a certain layout. A cat of inputs needs its own
launch, which an elementwise op does not. And a value that is written to a buffer Inductor would compute again in every
kernel that reads an element of it, from the old buffer, which then has to be kept.

Runs on the graphs of forward and backward, after the partitioner.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.base.node_meta import ONE_STAGE
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.patterns import CASTS, VIEWS, aten, dtype_of, readers
from fp8pass.quant.kernel_ops import JOINED, QUANTIZE

MAX_ELEMENTS = 1 << 12
"""Most elements of a vector that is materialized."""
MAX_PARTS = 8
MAX_AMAX_INPUT = 1 << 21
"""Most elements that a one-stage amax reads: 1,024 steps of history for 2,048 slots."""


class Materialize:
    """Materializes vectors of slots, and operands of several matmuls."""

    name = "materialize"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite all of them, and mark small amaxes as one stage; return the number of rewritten values."""
        cats = [n for n in graph.nodes if _is_small_cat(n)]
        written = [v for n in graph.nodes if (v := _vector(n)) is not None]
        build = context.builder(graph, self.name)
        for cat in cats:
            build.replace(cat, build.emit(cat, JOINED, cat.args[0]))
        shared = [n for n in graph.nodes if _is_shared_operand(n)]
        for value in dict.fromkeys([*(v for v in written if v not in cats), *shared]):
            self._make_here(build, value)
        for node in filter(_is_small_amax, graph.nodes):
            node.meta[ONE_STAGE] = True
        return len(cats) + len(written) + len(shared)

    def _make_here(self, build: Builder, value: fx.Node) -> None:
        made = build.emit(value.next, FORCE_STRIDE_ORDER, value, list(val(value).stride()))
        value.replace_all_uses_with(made, delete_user_cb=lambda user: user > made)  # not nodes that read its strides


def _is_small_cat(node: fx.Node) -> bool:
    if node.target is not aten.cat.default or val(node).dim() != 1:
        return False
    if val(node).dtype.is_floating_point and val(node).dtype.itemsize == 1:
        return False  # for float8, Inductor has no `where`
    parts: Any = node.args[0]
    return len(parts) <= MAX_PARTS and _is_small(val(node)) and len({val(p).dtype for p in parts}) == 1


def _is_small_amax(node: fx.Node) -> bool:
    """Return whether `node` is the amax of a history, or of the amaxes of rows or columns."""
    return (
        node.target is aten.amax.default
        and _is_at_most(val(node.args[0]), MAX_AMAX_INPUT)
        and _is_at_most(val(node), MAX_ELEMENTS)
    )


def _vector(node: fx.Node) -> fx.Node | None:
    """Return a small value, computed in the graph, of which `node` reads a part or which it writes to an input.

    None if `node` does neither.
    """
    if node.target is aten.copy_.default and is_tensor(node.args[1]) and len(node.args[1].users) > 1:
        value = node.args[1]
    elif node.target in (aten.select.int, aten.slice.Tensor) and is_tensor(node.args[0]):
        value = node.args[0]
    else:
        return None
    computed = value.op == "call_function" and value.target is not FORCE_STRIDE_ORDER
    if not computed or val(value).dim() == 0 or not _is_small(val(value)):
        return None
    return value if val(value).is_contiguous() else None  # excludes an expanded number: the gradient of a sum, sliced


def _is_shared_operand(node: fx.Node) -> bool:
    """Return whether `node` casts to float8, and several matmuls read the result."""
    return node.target in {QUANTIZE, *CASTS} and dtype_of(node) in FP8_DTYPES and len(_matmuls(node)) > 1


def _matmuls(x_q: fx.Node) -> set[fx.Node]:
    return {u for u in readers(x_q, lambda n: n.target in VIEWS) if u.target is aten._scaled_mm.default}


def _is_small(x: Tensor) -> bool:
    return isinstance(x.numel(), int) and x.numel() <= MAX_ELEMENTS


def _is_at_most(x: Tensor, elements: int) -> bool:
    """Return whether a tensor is known to have no more elements; adds no guard on a size that varies."""
    return bool(statically_known_true(x.numel() <= elements))
