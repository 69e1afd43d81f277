"""Write the FP8 copy of each weight in the update that writes the weight, for the next forward to read.

before   p.addcdiv_(exp_avg, denom)                              or any other last write into a parameter
after    p.addcdiv_(exp_avg, denom)
         s: f32[W] = scales_or_one(next_scales(scale: f32[T], amax_history: f32[H, T], amax_weights: f32[W]))
         a: f32[]  = write_weight(s, 0, [p], [x_q: f8[N, K]], [x_t: f8[K, N]])
         write_weight_copy_scales(weight_copy_scales: f32[2, W], s, [a, ...])
or       write_weight_by_itself(quantizer, [p], scales, [x_q: f8[N, K]], [x_t: f8[K, N]])      without delayed scaling
changes  no existing value; the copy equals the one that the next forward would have computed, or has the scale of a
         predicted amax, `s = predicted_scales(...)`

Of a weight that is divided among ranks, each rank writes the copy of its part. The scale of the next step comes from
the largest amax of all ranks, which are reduced after the step; so they are reduced here too, `amaxes_of_ranks`.

Runs on Dynamo's graph of an update: a graph that writes into parameters and returns nothing that requires a gradient.
Optimizers are not recognized by name. After AOTAutograd the parameter's `copy_` and these writes read one value, so
Inductor computes them in one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fp8pass.passes.common.state_inputs import state_input
from fp8pass.passes.update.context import UpdateContext
from fp8pass.passes.update.written import refs
from fp8pass.quant import ops
from fp8pass.runtime.update_key import TensorRef, WeightSlots, Write


class WriteWeights:
    """The pass over Dynamo's graph of an update."""

    name = "write_weights"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Write the FP8 copies of the key at the end of the graph; return their number.

        The graph gets as inputs the bounds of weights whose amax is predicted, for each of the key's `weight_slots`
        that has any; then for each weight its scales, if it has no slot of delayed scaling, the copies of its parts,
        their transposed copies, and the parts that have no place in the graph.
        """
        if context.key.writes:
            _write(graph, context.key.weight_slots, context.slot_inputs, context.key.writes)
        return len(context.key.writes)


def _write(
    graph: fx.Graph, weight_slots: Sequence[WeightSlots], inputs: Sequence[dict[str, fx.Node]], writes: Sequence[Write]
) -> None:
    nodes = {ref: node for node, ref in refs(graph).items()}
    bounds_of = [state_input(graph, f"fp8pass_bounds_{i}") for i in sorted({w.slots for w in writes if w.predicted})]
    to_write = [(w, _inputs_of(graph, i, w, nodes)) for i, w in enumerate(writes)]
    with graph.inserting_before(graph.output_node()):
        for i, (slots, of_slots) in enumerate(zip(weight_slots, inputs, strict=True)):
            if not slots.count:
                continue
            scale, history, amaxes_now = (of_slots[name] for name in ("scale", "amax_history", "amax_weights"))
            if slots.over:
                amaxes_now = graph.call_function(ops.amaxes_of_ranks, (amaxes_now, slots.over))
            of: Any = (slots.recipe, slots.first, scale, history, amaxes_now)
            scales = graph.call_function(ops.next_scales, of)
            predicted = tuple(w.index for w in writes if w.slots == i and w.predicted)
            bounds = [bounds_of.pop(0)] if predicted else []
            if predicted:
                of_scales: Any = (scales, of_slots["weight_copy_scales"], *bounds, predicted)
                scales = graph.call_function(ops.predicted_scales, of_scales)
            scales = graph.call_function(ops.scales_or_one, (scales,))
            amaxes: list[fx.Node | None] = [None] * slots.count  # None: this update does not write the copy
            for w, of_write in to_write:
                if w.slots == i:
                    amaxes[w.index] = graph.call_function(ops.write_weight, (scales, w.index, *of_write))
            graph.call_function(ops.write_weight_copy_scales, (of_slots["weight_copy_scales"], scales, amaxes))
            if predicted:
                graph.call_function(ops.note_overshoot, (*bounds, scales, amaxes, predicted))
        for w, (parts, *others) in to_write:
            if w.by_itself is not None:
                of_itself: Any = (w.by_itself, parts, *others)
                graph.call_function(ops.write_weight_by_itself, of_itself)


def _inputs_of(graph: fx.Graph, i: int, w: Write, nodes: Mapping[TensorRef, fx.Node]) -> list[Any]:
    """Add the inputs of a write; return its last arguments: parts, scales if it has its own, copies, transposes."""

    def several(name: str, count: int) -> list[fx.Node]:
        return [state_input(graph, f"fp8pass_weight_{i}_{name}_{k}") for k in range(count)]

    scales = [] if w.by_itself is None else [state_input(graph, f"fp8pass_weight_{i}_scales")]
    copies = [several(name, len(w.parts) if name in w.stored else 0) for name in ("x_q", "x_t")]
    others = several("part", w.parts.count(None))
    return [[others.pop(0) if ref is None else nodes[ref] for ref in w.parts], *scales, *copies]
