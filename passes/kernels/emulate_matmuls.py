"""Compute FP8 matmuls in float32 on CPUs where oneDNN would take a thousand times as long.

before   y: bf16[M, N] = _scaled_mm(a: e4m3[M, K], b: e4m3[K, N], scale_a, scale_b, bias)
after    y             = ((a.float() * scale_a) @ (b.float() * scale_b) + bias).to(bf16)
changes  nothing

Torch does the same on CPUs without AMX, and for e5m2 times e4m3 on those without AMX for 16-bit floats. Elsewhere torch
calls oneDNN, which has kernels for FP8 only with AMX for 16-bit floats. On Sapphire Rapids, which lacks that, and where
ONEDNN_MAX_CPU_ISA forbids it, oneDNN runs its reference, element by element. The pass decides by what torch reports
about the CPU, never by timing: ranks, resumed runs and caches must agree.

A `_scaled_mm` that torch computes in float32 stays, though compiled float32 is up to twice as fast
(bench/cpu_matmuls.py): `_scaled_mm` rounds its result, while Inductor would fuse the rounding away with the ops that
follow, and it is less to compile.

Runs on the graphs of forward and backward, on CPUs only, and last, since the other passes know matmuls by the op.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, fx

from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.hardware import why_emulated
from fp8pass.passes.common.patterns import aten, dtype_of

log = logging.getLogger(__name__)


class EmulateMatmuls:
    """Rewrites all FP8 matmuls of one graph that need it."""

    name = "emulate_matmuls"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite the matmuls that the CPU has no FP8 kernel for; return their number."""
        reasons = {n: why for n in graph.nodes if (why := _why_emulated(n))}
        if reasons:
            build = context.builder(graph, self.name)
            for node in reasons:
                _emulate(build, node)
            log.debug("FP8 matmuls computed in float32: %d; %s", len(reasons), next(iter(reasons.values())))
        return len(reasons)


def _why_emulated(node: fx.Node) -> str:
    if node.target is not aten._scaled_mm.default or dtype_of(node) in FP8_DTYPES:
        return ""  # a result in FP8 stays with the kernel, which may saturate or overflow
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
    """Return the product of a: float8[M, K] and b: float8[K, N], times their scales, plus bias[N], in float32[M, N]."""
    y = torch.mm(a.float() * scale_a, b.float() * scale_b)
    return y if bias is None else y + bias.float()
