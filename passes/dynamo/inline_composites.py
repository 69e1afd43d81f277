"""Replace composite torch functions with the ATen ops that they consist of.

before   out, weights = multi_head_attention_forward(q, k, v, ...)
after    packed = aten.linear(q, in_proj_weight, in_proj_bias); ...; out = aten.linear(attended, out_proj.weight, ...)
changes  nothing: the same ops, one level down

Dynamo keeps a few functions of torch.nn.functional as one call, with matmuls inside that the annotate pass would not
see. The pass traces them as torch.export does, before autograd (pre-dispatch), so that the result is still
differentiable.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.base._torch import FakeTensor
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.passes.common.checkpoint_regions import Part, parts

COMPOSITES = (F.multi_head_attention_forward,)


class InlineComposites:
    """The pass over Dynamo's graph and its checkpointed regions."""

    name = "inline_composites"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Inline every composite function that is not inside a function transform; return how many were found."""
        return sum(_inline(part) for part in parts(context.annotation.module, context.names))


def _inline(part: Part) -> int:
    graph = part.module.graph
    found = (n for n in graph.nodes if n.op == "call_function" and n.target in COMPOSITES)
    calls = [n for n in found if n not in part.inside]
    for node in calls:
        _inline_call(graph, node)
    return len(calls)


def _with_grad(value: Any, inputs: list[fx.Node]) -> Any:
    """Mark a floating-point value as requiring grad if any input does: pre-dispatch tracing does not keep this."""
    needed = torch.is_grad_enabled() and any(n.meta["example_value"].requires_grad for n in inputs)
    if needed and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _inline_call(graph: fx.Graph, node: fx.Node) -> None:
    inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("example_value"), torch.Tensor)]
    others = set(node.all_input_nodes) - set(inputs)
    if others:  # symbolic sizes among the arguments: keep the call; its matmuls are reported as declined
        return

    def call(*tensors: Any) -> Any:
        known = dict(zip(inputs, tensors, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    values = [n.meta["example_value"] for n in inputs]
    # Dynamo's fake mode, which differs from AOTAutograd's
    modes = (v.fake_mode for v in values if isinstance(v, FakeTensor))
    with next(modes, contextlib.nullcontext()):  # tensors that the function creates are fake, too
        traced = make_fx(call, pre_dispatch=True)(*values)
    if any(n.op == "get_attr" for n in traced.graph.nodes):  # a traced constant, which this graph does not hold
        return
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    twin = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "call_function":
                twin[inner] = copy = graph.node_copy(inner, twin.__getitem__)
                copy.meta = {**node.meta, "example_value": _with_grad(inner.meta.get("val"), inputs)}
    results = fx.map_arg(traced.graph.output_node().args[0], twin.__getitem__)
    for user in list(node.users):  # getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index, arg-type]
        graph.erase_node(user)
    graph.erase_node(node)
