"""Lift the state of recipes (scales, amax histories, FP8 weights) to inputs of the annotated graph.

before   x_ = qdq_operand(x, Delayed(slot=-1))
after    graph(..., scale: f32[T], amax_history: f32[H, T], amax_forward: f32[F], amax_backward: f32[T-F], held: b8[T],
               amax_backward_late: f32[T-F])
         scales = begin_step(scale, amax_history, amax_forward, amax_backward, held)
         x_ = qdq_operand(x, Delayed(slot=3, index=3), scales_or_one(scales), amax_forward)
changes  nothing: the state only becomes inputs

If find_layers has divided the graph into pieces, each piece reads its own part of each state tensor, in which its slots
count from 0: so the pieces of equal layers read equal parts, and are equal.

after    scales_0, scales_1, ... = split_with_sizes(scales, [2, 8, 8, ...])        the slots of piece 0, of piece 1, ...
         x_ = qdq_operand(x, Delayed(slot=1, index=1), scales_1, amax_forward_1)
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from fp8pass.base import scaling
from fp8pass.base._torch import ConstantSource
from fp8pass.base.node_meta import IS_STATE, PIECE
from fp8pass.graph.inputs import FixedScales, Input, SlotInput
from fp8pass.options.config import Reduction
from fp8pass.passes.common.checkpoint_regions import Region
from fp8pass.passes.common.divide_state import FIRST_PIECE, PieceNumber, PieceOf, StateDivision
from fp8pass.quant import ops
from fp8pass.recipes import DelayedScaling, Role, StaticScaling
from fp8pass.states.slots import SlotTable
from fp8pass.weights.prequantized import PrequantizedInput
from fp8pass.weights.weight_cache import CachedWeight, CachedWeightInput, CopiesOfGraph


@dataclass(frozen=True)
class Weight:
    """A weight that an operand is an FP8 copy of.

    parts: the inputs of the graph that the weight consists of, one below the other. stored: see `CachedWeight`.
    """

    parts: tuple[fx.Node, ...]
    stored: tuple[str, ...]


@dataclass
class NewSlot:
    """A quantizer in the arguments of `node` that has no slot in the state yet.

    anchor, source_line: see `SlotTable`. late: True if the backward records the amax, which most often is a gradient's.
    """

    name: str
    role: Role | Literal["saved"]
    anchor: int
    source_line: str
    quantizer: ops.Stateful
    node: fx.Node
    late: bool = False
    also: list[fx.Node] = field(default_factory=list)
    """Further nodes with this quantizer, in the piece of `node`. Those in another graph only read its scale."""
    position: int = -1
    """Its position in the table, from `lift_state` on."""


INPUTS = (*ops.SlotTensors._fields[:-2], "amax_backward_late")
"""The state inputs of delayed scaling, in order. If the graph has cached weights, `WEIGHT_INPUTS` come after them."""
WEIGHT_INPUTS = ("amax_weights", "weight_copy_scales")
_AMAXES = {"forward": "amax_forward", "weight": "weight_copy_scales", "gradient": "amax_backward_late"}
"""The state input that the amaxes of slots of each kind are recorded in."""


def lift_state(
    graph: fx.Graph,
    inputs: list[Input[Any]],
    slots: list[NewSlot],
    regions: list[Region],
    owned: tuple[str, ...],
    device: torch.device | None,
    reduces: Reduction | None,
) -> list[SlotTable]:
    """Add the state inputs of each recipe to the graph and to `inputs`, and assign every quantizer its slot.

    regions: outer ones before inner ones; the state is handed to their bodies as further inputs. reduces: how ranks
    share recorded amaxes. Returns one table for each recipe.
    """
    by_recipe: dict[DelayedScaling | StaticScaling, list[NewSlot]] = {}
    for slot in slots:
        by_recipe.setdefault(slot.quantizer.recipe, []).append(slot)
    tables: list[SlotTable] = []
    for recipe, of_recipe in by_recipe.items():
        assert device is not None
        piece_of = PieceOf(graph, regions)
        recording = {
            i: t for i, s in enumerate(of_recipe) if (t := _recording_slot(s, of_recipe, piece_of)) is not None
        }
        for i, recorder in recording.items():
            recorder.name = min(recorder.name, of_recipe[i].name, key=len)  # prefer the name without a numeric suffix
        separate = [s for i, s in enumerate(of_recipe) if i not in recording]
        # In the order of SlotTensors: tensors of the forward, weights with a copy, gradients. Within each kind, by
        # piece: the quantize of a tensor that several pieces read is in an earlier piece than its first reader.
        ordered = sorted(separate, key=lambda s: (s.late, _is_kept(s), piece_of(s.node) or 0))
        table = SlotTable(
            names=tuple(s.name for s in ordered),
            n_forward=sum(not s.late and not _is_kept(s) for s in ordered),
            n_weights=sum(map(_is_kept, ordered)),
            fp8_max=tuple(scaling.fp8_max(s.quantizer.dtype) for s in ordered),
            recipe=recipe,
            device=device,
            owned=owned,
            anchors=tuple(s.anchor for s in ordered),
            source_lines=tuple(s.source_line for s in ordered),
            training=any(map(_records, ordered)),
            records=tuple(map(_records, ordered)),
            reduces=reduces if any(map(_records, ordered)) else None,
        )
        for i, s in enumerate(ordered):
            s.position = i
        for i, recorder in recording.items():
            of_recipe[i].position = recorder.position
        suffix = f"_{len(tables)}" if tables else ""
        added = _add_inputs(graph, inputs, table, len(tables), suffix)
        _insert(graph, added, table, of_recipe, regions, suffix, reduces)
        tables.append(table)
    return tables


def _add_inputs(
    graph: fx.Graph, inputs: list[Input[Any]], table: SlotTable, index: int, suffix: str
) -> dict[str, fx.Node]:
    """Add the inputs of a table. index: its number among the tables of the graph."""
    if not table.remembers:
        return {"scales": add_input(graph, inputs, FixedScales(f"scales{suffix}", table, index))}
    names = (*INPUTS, *(WEIGHT_INPUTS if table.n_weights else ()))
    return {
        name: add_input(graph, inputs, SlotInput(f"{name}{suffix}", table, index, name.removesuffix("_late")))
        for name in names
    }


def prequantize(
    graph: fx.Graph, inputs: list[Input[Any]], tables: list[SlotTable], slots: list[NewSlot], by_columns: Set[fx.Node]
) -> None:
    """Add an input for each parameter that is quantized in advance, after all other inputs of the graph.

    slots: those of `lift_state`. by_columns: the nodes whose matmul sums over the first dimension of the parameter.
    """
    slot_of = {slot.node: slot.position for slot in slots}
    positions = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    for i, node in enumerate([n for n in graph.nodes if n.target is ops.frozen_operand]):
        weight, quantizer, *rest = node.args
        table = next(i for i, t in enumerate(tables) if t.recipe == quantizer.recipe)
        prequantized = PrequantizedInput(
            f"prequantized_{i}", positions[weight], table, slot_of[node], node in by_columns
        )
        node.args = (add_input(graph, inputs, prequantized), quantizer, *rest)


def cache(
    graph: fx.Graph,
    inputs: list[Input[Any]],
    tables: list[SlotTable],
    slots: list[NewSlot],
    regions: list[Region],
    weights: dict[fx.Node, Weight],
) -> None:
    """Add inputs for the FP8 copy of each weight, after all other inputs of the graph, and hand them to regions.

    A region gets the copies that it, or a region in it, reads. slots: those of `lift_state`. weights: the weight of
    each operand that is a copy.
    """
    slot_of = {slot.node: slot.position for slot in slots}
    positions = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    added: dict[CachedWeight, dict[str, fx.Node]] = {}
    read: dict[fx.Graph, dict[fx.Node, CachedWeight]] = {}
    together = CopiesOfGraph()
    for node, weight in weights.items():
        quantizer: Any = node.args[1]
        cached = CachedWeight(tuple(positions[p] for p in weight.parts), weight.stored)
        if isinstance(quantizer, ops.Stateful):
            table = next(i for i, t in enumerate(tables) if t.recipe == quantizer.recipe)
            cached = replace(cached, table=table, slot=slot_of[node])
        if not isinstance(quantizer, ops.Delayed):
            by_itself = replace(quantizer, slot=0) if isinstance(quantizer, ops.Static) else quantizer
            cached = replace(cached, by_itself=by_itself)
        if cached not in added:
            tensors = [
                CachedWeightInput(f"weight_{len(added)}_{name}", cached, name, together) for name in cached.fields
            ]
            added[cached] = {tensor.name: add_input(graph, inputs, tensor) for tensor in tensors}
        read.setdefault(node.graph, {})[node] = cached
    inputs_in = {graph: added}
    for region in regions:
        wanted = {cached for body in _bodies(region, regions) for cached in read.get(body, {}).values()}
        outer = {cached: names for cached, names in inputs_in[region.outer].items() if cached in wanted}
        handed = thread(region, {name: node for names in outer.values() for name, node in names.items()}, "")
        inputs_in[region.body.graph] = {
            cached: {name: handed[name] for name in names} for cached, names in outer.items()
        }
    for body, nodes in read.items():
        for node, cached in nodes.items():
            node.args = (*node.args, *inputs_in[body][cached].values())


def _bodies(region: Region, regions: list[Region]) -> set[fx.Graph]:
    """Return the body of the region and the bodies of all regions in it."""
    bodies = {region.body.graph}
    for other in regions:  # outer ones come first
        if other.outer in bodies:
            bodies.add(other.body.graph)
    return bodies


def _is_kept(slot: NewSlot) -> bool:
    """Return whether the slot has the history of a weight whose FP8 copy is cached."""
    return slot.node.target is ops.cached_operand and isinstance(slot.quantizer, ops.Delayed)


def _records(slot: NewSlot) -> bool:
    return isinstance(slot.quantizer, ops.Delayed) and slot.quantizer.record


def _recording_slot(slot: NewSlot, candidates: list[NewSlot], piece_of: PieceOf) -> NewSlot | None:
    """Return the slot of the use with grad, for a parameter read both with and without grad in a piece; None if not."""
    if _records(slot) or slot.source_line or slot.late:
        return None
    key = slot.anchor, "", slot.role, piece_of(slot.node)
    same = (o for o in candidates if _records(o) and (o.anchor, o.source_line, o.role, piece_of(o.node)) == key)
    return next(same, None)


def _insert(
    graph: fx.Graph,
    inputs: dict[str, fx.Node],
    table: SlotTable,
    slots: list[NewSlot],
    regions: list[Region],
    suffix: str,
    reduces: Reduction | None,
) -> None:
    read = {
        name: node
        for name, node in inputs.items()
        if name in ("scales", "amax_forward", "amax_backward_late", "weight_copy_scales")
    }
    begun = list[fx.Node]()
    # only if each step reduces: between reductions the ranks' scales differ
    group = reduces.process_group() if reduces is not None and reduces.interval == 1 and table.remembers else None
    if table.remembers:
        read["scales"] = inputs["scale"]
        if table.training:
            begun.append(_begin_step(graph, table, inputs))
            read["scales"] = begun[-1]
        if group is not None:
            with graph.inserting_after(read["scales"]):
                read["scales"] = graph.call_function(ops.shared, (read["scales"], group.group_name))
            begun.append(read["scales"])
        if any(slot.quantizer.bootstrap is False for slot in slots if isinstance(slot.quantizer, ops.Delayed)):
            with graph.inserting_after(read["scales"]):
                read["scales_or_one"] = graph.call_function(ops.scales_or_one, (read["scales"],))
            begun.append(read["scales_or_one"])
    piece_of = PieceOf(graph, regions)
    pieces = {slot.position: piece_of(slot.node) for slot in slots}
    rows = [(table.kind_of(i), pieces[i]) for i in range(len(table.names))]
    division = StateDivision(rows)
    if division.is_divided:
        for node in begun:
            node.meta[PIECE] = FIRST_PIECE
    of_piece = division.divide(graph, read)
    if division.is_divided and group is not None:
        _mark_in_pieces(graph, of_piece, group.group_name)
    inputs_in: dict[fx.Graph, dict[str, fx.Node]] = {}
    for region in regions:
        outer = of_piece.get(piece_of(region.call), {}) if region.outer is graph else inputs_in[region.outer]
        inputs_in[region.body.graph] = thread(region, outer, suffix)
    for slot in slots:
        piece = piece_of(slot.node)
        i, kind = slot.position, table.kind_of(slot.position)
        first_scale, first_amax = division.first(kind, piece)
        or_one = isinstance(slot.quantizer, ops.Delayed) and not slot.quantizer.bootstrap
        for node in (slot.node, *slot.also):
            inputs_here = of_piece[piece] if node.graph is graph else inputs_in[node.graph]
            scales = inputs_here.get(division.scales_of(kind, "scales_or_one" if or_one else "scales"))
            placed: ops.Stateful = replace(slot.quantizer, slot=i - first_scale)
            if isinstance(placed, ops.Static):
                state = [scales]
            else:
                placed = replace(placed, index=i - first_amax)
                amax = inputs_here[_AMAXES[kind]]
                state = [amax] if kind == "weight" else [scales, amax]
            if isinstance(placed, ops.Delayed) and node.graph is not slot.node.graph:
                placed = replace(placed, record=False)
            args: Any = (*(placed if a == slot.quantizer else a for a in node.args), *state)
            node.args = args


def _mark_in_pieces(graph: fx.Graph, of_piece: dict[PieceNumber, dict[str, fx.Node]], group: str) -> None:
    """Mark the scales as the same on all ranks in each piece too: outlined, it gets them as inputs."""
    for piece, inputs in of_piece.items():
        begin = next(n for n in graph.nodes if n.op != "placeholder" and n.meta.get(PIECE) == piece)
        for name in (n for n in inputs if n.startswith(("forward_scales", "gradient_scales"))):
            with graph.inserting_before(begin):
                inputs[name] = graph.call_function(ops.shared, (inputs[name], group))
            inputs[name].meta[PIECE] = piece


def thread(region: Region, outer: dict[str, fx.Node], suffix: str) -> dict[str, fx.Node]:
    """Hand state into the body of a region; return its new inputs by the names of `outer`."""
    region.hand_in(list(outer.values()))
    return {name: state_input(region.body.graph, f"fp8pass_{name}{suffix}") for name in outer}


def add_input(graph: fx.Graph, inputs: list[Input[Any]], new: Input[Any]) -> fx.Node:
    """Add an input to the graph, after all others, and to the list of them; return its node."""
    inputs.append(new)
    return state_input(graph, f"fp8pass_{new.name}")


def state_input(graph: fx.Graph, name: str) -> fx.Node:
    """Add a placeholder for state after all others; return it."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta[IS_STATE] = True
    node._dynamo_source = ConstantSource(node.name)  # AOTAutograd asserts that each input has its own source
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}  # a fixed address, for CUDA graphs
    return node


def _begin_step(graph: fx.Graph, table: SlotTable, inputs: dict[str, fx.Node]) -> fx.Node:
    state = [inputs[name] for name in ops.SlotTensors._fields if name in inputs]
    early = table.n_forward + table.n_weights
    operand, gradient = (scaling.fp8_max(table.delayed.dtype(role)) for role in ("input", "grad_output"))
    # Functions quantize operands in their backward, or gradients in their forward
    is_usual = table.fp8_max == (*[operand] * early, *[gradient] * (len(table.names) - early))
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        args: Any = (table.delayed, *state)
        return graph.call_function(ops.begin_step, args, {} if is_usual else {"limits": table.limits})
