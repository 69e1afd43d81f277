"""The recipe's choices become quantize-dequantize in the graph, around each matmul that it takes.

before   y: bf16[B, S, N] = linear(x: bf16[B, S, K], w: bf16[N, K], b)
after    x_: bf16[B, S, K] = qdq_operand(x)          amax, quantize, dequantize; the gradient passes through
         w_: bf16[N, K]    = qdq_operand(w)
         y_: bf16[B, S, N] = qdq_gradient(linear(x_, w_))    identity; quantizes the gradient
         y                 = y_ + b                  the bias's gradient comes from the unquantized one
or       y_o = linear(operand(x, by rows), operand(w, by rows))        where the three matmuls of a layer differ in how
         y_x = linear(x, operand(w, by columns))                       their operands are quantized, or whether: the
         y_w = linear(operand(x, by columns), w)                       product in three forms, of which the last two
         y_: bf16[B, S, N] = route(y_o, y_x, y_w, by rows, by columns)         only give their gradients
changes  the numbers, to those of FP8: from here on the graph, run eagerly, is the reference of what is compiled

This is the one pass that runs on Dynamo's graph, in torch functions: there the matmuls still have module names, and
forward and backward are one thing. A tensor that feeds several matmuls is quantized once, if alike. With delayed
scaling the graph gets the state tensors as extra inputs behind all others, and begins with the roll of the last step
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

from fp8pass import hardware, scaling
from fp8pass._torch import set_grad_enabled
from fp8pass.errors import Fp8Error, warn_once
from fp8pass.graph.annotation import CHECKPOINT, Choice
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.names import source_of
from fp8pass.options.config import Config
from fp8pass.passes.annotate.check import check, check_speedup, for_instance
from fp8pass.passes.annotate.quantize_call import QuantizeCall, Walk
from fp8pass.passes.annotate.write_matmuls import name_of, refusal
from fp8pass.passes.common.matmul_calls import Spelling, argument, mutates, spelling_of
from fp8pass.passes.common.regions import Region, body_of, in_its_modes
from fp8pass.passes.common.state_inputs import cache, freeze, lift_state
from fp8pass.passes.common.transforms import Transform, transforms
from fp8pass.recipes import BlockwiseScaling, MXFP8Scaling, Recipe
from fp8pass.states import scale_state


class Annotate:
    """Over Dynamo's graph and its regions. Grad mode is that of the graph's beginning."""

    name = "annotate"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Annotate; returns how many calls are. Raises Fp8Error under `strict` for matmuls in control flow."""
        _Annotator(context).run()
        choices = context.annotation.choices
        if context.config.strict:
            _raise_if_in_region(choices)
        return sum(choice.scaling != "" for choice in choices)


