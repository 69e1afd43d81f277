"""Merge linear layers that read one tensor into one: queries, keys and values; gate and up.

before   q: bf16[..., Q] = linear(x: bf16[..., K], w_q: bf16[Q, K]);  k = linear(x, w_k);  v = linear(x, w_v)
after    y: bf16[..., Q + R + R] = linear(x, cat([w_q, w_k, w_v]))
         q, k, v = split(y, [Q, R, R], -1);  v = contiguous(v)
changes  numerics: the weights share a scale, and so do the gradients of the results. The gradient of x is summed in
         float32, within one matmul, instead of as bfloat16 tensors

One matmul is launched instead of three, forward and backward, and the gradient of x is written once instead of once
for each layer. Kernels write the parts of a concatenation of quantized tensors in place (quantize_tiles.py): nothing is
written twice.

A result that only views and elementwise ops read is read in place. Any other reader gets a copy: it may depend on
strides, or be saved for backward, which would keep all of y alive. Attention that reads all the results gets no copies.

Runs on Dynamo's graph, before the annotate pass, which gives merged weights one scale.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass.base._torch import MODE_CHANGES, FakeTensor, TorchDispatchMode, is_alias_of, pytree
from fp8pass.base.names import Names
from fp8pass.base.node_meta import PIECE
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.prediction import Prediction, needed, predict
from fp8pass.graph.refusal import Reject
from fp8pass.hardware import Target, target_of
from fp8pass.options.setting import within
from fp8pass.passes.common.checkpoint_regions import Part, parts
from fp8pass.passes.common.matmul_calls import LINEAR, argument, mutates, signature_of
from fp8pass.passes.dynamo.check_matmul import check, has_one_scale
from fp8pass.recipes import KINDS, Kind, Recipe
from fp8pass.roofline import memory_seconds, merged_seconds, where


class MergeSiblings:
    """The pass over Dynamo's graph and its checkpointed regions."""

    name = "merge_siblings"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Merge the families that gain by prediction, or all, as `config.merge_siblings` says; return their number."""
        if context.config.merge_siblings is False:
            return 0
        return sum(_merge_all(part, context) for part in parts(context.annotation.module, context.names))


def _merge_all(part: Part, context: DynamoContext) -> int:
    graph, names, config, applied = part.module.graph, context.names, context.config, 0
    for family in families(graph, names, lambda node: _sibling(node, part, context)):
        first = family.siblings[0]
        target = target_of(first.weight.meta["example_value"].device, config.target)
        if should_merge(family, target, config.merge_siblings, config.min_speedup):
            context.merged[merge(graph, family, names)] = first.recipe
            applied += 1
    return applied


def _sibling(node: fx.Node, part: Part, context: DynamoContext) -> Sibling | None:
    """Return the linear layer as a sibling; None if the recipe or the filter does not select it."""
    if node in part.inside:
        return None
    name, _ = context.names.of(node, LINEAR.name, [argument(node, LINEAR.b)])
    try:
        call = check(node, LINEAR, name, within(node, context.config), node.meta["example_value"].requires_grad)
    except Reject:
        return None  # the annotate pass rejects this call again, and reports why
    return Sibling(node, call.recipe, call.sizes, call.kinds)


@dataclass(frozen=True)
class Sibling:
    """A linear layer that its recipe selects. sizes: M, K, N, ints or SymInts. kinds: the matmuls that it computes."""

    node: fx.Node
    recipe: Recipe
    sizes: tuple[Any, Any, Any]
    kinds: tuple[Kind, ...]

    @property
    def weight(self) -> fx.Node:
        """The weight, [N, K]."""
        weight = argument(self.node, LINEAR.b)
        assert isinstance(weight, fx.Node)
        return weight

    @property
    def bias(self) -> fx.Node | None:
        """The bias, [N]; None if the layer has none."""
        bias = argument(self.node, LINEAR.bias)
        return bias if isinstance(bias, fx.Node) else None


@dataclass(frozen=True)
class Family:
    """Siblings in graph order."""

    siblings: list[Sibling]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The matmuls that the merged call computes in this graph."""
        return tuple(kind for kind in KINDS if any(kind in s.kinds for s in self.siblings))

    @property
    def kinds_in_training(self) -> tuple[Kind, ...]:
        """The matmuls that the merged call computes in training, as far as an evaluation can tell."""
        return needed(True, any(_example(s.weight).requires_grad for s in self.siblings))

    @functools.cached_property
    def copied(self) -> list[bool]:
        """For each sibling, True if its result must be copied out of the merged one, by its readers."""
        results = [s.node for s in self.siblings]
        merged = _merged([_example(r) for r in results])
        readers = [_readers(r, merged) for r in results]
        if all(targets == {F.scaled_dot_product_attention} for targets in readers):
            return [False] * len(results)
        return [bool(targets) for targets in readers]


