"""Move quantize before a collective and dequantize after it, so that the collective sends FP8.

before   x: bf16[n M, K] = wait_tensor(all_gather_into_tensor(x_local: bf16[M, K]))
         x_q: f8[n M, K] = to(clamp(x * scale, -448, 448), f8)
         new             = amax(abs(x))                                recorded, and the next scale follows from it
after    q_local: f8[M, K] = to(clamp(x_local * scale, -448, 448), f8)
         x_q: f8[n M, K] = view(wait_tensor(all_gather_into_tensor(view(q_local, u8))), f8)
         new             = amax(abs(x_local))                          all ranks' are reduced once per step
or
before   x = wait_tensor(all_gather_into_tensor(to(x_q, f32) * scale_inv))
after    x = to(view(wait_tensor(all_gather_into_tensor(view(x_q, u8))), f8), f32) * scale_inv
changes  nothing, as long as the scale is the same on all ranks of the group; half of the bytes travel, or fewer.
         Gradients of biases, sums over gathered rows, become sums of the ranks' sums: the order of additions changes.
         A NaN or infinity, which through the amax made the whole tensor NaN, now makes only its own element NaN, and
         that NaN is sent; for such a tensor each rank recorded 0, or nothing, and now only the rank with the element
         does

Handles all_gather_into_tensor, all_to_all_single and broadcast: they move elements and change none. FP8 is sent as u8,
which every backend has; but as FP8 where Inductor fuses a matmul with its collective (async tensor parallelism), since
Inductor looks for FP8. A scale is the same on all ranks if it is computed from `ops.shared`, constants or the result of
an all-reduce. A scale of dynamic scaling is computed from the amax of the gathered tensor; after the rewrite that amax
is reduced over the group.

Rows, and blocks of rows, that have a scale each are quantized by their own amaxes before the collective, and these are
sent beside them: see `collective_rows.py`.

A record for a scale of `ops.shared` reads this rank's amax. Any other reader of the amax gets the amax of the whole
tensor, by a reduction over the group, or from the rank that broadcasts. After an all-to-all there is no such amax.
"""

from __future__ import annotations

from torch import fx

from fp8pass.graph.pass_base import JointContext
from fp8pass.passes.common.patterns import COLLECTIVES, first
from fp8pass.quant.ops import SHARED


class QuantizeCollectives:
    """Rewrites all collectives of a graph for which this is possible."""

    name = "quantize_collectives"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Rewrite collectives; note why where one is refused. Return the number of rewritten collectives."""
        applied = 0
        if any(n.target in COLLECTIVES for n in graph.nodes):
            from fp8pass.passes.joint.collective_rewriter import (
                rewrite_all,  # here: most models train without collectives
            )

            applied = rewrite_all(graph, context, self.name)
        for node in [n for n in graph.nodes if n.target is SHARED]:  # only a mark for this pass; run, it would copy
            node.replace_all_uses_with(first(node))
            graph.erase_node(node)
        return applied
