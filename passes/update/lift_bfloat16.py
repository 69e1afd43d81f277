"""Compute an update of bfloat16 parameters in float32: `update_rounding="stochastic"`.

before   p: bf16[N, K] = get_attr
         p.addcdiv_(exp_avg: bf16[N, K], denom: bf16[N, K])
after    x: f32[N, K] = float32_copy(p)
         x.addcdiv_(float32_copy(exp_avg), ...)
changes  results of each op, which keep the bits that bfloat16 drops; `round_bfloat16.py` rounds them once, at the end

All bfloat16 tensors that the update reads are copied, gradients too, since ops on lists take one dtype. The kernel that
reads them computes in float32 anyway, so nothing is written to memory.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor, fx

from fp8pass.passes.update.context import UpdateContext
from fp8pass.passes.update.written import example, refs
from fp8pass.quant import ops
from fp8pass.weights.update_key import TensorRef


class LiftBfloat16:
    """The pass over Dynamo's graph of an update."""

    name = "lift_bfloat16"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Copy bfloat16 tensors that are not moments of the key to float32, if it rounds any; return their number."""
        key = context.key
        if not key.rounded:
            return 0
        lifted = _lift(graph, {m.ref for m in key.moments})
        context.rounded = [lifted[ref] for ref in key.rounded]
        return len(lifted)


def _lift(graph: fx.Graph, moments: Set[TensorRef]) -> dict[TensorRef, fx.Node]:
    module = graph.owning_module
    assert module is not None
    nodes: dict[TensorRef, list[fx.Node]] = {}
    for node, ref in refs(graph).items():
        x = example(module, node)
        if ref not in moments and isinstance(x, Tensor) and x.dtype == torch.bfloat16:
            nodes.setdefault(ref, []).append(node)
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    copies: dict[TensorRef, fx.Node] = {}
    for ref, same in nodes.items():
        last = copies[ref] = _copied(graph, same, last)
    return copies


def _copied(graph: fx.Graph, same: Sequence[fx.Node], after: fx.Node) -> fx.Node:
    """Add a copy after the node `after`, for all readers of the nodes `same`, which are one tensor; return it."""
    source = same[0]
    if source.op == "get_attr":  # it may come later
        with graph.inserting_after(after):
            source = graph.get_attr(str(source.target))
        source.meta = dict(same[0].meta)
        after = source
    with graph.inserting_after(after):
        copy = graph.call_function(ops.float32_copy, (source,))
    for node in same:
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)  # the copy itself reads it
        if node.op == "get_attr" and node is not source:
            graph.erase_node(node)
    return copy