# ---------------------------------------------------------------------------------------------------------------------
# Pattern.


def families(graph: fx.Graph, names: Names, taken: Callable[[fx.Node], Sibling | None]) -> list[Family]:
    """Return layers that read one tensor under one recipe, and whose parameters nothing else reads or writes."""
    by_key: dict[Hashable, list[Sibling]] = {}
    stretch = 0
    for node in graph.nodes:
        # a write between two layers may change what the second reads; grad and autocast modes may differ after a change
        stretch += mutates(node) or node.target in MODE_CHANGES
        if signature_of(node) is LINEAR and (sibling := taken(node)) is not None and _is_alone(sibling, names):
            by_key.setdefault((stretch, *_alike(sibling)), []).append(sibling)
    return [Family(members) for members in by_key.values() if len(members) > 1]


def _is_alone(sibling: Sibling, names: Names) -> bool:
    parameters = [p for p in (sibling.weight, sibling.bias) if p is not None]
    _, k, n = sibling.sizes
    if not has_one_scale(sibling.recipe) or not isinstance(k, int) or not isinstance(n, int) or n % 16:
        return False
    return all(names.parts(p) and len(p.users) == 1 and type(_example(p)) in _PLAIN for p in parameters)


_PLAIN = (FakeTensor, Tensor, torch.nn.Parameter)
"""Types of parameters that are one plain tensor: not DTensor, for example."""


def _alike(sibling: Sibling) -> tuple[Hashable, ...]:
    """Return the key that siblings share: input, recipe, K, dtypes, device, requires_grad and piece."""
    weight, bias = _example(sibling.weight), sibling.bias
    of_bias = None if bias is None else (_example(bias).dtype, _example(bias).requires_grad)
    x = argument(sibling.node, LINEAR.a)
    piece = sibling.node.meta.get(PIECE)
    return x, sibling.recipe, sibling.sizes[1], weight.dtype, weight.device, weight.requires_grad, of_bias, piece