def _raise_if_in_region(choices: Sequence[Choice]) -> None:
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
        self.placeholders = self.graph.find_nodes(op="placeholder")
        self.choices = context.annotation.choices
        self.regions: list[Region] = []
        self.device: torch.device | None = None
        self.inside: dict[fx.Node, tuple[Transform, ...]] = {}

    def run(self) -> None:
        self._visit_all()
        of, owned = self.annotation, self.names.owned
        of.owned_paths = tuple(owned.values())
        of.owned = [i for i, p in enumerate(self.placeholders) if p in owned]
        of.tables = lift_state(self.graph, self.slots, self.regions, of.owned_paths, self.device, self.config.reduction)
        of.frozen = freeze(self.graph, of.tables, self.by_columns)
        of.cached = cache(self.graph, of.tables, self.regions, self.weights)

    def _visit_all(self, around: tuple[Transform, ...] = ()) -> None:
        """Annotate `self.graph`. around: the function transforms that it is inside of as a whole."""
        self.inside = transforms(self.graph, around)
        for node in in_its_modes(self.graph):
            if node.op == "get_attr":
                self._list_region(getattr(self.module, str(node.target), None), node)
            elif node.target is CHECKPOINT:
                self._enter(node)
            else:
                self._visit(node)

    def _enter(self, call: fx.Node) -> None:
        """Annotate the body of a region of activation checkpointing, as a part of this graph."""
        body = body_of(self.module, call, self.names)
        self.regions.append(Region(self.graph, call, body))
        own = self.module, self.graph, self.quantized, self.grad_enabled, self.inside
        self.module, self.graph, self.quantized = body, body.graph, {}
        self._visit_all(self.inside.get(call, ()))
        self.module, self.graph, self.quantized, self.grad_enabled, self.inside = own
        if any(map(mutates, body.graph.nodes)):
            self.quantized.clear()

    def _visit(self, node: fx.Node) -> None:
        if node.target is set_grad_enabled:
            self.grad_enabled = bool(node.args[0])
        if mutates(node):
            self.quantized.clear()  # what was quantized before may not be what the name stands for now
            self.mutated.update(_sources(node))
        spelling = spelling_of(node)
        if spelling is None:
            self._note_refusal(node)
            return
        choice, anchor = self._choice(node, spelling)
        if any(_comes_from_fp8(n) for n in node.all_input_nodes):
            return  # quantized by the user: the detector's business
        try:
            if self.declined:
                raise Reject("internal", self.declined)
            merged, experts = self.merged.get(node), self._is_of_experts(node, spelling)
            inside = self.inside.get(node, ())
            call = check(node, spelling, choice.name, self.config, self.grad_enabled, merged, experts, inside)
            choice.predicted_speedup = call.speedup
            check_speedup(call, argument(node, spelling.a).meta["example_value"].device, self.config)
            self._check_device(node, spelling)
            call = replace(call, recipe=for_instance(call.recipe, choice.name, bool(self.names.owned)))
        except Reject as reject:
            _decline(choice, reject)
            return
        _announce(call.recipe, self.device, self.config)
        choice.scaling, choice.fast_accum = call.recipe.name, call.recipe.fast_accum
        QuantizeCall(self, call, choice, anchor).rewrite()

    def _note_refusal(self, node: fx.Node) -> None:
        """List a call that multiplies matrices, and could not be written as matmuls."""
        inside = self.inside.get(node, ())
        reject = refusal(node, inside)
        if reject is None:
            return
        choice, _ = self._listed(node, name_of(node), node.all_input_nodes)
        recipe, why = self.config.recipe_of(choice.name)
        _decline(choice, reject if recipe is not None else LeftOut("recipe", why))

    def _is_of_experts(self, node: fx.Node, spelling: Spelling) -> bool:
        """Return whether the call multiplies batches by matrices that are a parameter: capacity times experts."""
        a, b = argument(node, spelling.a), argument(node, spelling.b)
        if not all(isinstance(x, fx.Node) and _dims(x) == 3 for x in (a, b)):
            return False
        return self.names.is_owned(_untransposed(b)) and _dims(node) == 3

    def _list_region(self, region: Any, holder: fx.Node) -> None:
        """Matmuls in a graph of its own, of control flow: listed, not annotated."""
        if not isinstance(region, fx.GraphModule) or any(user.target is CHECKPOINT for user in holder.users):
            return
        operators = ", ".join(sorted({str(user.target) for user in holder.users}))
        for node in region.graph.nodes:
            if node.op == "get_attr":
                self._list_region(getattr(region, str(node.target), None), holder)
            elif spelling := spelling_of(node):
                choice, _ = self._choice(node, spelling)
                choice.wanted, choice.rule = True, "region"
                choice.reason = (
                    f"inside a region of {operators}, which fp8pass does not enter yet; compile its inside by itself"
                )

    def _choice(self, node: fx.Node, spelling: Spelling) -> tuple[Choice, int]:
        """A new entry of `choices`; AOTAutograd carries its index along to every node that comes of this one."""
        operands = argument(node, spelling.b), argument(node, spelling.a)
        if spelling.offs is not None:
            operands = _untransposed(operands[0]), operands[1]
        return self._listed(node, spelling.name, operands)

    def _listed(self, node: fx.Node, op: str, operands: Sequence[object]) -> tuple[Choice, int]:
        name, anchor = self.names.of(node, op, operands)
        node.meta["custom"] = {**node.meta.get("custom", {}), "fp8pass": len(self.choices)}
        self.choices.append(Choice(name, source_of(node)))
        return self.choices[-1], anchor

    def _check_device(self, node: fx.Node, spelling: Spelling) -> None:
        device = argument(node, spelling.a).meta["example_value"].device
        self.device = self.device or device
        if device != self.device:
            raise Reject(
                "device", f"on {device}, while the state of this graph is on {self.device}; compile each part by itself"
            )


def _dims(node: fx.Node) -> int:
    """How many dimensions the tensor has; -1 for what is none."""
    value = node.meta.get("example_value")
    return value.dim() if isinstance(value, Tensor) else -1


def _untransposed(node: Any) -> Any:
    """What `node` is made of by no more than casts and transposes, as experts are in memory."""
    while isinstance(node, fx.Node) and node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if not _CAST_OR_TRANSPOSE.match(str(name)):
            break
        node = node.args[0]
    return node


_CAST_OR_TRANSPOSE = re.compile(r"^(to|type|float|bfloat16|half|transpose|permute|contiguous|mT|getattr)$")
_ELEMENTWISE_OR_VIEW = re.compile(
    r"^(to|type|float|bfloat16|half|mul|div|truediv|multiply|divide|view|reshape|t|transpose|permute|contiguous|clone|"
    r"unsqueeze|squeeze|expand|flatten|T|mT|getattr)$"
)


def _comes_from_fp8(node: fx.Node) -> bool:
    """Return whether the user dequantized this operand: casts, scales and views lead from an FP8 tensor to it."""
    while True:
        if node.target in (scale_state.qdq_operand, scale_state.qdq_unrecorded):
            return True
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.dtype in (*scaling.FP8_DTYPES, *scaling.FNUZ_DTYPES):
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        sources = [a for a in node.all_input_nodes if isinstance(a.meta.get("example_value"), Tensor)]
        if node.op not in ("call_function", "call_method") or not sources or not _ELEMENTWISE_OR_VIEW.match(str(name)):
            return False
        node = max(sources, key=lambda n: n.meta["example_value"].dim()) if len(sources) > 1 else sources[0]


def _decline(choice: Choice, reject: Reject) -> None:
    choice.rule, choice.reason, choice.wanted = reject.rule, str(reject), not isinstance(reject, LeftOut)


def _announce(recipe: Recipe, device: torch.device | None, config: Config) -> None:
    """Say before anything is compiled that a recipe has no kernels on this device."""
    if isinstance(recipe, (BlockwiseScaling, MXFP8Scaling)) and device is not None:
        target = hardware.target_of(device, config.target)
        if reason := hardware.why_no_block_kernel(recipe.name, device, target):
            warn_once(
                f"fp8pass: {reason}. Matmuls with this recipe are computed in high precision from the same FP8 values: "
                "right, and not faster"
            )


def _sources(node: fx.Node) -> set[fx.Node]:
    """All nodes that `node` comes of: what it writes into may be a view of any of them."""
    found, todo = set(), [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in found]
        found.update(new)
        todo += new
    return found
