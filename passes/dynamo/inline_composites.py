"""Replace composite torch functions with the ATen ops that they consist of.

before   out, weights = multi_head_attention_forward(q, k, v, ...)
after    packed = aten.linear(q, in_proj_weight, in_proj_bias); ...; out = aten.linear(attended, out_proj.weight, ...)
changes  nothing: the same ops, one level down

Dynamo keeps a few functions of torch.nn.functional as one call, with matmuls inside that the annotate pass would not
see. The pass traces them as torch.export does, before autograd (pre-dispatch), so that the result is still
differentiable. write_matmuls does so with recurrent cells, which torch decomposes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.base._torch import OpOverload
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.passes.common.checkpoint_regions import Part, in_its_modes, parts
from fp8pass.passes.common.function_graphs import with_functions
from fp8pass.passes.common.write_calls import CallWriter, rewrite

COMPOSITES = (F.multi_head_attention_forward,)
_aten = torch.ops.aten
_DECOMPOSITIONS = {
    op: op.decompose
    for op in (
        _aten.gru_cell.default,
        _aten.lstm_cell.default,
        _aten.rnn_relu_cell.default,
        _aten.rnn_tanh_cell.default,
    )
}
"""Composite ops that the tracer otherwise keeps whole."""


class InlineComposites:
    """The pass over Dynamo's graph and its checkpointed regions."""

    name = "inline_composites"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Inline every composite function that is not inside a function transform; return how many were inlined."""
        return sum(
            _inline(part) for part in with_functions(parts(context.annotation.module, context.names), context.names)
        )


def _inline(part: Part) -> int:
    graph = part.module.graph
    calls = (n for n in in_its_modes(graph) if n.target in COMPOSITES and n not in part.inside)
    return sum(rewrite(graph, node, inlined) for node in calls)


def inlined(write: CallWriter, *_: Any, **__: Any) -> Any:
    """Add the ops that the call to replace consists of; return its results, or None if it must stay."""
    node = write.node
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("example_value"), Tensor)]
    if len(inputs) < len(node.all_input_nodes):  # symbolic sizes among the arguments
        return None

    def call(*tensors: Tensor) -> Any:
        known = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    values, is_op = [n.meta["example_value"] for n in inputs], node.target not in COMPOSITES
    with write.mode:  # Dynamo's fake mode, which differs from AOTAutograd's
        if is_op:  # on a GPU, torch's cells are kernels of their own; and its autocast does not cast on the CPU
            values = [torch.empty_like(x, dtype=torch.float32, device="cpu") for x in values]
        traced = make_fx(call, _DECOMPOSITIONS, pre_dispatch=True)(*values).graph
    if traced.find_nodes(op="get_attr"):  # a traced constant, which this graph does not hold
        return None
    added: dict[fx.Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    for inner in traced.nodes:
        if inner.op == "call_function":
            args, kwargs = fx.map_arg((inner.args, inner.kwargs), added.__getitem__)
            added[inner] = write(_out_of_place(inner.target) if is_op else inner.target, *args, **kwargs)
    return fx.map_arg(traced.output_node().args[0], added.__getitem__)


def _out_of_place(op: Any) -> Any:
    """Return `add` for `add_`: the ops write into their own results, after which annotate would quantize x again."""
    if not isinstance(op, OpOverload) or not op._schema.is_mutable:
        return op
    return getattr(getattr(_aten, op._opname.removesuffix("_")), op._overloadname)
