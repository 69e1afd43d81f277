"""Restore all tensors that an update writes if one of its gradients holds a NaN or an infinity.

before   exp_avg.lerp_(grad, 0.1); p.addcdiv_(exp_avg, denom)
after    bad: b8[] = any_nonfinite([amax_of_part(grad)])
         p_old, exp_avg_old = p.clone(), exp_avg.clone()
         exp_avg.lerp_(grad, 0.1); p.addcdiv_(exp_avg, denom)
         keep(bad, p, p_old); keep(bad, exp_avg, exp_avg_old)
         forget_step(bad, amax: f32[F])                 the amaxes that this step has recorded, for all slots
         count(bad, counts: i64[2])
changes  the values after such a step, to those before it; nothing in any other step

Runs on Dynamo's graph of an update, before `write_weights`. The update's kernels read the old values anyway, so
Inductor makes no copies for the clones. The gradients are read once more, before these kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import fx

from fp8pass.base.names import gradients_of
from fp8pass.passes.update.context import UpdateContext
from fp8pass.passes.update.written import refs
from fp8pass.quant import ops
from fp8pass.quant.sharded import groups_of
from fp8pass.weights.update_key import TensorRef


def gradients(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs that are gradients of parameters."""
    inputs = graph.find_nodes(op="placeholder")
    return [inputs[i] for i in gradients_of(graph)]


class SkipNonfinite:
    """The pass over Dynamo's graph of an update."""

    name = "skip_nonfinite"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Restore the tensors in `key.restore_if_skipped` if a gradient is not finite; return their number."""
        key = context.key
        if not key.restore_if_skipped:
            return 0
        names = "amax_forward", "amax_backward", "amax_weights"
        amaxes = [inputs[name] for inputs in context.slot_inputs for name in inputs if name in names]
        decoded = {*(m.ref for m in key.moments), *key.rounded}
        # for a moment, the decoded tensor is restored, before WriteMoments stores it; likewise for one to be rounded
        restored = _at_beginning(graph, [ref for ref in key.restore_if_skipped if ref not in decoded])
        count = [] if context.updates is None else [context.updates]
        counts = context.take(graph, "counts", attrgetter("counts"))
        written = [*restored, *context.moments, *context.rounded, *count]
        context.skipped = _skip(graph, counts, written, amaxes)
        return len(key.restore_if_skipped)


def _at_beginning(graph: fx.Graph, wanted: Sequence[TensorRef]) -> list[fx.Node]:
    """Return nodes for the tensors at the places `wanted`, before every node that computes something."""
    nodes = {ref: node for node, ref in refs(graph).items()}
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    read = []
    for ref in wanted:
        if isinstance(ref, str):
            with graph.inserting_after(last):  # the graph's own `get_attr` may come later than nodes that read this one
                last = graph.get_attr(ref)
            last.meta = dict(nodes[ref].meta)
        read.append(last if isinstance(ref, str) else nodes[ref])
    return read


def _skip(graph: fx.Graph, counts: fx.Node, written: Sequence[fx.Node], amaxes: Sequence[fx.Node]) -> fx.Node:
    """Add ops that restore `written` and drop the recorded `amaxes` if a gradient is not finite.

    written: inputs and `get_attr` nodes at the beginning of the graph. Returns the node that is true if a gradient is
    not finite: b8[].
    """
    last, grads = max([counts, *written, *amaxes]), gradients(graph)
    groups = dict.fromkeys(group for g in grads for group in groups_of(g.meta["example_value"]))
    with graph.inserting_before(last.next):
        of_gradients = [graph.call_function(ops.amax_of_part, (g,)) for g in grads]
        bad = graph.call_function(ops.any_nonfinite, (of_gradients, tuple(groups)))
    with graph.inserting_after(bad):
        old = [graph.call_method("clone", (x,)) for x in written]
    with graph.inserting_before(graph.output_node()):
        for x, before in zip(written, old, strict=True):
            graph.call_function(ops.restore_where, (bad, x, before))
        for amax in amaxes:
            graph.call_function(ops.forget_step, (bad, amax))
        graph.call_function(ops.count_skips, (bad, counts))
    return bad
