"""Insert quantize-dequantize around one matmul call that passed all checks."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fp8pass.base.node_meta import GATHERED, PIECE, QUANTIZED, QuantizedTensor
from fp8pass.graph.annotation import MatmulChoice, SingleProduct
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.options import overrides
from fp8pass.passes.common.matmul_calls import GROUPED_FALLBACK, argument, set_argument
from fp8pass.passes.common.state_inputs import NewSlot, Weight
from fp8pass.passes.dynamo.check_matmul import CheckedCall
from fp8pass.passes.dynamo.product_roles import without_views
from fp8pass.passes.dynamo.quantizers import Pair, is_uniform, quantizers, quantizers_of_product, with_weight_of_now
from fp8pass.passes.dynamo.write_matmuls import name_of
from fp8pass.quant import ops, sharded
from fp8pass.quant.wrapper_tensor import Fp8Weight
from fp8pass.recipes import FACTORS, KINDS, Kind, Recipe, Role

LIMITS = {
    "declined": {
        "bisect": ("`fp8pass.bisect` tries the step without it", "nothing: so it finds the culprit"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


class Walk:
    """The state of a walk over a graph: the nodes that were added so far, and the slots that they need.

    graph: the graph that the walk is in, Dynamo's or a region's. quantized: its quantized tensors, by the tensor, the
    op, the quantizer and the group offsets. merged, quantized_in: see `DynamoContext`. products: the matmuls in
    Functions and in updates. saved: {input of a Function's backward: the node of its forward}. slot_of: the slots of
    Functions.
    """

    def __init__(self, context: DynamoContext) -> None:
        self.module = context.annotation.module
        self.graph = self.module.graph
        self.config = context.config
        self.names = context.names
        self.merged = context.merged
        self.quantized_in = context.quantized_in
        self.smoothed = context.smoothed
        self.grad_enabled = torch.is_grad_enabled()
        self.slots: list[NewSlot] = []
        self.quantized: dict[Hashable, fx.Node] = {}
        self.mutated: set[fx.Node] = set()
        self.by_columns: set[fx.Node] = set()
        self.weights: dict[fx.Node, Weight] = {}
        self.calls: Counter[Any] = Counter()
        self.products: dict[fx.Node, SingleProduct] = {}
        self.saved: dict[fx.Node, fx.Node] = {}
        self.slot_of: dict[Hashable, NewSlot] = {}


class QuantizeCall:
    """Inserts quantize-dequantize around one matmul call. anchor: see `SlotTable`."""

    def __init__(self, walk: Walk, call: CheckedCall, choice: MatmulChoice, anchor: int) -> None:
        self.walk = walk
        self.graph = walk.graph
        self.call = call
        self.choice = choice
        self.anchor = anchor
        self.product = walk.products.get(call.node)
        self.roles: tuple[Role, Role] = self.product.roles if self.product is not None else FACTORS["output"]

    def rewrite(self) -> None:
        """Replace the call with its annotated form; keep it if none of its matmuls is quantized."""
        node, signature = self.call.node, self.call.signature
        a, b, bias = (argument(node, where) for where in (signature.a, signature.b, signature.bias))
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        trains = self.walk.grad_enabled and node.meta["example_value"].requires_grad
        pairs = self._quantizers(a, b, trains)
        if not pairs:
            return
        with self.graph.inserting_before(node):
            # alpha scales an operand: a float16 product may overflow before it could be scaled
            first = a if alpha == 1 else self._call(torch.mul, (a, alpha), a)
            build = self._uniform if is_uniform(pairs, trains) else self._routed
            y = build(first, b, pairs, trains)
            if bias is not None:
                y = self._call(ops.add_bias, (y, bias, node.meta["example_value"].dtype, beta), node)
        node.replace_all_uses_with(y)
        self.graph.erase_node(node)

    def _quantizers(self, a: fx.Node, b: fx.Node, trains: bool) -> dict[Kind, Pair]:
        """Return the quantizers of each matmul by kind; record matmuls in high precision in `choice.declined`."""
        nodes: dict[Role, fx.Node] = {"input": a, "weight": b, "grad_output": self.call.node}
        tensors = {role: node.meta["example_value"] for role, node in nodes.items()}
        pairs: dict[Kind, Pair] = {}
        units = overrides.units_of(self.call.node, self.choice.name, self.walk.calls) if overrides.current() else {}
        if self.product is not None:
            return self._quantizers_of_product(self.product, (tensors["input"], tensors["weight"]), units)
        for kind in KINDS if trains else KINDS[:1]:
            chosen = functools.partial(self._chosen, kind, tensors)
            pair = chosen(self.call.recipe)
            if self.call.node in self.walk.smoothed and not isinstance(pair, Reject):
                pair = with_weight_of_now(kind, pair)
            if units and not isinstance(pair, Reject):
                is_read = kind == "output" or tensors["input" if kind == "grad_input" else "weight"].requires_grad
                pair = self._tried(units[kind], pair, FACTORS[kind], chosen, is_read)
            if isinstance(pair, Reject):
                self.choice.declined[kind] = pair
            else:
                pairs[kind] = pair
        return pairs

    def _chosen(self, kind: Kind, tensors: dict[Role, Tensor], recipe: Recipe) -> Pair | Reject:
        return quantizers(recipe, kind, self.call.dims, tensors, self.walk.grad_enabled, self.choice.name)

    def _quantizers_of_product(
        self, product: SingleProduct, operands: tuple[Tensor, Tensor], units: Mapping[Kind, overrides.Unit]
    ) -> dict[Kind, Pair]:
        """Return the quantizers of a matmul in a Function, as those of an output: it has no other products."""

        def chosen(recipe: Recipe) -> Pair | Reject:
            return quantizers_of_product(product, recipe, self.call.dims, operands, self.choice.name)

        pair = chosen(self.call.recipe)
        if units and not isinstance(pair, Reject):
            pair = self._tried(units[product.kind], pair, product.roles, chosen)
        if isinstance(pair, Reject):
            self.choice.declined[product.kind] = pair
            return {}
        return {"output": pair}

    def _tried(
        self,
        unit: overrides.Unit,
        pair: Pair,
        roles: tuple[Role, Role],
        chosen: Callable[[Recipe], Pair | Reject],
        is_read: bool = True,
    ) -> Pair | Reject:
        """Return the quantizers that a trial of `fp8pass.bisect` uses instead of `pair`, or why it uses none.

        chosen: returns those of a recipe. is_read: False if the matmul's result is not needed.
        """
        trial = overrides.current()
        assert trial is not None
        if not (trial.see(unit, self.call.recipe) if is_read else trial.units is None):
            return LeftOut("bisect", "this trial of fp8pass.bisect leaves it in high precision")
        tried = list(pair)
        for i, role in enumerate(roles):
            if (unit, role) in trial.instead:
                recipe = trial.instead[unit, role]
                other = recipe and chosen(recipe)
                if isinstance(other, Reject):
                    return other
                tried[i] = other[i] if other else None
        return tried[0], tried[1]

    def _uniform(self, a: fx.Node, b: fx.Node, pairs: dict[Kind, Pair], trains: bool) -> fx.Node:
        """Build a call whose three matmuls read the same quantized tensors: autograd derives the backward."""
        of_a, of_b = pairs["output"]
        (role_a, role_b), operand = self.roles, functools.partial(self._operand, ops.qdq_operand)
        a_, b_ = operand(a, role_a, of_a), operand(b, role_b, of_b)
        # kernels want both operands contiguous along the sum, which for grad_input is over the weight's rows: it reads
        # the transposed copy
        keeps_transpose = self.walk.config.caches_transposes and a.meta["example_value"].requires_grad
        if b_ in self.walk.weights and keeps_transpose:
            self.walk.weights[b_] = replace(self.walk.weights[b_], stored=("x_q", "x_t"))
        y = self._product(a_, b_)
        return self._quantized(ops.qdq_gradient, (y, pairs["grad_input"][0]), y, "grad_output") if trains else y

    def _routed(self, a: fx.Node, b: fx.Node, pairs: dict[Kind, Pair], trains: bool) -> fx.Node:
        """Build the product three times: for its value, for the gradient of `a`, and for the gradient of `b`.

        `select_gradients` returns the first, and gives each of the other two the gradient that it computes.
        """
        none: tuple[None, None] = (None, None)
        (out_a, out_b), (grad_a, for_a), (for_b, grad_b) = (pairs.get(kind, none) for kind in KINDS)
        operand = functools.partial(self._operand, ops.qdq_no_grad)
        role_a, role_b = self.roles
        y = self._product(operand(a, role_a, out_a), operand(b, role_b, out_b))
        if not trains:
            return y
        b_for_a = operand(b, "weight", for_a, is_read=a.meta["example_value"].requires_grad)
        y_a = self._product(a, b_for_a, "grad_input")
        y_b = self._product(operand(a, "input", for_b), b, "grad_weight")
        routed = y, y_a, y_b, grad_a, grad_b, *self._offs(grad_b)
        return self._quantized(ops.select_gradients, routed, y, "grad_output")

    def _product(self, a: fx.Node, b: fx.Node, kind: Kind = "output") -> fx.Node:
        """Copy the call without its bias, with operands `a` and `b`. kind: the matmul that the copy stands for."""
        node, signature = self.call.node, self.call.signature
        if signature.product is not None and (
            signature is GROUPED_FALLBACK or argument(node, signature.bias) is not None
        ):
            y = self._call(signature.product, (a, b, *self._groups()), node)
            y.kwargs = {key: node.kwargs[key] for key in ("out_dtype",) if key in node.kwargs}
        else:
            y = self.graph.node_copy(node)
            set_argument(y, signature.a, a)
            set_argument(y, signature.b, b)
        # AOTAutograd copies it to the matmuls of this copy's backward, where list_matmuls reads which product they are
        y.meta["custom"] = {**y.meta["custom"], "fp8pass_kind": kind}
        return y

    def _operand(
        self, how: Callable[..., Any], x: fx.Node, role: Role, quantizer: ops.Quantizer | None, is_read: bool = True
    ) -> fx.Node:
        """Return `x` quantized and dequantized: one node for all matmuls that read it in the same way.

        is_read: False if no matmul reads it, because the matmul's result is not needed.
        """
        if isinstance(sharded.part_of(x.meta["example_value"]), Fp8Weight):
            return x if how is ops.qdq_operand else self._call(torch.detach, (x,), x)
        if self.product is not None:
            return self._operand_of_product(x, role, quantizer)
        if isinstance(quantizer, ops.Observe):  # calibration records it once for each slot name
            return self._quantized(how, (x, quantizer), x, role)
        offs = self._offs(quantizer)
        # keyed by grad mode, because no gradient passes through a quantize under no_grad; and by the part of the graph,
        # because the parts become functions, which exchange tensors in high precision
        key = (x, how, quantizer, *offs, self.walk.grad_enabled, self.call.node.meta.get(PIECE))
        quantized = self.walk.quantized
        if key not in quantized and x in self.walk.quantized_in and isinstance(quantizer, ops.Delayed | ops.Dynamic):
            node = self._call(ops.handed_over, (x, *self._quantized_once(x, role, quantizer)), x)
            quantized[key] = node if how is ops.qdq_operand else self._call(torch.detach, (node,), x)
        elif key not in quantized:
            prequantizes = isinstance(quantizer, ops.Static) and self._is_constant(x)
            parts = self._cached_parts(x, quantizer) if role == "weight" and is_read else ()
            if parts:
                node = self._quantized(ops.cached_operand, (x, quantizer), x, role)
                self.walk.weights[node] = Weight(parts, ("x_t" if ops.is_turned(quantizer) else "x_q",))
                # unlike `operand`, `cached_operand` passes a gradient: without detach the weight would get a second one
                quantized[key] = node if how is ops.qdq_operand else self._call(torch.detach, (node,), x)
            else:
                new = (x, quantizer, *offs)
                quantized[key] = (
                    self._prequantized(x, quantizer, role) if prequantizes else self._quantized(how, new, x, role)
                )
        return quantized[key]

    def _operand_of_product(self, operand: fx.Node, role: Role, quantizer: ops.Quantizer | None) -> fx.Node:
        """Return an operand of a matmul in a Function, quantized and dequantized.

        It is quantized before it is viewed if that is the same: so forward and backward quantize the same tensor, and
        `x @ x.T` quantizes once.
        """
        *views, x = without_views(operand, self.call.node)
        if isinstance(quantizer, ops.Rowwise) and all(map(_is_transpose, views)):
            dims = tuple(1 - dim for dim in quantizer.dims) if len(views) % 2 else quantizer.dims
            quantizer = replace(quantizer, dims=dims)
        elif not isinstance(quantizer, ops.Delayed | ops.Dynamic | ops.Static | ops.Observe):
            views, x = [], operand
        slot = self._slot_in_forward(x, role, quantizer)
        if slot is not None and isinstance(quantizer, ops.Observe):
            return operand  # the forward has observed it
        offs = self._offs(quantizer)
        key = (x, ops.qdq_no_grad, quantizer, *offs)
        if key not in self.walk.quantized:
            self.walk.quantized[key] = self._quantized(ops.qdq_no_grad, (x, quantizer, *offs), x, role, operand)
        copies = {x: self.walk.quantized[key]}
        for view in reversed(views):
            copies[view] = self.graph.node_copy(view, lambda n: copies.get(n, n))
        return copies[operand]

    def _slot_in_forward(self, x: fx.Node, role: Role, quantizer: ops.Quantizer | None) -> NewSlot | None:
        """Return the slot by which the forward of the Function has quantized what its backward reads as `x`."""
        saved = self.walk.saved.get(x)
        if saved is None:
            return None
        return self.walk.slot_of.get((without_views(saved, saved)[-1], role, quantizer))

    def _quantized_once(self, x: fx.Node, role: Role, quantizer: ops.Delayed | ops.Dynamic) -> list[fx.Node]:
        """Return the results of `quantize_once`, placed before the first reader, in the part that quantizes."""
        quantized, piece, transposed = self.walk.quantized, self.walk.quantized_in[x], self.walk.grad_enabled
        key = x, ops.quantize_once, quantizer, transposed
        if key not in quantized:
            # at the end of the piece that quantizes, before the first node of a later one
            later = (n for n in self.graph.nodes if n is self.call.node or (n.meta.get(PIECE) or 0) > piece)
            with self.graph.inserting_before(next(later)):
                node = quantized[key] = self._quantized(ops.quantize_once, (x, quantizer, transposed), x, role)
                node.meta[PIECE] = piece
                for i, example in enumerate(_quantized_like(x.meta["example_value"], quantizer.dtype, transposed)):
                    part = quantized[(*key, i)] = self.graph.call_function(operator.getitem, (node, i))
                    part.meta.update({PIECE: piece, "example_value": example})
        return [quantized[(*key, i)] for i in range(2 + transposed)]

    def _offs(self, *quantizers: ops.Quantizer | None) -> tuple[fx.Node, ...]:
        """Return the call's group offsets if one of the quantizers works by groups; () if none does."""
        return self._groups() if any(isinstance(q, ops.Groupwise) for q in quantizers) else ()

    def _groups(self) -> tuple[fx.Node, ...]:
        """Return the node that holds the end of each group of rows of the call; () if it has no groups."""
        offs = argument(self.call.node, self.call.signature.offs)
        return () if offs is None else (offs,)

    def _cached_parts(self, x: fx.Node, quantizer: ops.Quantizer | None) -> tuple[fx.Node, ...]:
        """Return the parameters that `x` consists of, if their FP8 copies are cached between steps; () if not."""
        names, mutated = self.walk.names, self.walk.mutated
        if not self.walk.config.caches_weights or not self.walk.grad_enabled or x.meta["example_value"].dim() != 2:
            return ()
        # a scale of the weight itself would need the amax of all ranks in each update: only recorded ones are shared
        is_kept = isinstance(quantizer, ops.Delayed if sharded.groups_of(x.meta["example_value"]) else ops.Cacheable)
        if not is_kept or names.is_gathered(x):
            return ()
        parts = names.parts(x)
        copies: list[Any] = [n.args[1] for n, weight in self.walk.weights.items() if weight.parts == parts]
        if not self.walk.config.caches_transposes and any(
            isinstance(q, ops.Rowwise) and q != quantizer for q in copies
        ):
            return ()  # a copy scaled along the other dimension would take as much memory again
        # `mutated`: the copy is made between calls, so it would lack what this graph has written into the weight
        return parts if all(_is_cacheable(p.meta["example_value"]) for p in parts) and not mutated & {*parts} else ()

    def _is_constant(self, x: fx.Node) -> bool:
        """Return whether `x` is a whole parameter that only the user can change, and only between two calls."""
        walk, is_whole = self.walk, not isinstance(x.meta["example_value"], DTensor)
        return is_whole and x in walk.names.owned and x not in walk.mutated and not walk.grad_enabled

    def _prequantized(self, x: fx.Node, quantizer: Any, role: Role) -> fx.Node:
        """Add a node for a parameter that is quantized once, before the calls: nothing changes it between them."""
        value = x.meta["example_value"]
        node = self._quantized(ops.frozen_operand, (x, quantizer, value.dtype), x, role)
        if value.dim() == 2 and self.call.dims.contracted("output")[int(role == "weight")] == (0,):
            self.walk.by_columns.add(node)
        return node

    def _quantized(
        self, how: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, role: Role, operand: fx.Node | None = None
    ) -> fx.Node:
        """Add a call with quantizers among its arguments; give each quantizer that has state a slot.

        operand: of the matmul, if it is a view of `like`.
        """
        node, walk = self._call(how, args, like), self.walk
        tensors = []
        for quantizer in dict.fromkeys(a for a in args if isinstance(a, ops.Quantizer)):
            known = self._known_slot(like, role, quantizer)
            name = walk.names.slot(self.choice.name, role) if known is None else known.name
            tensors.append(QuantizedTensor(name, role, self.choice.source))
            if known is not None:
                known.also.append(node)
                walk.slot_of.update(dict.fromkeys(self._keys(like, role, quantizer), known))
            if known is not None or not isinstance(quantizer, ops.Stateful):
                continue
            # a parameter has one slot wherever it is read; an activation may be a different tensor at each line
            line = "" if walk.names.is_owned(operand or like) else self.choice.source
            if self.call.node in walk.merged:
                # an unmerged call at the same line has other scales, and must not share the state
                line += " merged"
            late = role == "grad_output" if self.product is None else self.product.late
            slot = NewSlot(name, role, self.anchor, line, quantizer, node, late)
            walk.slots.append(slot)
            walk.slot_of.update(dict.fromkeys(self._keys(like, role, quantizer), slot))
        node.meta[QUANTIZED] = tensors
        if walk.names.is_gathered(like):  # in "custom", which AOTAutograd copies to the ATen nodes
            node.meta["custom"] = {**(node.meta.get("custom") or {}), GATHERED: True}
        return node

    def _keys(self, x: fx.Node, role: Role, quantizer: ops.Quantizer) -> list[Hashable]:
        """Return keys of a tensor of a Function. Two tensors that share one have one slot; [] outside of Functions.

        They do if they are one tensor, or if a loop, which Dynamo unrolls, comes to the same line again.
        """
        if self.product is None:
            return []
        line = self.graph, self.call.node.meta.get("stack_trace"), self.choice.name
        return [(x, role, quantizer), (*line, role, quantizer)]

    def _known_slot(self, x: fx.Node, role: Role, quantizer: ops.Quantizer) -> NewSlot | None:
        known = (self.walk.slot_of.get(key) for key in self._keys(x, role, quantizer))
        return self._slot_in_forward(x, role, quantizer) or next(filter(None, known), None)

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, args)
        # a data-dependent size must be bound by one node only, and `like` binds it
        new.meta.update({key: value for key, value in like.meta.items() if key != "unbacked_bindings"})
        if PIECE in self.call.node.meta:  # `like` may be in an earlier part of the graph
            new.meta[PIECE] = self.call.node.meta[PIECE]
        return new


def _is_transpose(view: fx.Node) -> bool:
    """Return whether a view is the transpose of a matrix."""
    names = "T", "numpy_T", "mT", "t", "transpose"  # numpy_T is `.T` in torch 2.15
    return view.meta["example_value"].dim() == 2 and name_of(view) in names


def _is_cacheable(x: Tensor) -> bool:
    """Return whether `x` is a parameter in high precision. A sharded one qualifies: each rank copies its shard."""
    return isinstance(x, torch.nn.Parameter) and not isinstance(sharded.part_of(x), Fp8Weight)


def _quantized_like(x: Tensor, dtype: torch.dtype, transposed: bool) -> list[Tensor]:
    """Return tensors like the results of `quantize_once`."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    copies = [x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)]
    return [x.new_empty((), dtype=torch.float32), *copies[: 1 + transposed]]
