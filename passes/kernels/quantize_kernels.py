"""Quantize tensors by a kernel of our own, with the elementwise ops before the quantize: one tile to a program.

before   h: bf16[M, N]     = gelu(y)                               any elementwise ops, on tensors that are in memory
         h_q: f8[M, N]     = quantize(h, scale);  h_t: f8[N, M] = clone(permute(h_q))
         amax: bf16[]      = amax(amax(abs(h), -1))
         b: bf16[N]        = sum(h, 0)                             the gradient of a bias, where there is one
after    h_q, h_t, tiles: bf16[T], sums: f32[R, N] = kernel(y, scale)
         amax              = amax(tiles);  b = sum(sums, 0)
changes  nothing: the kernel computes what Inductor's would

Tensors that are computed from the same matrices are quantized by one kernel, as the gradients of gate and up are, and
the hidden tensor that the gradient of a weight needs again. The weights of siblings are read where they are. There may
be a scale for each row, and for each column; another kernel then takes the amaxes of rows and of columns before, in one
pass over the same matrices. Or there is a scale for each block; a tile holds whole blocks, so that their amaxes and
scales are computed before it is quantized.

Only on GPUs, for large tensors. Not done where Inductor fuses the quantize with something that a tile can't hold: a
norm, whose rows are longer, or the amaxes of rows; an update, which writes in place; what is read transposed. But what
attention returns is read where it is, with its heads apart; the gradients of queries and keys are rotated back in the
kernel, both halves of a head at once, and those of values stand beside them.
quantize_tiles.py, which runs after this pass, is for these.
"""

from __future__ import annotations

from torch import fx

from fp8pass import hardware
from fp8pass.graph.builder import erase_unused, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.quant.kernel_ops import QUANTIZE

LEAST_ELEMENTS = 1 << 20
"""Smaller tensors are left to Inductor, which joins small kernels into one launch."""


class QuantizeKernels:
    """Rewrites the quantizes of one graph."""

    name = "quantize_kernels"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite every group that one kernel can compute, and pays; return the number of quantizes in them."""
        large = [n for n in graph.nodes if is_large_on_gpu(n)]
        if not large:
            return 0
        from fp8pass.passes.kernels.quantize_groups import rewrite_groups  # here: it generates kernels for GPUs

        applied = rewrite_groups(graph, large, context, self.name)
        if applied:
            erase_unused(graph)
        return applied


def is_large_on_gpu(x_q: fx.Node) -> bool:
    """Return whether a node quantizes a tensor on a GPU that is large enough for a kernel of our own."""
    if x_q.target is not QUANTIZE or (hardware.pretended_device or val(x_q).device).type != "cuda":
        return False
    shape = val(x_q).shape
    is_static = all(isinstance(size, int) for size in shape) and len(shape) > 1
    return is_static and val(x_q).numel() >= LEAST_ELEMENTS
