"""Insert quantize-dequantize around each matmul that the recipe and the filter select.

before   y: bf16[B, S, N] = linear(x: bf16[B, S, K], w: bf16[N, K], b)
after    x_: bf16[B, S, K] = qdq_operand(x)          amax, quantize, dequantize; the gradient passes through
         w_: bf16[N, K]    = qdq_operand(w)
         y_: bf16[B, S, N] = qdq_gradient(linear(x_, w_))    identity; quantizes the gradient
         y                 = y_ + b                  the bias's gradient is computed from the unquantized gradient
or       y_o = linear(qdq_no_grad(x, by rows), qdq_no_grad(w, by rows))    if the three matmuls of a layer quantize
         y_x = linear(x, qdq_no_grad(w, by columns))                       their operands differently, or not all of
         y_w = linear(qdq_no_grad(x, by columns), w)                       them: the product in three forms; the last
         y_: bf16[B, S, N] = select_gradients(y_o, y_x, y_w, by rows, by columns)    two only contribute gradients
changes  values, to those of FP8: the annotated graph, run eagerly, is the reference for the compiled one

The pass runs on Dynamo's graph of torch functions: its matmuls still have module names, and autograd derives the
backward from it. A tensor that several matmuls read in the same way is quantized once. With delayed scaling the
graph gets the state tensors as inputs after all others, and begins by rolling the amaxes of the last step
(state_inputs.py). A graph that reads no parameter and no buffer has no instance to keep state for, and is scaled
dynamically.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass.base import scaling
from fp8pass.base._torch import set_grad_enabled
from fp8pass.base.errors import Fp8Error, faults_of, warn_once
from fp8pass.base.names import source_of
from fp8pass.base.node_meta import IN_BACKWARD, IN_FORWARD
from fp8pass.graph.annotation import CHECKPOINT, COND, FUNCTION, MatmulChoice, SingleProduct, WeightUse
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.options.config import Config
from fp8pass.options.setting import within
from fp8pass.passes.common.checkpoint_regions import Region, branches_of, in_its_modes, named_body
from fp8pass.passes.common.function_graphs import named_graphs, regions_of
from fp8pass.passes.common.matmul_calls import LINEAR, MatmulSignature, argument, mutates, signature_of
from fp8pass.passes.common.patterns import reach
from fp8pass.passes.common.state_inputs import cache, lift_state, prequantize
from fp8pass.passes.common.transforms import Transform, transforms
from fp8pass.passes.dynamo import save_fp8
from fp8pass.passes.dynamo.check_matmul import check, check_not_left_out, check_speedup, for_instance
from fp8pass.passes.dynamo.product_roles import products_of, without_views
from fp8pass.passes.dynamo.quantize_call import QuantizeCall, Walk
from fp8pass.passes.dynamo.write_matmuls import name_of, refusal
from fp8pass.quant import sharded
from fp8pass.quant.wrapper_tensor import Fp8Weight
from fp8pass.recipes import BlockwiseScaling, Calibration, DynamicScaling, MXFP8Scaling, Recipe, RowwiseScaling
from fp8pass.states import scale_state

LIMITS = {
    "declined": {
        "region": (
            "it is inside a branch of [`torch.cond`](recipes.md#branches), and its recipe keeps state; or inside "
            "other control flow",
            '`"dynamic"` or `"rowwise"` for this module; move the matmul out of a loop',
        ),
        "internal": (
            "fp8pass itself failed on the graph, and [went on without FP8](debugging.md#5-fp8pass-itself-fails)",
            "please report it, with the dump that the reason names",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


class Annotate:
    """The pass over Dynamo's graph and its checkpointed regions. The caller sets the grad mode of the graph's start."""

    name = "annotate"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Annotate the graph; return the number of annotated calls.

        Raises Fp8Error under `strict` if the graph of a control-flow operator holds a matmul.
        """
        _Annotator(context).run()
        choices = context.annotation.choices
        if context.config.strict:
            _raise_if_in_region(choices)
        return sum(choice.scaling != "" for choice in choices)


def _raise_if_in_region(choices: Sequence[MatmulChoice]) -> None:
    for choice in choices:
        if choice.rule == "region":
            raise Fp8Error(
                f"strict: output of {choice.name} at {choice.source} does not run in FP8: {choice.reason}. Leave it "
                "out with filter=, or drop strict."
            )


