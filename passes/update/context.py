"""The context that the passes over Dynamo's graph of an update share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fp8pass.graph.annotation import Body, MatmulChoice
from fp8pass.graph.inputs import Input
from fp8pass.graph.pass_base import Context
from fp8pass.passes.common.state_inputs import add_input
from fp8pass.weights.update_inputs import UpdateCall, UpdateInput
from fp8pass.weights.update_key import UpdateKey, attribute


@dataclass
class UpdateContext(Context):
    """The context of one update. inputs: those of the graph after Dynamo's, in order; passes add them with `take`.

    key: what the graph is compiled for. slot_inputs: for each of the key's `weight_slots`, the inputs by their
    names in `SlotTensors`.
    moments: the nodes of the key's moments, once they are read. rounded: the float32 copies of the tensors in the key's
    `rounded`. updates: i32[1], the number of updates so far; keys: i32[n] or i32[n, 2], see `random_bits.keys_of`, for
    each moment and each tensor in `rounded`; both None if nothing is rounded stochastically. skipped: b8[], true if the
    update must change nothing; None if the update does not check its gradients, or not yet. tensors: returns the inputs
    of the call that the graph is compiled for. choices, bodies: see `Annotation`.
    """

    key: UpdateKey = field(kw_only=True)
    inputs: list[Input[UpdateCall]] = field(default_factory=list)
    slot_inputs: list[dict[str, fx.Node]] = field(default_factory=list)
    moments: list[fx.Node] = field(default_factory=list)
    rounded: list[fx.Node] = field(default_factory=list)
    updates: fx.Node | None = None
    keys: fx.Node | None = None
    skipped: fx.Node | None = None
    tensors: Callable[[], Sequence[Any]] = tuple
    choices: list[MatmulChoice] = field(default_factory=list)
    bodies: dict[str, Body] = field(default_factory=dict)

    def examples(self, graph: fx.Graph) -> dict[fx.Node, Any]:
        """Return the real tensors, or numbers, that the graph's inputs and attributes are in a call."""
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        of_attributes = ((n, attribute(graph.owning_module, str(n.target))) for n in graph.find_nodes(op="get_attr"))
        return {**dict(zip(inputs, self.tensors(), strict=True)), **dict(of_attributes)}

    def take(
        self, graph: fx.Graph, name: str, value: Callable[[UpdateCall], Tensor], is_fixed: bool = False
    ) -> fx.Node:
        """Add an input to the graph; return its node. value, is_fixed: see `UpdateInput`."""
        return add_input(graph, self.inputs, UpdateInput(name, value, is_fixed))
