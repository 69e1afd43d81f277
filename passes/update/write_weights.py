"""Write the FP8 copy of each weight in the update that writes the weight, for the next forward to read.

before   p.addcdiv_(exp_avg, denom)                              or any other last write into a parameter
after    p.addcdiv_(exp_avg, denom)
         s: f32[W] = scales_or_one(next_scales(scale: f32[T], amax_history: f32[H, T], amax_weights: f32[W]))
         a: f32[]  = write_weight(s, 0, [p], [x_q: f8[N, K]], [x_t: f8[K, N]])
         write_weight_copy_scales(weight_copy_scales: f32[2, W], s, [a, ...])
or       write_weight_by_itself(quantizer, [p], scales, [x_q: f8[N, K]], [x_t: f8[K, N]])      without delayed scaling
changes  no existing value; the copy equals the one that the next forward would have computed, or has the scale of a
         predicted amax, `s = predicted_scales(...)`

If a weight is sharded, each rank writes the copy of its shard. The scale of the next step comes from the largest amax
of all ranks, which are reduced after the step; so they are reduced here too, `amaxes_of_ranks`.

Runs on Dynamo's graph of an update: a graph that writes into parameters and returns nothing that requires a gradient.
Optimizers are not recognized by name. After AOTAutograd the parameter's `copy_` and these writes read one value, so
Inductor computes them in one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx

from fp8pass.passes.update.context import UpdateContext
from fp8pass.passes.update.written import refs
from fp8pass.quant import ops
from fp8pass.weights.update_inputs import UpdateCall
from fp8pass.weights.update_key import TensorRef, WeightWrite


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
            _write(graph, context)
        return len(context.key.writes)


def _write(graph: fx.Graph, context: UpdateContext) -> None:
    writes = context.key.writes
    nodes = {ref: node for node, ref in refs(graph).items()}
    bounds_of = {
        i: context.take(graph, f"bounds_{i}", partial(_bounds, i))
        for i in sorted({w.slots for w in writes if w.predicted})
    }
    to_write = [(w, _inputs_of(graph, context, i, w, nodes)) for i, w in enumerate(writes)]
    with graph.inserting_before(graph.output_node()):
        for i, (slots, of_slots) in enumerate(zip(context.key.weight_slots, context.slot_inputs, strict=True)):
            if not slots.count:
                continue
            scale, history, amaxes_now = (of_slots[name] for name in ("scale", "amax_history", "amax_weights"))
            if slots.over:
                amaxes_now = graph.call_function(ops.amaxes_of_ranks, (amaxes_now, slots.over))
            arguments: Any = (slots.recipe, slots.first, scale, history, amaxes_now)
            scales = graph.call_function(ops.next_scales, arguments)
            predicted = tuple(w.index for w in writes if w.slots == i and w.predicted)
            bounds = [bounds_of[i]] if predicted else []
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
                of_bounds: Any = (*bounds, scales, of_slots["weight_copy_scales"], predicted)
                graph.call_function(ops.note_overshoot, of_bounds)
        for w, (parts, *rest) in to_write:
            if w.by_itself is not None:
                of_itself: Any = (w.by_itself, parts, *rest)
                graph.call_function(ops.write_weight_by_itself, of_itself)


def _inputs_of(
    graph: fx.Graph, context: UpdateContext, i: int, w: WeightWrite, nodes: Mapping[TensorRef, fx.Node]
) -> list[Any]:
    """Add the inputs of a write; return its last arguments: parts, scales if it has its own, copies, transposes."""

    def several(name: str, tensors: str, which: Sequence[int]) -> list[fx.Node]:
        return [
            context.take(graph, f"weight_{i}_{name}_{n}", partial(_tensor_of, i, tensors, k), is_fixed=True)
            for n, k in enumerate(which)
        ]

    scales = (
        []
        if w.by_itself is None
        else [context.take(graph, f"weight_{i}_scales", lambda call: call.weights[i].scales, True)]
    )
    parts = range(len(w.parts))
    copies = several("x_q", "copies", parts if "x_q" in w.stored else ())
    transposes = several("x_t", "transposes", parts if "x_t" in w.stored else ())
    several_parts = several("part", "parts", [k for k in parts if w.parts[k] is None])
    return [[several_parts.pop(0) if ref is None else nodes[ref] for ref in w.parts], *scales, copies, transposes]


def _bounds(index: int, call: UpdateCall) -> Tensor:
    return call.bounds[index].current()


def _tensor_of(index: int, name: str, part: int, call: UpdateCall) -> Tensor:
    """Return a part's tensor of a weight. name: "copies", "transposes" or "parts" of `Fp8Weight`."""
    tensor: Tensor = getattr(call.weights[index], name)[part]
    return tensor
