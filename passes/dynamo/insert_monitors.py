"""Insert ops that count what quantization does to each tensor, next to the quantize: see `quant/monitor_ops.py`.

before   x_ = qdq_operand(x, q, scales, amax)
         y_ = qdq_gradient(y, q, scales, amax)
after    graph(..., numerics_forward: f32[F, 13], numerics_backward: f32[T-F, 13])
         watch_operand(x, q, numerics_forward, 0, scales, amax)
         x_ = qdq_operand(x, q, scales, amax)
         y_ = qdq_gradient(y, q, scales, amax)
         y_2 = watch_gradient(y_, (q,), numerics_backward, (0,), scales, amax)
changes  no value that the model computes

Runs on Dynamo's annotated graph, if gradients are enabled. No other pass inserts ops of the monitor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fp8pass.base.node_meta import PIECE, QUANTIZED
from fp8pass.graph.annotation import CHECKPOINT, FUNCTION, Annotation
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.options.config import Config
from fp8pass.passes.common.checkpoint_regions import Region
from fp8pass.passes.common.divide_state import PieceNumber, PieceOf, StateDivision
from fp8pass.passes.common.function_graphs import BackwardRegion, regions_of
from fp8pass.passes.common.state_inputs import add_input, thread
from fp8pass.quant import monitor_ops, ops
from fp8pass.quant.monitor_ops import WatchTable
from fp8pass.states.slots import SlotKind, SlotTable
from fp8pass.weights.monitor_inputs import MonitorInput

FORWARD: dict[Any, Callable[..., Any]] = {
    ops.qdq_operand: monitor_ops.watch_operand,
    ops.qdq_no_grad: monitor_ops.watch_operand,
    ops.quantize_once: monitor_ops.watch_operand,
    ops.cached_operand: monitor_ops.watch_cached,
}
BACKWARD = (ops.qdq_gradient, ops.select_gradients)
INPUTS = ("numerics_forward", "numerics_backward")


class InsertMonitors:
    """The pass over Dynamo's graph and its checkpointed regions."""

    name = "insert_monitors"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Watch the tensors that `config.monitor` names; return their number."""
        if not context.config.monitor or not torch.is_grad_enabled():
            return 0
        return _watch(context.annotation, context.config)


def _watch(annotation: Annotation, config: Config) -> int:
    """Insert the ops; return the number of watched tensors: of the forward, then gradients, each in graph order."""
    module = annotation.module
    parts = list(_parts(module))
    watches = [(part, node) for part, _ in parts for node in part.graph.nodes if _watches(node, config)]
    late = {part for part, region in parts if isinstance(region, BackwardRegion)}
    forward = [(p, n) for p, n in watches if n.target in FORWARD and p not in late]
    backward = [(p, n) for p, n in watches if n.target in BACKWARD or p in late]
    if not watches:
        return 0
    watched = tuple(w for _, node in (*forward, *backward) for w in node.meta[QUANTIZED])
    device = watches[0][1].meta["example_value"].device
    table = WatchTable(watched, len(forward), device, config.monitor_steps, config.monitor_kurtosis)
    counter = SlotTable.counter(annotation.owned_paths, table.code)
    piece_of = PieceOf(module.graph, [region for _, region in parts if region is not None])
    rows: list[tuple[SlotKind, PieceNumber]] = [("forward", piece_of(node)) for _, node in forward]
    rows += [("gradient", piece_of(node)) for _, node in backward for _ in node.meta[QUANTIZED]]
    division = StateDivision(rows, dim=0)
    tables = {
        name: add_input(module.graph, annotation.inputs, MonitorInput(name, table, counter, name == INPUTS[1]))
        for name in INPUTS
    }
    inputs = _inputs(parts, tables, {p for p, _ in watches}, division, piece_of)
    row = 0
    for part, node in (*forward, *backward):
        watch, name, kind = _BACKWARD if node.target in BACKWARD else _IN_BACKWARD if part in late else _FORWARD
        watch(node, inputs[part, piece_of(node)][name], row - division.first(kind, piece_of(node))[1])
        row += len(node.meta[QUANTIZED])
    return len(watched)


def _parts(module: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, Region | None]]:
    """Yield the graph, then its checkpointed regions and Functions: outer before inner ones, in the order of calls."""
    todo: list[tuple[fx.GraphModule, Region | None]] = [(module, None)]
    while todo:
        part, region = todo.pop(0)
        yield part, region
        for call in [n for n in part.graph.nodes if n.target is CHECKPOINT]:
            body = getattr(part, str(call.args[0].target))
            todo.append((body, Region(part.graph, call, body)))
        for call in [n for n in part.graph.nodes if n.target is FUNCTION]:
            todo += [(region.body, region) for region in regions_of(part, call)]


def _watches(node: fx.Node, config: Config) -> bool:
    if node.target not in FORWARD and node.target not in BACKWARD:
        return False
    if QUANTIZED not in node.meta:  # a user's `in_qdq` or `out_qdq`, which has no slot to count under
        return False
    return any(config.monitors(w.name) for w in node.meta[QUANTIZED]) and not any(
        isinstance(a, ops.Observe) for a in node.args
    )


def _inputs(
    parts: Sequence[tuple[fx.GraphModule, Region | None]],
    tables: dict[str, fx.Node],
    wanted: set[fx.GraphModule],
    division: StateDivision,
    piece_of: PieceOf,
) -> dict[tuple[fx.GraphModule, PieceNumber], dict[str, fx.Node]]:
    """Add the table inputs to each part; return them by part and piece. Regions get those of the enclosing graph."""
    graphs = {part.graph: part for part, _ in parts}
    for part, region in reversed(parts):  # a graph passes the tables on to its inner regions
        if part in wanted and region is not None:
            wanted = {*wanted, graphs[region.outer]}
    inputs: dict[tuple[fx.GraphModule, PieceNumber], dict[str, fx.Node]] = {}
    for part, region in parts:
        if region is None:
            inputs.update({(part, piece): divided for piece, divided in division.divide(part.graph, tables).items()})
        elif part in wanted:
            piece = piece_of(region.call)
            inputs[part, piece] = thread(region, inputs[graphs[region.outer], piece], "")
    return inputs


def _watch_operand(node: fx.Node, counted: fx.Node, index: int) -> None:
    x, quantizer, *state = (a for a in node.args if not isinstance(a, bool))
    with node.graph.inserting_before(node):
        new = node.graph.call_function(FORWARD[node.target], (x, quantizer, counted, index, *state))
    new.meta.update({key: node.meta[key] for key in (PIECE,) if key in node.meta})


def _watch_gradient(node: fx.Node, counted: fx.Node, first: int) -> None:
    quantizers = list(dict.fromkeys(a for a in node.args if isinstance(a, ops.Quantizer)))
    state = node.args[_FIRST_STATE[node.target] :]
    indices = tuple(range(first, first + len(quantizers)))
    with node.graph.inserting_after(node):  # so that the backward counts the gradient before `node` quantizes it
        args = (node, tuple(quantizers), counted, indices, *state)
        new = node.graph.call_function(monitor_ops.watch_gradient, args)
    new.meta.update({k: v for k, v in node.meta.items() if k != QUANTIZED})
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


# qdq_gradient(y, quantizer, *state), select_gradients(y, y_a, y_b, grad_a, grad_b, *state)
_FIRST_STATE: dict[Any, int] = {ops.qdq_gradient: 2, ops.select_gradients: 5}
_FORWARD: tuple[Callable[..., None], str, SlotKind] = _watch_operand, "numerics_forward", "forward"
_IN_BACKWARD: tuple[Callable[..., None], str, SlotKind] = _watch_operand, "numerics_backward", "gradient"
_BACKWARD: tuple[Callable[..., None], str, SlotKind] = _watch_gradient, "numerics_backward", "gradient"
