"""Add the scales and amaxes that an update reads and writes as inputs of its graph.

before   graph(p, grad, ...)
after    graph(p, grad, ..., scale: f32[T], amax_history: f32[H, T], amax_weights: f32[W],
               weight_copy_scales: f32[2, W])
changes  nothing

An update that may be skipped takes all amaxes of the step, to drop them.
"""

from __future__ import annotations

from torch import fx

from fp8pass.passes.common.state_inputs import state_input
from fp8pass.passes.update.context import UpdateContext


class TakeStates:
    """The pass over Dynamo's graph of an update."""

    name = "take_states"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Add inputs for the tensors of each of the key's `weight_slots`; return the number of these."""
        skips = bool(context.key.restore_if_skipped)
        context.slot_inputs = [
            {name: state_input(graph, f"fp8pass_{name}_{i}") for name in slots.inputs(skips)}
            for i, slots in enumerate(context.key.weight_slots)
        ]
        return len(context.slot_inputs)
