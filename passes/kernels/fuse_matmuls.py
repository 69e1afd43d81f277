"""Fuse a matmul with the ops after it: one kernel whose epilogue quantizes the result, and takes its amax.

before   y: bf16[M, N]     = _scaled_mm(a, b, s_a, s_b, bias)
         h: bf16[M, N]     = gelu(y)                                any elementwise ops, on other tensors too
         h_q: f8[M, N]     = quantize(h, scale);  h_t: f8[N, M] = clone(permute(h_q))
         amax: bf16[]      = amax(amax(abs(h), -1))
         g: bf16[N]        = sum(h, 0)                              the gradient of a bias, where there is one
after    h_q, h_t, tiles: bf16[T], sums: f32[R, N] = kernel(a, b, s_a, s_b, bias, scale)
         amax              = amax(tiles);  g = sum(sums, 0)
changes  nothing: the kernel computes what Inductor's would, and rounds y as the matmul does

The kernel also writes y, or one later tensor, if something else reads it; and it quantizes tensors that are computed
from what it reads anyway, as the backward of an activation reads the tensor from which its forward is recomputed. A
sum with a residual is fused too. If the ops combine two halves of y, as gate and up, each tile computes both.

Only on GPUs, and only if the scale does not depend on y, as delayed scaling makes it.
"""

from __future__ import annotations

from torch import fx

from fp8pass import hardware
from fp8pass.graph.builder import erase_unused, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.patterns import aten


class FuseMatmuls:
    """Fuses the matmuls of one graph."""

    name = "fuse_matmuls"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite the matmuls whose epilogue can be generated, and pays; return their number."""
        matmuls = [n for n in graph.nodes if n.target is aten._scaled_mm.default and _is_on_gpu(n)]
        if not matmuls:
            return 0
        from fp8pass.passes.kernels.fused_matmul import fuse  # here: the code that generates kernels is for GPUs

        applied = sum([fuse(matmul, context) for matmul in matmuls])
        if applied:
            erase_unused(graph)
        return applied


def _is_on_gpu(matmul: fx.Node) -> bool:
    return (hardware.pretended_device or val(matmul).device).type == "cuda"
