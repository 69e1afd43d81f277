"""FP8 matmuls in float32, on processors where they would take a thousand times as long.

before   y: bf16[M, N] = _scaled_mm(a: e4m3[M, K], b: e4m3[K, N], scale_a, scale_b, bias)
after    y             = ((a.float() * scale_a) @ (b.float() * scale_b) + bias).to(bf16)
changes  nothing

That is what torch does itself on CPUs without AMX, and for e5m2 times e4m3 on those without AMX for 16-bit floats.
Elsewhere it calls oneDNN, which has kernels for FP8 only with AMX for 16-bit floats. On Sapphire Rapids, which lacks
that, and where ONEDNN_MAX_CPU_ISA forbids it, oneDNN runs its reference, element by element. The pass goes by what
torch reports of the CPU, never by timing: ranks, resumed runs and caches must agree.

What torch does in float32 stays `_scaled_mm`, though compiled float32 is up to twice as fast (bench/cpu_matmuls.py): it
rounds its result, where Inductor fuses the rounding away with what follows, and it is less to compile.

Runs on the graphs of forward and backward, on CPUs alone; last, for the other passes know matmuls by the op.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, fx

from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.pass_base import Context
from fp8pass.hardware import why_emulated
from fp8pass.passes.common.patterns import aten, dtype_of
from fp8pass.scaling import FP8_DTYPES

log = logging.getLogger(__name__)


class EmulateMatmuls:
    """All of one graph."""

    name = "emulate_matmuls"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Rewrite those that the processor has no kernel for."""
        reasons = {n: why for n in graph.nodes if (why := _why_emulated(n))}
        if reasons:
            build = context.builder(graph, self.name)
            for node in reasons:
                _emulate(build, node)
            log.debug("FP8 matmuls computed in float32: %d; %s", len(reasons), next(iter(reasons.values())))
        return len(reasons)


def _why_emulated(node: fx.Node) -> str:
    if node.target is not aten._scaled_mm.default or dtype_of(node) in FP8_DTYPES:
        return ""
    a, b = map(val, node.args[:2])
    return why_emulated(val(node).device, a.dtype, b.dtype)


def _emulate(build: Builder, node: fx.Node) -> None:
    a, b, scale_a, scale_b, *rest = node.args
    bias = rest[0] if rest and is_tensor(rest[0]) else None
    inputs = [x for x in (a, b, scale_a, scale_b, bias) if isinstance(x, fx.Node)]
    dtype = val(node).dtype

    def product(*tensors: Tensor) -> Tensor:
        return in_float32(*tensors).to(dtype)

    (y,) = build.inline(node, product, *inputs)
    build.replace(node, y)


def in_float32(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of a: float8[M, K] and b: float8[K, N], times their scales, plus bias[N]: float32[M, N]."""
    y = torch.mm(a.float() * scale_a, b.float() * scale_b)
    return y if bias is None else y + bias.float()
