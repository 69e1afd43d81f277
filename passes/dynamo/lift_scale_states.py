"""Turn the scale states that the user's `in_qdq` and `out_qdq` name into state that the graph is called with.

before   s: f32[] = begin_use(scale, amax_history, amax, ..., key, float8_e5m2)      rolls if a backward has run
         y_ = qdq_gradient(y, s, amax, step_ended, held, key, float8_e5m2)           its backward ends the step
after    s: f32[] = begin_graph(scale, amax_history, amax, ..., key, float8_e5m2)    rolls: each call is a step
         y_ = qdq_gradient(y, ByState(...), s, amax_late)                            its backward only records
changes  the end of a step: each call of the graph is one. Later uses of a state in it take the scale of the first

Runs on Dynamo's graph, after the annotate pass. `amax_late` is the buffer `amax`, passed a second time as a separate
input: see `SlotInput`. Uses in the bodies of control flow and checkpoints do not change.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8pass.graph.inputs import Input, LateAmax
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.passes.common.state_inputs import add_input
from fp8pass.quant import ops
from fp8pass.states import scale_state


class LiftScaleStates:
    """The pass over Dynamo's graph. Graphs in it are left alone."""

    name = "lift_scale_states"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Make every call of the graph a step of the states that it uses; return the number of these states."""
        lifter = _Lifter(graph, context.annotation.inputs)
        if any(n.target is scale_state.begin_use for n in graph.nodes):
            for node in list(graph.nodes):
                lifter.visit(node)
        context.annotation.scale_states = lifter.scale_states
        return len(lifter.scale_states)


class _Lifter:
    def __init__(self, graph: fx.Graph, inputs: list[Input[Any]]) -> None:
        self.graph = graph
        self.inputs = inputs
        # before `_late` adds inputs: positions in this list are those of Dynamo's inputs
        self.placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self.begun: dict[fx.Node, fx.Node] = {}
        """The node of a state's scale in this graph, by the state's `amax` input."""
        self.scale_states: list[tuple[int, ...]] = []
        self.late: dict[fx.Node, fx.Node] = {}
        """The input that the backward writes, by the state's `amax` input."""

    def visit(self, node: fx.Node) -> None:
        """Replace the node if it uses a state."""
        args: Any = node.args
        if node.target is scale_state.begin_use:
            self._begin(node, amax=args[2])
        elif node.target is scale_state.qdq_operand:
            x, scale, amax, *_, key, dtype = args
            node.target, node.args = ops.qdq_operand, (x, scale_state.quantizer(key, dtype), scale, amax)
        elif node.target is scale_state.qdq_gradient:
            y, scale, amax, *_, key, dtype = args
            node.target, node.args = ops.qdq_gradient, (y, scale_state.quantizer(key, dtype), scale, self._late(amax))

    def _begin(self, node: fx.Node, amax: fx.Node) -> None:
        if amax in self.begun:
            node.replace_all_uses_with(self.begun[amax])
            self.graph.erase_node(node)
        else:
            node.target = scale_state.begin_graph
            self.begun[amax] = node
            scale, amax_history, _, _, step_ended, held, *_ = node.args
            state = scale, amax_history, amax, step_ended, held
            self.scale_states.append(tuple(map(self.placeholders.index, state)))

    def _late(self, amax: fx.Node) -> fx.Node:
        if amax not in self.late:
            late = LateAmax(f"amax_late_{len(self.late)}", self.placeholders.index(amax))
            self.late[amax] = add_input(self.graph, self.inputs, late)
        return self.late[amax]
