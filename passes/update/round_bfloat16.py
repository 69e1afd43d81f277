"""Round the bfloat16 tensors that an update writes once, stochastically: `update_rounding="stochastic"`.

before   x: f32[N, K] = float32_copy(p: bf16[N, K])
         x.addcdiv_(exp_avg, denom)
after    x.addcdiv_(exp_avg, denom)
         write_rounded(x, p, keys: i32[n], 2)
changes  the parameters, to one of the two nearest bfloat16 numbers, whose mean is the result of the update

This keeps steps that are smaller than half of a parameter's last bit, which rounding to nearest would drop.
"""

from __future__ import annotations

from torch import fx

from fp8pass.passes.update.context import UpdateContext
from fp8pass.quant import ops


class RoundBfloat16:
    """The pass over Dynamo's graph of an update."""

    name = "round_bfloat16"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Write the tensors that `LiftBfloat16` copied, at the end of the graph; return their number."""
        with graph.inserting_before(graph.output_node()):
            for i, x in enumerate(context.rounded, start=len(context.moments)):
                graph.call_function(ops.write_rounded, (x, x.args[0], context.keys, i))
        return len(context.rounded)
