"""Write an optimizer's moments to 8-bit and 16-bit storage.

before   x: f32[N, K] = decode_moment(Format("first"), x_q: f8[N, K], moment_scales: f32[2, n], 0)
         x.lerp_(grad, 0.1); p.addcdiv_(x, denom)
after    x.lerp_(grad, 0.1); p.addcdiv_(x, denom)
         s: f32[n] = next_moment_scales(targets, moment_scales)
         write_moment_scales(moment_scales, s, [write_moment(Format("first"), x, x_q, s, 0, keys), ...])
changes  the moments that the next update reads, to values that 8 bits can hold, or 16 bits of a square root
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8pass.passes.update.context import UpdateContext
from fp8pass.quant import ops


class WriteMoments:
    """The pass over Dynamo's graph of an update."""

    name = "write_moments"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Store the moments at the end of the graph, unless the update is skipped; return their number."""
        if context.moments:
            _write(graph, context)
        return len(context.moments)


def _write(graph: fx.Graph, context: UpdateContext) -> None:
    moments, decoded, skipped = context.key.moments, context.moments, context.skipped
    moment_scales = decoded[0].args[2]
    with graph.inserting_before(graph.output_node()):
        targets = tuple(m.stored_as.target for m in moments)
        scales = graph.call_function(ops.next_moment_scales, (targets, moment_scales, skipped))
        amaxes = []
        for i, (m, x) in enumerate(zip(moments, decoded, strict=True)):
            keys = context.keys if m.stored_as.stochastic else None
            # x.args: those of the `decode_moment` that returned x, with x_q and the scales of blocks
            args: Any = (
                m.stored_as,
                x,
                x.args[1],
                scales,
                i,
                keys,
                *((x.args[5], skipped) if m.stored_as.block else ()),
            )
            amaxes.append(graph.call_function(ops.write_moment, args))
        graph.call_function(ops.write_moment_scales, (moment_scales, scales, amaxes))
