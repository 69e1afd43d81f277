"""Give an update the scales and amaxes that it reads and writes, as inputs.

before   graph(p, grad, ...)
after    graph(p, grad, ..., scale: f32[T], amax_history: f32[H, T], amax_weights: f32[W], made: f32[2, W])
changes  nothing

If an update may be skipped, it takes all amaxes of the step.
"""

from __future__ import annotations

from torch import fx

from fp8pass.passes.common.state_inputs import state_input
from fp8pass.passes.update.context import UpdateContext


class TakeStates:
    """Over Dynamo's graph of an update."""

    name = "take_states"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Add inputs for the tensors of each state that the key has."""
        skips = bool(context.key.keeps)
        context.states = [
            {name: state_input(graph, f"fp8pass_{name}_{i}") for name in state.inputs(skips)}
            for i, state in enumerate(context.key.states)
        ]
        return len(context.states)