class _Annotator(Walk):
    def __init__(self, context: DynamoContext) -> None:
        super().__init__(context)
        self.annotation = context.annotation
        self.declined = context.declined
        self.refused = context.refused
        self.placeholders = self.graph.find_nodes(op="placeholder")
        self.choices = context.annotation.choices
        self.regions: list[Region] = []
        self.device: torch.device | None = None
        self.inside: dict[fx.Node, tuple[Transform, ...]] = {}
        self.splits = context.splits
        self.in_branch = False
        self.named: dict[fx.Node | None, tuple[str, int]] = {}
        if context.is_update:  # each of its matmuls is one product, not a layer's call
            matmuls = (node for node in self.graph.nodes if signature_of(node) is not None)
            self.products = dict.fromkeys(matmuls, SingleProduct("output", ("input", "weight"), late=False))

    def run(self) -> None:
        self._visit_all()
        annotation, owned = self.annotation, self.names.owned
        if self.config.save_fp8 and self.grad_enabled and self.quantized:
            with faults_of(save_fp8.NAME):
                annotation.saved = save_fp8.save(self)
        annotation.owned_paths = tuple(owned.values())
        annotation.owned = [i for i, p in enumerate(self.placeholders) if p in owned]
        reduction = self.config.reduction_for(slot.quantizer.recipe for slot in self.slots)
        inputs = annotation.inputs
        annotation.tables = tables = lift_state(
            self.graph, inputs, self.slots, self.regions, annotation.owned_paths, self.device, reduction
        )
        prequantize(self.graph, inputs, tables, self.slots, self.by_columns)
        cache(self.graph, inputs, tables, self.slots, self.regions, self.weights)

    def _visit_all(self, around: tuple[Transform, ...] = ()) -> None:
        """Annotate `self.graph`. around: the function transforms that enclose the whole graph."""
        self.inside = transforms(self.graph, around)
        for node in in_its_modes(self.graph):
            if node.op == "get_attr":
                self._list_region(getattr(self.module, str(node.target), None), node)
            elif node.target is CHECKPOINT and not self.in_branch:
                self._enter(node)
            elif node.target is FUNCTION and not self.in_branch:
                self._enter_function(node)
            elif node.target is COND:
                self._enter_branches(node)
                self._visit(node)
            else:
                self._visit(node)

    def _enter(self, call: fx.Node) -> None:
        """Annotate the body of a checkpointed region as a part of this graph."""
        self._visit_region(Region(self.graph, call, named_body(self.module, call, self.names)))

    def _enter_function(self, call: fx.Node) -> None:
        """Annotate the matmuls of a Function as products of their own: its backward need not be the gradient."""
        graphs = named_graphs(self.module, call, self.names)
        self.products.update(products_of(graphs, self.names))
        self.saved.update(graphs.saved)
        for region in regions_of(self.module, call):
            self._visit_region(region)
            if any(map(mutates, region.body.graph.nodes)):
                self.mutated.update(_sources(call))

    def _visit_region(self, region: Region) -> None:
        body, inside = region.body, self.inside.get(region.call, ())
        self.regions.append(region)
        outer = self.module, self.graph, self.quantized, self.grad_enabled, self.inside
        self.module, self.graph, self.quantized = body, body.graph, {}  # fx graphs cannot read each other's nodes
        self._visit_all(inside)
        self.module, self.graph, self.quantized, self.grad_enabled, self.inside = outer
        if any(map(mutates, body.graph.nodes)):  # the body may write into a tensor that this graph has quantized
            self.quantized.clear()

    def _enter_branches(self, call: fx.Node) -> None:
        """Annotate the branches of `torch.cond`, which must not write: a matmul that needs state is declined."""
        outer = self.module, self.graph, self.quantized, self.grad_enabled, self.inside, self.in_branch
        for branch in branches_of(self.module, call, self.names):
            self.module, self.graph, self.quantized, self.in_branch = branch, branch.graph, {}, True
            self._visit_all(outer[4].get(call, ()))
            self.module, self.graph, self.quantized, self.grad_enabled, self.inside, self.in_branch = outer

    def _visit(self, node: fx.Node) -> None:
        if node.target is set_grad_enabled:
            self.grad_enabled = bool(node.args[0])
        if mutates(node):
            self.quantized.clear()  # a tensor that was quantized before may have been written since
            self.mutated.update(_sources(node))
        signature = signature_of(node)
        if signature is None:
            self._note_refusal(node)
            return
        choice, anchor = self._choice(node, signature)
        if any(_comes_from_fp8(n) for n in node.all_input_nodes):
            return  # quantized by the user: passes over the joint graph detect it
        try:
            if self.declined:
                raise Reject("internal", self.declined)
            merged, experts = self.merged.get(node), self._is_of_experts(node, signature)
            inside = self.inside.get(node, ())
            call = check(
                node, signature, choice.name, within(node, self.config), self.grad_enabled, merged, experts, inside
            )
            choice.prediction = call.prediction  # before the checks below raise: the report shows it anyway
            check_speedup(call, argument(node, signature.a).meta["example_value"].device, self.config, self.splits)
            self._check_device(node, signature)
            self._check_weights(node, signature)
            call = replace(call, recipe=for_instance(call.recipe, choice.name, bool(self.names.owned)))
            if self.in_branch:
                _check_stateless(call.recipe)
        except Reject as reject:
            _decline(choice, reject)
            self._note_weight(argument(node, signature.b), signature, None, reject)
            return
        _announce(call.recipe, self.device, self.config)
        choice.scaling, choice.fast_accum = call.recipe.name, call.recipe.fast_accum
        weight = argument(node, signature.b)
        if (product := self.products.get(node)) is not None and not product.told:
            choice.note = f"in a Function, {_UNTOLD}"
        if node in self.smoothed:
            choice.note = "smooth_swiglu scales its weight by channels of the input: it is quantized in each forward"
        QuantizeCall(self, call, choice, anchor).rewrite()
        self._note_weight(weight, signature, call.recipe, choice.declined.get("output"))

    def _note_weight(
        self, weight: Any, signature: MatmulSignature, recipe: Recipe | None, reject: Reject | None
    ) -> None:
        """Record how a linear layer's call takes its weight, if that is a parameter, or several that are merged."""
        parts = self.names.parts(weight) if signature is LINEAR and isinstance(weight, fx.Node) else ()
        if parts:
            positions = tuple(self.placeholders.index(p) for p in parts)
            use = WeightUse(positions, recipe) if reject is None else WeightUse(positions, None, str(reject))
            self.annotation.weights.append(use)

    def _note_refusal(self, node: fx.Node) -> None:
        """Record a refused choice for a call that multiplies matrices but could not be written as matmuls."""
        inside = self.inside.get(node, ())
        reject = self.refused.get(node) or refusal(node, inside)
        if reject is None:
            return
        choice, _ = self._listed(node, name_of(node), node.all_input_nodes)
        recipe, why = within(node, self.config).recipe_of(choice.name)
        keeps = recipe is not None or reject.rule == "convolution"
        _decline(choice, reject if keeps else LeftOut("recipe", why))

    def _is_of_experts(self, node: fx.Node, signature: MatmulSignature) -> bool:
        """Return whether the call multiplies a batch by a parameter f[E, K, N], as experts with a capacity do."""
        a, b = argument(node, signature.a), argument(node, signature.b)
        if not all(isinstance(x, fx.Node) and _dims(x) == 3 for x in (a, b)):
            return False
        return self.names.is_owned(_untransposed(b)) and _dims(node) == 3

    def _list_region(self, region: Any, holder: fx.Node) -> None:
        """Record a refused choice for each matmul in the graph of a control-flow operator; annotate none of them."""
        entered = {COND} if self.in_branch else {CHECKPOINT, COND, FUNCTION}
        if not isinstance(region, fx.GraphModule) or any(user.target in entered for user in holder.users):
            return  # no graph, or one that is annotated
        operators = ", ".join(sorted({str(user.target) for user in holder.users}))
        why = f"inside a region of {operators}, which fp8pass does not enter yet; compile its body separately"
        for node in region.graph.nodes:
            if node.op == "get_attr":
                self._list_region(getattr(region, str(node.target), None), holder)
            elif signature := signature_of(node):
                choice, _ = self._choice(node, signature)
                a, b = (argument(node, where).meta["example_value"] for where in (signature.a, signature.b))
                try:
                    check_not_left_out(choice.name, within(holder, self.config), a, b)
                    raise Reject("region", why)
                except Reject as reject:
                    _decline(choice, reject)

    def _choice(self, node: fx.Node, signature: MatmulSignature) -> tuple[MatmulChoice, int]:
        """Append a matmul's entry to `choices`; return it, and the anchor of its slots (see `SlotTable`)."""
        # b first: a matmul is named after the first operand that is a parameter, most often the second
        operands = argument(node, signature.b), argument(node, signature.a)
        if signature.offs is not None:
            operands = _untransposed(operands[0]), operands[1]
        return self._listed(node, signature.name, operands)

    def _listed(self, node: fx.Node, op: str, operands: Sequence[object]) -> tuple[MatmulChoice, int]:
        product = self.products.get(node)
        # the gradients of a layer have its name, as those that autograd derives do
        forward = product.forward if product is not None else None
        name, anchor = self.named.get(forward) or self.names.of(node, op, operands)
        self.named[node] = name, anchor
        # AOTAutograd copies meta["custom"] to each ATen node that it traces from this one, in the backward too
        node.meta["custom"] = {**node.meta.get("custom", {}), "fp8pass": len(self.choices)}
        if product is not None:
            node.meta["custom"][IN_BACKWARD if product.late else IN_FORWARD] = len(self.choices), product.kind
        self.choices.append(MatmulChoice(name, source_of(node)))
        return self.choices[-1], anchor

    def _check_weights(self, node: fx.Node, signature: MatmulSignature) -> None:
        """Raise Reject for a matmul of a Function whose weight is in FP8 already: views show it in high precision."""
        if node in self.products:
            wholes = (without_views(argument(node, where), node)[-1] for where in (signature.a, signature.b))
            if any(isinstance(sharded.part_of(x.meta["example_value"]), Fp8Weight) for x in wholes):
                raise Reject(
                    "gathered in FP8",
                    "its weight is in FP8, and a torch.autograd.Function reads it in high precision; leave the layer "
                    "out with the filter= of enable_fp8_all_gather, or of freeze",
                )

    def _check_device(self, node: fx.Node, signature: MatmulSignature) -> None:
        device = argument(node, signature.a).meta["example_value"].device
        self.device = self.device or device
        if device != self.device:
            raise Reject(
                "device",
                f"on {device}, while the state of this graph is on {self.device}; compile each part separately",
            )


