"""Guard each dynamic size where FP8 becomes faster, so that a compilation serves the sizes on one side.

before   y: bf16[s27, N] = linear(x: bf16[s27, K], w: bf16[N, K])       s27 from 2 on
after    the same graph, for which Dynamo gets the guard s27 >= 1184    or s27 < 1184, as the call is that is compiled
changes  nothing: a call on the other side is compiled anew, when there is one

The roofline is solved for the dynamic size, so no shape is guessed from its first value. Matmuls of a model differ in
the size from which FP8 is faster, and each guard may cost a compilation. So values that are near to each other are one,
the largest of them: a matmul may stay in high precision for a few more rows, and none runs in FP8 below `min_speedup`.

Runs on Dynamo's graph, after merge_siblings, which makes other matmuls, and before annotate, which declines those that
are not faster on this side.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from fp8pass.base._torch import set_grad_enabled
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.prediction import Prediction
from fp8pass.graph.refusal import Reject
from fp8pass.graph.sizes import bounds, expression, is_at_least, why_no_guard
from fp8pass.options.setting import within
from fp8pass.passes.common.checkpoint_regions import Part, in_its_modes, with_branches
from fp8pass.passes.common.function_graphs import with_functions
from fp8pass.passes.common.matmul_calls import argument, signature_of
from fp8pass.passes.dynamo.check_matmul import check

NEAR = 1.25
"""Values whose quotient is not larger than this are one: published times differ more from their predictions."""
MOST = 3
"""Most values at which one size is split: each may cost a compilation, and Dynamo allows 8 for a function."""


class SplitSizes:
    """The pass over Dynamo's graph, its checkpointed regions and branches."""

    name = "split_sizes"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Decide on which side of each value this compilation is, in `context.splits`; return the number of values."""
        if context.config.min_speedup == 0 or not has_symbols(graph):
            return 0
        begins, ends, sizes = dict[Any, set[int]](), dict[Any, set[int]](), dict[Any, Any]()
        for prediction in _predictions(context):
            size = expression(prediction.variable)
            sizes[size] = prediction.variable
            begins.setdefault(size, set()).update(first for first, _ in prediction.pays or ())
            ends.setdefault(size, set()).update(last + 1 for _, last in prediction.pays or () if last is not None)
        guards = 0
        for size, values in begins.items():
            # a value from which FP8 is no longer faster, which is rare, is not merged with others
            merged = {value: value for value in _possible(ends[size], sizes[size])}
            merged |= merge(_possible(values, sizes[size]))
            sides = _sides(sizes[size], sorted(set(merged.values())), context)
            context.splits[size] = {value: sides[at] for value, at in merged.items()}
            guards += len(sides)
        return guards


def has_symbols(graph: fx.Graph) -> bool:
    """Return whether a size of one of the graph's inputs varies."""
    values = (n.meta.get("example_value") for n in graph.find_nodes(op="placeholder"))
    return any(not isinstance(size, int) for v in values for size in getattr(v, "shape", ()))


def _predictions(context: DynamoContext) -> Iterator[Prediction]:
    """Yield the predictions of the matmuls that may run in FP8 and have one size that varies."""
    for part in with_functions(with_branches(context.annotation.module, context.names), context.names):
        trains = torch.is_grad_enabled()
        for node in in_its_modes(part.module.graph):
            trains = bool(node.args[0]) if node.target is set_grad_enabled else trains
            prediction = _prediction(node, part, trains, context)
            if prediction is not None and prediction.variable is not None and prediction.pays is not None:
                yield prediction


def _prediction(node: fx.Node, part: Part, trains: bool, context: DynamoContext) -> Prediction | None:
    signature = signature_of(node)
    if signature is None or node in part.inside:
        return None
    b = argument(node, signature.b)
    name, _ = context.names.of(node, signature.name, [b, argument(node, signature.a)])
    try:
        merged = context.merged.get(node)
        return check(node, signature, name, within(node, context.config), trains, merged).prediction
    except Reject:
        return None  # the annotate pass rejects this call again, and reports why


def _possible(values: Iterable[int], size: Any) -> list[int]:
    low, high = bounds(size)
    return [value for value in values if value > low and (high is None or value <= high)]


def merge(values: Iterable[int], near: float = NEAR, most: int = MOST) -> dict[int, int]:
    """Return the value that each of `values` is replaced by: at most `most` different ones, none smaller than its own.

    Neighbours are joined, those with the smallest quotient first, until all quotients are larger than `near`.
    """
    groups = [[value] for value in sorted(set(values))]
    while len(groups) > 1:
        quotients = [after[-1] / before[-1] for before, after in pairwise(groups)]
        smallest = min(range(len(quotients)), key=quotients.__getitem__)
        if quotients[smallest] > near and len(groups) <= most:
            break
        groups[smallest : smallest + 2] = [groups[smallest] + groups[smallest + 1]]
    return {value: group[-1] for group in groups for value in group}


_decided: weakref.WeakKeyDictionary[Any, dict[tuple[Any, int], bool]] = weakref.WeakKeyDictionary()
"""By torch's environment of symbols: {(size, value): whether the size is at least the value, by a guard}.

A graph is compiled again, for example for slots without a scale, when torch takes no more guards; and torch does not
remember a guard on a product of symbols.
"""


def _sides(size: Any, values: list[int], context: DynamoContext) -> dict[int, bool | None]:
    """Return for each of the values whether the sizes that are compiled for are at least that; None if it is not known.

    Limits the compilation to the sizes between two of the values.
    """
    decided = _decided.setdefault(size.node.shape_env, {})
    name, sides = expression(size), dict[int, bool | None]()
    for value in reversed(values):  # from the largest on: what it implies of smaller ones needs no guard
        side = True if True in sides.values() else is_at_least(size, value)
        if side is None:
            side = decided.get((name, value))
        if side is None:
            if reason := why_no_guard(size, value):
                context.notes.append(
                    f"{size} is not split at {value:,}, from where on FP8 pays for a matmul: {reason}. The largest "
                    "sizes decide"
                )
            else:
                side = decided[name, value] = bool(size >= value)  # Dynamo gets a guard here
        sides[value] = side
    return sides
