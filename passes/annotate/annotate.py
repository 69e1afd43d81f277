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

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fp8pass import hardware, scaling
from fp8pass._torch import set_grad_enabled
from fp8pass.errors import warn_once
from fp8pass.fsdp import GatheredWeight
from fp8pass.graph.annotation import CHECKPOINT, Annotation, Choice, copy_to_edit
from fp8pass.graph.rule import MAX_BATCHES, LeftOut, Reject
from fp8pass.graph.wanted import HIGH_PRECISION, check_sizes, hint, recipe_of
from fp8pass.names import Names, source_of
from fp8pass.node_meta import GATHERED
from fp8pass.options import overrides
from fp8pass.options.config import Config
from fp8pass.passes.annotate.inline_composites import inline
from fp8pass.passes.annotate.merge_siblings import ONE_SCALE, Sibling, families, merge, should_merge
from fp8pass.passes.annotate.quantizers import Pair, is_uniform, quantizers
from fp8pass.passes.annotate.write_matmuls import in_its_modes, name_of, refusal, write_matmuls
from fp8pass.passes.common.grouped_kernels import MAX_GROUPS, why_no_kernel
from fp8pass.passes.common.matmul_calls import (
    GROUPED_FALLBACK,
    LINEAR,
    Dims,
    Spelling,
    argument,
    dims_of,
    mutates,
    result_type,
    set_argument,
    spelling_of,
)
from fp8pass.passes.common.patterns import dtype_name
from fp8pass.passes.common.state_inputs import Region, Slot, Weight, cache, freeze, lift_state
from fp8pass.passes.common.transforms import Transform, held_by, transforms
from fp8pass.quant import ops, sharded
from fp8pass.quant.monitor_ops import WATCHED, Watched
from fp8pass.recipes import (
    FACTORS,
    KINDS,
    BlockwiseScaling,
    Calibration,
    DelayedScaling,
    DynamicScaling,
    Kind,
    MXFP8Scaling,
    Recipe,
    Role,
    RowwiseScaling,
    StaticScaling,
)
from fp8pass.roofline import predicted_speedup
from fp8pass.states import scale_state


@dataclass(frozen=True)
class Call:
    """A matmul call of Dynamo's graph that nothing is against, and its recipe.

    speedup: predicted, None without a target. sizes: examples of M, K, N.
    """

    node: fx.Node
    spelling: Spelling
    dims: Dims
    recipe: Recipe
    speedup: float | None
    sizes: tuple[int, int, int]


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


def check(
    node: fx.Node,
    spelling: Spelling,
    name: str,
    config: Config,
    training: bool,
    merged: Recipe | None = None,
    experts: bool = False,
    inside: Sequence[Transform] = (),
) -> Call:
    """Raise LeftOut if the recipe or the filter does not want this matmul, Reject if it can't be had.

    merged: the recipe of a call that stands for several, which were checked one by one. experts: whether the second
    operand is several matrices that are a parameter. inside: the function transforms that it is inside of.
    """
    operands = argument(node, spelling.a), argument(node, spelling.b)
    if not all(isinstance(o, fx.Node) and isinstance(o.meta.get("example_value"), Tensor) for o in operands):
        raise Reject("form", f"{spelling.name} is called in a form that is not understood: {node.format_node()}")
    a, b = (o.meta["example_value"] for o in operands)
    _check_dtypes(a, b)
    if inside:
        _refuse(name, config, a, b, inside)
    _check_operands(a, b)
    if node.kwargs.get("out") is not None:
        raise Reject("out=", f"{spelling.name} writes into out=; assign its result instead")
    if not isinstance(argument(node, spelling.bias), fx.Node | None):
        raise Reject("form", f"{spelling.name} adds a number, not a tensor: {node.format_node()}")
    dims = dims_of(spelling, node, a, b)
    sizes = dims.sizes(sharded.part_of(a), sharded.part_of(b))
    target = hardware.target_of(a.device, config.target)
    may_be_grouped = spelling.offs is not None or experts
    no_kernel = why_no_kernel(b, result_type(spelling, node), target) if may_be_grouped else None
    is_grouped = spelling.offs is not None or (experts and no_kernel is None)
    check_sizes(sizes, MAX_GROUPS if is_grouped else MAX_BATCHES, f"; {no_kernel}" if no_kernel else "")
    m, k, n = (hint(s) for s in (sizes.m, sizes.k, sizes.n))
    recipe = merged or recipe_of(name, config, m, k, n)
    if is_grouped:
        recipe = _by_rows(recipe)
        if no_kernel is not None:
            raise no_kernel
    if isinstance(sharded.part_of(b), GatheredWeight) and type(recipe) not in ONE_SCALE:
        raise Reject(
            "gathered in FP8",
            f"its weight travels in FP8 with one scale, and the recipe {recipe.name!r} has others: leave it out with "
            "enable_fp8_all_gather(filter=)",
        )
    if reason := hardware.why_no_fp8(a.device, target):
        raise Reject("device", reason)
    size = node.meta["example_value"].element_size()
    gain = None if target is None else predicted_speedup(target, m, k, n, recipe, size, training)
    return Call(node, spelling, dims, recipe, gain, (m, k, n))