@torch.no_grad()
def _readers(result: fx.Node, merged: Tensor) -> set[Any]:
    """Return the targets that read `result`, or a view of it, as a slice of `merged`, and are not elementwise."""
    # the first part stands for each: all have the same strides, and only these matter
    values: dict[fx.Node, Any] = {result: merged.narrow(-1, 0, _example(result).shape[-1])}
    targets: set[Any] = set()
    todo = sorted(result.users)
    while todo:  # in graph order, so that all views that a node reads are known
        reader = heapq.heappop(todo)
        if reader in values:
            continue
        if (value := _value(reader, values)) is None:
            targets.add(reader.target)
        elif _is_part(value, merged):
            values[reader] = value
            for user in reader.users:
                heapq.heappush(todo, user)
    return targets


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return the value of `node`, given new values of some inputs; None if it runs an op that may depend on strides."""
    if node.op not in ("call_function", "call_method") or mutates(node):
        return None
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta["example_value"]))
        function: Any = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        with _OnlyElementwise():  # type: ignore[no-untyped-call]
            return function(*args[isinstance(node.target, str) :], **kwargs)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        # for example, a view that these strides do not allow
        return None


class _OnlyElementwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that raises RuntimeError for ops that are neither elementwise nor views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        harmless = func.is_view or torch.Tag.pointwise in func.tags or func in _LIKE_ELEMENTWISE
        if not harmless and func.namespace != "prim":  # prim ops query a tensor's device and the like
            raise RuntimeError(f"{func} may depend on strides")
        return func(*args, **(kwargs or {}))


_aten = torch.ops.aten
# not tagged pointwise, but their results do not depend on the strides of their inputs
_LIKE_ELEMENTWISE = {_aten.cat.default, _aten.clone.default, _aten._to_copy.default, _aten._unsafe_view.default}


def _is_part(value: Any, merged: Tensor) -> bool:
    return any(isinstance(x, Tensor) and is_alias_of(x, merged) for x in pytree.tree_leaves(value))


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


def should_merge(family: Family, target: Target | None, wanted: bool | None, min_speedup: float) -> bool:
    """Return whether one call is predicted to be faster than several, or the user wants it, and it reaches min_speedup.

    The prediction is for training in evaluation too: both graphs must merge the same calls to share scales. But a call
    that stays in high precision in this graph is not merged: without FP8, joining weights only costs time.
    """
    if target is None:
        return bool(wanted)
    first, widths = family.siblings[0], [s.sizes[2] for s in family.siblings]
    (m, k, _), size = first.sizes, _example(first.node).element_size()
    prediction, here = (
        predict(target, (m, k, sum(widths)), first.recipe, size, kinds, min_speedup)
        for kinds in (family.kinds_in_training, family.kinds)
    )
    if prediction is None or here is None:
        return False
    if prediction.ends is not None:
        return _pays_where_it_varies(prediction, functools.partial(_apart_and_merged, family, target, k), bool(wanted))
    if min(prediction.speedup, here.speedup) < min_speedup:
        return False
    apart, merged = _apart_and_merged(family, target, k, m)
    return apart > merged or bool(wanted)


def _apart_and_merged(family: Family, target: Target, k: int, m: int) -> tuple[float, float]:
    """Predict two times for M rows, of separate calls and of the merged one: see `merged_seconds`."""
    first, widths = family.siblings[0], [s.sizes[2] for s in family.siblings]
    size = _example(first.node).element_size()
    # 2: a copy reads and writes each element
    copies = sum(memory_seconds(target, 2 * m * n * size) for n, c in zip(widths, family.copied, strict=True) if c)
    apart, merged = merged_seconds(target, m, k, widths, first.recipe, size, family.kinds_in_training)
    return apart, merged + copies


def _pays_where_it_varies(
    prediction: Prediction, apart_and_merged: Callable[[int], tuple[float, float]], wanted: bool
) -> bool:
    """Return whether siblings merge for every number of rows M: if that saves time wherever the merged call pays.

    For fewer rows the merged call stays in high precision, and nothing is split: graphs for few rows and for many, and
    for evaluation, merge the same calls.
    """
    if not prediction.pays:
        return False
    if wanted:
        return True
    saves = where(apart_and_merged)
    return all(any(_holds(saving, interval) for saving in saves) for interval in prediction.pays)


def _holds(outer: tuple[int, int | None], inner: tuple[int, int | None]) -> bool:
    return outer[0] <= inner[0] and (outer[1] is None or (inner[1] is not None and inner[1] <= outer[1]))


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


def merge(graph: fx.Graph, family: Family, names: Names) -> fx.Node:
    """Replace the siblings with one call; return it."""
    nodes, widths = [s.node for s in family.siblings], [s.sizes[2] for s in family.siblings]
    meta = {**nodes[0].meta, "nn_module_stack": _merged_stack(family, names)}
    with graph.inserting_before(nodes[0]):
        weight = _cat(graph, [s.weight for s in family.siblings], meta)
        biases = [s.bias for s in family.siblings if s.bias is not None]
        bias = _cat(graph, biases, meta) if biases else None
        y = graph.call_function(F.linear, (argument(nodes[0], LINEAR.a), weight, bias))
        y.meta = {**meta, "example_value": _merged([_example(n) for n in nodes])}
        parts = graph.call_method("split", (y, widths, -1))
        parts.meta = {key: meta[key] for key in (PIECE,) if key in meta}
        for i, (node, copied) in enumerate(zip(nodes, family.copied, strict=True)):
            part = graph.call_function(operator.getitem, (parts, i))
            if copied:  # `contiguous` would return a part of one row as it is, a view that keeps all of y alive
                part = graph.call_method("clone", (part,), {"memory_format": torch.contiguous_format})
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    names.merge(weight, [s.weight for s in family.siblings])
    for node in nodes:
        graph.erase_node(node)
    return y


def _merged_stack(family: Family, names: Names) -> dict[Any, Any]:
    """Return the module stack of the first sibling, its name replaced by the joined names of all, for reports."""
    name, *_ = parts = [names.of(s.node, LINEAR.name, [s.weight])[0].rpartition(".")[2] for s in family.siblings]
    stack = dict(family.siblings[0].node.meta.get("nn_module_stack") or {})
    if stack:
        key, (path, kind) = list(stack.items())[-1]
        for suffix in (f"['{name}']", f".{name}"):
            if path.endswith(suffix):
                stack[key] = f"{path.removesuffix(suffix)}['{'+'.join(parts)}']", kind
    return stack


def _cat(graph: fx.Graph, parameters: list[fx.Node], meta: dict[str, Any]) -> fx.Node:
    cat = graph.call_function(torch.cat, (parameters,))
    cat.meta = {**meta, "example_value": _merged([_example(p) for p in parameters], 0)}
    return cat


def _merged(examples: list[Tensor], dim: int = -1) -> Tensor:
    """Return the concatenation of the examples, computed without recording it in autograd."""
    with torch.no_grad():
        return torch.cat(examples, dim).requires_grad_(examples[0].requires_grad)


def _example(node: fx.Node) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor), node
    return value
