"""Write an optimizer's moments to 8-bit and 16-bit storage.

before   x: f32[N, K] = decode_moment("first", x_q: f8[N, K], moment_scales: f32[2, n], 0)
         x.lerp_(grad, 0.1); p.addcdiv_(x, denom)
after    x.lerp_(grad, 0.1); p.addcdiv_(x, denom)
         s: f32[n] = next_moment_scales(kinds, moment_scales)
         write_moment_scales(moment_scales, s, [write_moment("first", x, x_q, s, 0), ...])
changes  the moments that the next update reads, to values that 8 bits can hold, or 16 bits of a square root
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fp8pass.passes.update.context import UpdateContext
from fp8pass.quant import ops
from fp8pass.runtime.update_key import Moment


class WriteMoments:
    """The pass over Dynamo's graph of an update."""

    name = "write_moments"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Store the moments at the end of the graph, unless the update is skipped; return their number."""
        if context.moments:
            _write(graph, context.key.moments, context.moments, context.skipped)
        return len(context.moments)


def _write(graph: fx.Graph, moments: Sequence[Moment], decoded: Sequence[fx.Node], skipped: fx.Node | None) -> None:
    kinds = tuple(m.kind for m in moments)
    moment_scales = decoded[0].args[2]
    with graph.inserting_before(graph.output_node()):
        scales = graph.call_function(ops.next_moment_scales, (kinds, moment_scales, skipped))
        amaxes = [
            graph.call_function(ops.write_moment, (kind, x, x.args[1], scales, i))
            for i, (kind, x) in enumerate(zip(kinds, decoded, strict=True))
        ]
        graph.call_function(ops.write_moment_scales, (moment_scales, scales, amaxes))