_UNTOLD = (
    "where nothing tells which operand is a gradient: both are quantized as activations are, with scales of their own"
)


def _dims(node: fx.Node) -> int:
    """Return the number of dimensions of the node's tensor; -1 if its value is not a tensor."""
    value = node.meta.get("example_value")
    return value.dim() if isinstance(value, Tensor) else -1


def _untransposed(node: Any) -> Any:
    """Follow casts and transposes back from `node`: experts' weights may be stored transposed."""
    while isinstance(node, fx.Node) and node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if not _CAST_OR_TRANSPOSE.match(str(name)):
            break
        node = node.args[0]
    return node


# "getattr" is what Dynamo calls for `x.T` and `x.mT`
_CAST_OR_TRANSPOSE = re.compile(r"^(to|type|float|bfloat16|half|transpose|permute|contiguous|mT|getattr)$")
_ELEMENTWISE_OR_VIEW = re.compile(
    r"^(to|type|float|bfloat16|half|mul|div|truediv|multiply|divide|view|reshape|t|transpose|permute|contiguous|clone|"
    r"unsqueeze|squeeze|expand|flatten|T|mT|getattr)$"
)


def _comes_from_fp8(node: fx.Node) -> bool:
    """Return whether the user dequantized this operand: only casts, scaling and views lead from an FP8 tensor to it."""
    while True:
        if node.target in (scale_state.qdq_operand, scale_state.qdq_unrecorded):  # what `in_qdq` is traced to
            return True
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.dtype in (*scaling.FP8_DTYPES, *scaling.FNUZ_DTYPES):
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        sources = [a for a in node.all_input_nodes if isinstance(a.meta.get("example_value"), Tensor)]
        if node.op not in ("call_function", "call_method") or not sources or not _ELEMENTWISE_OR_VIEW.match(str(name)):
            return False
        # a tensor and its scale: follow the one with more dimensions
        node = max(sources, key=lambda n: n.meta["example_value"].dim()) if len(sources) > 1 else sources[0]


