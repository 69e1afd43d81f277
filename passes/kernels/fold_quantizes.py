"""Fold the ops of a quantize into one node: Inductor compiles fewer nodes, and other passes match a single one.

before   wide: f32[...] = convert_element_type(x: bf16[...], float32)        unless x is float32; integers stay cast
         scaled         = wide * scale
         x_q: f8[...]   = convert_element_type(clamp_max(clamp_min(scaled, -448), 448), float8_e4m3fn)
after    x_q: f8[...]   = fp8pass.quantize(x, scale, float8_e4m3fn)
changes  nothing: the op's lowering has Inductor generate the same code

Runs on the graphs of forward and backward, after the partitioner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from fp8pass.base.scaling import FP8_DTYPES, fp8_max
from fp8pass.graph.builder import erase_unused, is_tensor, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.patterns import CASTS, aten, dtype_of, first, prims
from fp8pass.quant.kernel_ops import QUANTIZE


class QuantizeMatch(NamedTuple):
    """`x_q = quantize(x, scale)`, as `scaling.quantize` is traced."""

    x_q: fx.Node
    x: fx.Node
    scale: fx.Node


def match(x_q: fx.Node) -> QuantizeMatch | None:
    """Match the ops of `scaling.quantize` backwards; only the cast to float32 may have other readers."""
    dtype = dtype_of(x_q)
    if x_q.target is not prims.convert_element_type.default or dtype not in FP8_DTYPES:
        return None
    node, limit = first(x_q), fp8_max(dtype)
    # the two ops into which Inductor decomposes `clamp`
    for target, bound in ((aten.clamp_max.default, limit), (aten.clamp_min.default, -limit)):
        if node.target is not target or node.args[1:] != (bound,) or len(node.users) > 1:
            return None
        node = first(node)
    scale = node.args[1] if node.target is aten.mul.Tensor and dtype_of(node) == torch.float32 else None
    if not is_tensor(scale) or dtype_of(scale) != torch.float32 or len(node.users) > 1:
        return None
    x = first(node)
    if val(x).shape != val(x_q).shape:
        return None
    if x.target in CASTS and dtype_of(x) == torch.float32 and len(x.args) == 2 and val(first(x)).is_floating_point():
        x = first(x)  # not for counts, masks and one-hot rows: `quantize` takes floating point only
    return QuantizeMatch(x_q, x, scale)


class FoldQuantizes:
    """Folds all quantizes of a graph."""

    name = "fold_quantizes"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite every match; return their number."""
        matches = [m for node in graph.nodes if (m := match(node)) is not None]
        if matches:
            build = context.builder(graph, self.name)
            for x_q, x, scale in matches:
                build.replace(x_q, build.emit(x_q, QUANTIZE, x, scale, val(x_q).dtype))
            erase_unused(graph)
        return len(matches)
