"""Save the scales with which the backward dequantizes tensors saved in FP8, instead of what they are computed from.

before   scale_inv: f32[] = where(amax < inf, 1 / scale, nan)
         x_ = mul(x_q, scale_inv)                    the backward computes x_ and scale_inv again, in each element
after    scale_inv is marked to be saved
changes  nothing but where it is computed

Each element then takes fewer ops and loads. Inductor gives an elementwise op with more than 30 ops, or with more than 8
loads, a buffer of its own, and the kernel that quantizes a gradient would become two.
"""

from __future__ import annotations

from torch import fx

from fp8pass.base.node_meta import SAVED_FP8
from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.passes.common.patterns import MULTIPLYING, RESHAPES, as_node, through
from fp8pass.passes.joint.list_matmuls import save_for_backward


class SaveScales:
    """Marks scales to be saved; adds no nodes."""

    name = "save_scales"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Mark every scale that `match` finds; return how many are new."""
        scales = {scale for node in graph.nodes if (scale := match(node)) is not None}
        return save_for_backward(graph, lambda node, _: node in scales)


def match(node: fx.Node) -> fx.Node | None:
    """Return the scale with which `node` dequantizes a tensor for `save_fp8`; None if it does not."""
    if node.target not in MULTIPLYING or SAVED_FP8 not in (node.meta.get("custom") or {}):
        return None
    x, scale = node.args
    if not is_tensor(scale) or val(scale).numel() == val(as_node(x)).numel():
        return None
    source = through(scale, RESHAPES)
    return source if source.op == "call_function" else None
