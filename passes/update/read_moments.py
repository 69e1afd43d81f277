"""Read an optimizer's moments from 8-bit and 16-bit storage.

before   exp_avg: f32[N, K] = get_attr
         exp_avg.lerp_(grad, 0.1)
after    x: f32[N, K] = decode_moment(Format("first"), x_q: f8[N, K], moment_scales: f32[2, n], 0)
         x.lerp_(grad, 0.1)
changes  the moments, to values that 8 bits can hold, or 16 bits of a square root

If ranks have parts of a moment, `x_q` and its scales are those of this rank's part, and `x` is a DTensor, as `exp_avg`
was: `decode_moment(..., division=Division(...))`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, fx

from fp8pass.passes.update.context import UpdateContext
from fp8pass.passes.update.written import refs
from fp8pass.quant import ops
from fp8pass.quant.moments import pack
from fp8pass.weights.update_inputs import UpdateCall
from fp8pass.weights.update_key import TensorRef


class ReadMoments:
    """The pass over Dynamo's graph of an update."""

    name = "read_moments"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Decode the moments of the key before any other op; return their number.

        The graph gets the inputs `moment_scales`, and `x_q` of each moment, and `blocks` if any: see `Fp8Moment`.
        """
        if context.key.moments:
            context.moments = _read(graph, context)
        return len(context.moments)


def _read(graph: fx.Graph, context: UpdateContext) -> list[fx.Node]:
    moments = context.key.moments
    moment_scales = context.take(graph, "moment_scales", lambda call: pack(call.moments))
    stored = [
        [
            context.take(graph, f"moment_{i}{name}", partial(_stored, i, part))
            for part, name in enumerate(("", "_blocks")[: 1 + (m.stored_as.block is not None)])
        ]
        for i, m in enumerate(moments)
    ]
    nodes: dict[TensorRef, list[fx.Node]] = {}
    for node, ref in refs(graph).items():
        nodes.setdefault(ref, []).append(node)
    decoded, after = [], max(n for n in graph.nodes if n.op == "placeholder")
    for i, (m, (x_q, *blocks)) in enumerate(zip(moments, stored, strict=True)):
        with graph.inserting_after(after):
            args: Any = (m.stored_as, x_q, moment_scales, i, m.dtype, *blocks)
            kwargs: Any = {"division": m.division} if m.division is not None else {}
            after = graph.call_function(ops.decode_moment, args, kwargs)
        for node in nodes[m.ref]:
            node.replace_all_uses_with(after)
            if node.op == "get_attr":  # an input stays, for the graph is called with it
                graph.erase_node(node)
        decoded.append(after)
    return decoded


def _stored(index: int, part: int, call: UpdateCall) -> Tensor:
    return call.moments[index].stored[part]
