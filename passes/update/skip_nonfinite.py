"""An update whose gradients hold a NaN or an infinity leaves everything as it was.

before   exp_avg.lerp_(grad, 0.1); p.addcdiv_(exp_avg, denom)
after    bad: b8[] = any_nonfinite([grad])
         p_old, exp_avg_old = p.clone(), exp_avg.clone()
         exp_avg.lerp_(grad, 0.1); p.addcdiv_(exp_avg, denom)
         keep(bad, p, p_old); keep(bad, exp_avg, exp_avg_old)
         forget_step(bad, amax: f32[F])                 what this step has recorded of tensors, for all slots
         count(bad, counts: i64[2])
changes  the numbers of such a step, to those before it; none of any other

Runs on Dynamo's graph of an update, ahead of `write_weights`. The old values are those that the update's kernels have
read: Inductor makes no copies of them. The gradients are read once more, ahead of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fp8pass.names import source_name
from fp8pass.passes.common.state_inputs import state_input
from fp8pass.passes.update.context import UpdateContext
from fp8pass.passes.update.written import places
from fp8pass.quant import ops
from fp8pass.runtime.update_key import Place


def gradients(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that are gradients of parameters."""
    return [n for n in graph.nodes if n.op == "placeholder" and source_name(n).endswith(".grad")]


class SkipNonfinite:
    """Over Dynamo's graph of an update."""

    name = "skip_nonfinite"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Put back what the key keeps, and forget the amaxes of the step, if a gradient is not finite."""
        key = context.key
        if not key.keeps:
            return 0
        names = "amax_forward", "amax_backward", "amax_weights"
        amaxes = [of[name] for of in context.states for name in of if name in names]
        moments = {m.place for m in key.moments}
        others = _at_beginning(graph, [place for place in key.keeps if place not in moments])
        context.skipped = _skip(graph, [*others, *context.moments], amaxes)
        return len(key.keeps)


def _at_beginning(graph: fx.Graph, wanted: Sequence[Place]) -> list[fx.Node]:
    """Nodes for the tensors at some places, ahead of everything that is computed."""
    nodes = {place: node for node, place in places(graph).items()}
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    found = []
    for place in wanted:
        if isinstance(place, str):
            with graph.inserting_after(last):
                last = graph.get_attr(place)
            last.meta = dict(nodes[place].meta)
        found.append(last if isinstance(place, str) else nodes[place])
    return found


def _skip(graph: fx.Graph, written: Sequence[fx.Node], amaxes: Sequence[fx.Node]) -> fx.Node:
    """Put back what was `written`, and forget `amaxes`, if a gradient is not finite. Returns whether: b8[].

    written: inputs, and nodes that get attributes, at the beginning of the graph. Behind the inputs comes `counts`.
    """
    counts = state_input(graph, "fp8pass_counts")
    last = max([counts, *written, *amaxes])
    with graph.inserting_after(last):
        bad = graph.call_function(ops.any_nonfinite, (gradients(graph),))
    with graph.inserting_after(bad):
        old = [graph.call_method("clone", (x,)) for x in written]
    with graph.inserting_before(graph.output_node()):
        for x, before in zip(written, old, strict=True):
            graph.call_function(ops.keep, (bad, x, before))
        for amax in amaxes:
            graph.call_function(ops.forget_step, (bad, amax))
        graph.call_function(ops.count, (bad, counts))
    return bad
