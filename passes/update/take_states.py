"""Add the scales and amaxes that an update reads and writes as inputs of its graph.

before   graph(p, grad, ...)
after    graph(p, grad, ..., scale: f32[T], amax_history: f32[H, T], amax_weights: f32[W],
               weight_copy_scales: f32[2, W])
changes  nothing

An update that may be skipped takes all amaxes of the step, to drop them. One that rounds stochastically takes the
number of updates, i32[1], which it counts up, and numbers of its tensors, i32[n]: the keys of random bits are of these.
If ranks have parts of the tensors, these numbers are i32[n, 2], with the index of each part's first element.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter

from torch import Tensor, fx

from fp8pass.passes.update.context import UpdateContext
from fp8pass.quant import ops
from fp8pass.weights.update_inputs import UpdateCall


class TakeStates:
    """The pass over Dynamo's graph of an update."""

    name = "take_states"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Add inputs for the tensors of each of the key's `weight_slots`; return the number of these."""
        skips = bool(context.key.restore_if_skipped)
        context.slot_inputs = [
            {name: context.take(graph, f"{name}_{i}", partial(_tensor_of, i, name)) for name in slots.inputs(skips)}
            for i, slots in enumerate(context.key.weight_slots)
        ]
        if context.key.is_random:
            context.updates = context.take(graph, "updates", attrgetter("updates"))
            seeds = context.take(graph, "seeds", attrgetter("seeds"))
            with graph.inserting_after(seeds):
                context.keys = graph.call_function(ops.keys_of, (context.updates, seeds))
            with graph.inserting_before(graph.output_node()):
                graph.call_function(ops.count_update, (context.updates,))
        return len(context.slot_inputs)


def _tensor_of(index: int, name: str, call: UpdateCall) -> Tensor:
    """Return a tensor of a state. name: a field of `SlotTensors`."""
    tensor: Tensor = getattr(call.states[index].tensors, name)
    return tensor.data