def _by_rows(recipe: Recipe) -> Recipe:
    """The recipe of a grouped matmul, whose kernels take a scale for each row: without state, so that an expert which
    gets no token has none to lose."""
    if isinstance(recipe, RowwiseScaling):
        return recipe
    if isinstance(recipe, (DelayedScaling, DynamicScaling)) and not isinstance(recipe, Calibration):
        return RowwiseScaling(high_precision=recipe.high_precision, fast_accum=recipe.fast_accum)
    raise Reject("grouped scale", f"{recipe.name} scales; grouped FP8 matmuls take one for each row: recipe 'rowwise'")


def check_speedup(call: Call, device: torch.device, config: Config) -> None:
    """Raise LeftOut if the call is predicted to gain less than the user wants."""
    if call.speedup is not None and call.speedup < config.min_speedup:
        target = hardware.target_of(device, config.target)
        assert target is not None
        m, k, n = call.sizes
        raise LeftOut(
            "min_speedup",
            f"predicted speed-up on {target.name} is {call.speedup:.2f}, below min_speedup={config.min_speedup:g}: "
            f"[{m}, {k}] by [{k}, {n}] is too small to pay for its quantization",
        )


def _refuse(name: str, config: Config, a: Tensor, b: Tensor, inside: Sequence[Transform]) -> None:
    """Raise LeftOut or Reject for a matmul inside of function transforms, without a look at sizes but the filter's.

    Under vmap the operands show the sizes of one example, which may be vectors where a matmul of all examples runs.
    """
    *rows, k = (hint(size) for size in (a.shape or (1,)))
    recipe_of(name, config, math.prod(rows), k, hint(b.numel()) // max(k, 1))
    raise held_by(inside)


def _check_dtypes(a: Tensor, b: Tensor) -> None:
    if a.dtype not in HIGH_PRECISION or b.dtype not in HIGH_PRECISION:
        types = f"{dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
        raise LeftOut("dtype", f"operands are {types}; FP8 replaces float32, bfloat16 and float16")


def _check_operands(a: Tensor, b: Tensor) -> None:
    for operand in (a, b):
        if over := sharded.partial_over(operand):
            raise Reject(
                "partial sum",
                f"an operand is still to be summed up over {' and '.join(over)} of the device mesh, and parts of a sum "
                "have no scale in common with it; redistribute it first",
            )
        if operand.dim() == 0:
            raise LeftOut("vector", "an operand is a scalar")
        if operand.dim() == 1:
            raise LeftOut("vector", f"an operand is a vector of {operand.shape[0]} elements")


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
    """Whether the user dequantized this operand: casts, scales and views lead from an FP8 tensor to it."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


def annotate(module: fx.GraphModule, config: Config, declined: str = "") -> Annotation:
    """An annotated copy of Dynamo's graph `module`, which is being compiled: grad mode is that of its beginning.

    declined: why no matmul is to be annotated, if fp8pass has failed on the graph before.
    """
    return _Annotator(module, config, declined).run()


class _Annotator:
    def __init__(self, module: fx.GraphModule, config: Config, declined: str) -> None:
        self.module = copy_to_edit(module)
        self.graph = self.module.graph
        self.config = config
        self.declined = declined
        self.grad_enabled = torch.is_grad_enabled()
        self.placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.names = Names(self.placeholders)
        self.slots: list[Slot] = []
        self.choices: list[Choice] = []
        self.quantized: dict[Hashable, fx.Node] = {}
        self.mutated: set[fx.Node] = set()
        self.by_columns: set[fx.Node] = set()
        self.weights: dict[fx.Node, Weight] = {}
        self.regions: list[Region] = []
        self.merged: dict[fx.Node, Recipe] = {}
        self.calls: Counter[Any] = Counter()
        self.device: torch.device | None = None
        self.inside: dict[fx.Node, tuple[Transform, ...]] = {}

    def run(self) -> Annotation:
        self._visit_all()
        owned = tuple(self.names.owned.values())
        tables = lift_state(self.graph, self.slots, self.regions, owned, self.device, self.config.reduction)
        frozen = freeze(self.graph, tables, self.by_columns)
        cached = cache(self.graph, tables, self.regions, self.weights)
        for module in (self.module, *(region.body for region in self.regions)):
            module.graph.lint()
            module.recompile()
        positions = [i for i, p in enumerate(self.placeholders) if p in self.names.owned]
        return Annotation(self.module, self.choices, positions, tables, frozen, cached, owned_paths=owned)

    def _visit_all(self, around: tuple[Transform, ...] = ()) -> None:
        """Annotate `self.graph`. around: the function transforms that it is inside of as a whole."""
        self.inside = transforms(self.graph, around)
        if not self.declined:
            inline(self.module, self.inside)
            write_matmuls(self.module, self.inside)
            if self.config.merge_siblings is not False:
                self._merge_siblings()
        for node in in_its_modes(self.graph):
            if node.op == "get_attr":
                self._list_region(getattr(self.module, str(node.target), None), node)
            elif node.target is CHECKPOINT:
                self._enter(node)
            else:
                self._visit(node)

    def _merge_siblings(self) -> None:
        for family in families(self.graph, self.names, self._sibling):
            first, config = family.siblings[0], self.config
            target = hardware.target_of(first.weight.meta["example_value"].device, config.target)
            if should_merge(family, target, config.merge_siblings, config.min_speedup):
                self.merged[merge(self.graph, family, self.names)] = first.recipe

    def _sibling(self, node: fx.Node) -> Sibling | None:
        """A linear layer, if the recipe and the filter take it."""
        if node in self.inside:
            return None
        name, _ = self.names.of(node, LINEAR.name, [argument(node, LINEAR.b)])
        try:
            call = check(node, LINEAR, name, self.config, node.meta["example_value"].requires_grad)
        except Reject:
            return None  # for a reason that it will be given as itself
        return Sibling(node, call.recipe, call.sizes)

    def _enter(self, call: fx.Node) -> None:
        """Annotate the body of a region of activation checkpointing, as a part of this graph."""
        body = getattr(self.module, str(call.args[0].target))  # type: ignore[union-attr]
        self.regions.append(Region(self.graph, call, body))
        inputs = (n for n in body.graph.nodes if n.op == "placeholder")
        for inner, outer in zip(inputs, call.args[1:], strict=True):
            if isinstance(outer, fx.Node):
                self.names.alias(inner, outer)
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
            call = replace(call, recipe=_for_instance(call.recipe, choice.name, bool(self.names.owned)))
        except Reject as reject:
            _decline(choice, reject)
            return
        _announce(call.recipe, self.device, self.config)
        choice.scaling, choice.fast_accum = call.recipe.name, call.recipe.fast_accum
        _Rewriter(self, call, choice, anchor).rewrite()

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
        """Whether the call multiplies batches by matrices that are a parameter: capacity times experts."""
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


class _Rewriter:
    """Puts quantize-dequantize around one matmul call. anchor: see `SlotTable`."""

    def __init__(self, owner: _Annotator, call: Call, choice: Choice, anchor: int) -> None:
        self.owner = owner
        self.graph = owner.graph
        self.call = call
        self.choice = choice
        self.anchor = anchor

    def rewrite(self) -> None:
        node, spelling = self.call.node, self.call.spelling
        a, b, bias = (argument(node, where) for where in (spelling.a, spelling.b, spelling.bias))
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        trains = self.owner.grad_enabled and node.meta["example_value"].requires_grad
        found = self._quantizers(a, b, trains)
        if not found:
            return
        with self.graph.inserting_before(node):
            # alpha belongs to an operand: behind the product it could come too late, float16 overflows
            first = a if alpha == 1 else self._call(torch.mul, (a, alpha), a)
            build = self._uniform if is_uniform(found, trains) else self._routed
            y = build(first, b, found, trains)
            if bias is not None:
                y = self._call(_add_bias, (y, bias, node.meta["example_value"].dtype, beta), node)
        node.replace_all_uses_with(y)
        self.graph.erase_node(node)

    def _quantizers(self, a: fx.Node, b: fx.Node, trains: bool) -> dict[Kind, Pair]:
        """By kind of matmul what quantizes its factors; those that stay in high precision are noted, and not in it."""
        nodes: dict[Role, fx.Node] = {"input": a, "weight": b, "grad_output": self.call.node}
        tensors = {role: node.meta["example_value"] for role, node in nodes.items()}
        found: dict[Kind, Pair] = {}
        units = overrides.units_of(self.call.node, self.choice.name, self.owner.calls) if overrides.current() else {}
        for kind in KINDS if trains else KINDS[:1]:
            pair = quantizers(self.call.recipe, kind, self.call.dims, tensors, self.owner.grad_enabled)
            if units and not isinstance(pair, Reject):
                pair = self._tried(units[kind], pair, tensors)
            if isinstance(pair, Reject):
                self.choice.declined[kind] = pair
            else:
                found[kind] = pair
        return found

    def _tried(self, unit: overrides.Unit, pair: Pair, tensors: dict[Role, Tensor]) -> Pair | Reject:
        """What a trial of `fp8pass.bisect` makes of it."""
        trial, (kind, call) = overrides.current(), (unit.kind, self.call)
        assert trial is not None and kind != "moments"
        of: dict[str, Role] = {"grad_input": "input", "grad_weight": "weight"}
        needed = kind == "output" or tensors[of[kind]].requires_grad
        if not (trial.see(unit, call.recipe) if needed else trial.units is None):
            return LeftOut("bisect", "this trial of fp8pass.bisect leaves it in high precision")
        tried = list(pair)
        for i, role in enumerate(FACTORS[kind]):
            if (unit, role) in trial.instead:
                recipe = trial.instead[unit, role]
                other = recipe and quantizers(recipe, kind, call.dims, tensors, self.owner.grad_enabled)
                if isinstance(other, Reject):
                    return other
                tried[i] = other[i] if other else None
        return tried[0], tried[1]

    def _uniform(self, a: fx.Node, b: fx.Node, found: dict[Kind, Pair], trains: bool) -> fx.Node:
        """All matmuls read the same quantized tensors, and autograd does the rest."""
        of_a, of_b = found["output"]
        a_, b_ = self._operand(ops.qdq_operand, a, "input", of_a), self._operand(ops.qdq_operand, b, "weight", of_b)
        if b_ in self.owner.weights and a.meta["example_value"].requires_grad:
            self.owner.weights[b_] = replace(self.owner.weights[b_], transposed=self.owner.config.caches_transposes)
        y = self._product(a_, b_)
        return self._quantized(ops.qdq_gradient, (y, found["grad_input"][0]), y, "grad_output") if trains else y

    def _routed(self, a: fx.Node, b: fx.Node, found: dict[Kind, Pair], trains: bool) -> fx.Node:
        """The product three times: for its value, for the gradient of the one factor, and for that of the other."""
        none: tuple[None, None] = (None, None)
        (out_a, out_b), (grad_a, for_a), (for_b, grad_b) = (found.get(kind, none) for kind in KINDS)
        operand = functools.partial(self._operand, ops.operand)
        y = self._product(operand(a, "input", out_a), operand(b, "weight", out_b))
        if not trains:
            return y
        y_a = self._product(a, operand(b, "weight", for_a), "grad_input")
        y_b = self._product(operand(a, "input", for_b), b, "grad_weight")
        routed = y, y_a, y_b, grad_a, grad_b, *self._offs(grad_b)
        return self._quantized(ops.route, routed, y, "grad_output")

    def _product(self, a: fx.Node, b: fx.Node, kind: Kind = "output") -> fx.Node:
        """The call, without its bias, of other operands. kind: the matmul that it is there for."""
        node, spelling = self.call.node, self.call.spelling
        if spelling.product is not None and (spelling is GROUPED_FALLBACK or argument(node, spelling.bias) is not None):
            y = self._call(spelling.product, (a, b, *self._groups()), node)
        else:
            y = self.graph.node_copy(node)
            set_argument(y, spelling.a, a)
            set_argument(y, spelling.b, b)
        y.meta["custom"] = {**y.meta["custom"], "fp8pass_kind": kind}
        return y

    def _operand(self, how: Callable[..., Any], x: fx.Node, role: Role, quantizer: ops.Quantizer | None) -> fx.Node:
        """`x` quantized and dequantized, once for all matmuls that read it so."""
        if isinstance(sharded.part_of(x.meta["example_value"]), GatheredWeight):  # quantized where it came from
            return x if how is ops.qdq_operand else self._call(torch.detach, (x,), x)
        if isinstance(quantizer, ops.Observe):  # under each name that it has
            return self._quantized(how, (x, quantizer), x, role)
        offs = self._offs(quantizer)
        key = (x, how, quantizer, *offs, self.owner.grad_enabled)
        known = self.owner.quantized
        if key not in known:
            freezes = isinstance(quantizer, ops.Static) and self._is_constant(x)
            parts = self._cached_parts(x, quantizer) if role == "weight" else ()
            if parts:
                node = self._quantized(ops.cached_operand, (x, quantizer), x, role)
                self.owner.weights[node] = Weight(parts, transposed=False)
                # through `operand` no gradient passes, and through a cached one it would: a second one for the weight
                known[key] = node if how is ops.qdq_operand else self._call(torch.detach, (node,), x)
            else:
                new = (x, quantizer, *offs)
                known[key] = self._frozen(x, quantizer, role) if freezes else self._quantized(how, new, x, role)
        return known[key]

    def _offs(self, *quantizers: ops.Quantizer | None) -> tuple[fx.Node, ...]:
        """Where the groups end that one of them quantizes by."""
        return self._groups() if any(isinstance(q, ops.Groupwise) for q in quantizers) else ()

    def _groups(self) -> tuple[fx.Node, ...]:
        """Where the groups of rows end that the call has."""
        offs = argument(self.call.node, self.call.spelling.offs)
        return () if offs is None else (offs,)

    def _cached_parts(self, x: fx.Node, quantizer: ops.Quantizer | None) -> tuple[fx.Node, ...]:
        """The parameters that `x` consists of, if their FP8 copy is kept from one step to the next."""
        names, mutated = self.owner.names, self.owner.mutated
        if not self.owner.config.caches_weights or not self.owner.grad_enabled or x.meta["example_value"].dim() != 2:
            return ()
        if not isinstance(quantizer, ops.Delayed):
            return ()
        parts = names.parts(x)
        return parts if all(_is_cacheable(p.meta["example_value"]) for p in parts) and not mutated & {*parts} else ()

    def _is_constant(self, x: fx.Node) -> bool:
        """Whether `x` is a parameter that only the user can change, between two calls."""
        owner, is_whole = self.owner, not isinstance(x.meta["example_value"], DTensor)
        return is_whole and x in owner.names.owned and x not in owner.mutated and not owner.grad_enabled

    def _frozen(self, x: fx.Node, quantizer: Any, role: Role) -> fx.Node:
        """A parameter that nothing changes while it is used: quantized in advance."""
        value = x.meta["example_value"]
        node = self._quantized(ops.frozen_operand, (x, quantizer, value.dtype), x, role)
        if value.dim() == 2 and self.call.dims.contracted("output")[int(role == "weight")] == (0,):
            self.owner.by_columns.add(node)
        return node

    def _quantized(self, how: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, role: Role) -> fx.Node:
        """A call with quantizers among its arguments. One that has state gets a slot."""
        node, owner = self._call(how, args, like), self.owner
        watched = []
        for quantizer in dict.fromkeys(a for a in args if isinstance(a, ops.Quantizer)):
            name = owner.names.slot(self.choice.name, role)
            watched.append(Watched(name, role, self.choice.source))
            if not isinstance(quantizer, ops.Stateful):
                continue
            place = "" if owner.names.is_owned(like) else self.choice.source
            if self.call.node in owner.merged:
                place += " merged"  # one state with a call at the same line that stands for itself: not right for both
            owner.slots.append(Slot(name, role, self.anchor, place, quantizer, node))
        node.meta[WATCHED] = watched
        if owner.names.is_gathered(like):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), GATHERED: True}
        return node

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, args)
        new.meta.update(like.meta)
        return new


def _decline(choice: Choice, reject: Reject) -> None:
    choice.rule, choice.reason, choice.wanted = reject.rule, str(reject), not isinstance(reject, LeftOut)


def _is_cacheable(x: Tensor) -> bool:
    """Whether it is a parameter, and as a whole on this rank."""
    return isinstance(x, torch.nn.Parameter) and not isinstance(x, (DTensor, GatheredWeight))


def _announce(recipe: Recipe, device: torch.device | None, config: Config) -> None:
    """Say before anything is compiled that a recipe has no kernels on this device."""
    if isinstance(recipe, (BlockwiseScaling, MXFP8Scaling)) and device is not None:
        target = hardware.target_of(device, config.target)
        if reason := hardware.why_no_block_kernel(recipe.name, device, target):
            warn_once(
                f"fp8pass: {reason}. Matmuls with this recipe are computed in high precision from the same FP8 values: "
                "right, and not faster"
            )


def _for_instance(recipe: Recipe, name: str, has_owner: bool) -> Recipe:
    """The recipe where there may be no instance to keep state for. Raises LeftOut for scales that do not exist."""
    if isinstance(recipe, StaticScaling):
        absent = [f"{name}.{role}" for role in ("input", "weight") if not recipe.has(f"{name}.{role}")]
        if absent or not has_owner:
            raise LeftOut("not calibrated", f"no scale for {' and '.join(absent)} was calibrated")
    if has_owner or not isinstance(recipe, DelayedScaling):
        return recipe
    if isinstance(recipe, Calibration):
        raise LeftOut("no parameters", "the graph has no parameters by which its scales could be named")
    return DynamicScaling(
        fp8_format=recipe.fp8_format, high_precision=recipe.high_precision, fast_accum=recipe.fast_accum
    )


def _sources(node: fx.Node) -> set[fx.Node]:
    """All nodes that `node` comes of: what it writes into may be a view of any of them."""
    found, todo = set(), [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in found]
        found.update(new)
        todo += new
    return found


def _add_bias(y: Tensor, bias: Tensor, dtype: torch.dtype, beta: float = 1) -> Tensor:
    """`beta * bias + y` in `dtype`, as linear, addmm and baddbmm mean it: beta 0 ignores even a NaN bias."""
    if beta == 0:
        bias = torch.where(torch.zeros_like(bias, dtype=torch.bool), bias, 0)
    bias = bias.to(dtype)
    return sharded.add(y, bias if beta in (0, 1) else beta * bias)
