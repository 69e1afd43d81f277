"""Replace transposes of an FP8 tensor that was quantized elsewhere by the transposed copy that was made there.

before   w: f8[N, K]   = fp8pass.with_transpose(w_q, w_t: f8[K, N])
         t: f8[K, N]   = clone(permute(w, [1, 0]))                 where a matmul sums over N
after    w is w_q, t is w_t
changes  nothing: `w_t` is that copy

Both copies of a cached weight are written when it changes. Those of a tensor that several functions read are written by
the one that quantizes it: see `ops.quantize_once`.
"""

from __future__ import annotations

from torch import fx

from fp8pass.graph.builder import erase_unused, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.graph.sizes import alike
from fp8pass.passes.common.patterns import RESHAPES, as_node, aten, first, reach
from fp8pass.quant.ops import WITH_TRANSPOSE


def match(node: fx.Node) -> list[fx.Node]:
    """Return the transposed copies of the result of `with_transpose` that have the strides of its `w_t`."""
    x_t = as_node(node.args[1])
    # a tensor of more dimensions was quantized as rows: views of it come between, which end in rows again
    reshaped = reach([node], lambda n: (u for u in n.users if u.target in RESHAPES), lambda n: n.target in RESHAPES)
    rows = [n for n in reshaped if alike(val(n).shape, val(node).shape)]
    turned = [u for n in rows for u in n.users if u.target is aten.permute.default and u.args[1] == [1, 0]]
    copies = [u for t in turned for u in t.users if u.target is aten.clone.default and first(u) is t]
    return [c for c in copies if alike(val(c).stride(), val(x_t).stride())]


class UseTransposes:
    """Replaces all `with_transpose` ops of a graph."""

    name = "use_transposes"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Remove every `with_transpose`, and replace transposed copies of its result; return the number of ops."""
        matches = [n for n in graph.nodes if n.target is WITH_TRANSPOSE]
        for node in matches:
            for copy in match(node):
                copy.replace_all_uses_with(as_node(node.args[1]))
            node.replace_all_uses_with(first(node))
        erase_unused(graph)
        return len(matches)
