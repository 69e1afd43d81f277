"""Move the spread of a gated activation's channels into the weight that multiplies it: Smooth-SwiGLU.

before   h: bf16[..., K] = silu(gate) * up
         y: bf16[..., N] = linear(h, w: bf16[N, K], b)
after    s: f32[K]       = channel_scales(h)          the largest magnitude of each channel, as a power of two
         y               = linear(h * (1 / s), w * s, b)
changes  nothing but what FP8 rounds: powers of two are exact, and both gradients are those of the original

The product of a gate and an activation is quadratic in the input where two weights align, so that one channel of `h`
grows out of the scale that delayed scaling has from earlier steps (Fishman et al., arXiv 2409.12517). Each channel of
`h / s` has a largest magnitude of 1 to 2. The weight `w * s` grows with the channel instead, so it is scaled by its
current amax, not by the recipe's history.

Runs on Dynamo's graph, before the annotate pass, for the layers that the option `smooth_swiglu` selects and that run in
FP8.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import is_traceable_wrapper_subclass
from fp8pass.base.names import Names
from fp8pass.base.scaling import channel_scales
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.refusal import Reject
from fp8pass.options.setting import within
from fp8pass.passes.common.checkpoint_regions import Part, in_its_modes, parts
from fp8pass.passes.common.matmul_calls import LINEAR, argument, set_argument, signature_of
from fp8pass.passes.common.write_calls import CallWriter
from fp8pass.passes.dynamo.check_matmul import check, check_speedup
from fp8pass.passes.dynamo.write_matmuls import name_of

ACTIVATIONS = ("silu", "gelu")
"""Functions whose product with another tensor is a gated activation; some write silu as `x * sigmoid(x)`."""
_PASSED = ("to", "type", "float", "bfloat16", "half", "contiguous", "clone", "dropout")
"""Calls between the product and the matmul that keep the channels."""


class SmoothSwiglu:
    """The pass over Dynamo's graph and its checkpointed regions."""

    name = "smooth_swiglu"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Rewrite every layer that is selected and reads a gated activation; return how many were rewritten."""
        if context.config.smooth_swiglu is False:
            return 0
        return sum(_rewrite_all(part, context) for part in parts(context.annotation.module, context.names))


def _rewrite_all(part: Part, context: DynamoContext) -> int:
    applied = 0
    for node in in_its_modes(part.module.graph):
        if node in part.inside or node in context.smoothed or not match(node):
            continue
        name, _ = context.names.of(node, LINEAR.name, [argument(node, LINEAR.b)])
        if not context.config.smooths(name):
            continue
        try:
            _check(node, name, context)
        except Reject:
            continue  # the annotate pass rejects this call again, and reports why
        if why := _why_not(node):
            context.notes.append(f"smooth_swiglu leaves {name} as it is: {why}")
            continue
        rewrite(part.module.graph, node, context.names)
        context.smoothed.add(node)
        applied += 1
    return applied


# ---------------------------------------------------------------------------------------------------------------------
# Pattern.


def match(node: fx.Node) -> bool:
    """Return whether the node is a linear layer that reads a gated activation."""
    if signature_of(node) is not LINEAR:
        return False
    x = argument(node, LINEAR.a)
    while isinstance(x, fx.Node) and name_of(x) in _PASSED:
        x = x.args[0]
    if not isinstance(x, fx.Node) or name_of(x) not in ("mul", "multiply"):
        return False
    first, second = x.args[0], x.args[1] if len(x.args) > 1 else x.kwargs.get("other")
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)) or first is second:
        return False
    sizes = [n.meta["example_value"].shape if _is_tensor(n) else None for n in (first, second, x)]
    return None not in sizes and sizes[0] == sizes[1] and any(map(_is_activation, (first, second)))


def _is_activation(node: fx.Node) -> bool:
    while name_of(node) in _PASSED and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if name_of(node) in ACTIVATIONS:
        return True
    # a * sigmoid(a)
    return name_of(node) == "mul" and any(isinstance(n, fx.Node) and name_of(n) == "sigmoid" for n in node.args)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


def _check(node: fx.Node, name: str, context: DynamoContext) -> None:
    """Raise Reject if the layer does not run in FP8."""
    call = check(node, LINEAR, name, within(node, context.config), node.meta["example_value"].requires_grad)
    check_speedup(call, argument(node, LINEAR.a).meta["example_value"].device, context.config)


def _why_not(node: fx.Node) -> str:
    """Return why operands can't be multiplied by scales; "" if they can."""
    for operand in (argument(node, LINEAR.a), argument(node, LINEAR.b)):
        if is_traceable_wrapper_subclass(value := operand.meta["example_value"]):
            return f"an operand is a {type(value).__name__}, of which this rank has no plain tensor"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


def rewrite(graph: fx.Graph, node: fx.Node, names: Names) -> None:
    """Divide the input of the layer by a scale for each channel, and multiply the weight by it."""
    x, weight = argument(node, LINEAR.a), argument(node, LINEAR.b)
    with graph.inserting_before(node):
        write = CallWriter(graph, node)
        scales = write(channel_scales, x)
        inverse = write(torch.reciprocal, scales)
        set_argument(node, LINEAR.a, _times(write, x, inverse))
        scaled = _times(write, weight, scales)
    names.view(scaled, weight)
    set_argument(node, LINEAR.b, scaled)


def _times(write: CallWriter, x: fx.Node, scales: Any) -> fx.Node:
    """Multiply by scales, each of which is exact in the dtype of `x`."""
    dtype = x.meta["example_value"].dtype
    return write(operator.mul, x, write(torch.Tensor.to, scales, dtype))
