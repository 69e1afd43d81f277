"""Insert quantize-dequantize around each matmul of a traced graph, forward and backward, that recipe and filter select.

before   y: bf16[M, N] = addmm(b, x: bf16[M, K], t(w: bf16[N, K]))
         dx: bf16[M, K] = mm(dy: bf16[M, N], w);  dw: bf16[N, K] = mm(t(dy), x)
after    scale_, amax_history_ = roll(scale: f32[T], amax_history: f32[H, T], amax: f32[T])
         x_, amax_x = qdq(x, scale_[0]);  w_, amax_w = qdq(w, scale_[1]);  dy_, amax_dy = qdq(dy, scale_[2])
         y = mm(x_, permute(w_)) + b;  dx = mm(dy_, w_);  dw = mm(permute(dy_), x_)
         return ..., scale_, amax_history_, stack([amax_x, amax_w, amax_dy])
changes  numerics, to those of FP8: the same as those of the annotate pass's quantize-dequantize

The state of delayed scaling becomes inputs after all others, and its new values outputs after all others: nothing is
written in place. A tensor that two matmuls read is quantized once, before its views, and has one slot. A graph without
a backward reads the scales and returns its state as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from fp8pass.base import scaling
from fp8pass.base.names import Names, source_of
from fp8pass.base.node_meta import KIND
from fp8pass.graph.annotation import MatmulChoice
from fp8pass.graph.builder import Builder, fake_mode_of, op_name, val
from fp8pass.graph.pass_base import Context
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.passes.common.patterns import ALL_MATMULS, CASTS, COPIES, at, aten, fp8_source
from fp8pass.passes.dynamo.check_matmul import CheckedCall, check, check_speedup, for_instance
from fp8pass.passes.dynamo.quantizers import Pair, quantizers
from fp8pass.passes.joint.list_matmuls import operands
from fp8pass.passes.traced.matmuls_of_layers import (
    VIEWS,
    Finder,
    TracedLayer,
    TracedProduct,
    Values,
    base,
    bias_of,
    chain,
)
from fp8pass.quant import ops
from fp8pass.recipes import DelayedScaling, Kind, Role, StaticScaling, next_scale_of
from fp8pass.states.slots import SlotTable

LIMITS = {
    "declined": {
        "product": (
            "only by [`fp8pass.rewrite`](rewrite.md#which-matmul-is-which): the graph does not show which product of "
            "which layer it is",
            "see there",
        ),
        "grouped": ("only by `fp8pass.rewrite`: it is a matmul of experts", "`torch.compile` the model"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

STATE = ("scale", "amax_history", "amax")
"""The names of the state inputs of delayed scaling: f32[T], f32[H, T], f32[T]. Static scaling has one, `scales`."""


@dataclass
class TracedContext(Context):
    """The context of the pass. names: of the graph's inputs and attributes.

    bootstrap: True to scale a tensor without history by its own amax. tables: the slots, one table for each recipe that
    has state, in the order of the state inputs. choices: as `Annotation.choices`.
    """

    names: Names = field(kw_only=True)
    bootstrap: bool = field(kw_only=True)
    tables: list[SlotTable] = field(default_factory=list)
    choices: list[MatmulChoice] = field(default_factory=list)


class QuantizeTraced:
    """The pass, on a functional graph of ATen ops, in which every node has its fake tensor."""

    name = "quantize_traced"

    def run(self, graph: fx.Graph, context: TracedContext) -> int:
        """Quantize; add the state to inputs and outputs; return the number of quantized matmuls."""
        plan = _Planner(graph, context)
        plan.run()
        return _Writer(graph, context, plan).run()


@dataclass
class _Slot:
    """One quantized tensor with state. position: in its table."""

    name: str
    role: Role
    quantizer: ops.Delayed | ops.Static
    table: int = -1
    position: int = -1


Factor = tuple[ops.Quantizer, _Slot | None]
"""How one factor is quantized."""


class _Planner:
    """Decides which matmuls are quantized, by which quantizers, and which slots they need. Changes only metadata."""

    def __init__(self, graph: fx.Graph, context: TracedContext) -> None:
        self.graph = graph
        self.context = context
        self.values = Values(graph)
        finder = Finder(graph, self.values, self._has_one_recipe).run()
        self.layers, self.reasons = list(finder.layers.values()), finder.reasons
        if (disguised := finder.disguised()) is not None:
            context.notes.append(_disguise(*disguised))
        self.records = any(layer.trains for layer in self.layers)
        self.factors: dict[fx.Node, tuple[TracedProduct, tuple[Factor, Factor]]] = {}
        self.slots: dict[Hashable, _Slot] = {}
        self.device: torch.device | None = None

    def run(self) -> None:
        for layer in self.layers:
            self._decide(layer)
        listed = {p.node for layer in self.layers for p in layer.products} | {
            n for layer in self.layers for n in layer.repeats
        }
        for node in self.graph.nodes:
            if node.target in ALL_MATMULS and node not in listed:
                self._refuse(node)

    def _refuse(self, node: fx.Node) -> None:
        """Decline a matmul that belongs to no layer."""
        choice = self._choose(node, [TracedProduct(node, "output")])
        if node not in self.reasons:
            self._decline(choice, Reject("grouped", "matmuls of experts stay as they are in a traced graph"))
            return
        choice.rule, choice.wanted = "product", True
        choice.reason = f"which product of which layer it is can't be decided: {self.reasons[node]}"

    def _decide(self, layer: TracedLayer) -> None:
        node = layer.output
        choice = self._choose(node, [*layer.products, *(TracedProduct(n, "output") for n in layer.repeats)])
        if any(fp8_source(x) is not None for x in operands(node)):
            return  # quantized by the user: passes over the joint graph detect it
        try:
            call = self._checked(layer, choice)
        except Reject as reject:
            self._decline(choice, reject)
            return
        choice.scaling, choice.fast_accum = call.recipe.name, call.recipe.fast_accum
        pairs: dict[Kind, Pair] = {}
        tensors = dict(zip(("input", "weight", "grad_output"), map(val, (*operands(node), node)), strict=True))
        for product in layer.products:
            pair = quantizers(call.recipe, product.kind, call.dims, tensors, self.records, choice.name)  # type: ignore[arg-type]
            if isinstance(pair, Reject):
                choice.declined[product.kind] = pair
            else:
                pairs[product.kind] = pair
        for product in layer.products:
            if product.kind in pairs:
                self._plan(layer, choice.name, product, pairs[product.kind])

    def _choose(self, node: fx.Node, products: Sequence[TracedProduct]) -> MatmulChoice:
        """Append a choice, and leave its index on the matmuls that it is for."""
        choices = self.context.choices
        for product in products:
            product.node.meta[KIND] = product.kind
            product.node.meta["custom"] = {**(product.node.meta.get("custom") or {}), "fp8pass": len(choices)}
        choices.append(MatmulChoice(self._name(node), source_of(node)))
        return choices[-1]

    def _name(self, node: fx.Node) -> str:
        a, b = operands(node)
        return self.context.names.of(node, op_name(node), [_origin(b), _origin(a)])[0]

    def _decline(self, choice: MatmulChoice, reject: Reject) -> None:
        choice.rule, choice.reason = reject.rule, str(reject)
        recipe, why = self.context.config.recipe_of(choice.name)
        if recipe is None and not isinstance(reject, LeftOut):
            reject = LeftOut("recipe", why)
            choice.rule, choice.reason = reject.rule, why
        choice.wanted = not isinstance(reject, LeftOut)

    def _checked(self, layer: TracedLayer, choice: MatmulChoice) -> CheckedCall:
        """Return the layer's call and recipe; raise Reject if it can't run in FP8, LeftOut if it is not wanted."""
        node, config = layer.output, self.context.config
        signature = signature_of(node)
        assert signature is not None, node
        for n in (node, *node.all_input_nodes):
            # `check` is written for Dynamo's graph, where values have this key
            n.meta["example_value"] = n.meta["val"]
        call = check(node, signature, choice.name, config, layer.trains)
        choice.prediction = call.prediction
        device = val(node).device
        check_speedup(call, device, config)
        _, alpha, _ = bias_of(node)
        if alpha != 1 or "dtype" in str(node.target):
            raise Reject(
                "form", f"{node.format_node()}: only products that are not scaled, in the type of their operands"
            )
        self.device = self.device or device
        if device != self.device:
            raise Reject("device", f"on {device}, while the state of this graph is on {self.device}")
        return replace(call, recipe=for_instance(call.recipe, choice.name, has_owner=True))

    def _has_one_recipe(self, nodes: Sequence[fx.Node]) -> bool:
        recipes = set()
        for node in nodes:
            name, (a, b) = self._name(node), operands(node)
            *_, m, k = val(a).shape
            config = self.context.config
            recipes.add((config.recipe_of(name)[0], bool(config.leaves_out(name, m, k, val(b).shape[-1]))))
        return len(recipes) == 1

    def _plan(self, layer: TracedLayer, name: str, product: TracedProduct, pair: Pair) -> None:
        by_role = dict(zip(TracedProduct(product.node, product.kind).roles, pair, strict=True))
        factors: list[Factor] = []
        for position, role in enumerate(product.roles):
            quantizer = by_role[role]
            assert quantizer is not None
            factors.append(
                (_turned(quantizer, product, position), self._slot(layer, name, product, position, quantizer))
            )
        self.factors[product.node] = product, (factors[0], factors[1])
        for repeat in layer.repeats if product.kind == "output" else ():
            self.factors[repeat] = replace(product, node=repeat), (factors[0], factors[1])

    def _slot(
        self, layer: TracedLayer, name: str, product: TracedProduct, position: int, quantizer: ops.Quantizer
    ) -> _Slot | None:
        if not isinstance(quantizer, (ops.Delayed, ops.Static)):
            return None
        role = product.roles[position]
        number = self.values.of(base(operands(product.node)[position]))
        # a gradient has a slot for each layer whose result it is the gradient of; other tensors have one
        key = number, quantizer, layer.output if role == "grad_output" else None
        if key not in self.slots:
            self.slots[key] = _Slot(self.context.names.slot(name, role), role, quantizer)
        return self.slots[key]

    def tables(self) -> list[SlotTable]:
        """Return a table for each recipe with state, and give the slots their positions: gradients come last."""
        by_recipe: dict[DelayedScaling | StaticScaling, list[_Slot]] = {}
        for slot in self.slots.values():
            by_recipe.setdefault(slot.quantizer.recipe, []).append(slot)
        tables: list[SlotTable] = []
        for recipe, slots in by_recipe.items():
            slots.sort(key=lambda s: s.role == "grad_output")
            for position, slot in enumerate(slots):
                slot.table, slot.position = len(tables), position
            tables.append(_table(recipe, slots, self.device, self.records))
        return tables


def _table(recipe: Any, slots: Sequence[_Slot], device: Any, records: bool) -> SlotTable:
    # all slots count as those of the forward: the running amaxes of a traced graph are one tensor
    return SlotTable(
        names=tuple(s.name for s in slots),
        n_forward=len(slots),
        fp8_max=tuple(scaling.fp8_max(s.quantizer.dtype) for s in slots),
        recipe=recipe,
        device=device,
        owned=(),
        anchors=(-1,) * len(slots),
        source_lines=("",) * len(slots),
        training=records,
        records=(records,) * len(slots),
    )


def _turned(quantizer: ops.Quantizer, product: TracedProduct, position: int) -> ops.Quantizer:
    """Return the quantizer for a factor, which may be the transpose of the tensor that the quantizer is made for."""
    if not isinstance(quantizer, (ops.Rowwise, ops.Blockwise)) or not product.is_transposed(position):
        return quantizer
    x = val(operands(product.node)[position])
    last = x.dim() - 1
    return replace(quantizer, dims=tuple({last: last - 1, last - 1: last}.get(d, d) for d in quantizer.dims))


def _disguise(node: fx.Node, other: fx.Node) -> str:
    return (
        f"the graph counts as a forward, for it has no input named tangents..., and no gradient of a loss; "
        f"yet {at(node)} looks like a gradient of {at(other)}. If it is one, name the inputs that are gradients so"
    )


def _origin(node: fx.Node) -> fx.Node:
    """Return the tensor that a factor is a view, a copy or a cast of, or is gathered from: the one with a name."""
    while _keeps_name(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _keeps_name(node: fx.Node) -> bool:
    return node.target in VIEWS or node.target in CASTS or "c10d_functional" in str(node.target)


class _Writer:
    """Writes what the planner has decided into the graph."""

    def __init__(self, graph: fx.Graph, context: TracedContext, plan: _Planner) -> None:
        self.graph = graph
        self.context = context
        self.plan = plan
        self.build: Builder = context.builder(graph, QuantizeTraced.name)
        self.inputs: list[list[fx.Node]] = []
        self.scales: list[fx.Node] = []
        self.rolled: list[list[fx.Node]] = []
        self.amaxes: dict[tuple[int, int], fx.Node] = {}
        self.quantized: dict[Hashable, fx.Node] = {}

    def run(self) -> int:
        self.context.tables = self.plan.tables()
        if self.context.tables:
            self._read_state()
        for node in [n for n in self.graph.nodes if n in self.plan.factors]:
            self._rewrite(node, *self.plan.factors[node])
        if self.context.tables:
            self._return_state()
        self.graph.eliminate_dead_code()
        return len(self.plan.factors)

    # -- State.

    def _read_state(self) -> None:
        mode = fake_mode_of(self.graph)
        for number, table in enumerate(self.context.tables):
            suffix = f"_{number}" if number else ""
            names = STATE if table.remembers else ("scales",)
            with mode, torch.no_grad():
                tensors = table.new_tensors()  # fake ones: the state itself is made by `RewriteState`
                fakes = [tensors.scale, tensors.amax_history, tensors.amax_forward]
                fakes = fakes if table.remembers else [torch.stack([tensors.scale, tensors.scale])]
            self.inputs.append([self._input(f"fp8pass_{n}{suffix}", x) for n, x in zip(names, fakes, strict=True)])
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        for table, inputs in zip(self.context.tables, self.inputs, strict=True):
            self._begin(first, table, inputs)

    def _input(self, name: str, fake: Tensor) -> fx.Node:
        inputs = self.graph.find_nodes(op="placeholder")
        at = self.graph.inserting_after(inputs[-1]) if inputs else self.graph.inserting_before(None)
        with at:
            node = self.graph.placeholder(name)
        node.meta["val"] = fake
        return node

    def _begin(self, before: fx.Node, table: SlotTable, inputs: list[fx.Node]) -> None:
        scales, rolled = inputs[0], list(inputs)
        if table.remembers and table.training:
            recipe, limits = table.delayed, table.limits

            def roll(scale: Tensor, history: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
                fp8_max = torch.cat([torch.full_like(amax[:n], limit) for limit, n in limits])
                return scaling.roll_history(
                    scale,
                    history,
                    amax,
                    fp8_max,
                    next_scale=next_scale_of(recipe),
                )

            rolled[:2] = self.build.inline(before, roll, *inputs)
            scales = rolled[0]
            if not self.context.bootstrap:
                (scales,) = self.build.inline(before, ops.scales_or_one, scales)
        self.scales.append(scales)
        self.rolled.append(rolled)

    def _return_state(self) -> None:
        output = self.graph.output_node()
        for number, table in enumerate(self.context.tables):
            if not (table.remembers and table.training):
                continue
            on_nonfinite = table.delayed.on_nonfinite
            new = [self.amaxes[number, i] for i in range(len(table.names))]

            def record(*amaxes: Tensor, on_nonfinite: str = on_nonfinite) -> Tensor:
                latest = torch.stack(amaxes)
                return scaling.merge_amax(torch.full_like(latest, scaling.NOTHING), latest, on_nonfinite)

            (self.rolled[number][2],) = self.build.inline(output, record, *new)
        results: Any = output.args[0]
        output.args = ((*results, *(n for nodes in self.rolled for n in nodes)),)

    # -- Matmuls.

    def _rewrite(self, node: fx.Node, product: TracedProduct, factors: tuple[Factor, Factor]) -> None:
        a, b = (self._factor(node, x, *how) for x, how in zip(operands(node), factors, strict=True))
        bias, _, beta = bias_of(node)
        if bias is None:
            node.args = (a, b, *node.args[2:])
            return
        is_batched = val(node).dim() == 3
        y = self.build.emit(node, aten.bmm.default if is_batched else aten.mm.default, a, b)
        y.meta["custom"], y.meta[KIND] = node.meta["custom"], product.kind
        dtype = val(node).dtype

        def add(y: Tensor, bias: Tensor) -> Tensor:
            return ops.add_bias(y, bias, dtype, beta)

        (sum_,) = self.build.inline(node, add, y, bias)
        # `y` is the matmul now, and has these
        node.meta = {key: value for key, value in node.meta.items() if key not in ("custom", KIND)}
        self.build.replace(node, sum_)

    def _factor(self, before: fx.Node, x: fx.Node, quantizer: ops.Quantizer, slot: _Slot | None) -> fx.Node:
        if not isinstance(quantizer, (ops.Delayed, ops.Dynamic, ops.Static)):
            return self._qdq(before, x, quantizer, slot)
        # one scale for all elements: quantized before its views, a tensor is quantized once for all of them
        source = base(x)
        return self._viewed(before, chain(x), self._qdq(before, source, quantizer, slot))

    def _qdq(self, before: fx.Node, x: fx.Node, quantizer: ops.Quantizer, slot: _Slot | None) -> fx.Node:
        key = x, quantizer, None if slot is None else slot.name
        if key not in self.quantized:
            self.quantized[key] = self._new_qdq(before, x, quantizer, slot)
        return self.quantized[key]

    def _new_qdq(self, before: fx.Node, x: fx.Node, quantizer: Any, slot: _Slot | None) -> fx.Node:
        if slot is None:
            return self.build.inline(before, quantizer, x)[0]
        i, scales = slot.position, self.scales[slot.table]
        if isinstance(quantizer, ops.Static):
            return self.build.inline(before, replace(quantizer, slot=i), x, scales)[0]
        # without records, as in an evaluation, a tensor without history is always scaled by its own amax
        bootstrap = quantizer.bootstrap or self.context.bootstrap
        placed = replace(quantizer, slot=i, index=i, bootstrap=bootstrap, record=False)

        y, amax = self.build.inline(before, lambda x, scales: placed.by_scale(x, scales[i]), x, scales)
        # a forward that checkpointing repeats quantizes another node of the same value: its amax is the same
        self.amaxes.setdefault((slot.table, i), amax)
        return y

    def _viewed(self, before: fx.Node, views: Sequence[fx.Node], y: fx.Node) -> fx.Node:
        """Return `y` in the views of another tensor of its shape."""
        for view in views:
            if view.target in COPIES or view.target in (aten.detach.default, aten.lift_fresh_copy.default):
                continue
            key = y, view
            if key not in self.quantized:
                self.quantized[key] = self.build.emit(before, *_as_taken(view, y))
            y = self.quantized[key]
        return y


def _as_taken(view: fx.Node, y: fx.Node) -> tuple[Any, ...]:
    """Return the op and the arguments of a view of `y`, as the passes over the joint graph know it."""
    dims = list(range(val(y).dim()))
    if view.target is aten.t.default:
        return aten.permute.default, y, dims[::-1]
    if view.target is aten.transpose.int:
        i, j = cast("tuple[int, int]", view.args[1:])
        dims[i], dims[j] = dims[j], dims[i]
        return aten.permute.default, y, dims
    if view.target in (aten.view.default, aten._unsafe_view.default):
        # of a copy with other strides `view` might not be possible
        return aten.reshape.default, y, *view.args[1:]
    return view.target, y, *view.args[1:]