def _check_stateless(recipe: Recipe) -> None:
    """Raise Reject for a recipe whose quantizers have state: a branch of `torch.cond` may write nothing."""
    stateless = (DynamicScaling, RowwiseScaling, BlockwiseScaling, MXFP8Scaling)
    if not isinstance(recipe, stateless) or isinstance(recipe, Calibration):
        raise Reject(
            "region",
            f"inside a branch of torch.cond, which may not write amaxes as {recipe.name!r} scaling does; choose "
            "'dynamic' or 'rowwise' for it",
        )


def _decline(choice: MatmulChoice, reject: Reject) -> None:
    choice.rule, choice.reason, choice.wanted = reject.rule, str(reject), not isinstance(reject, LeftOut)


def _announce(recipe: Recipe, device: torch.device | None, config: Config) -> None:
    """Warn before anything is compiled if a recipe has no kernels on this device."""
    if isinstance(recipe, (BlockwiseScaling, MXFP8Scaling)) and device is not None:
        target = hardware.target_of(device, config.target)
        if reason := hardware.why_no_block_kernel(recipe.name, device, target):
            warn_once(
                f"fp8pass: {reason}. Matmuls with this recipe are computed in high precision from the same FP8 values: "
                "correct, but not faster"
            )


def _sources(node: fx.Node) -> set[fx.Node]:
    """Return all nodes that `node` depends on: it may write into a view of any of them."""
    return set(reach(node.all_input_nodes, lambda n: n.all_input_nodes))
