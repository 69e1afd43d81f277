"""Find the matmuls of a part of Dynamo's graph, and add its inputs to the function that a pass makes of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from torch import fx

from fp8pass.graph.annotation import CHECKPOINT, MatmulChoice
from fp8pass.passes.common.checkpoint_regions import body_of
from fp8pass.passes.common.function_graphs import graphs_in


def choices_of(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> Iterator[int]:
    """Yield the index of each matmul's choice, also in checkpointed regions and Functions."""
    for node in nodes:
        custom = node.meta.get("custom") or {}
        # a quantize has the notes of the tensor that it reads, which another layer may have computed
        is_quantize = str(getattr(node.target, "__module__", "")).startswith("fp8pass") and "fp8pass_kind" not in custom
        if "fp8pass" in custom and not is_quantize:
            yield custom["fp8pass"]
        if node.target is CHECKPOINT:
            body = body_of(module, node)
            yield from choices_of(body, list(body.graph.nodes))
        for body in graphs_in(module, [node]):
            yield from choices_of(body, list(body.graph.nodes))


def verdict_key(choice: MatmulChoice) -> Hashable:
    """Return a key of what passes over the joint graph read of a choice."""
    declined = tuple(sorted((kind, reject.rule) for kind, reject in choice.declined.items()))
    return choice.scaling, choice.rule, choice.wanted, declined, choice.fast_accum, choice.prediction


def input_of(graph: fx.Graph, node: fx.Node, is_shared: bool) -> fx.Node:
    """Add an input to a function.

    The sources of a shared function's inputs differ between calls, and so do their addresses: it has none of the marks
    with which torch relies on them.
    """
    new = graph.placeholder(node.name)
    new.meta = dict(node.meta)
    new._dynamo_source = None if is_shared else getattr(node, "_dynamo_source", None)
    if is_shared:
        new.meta.pop("tensor_dict", None)
    return new
