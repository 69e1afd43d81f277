"""Replace transposes of a cached FP8 weight by its cached transposed copy.

before   w: f8[N, K]   = fp8pass.with_transpose(w_q, w_t: f8[K, N])
         t: f8[K, N]   = clone(permute(w, [1, 0]))                 where a matmul sums over N
after    w is w_q, t is w_t
changes  nothing: `w_t` is that copy

Both copies are written when the weight changes: see `fp8pass.runtime.weight_cache`.
"""

from __future__ import annotations

from torch import fx

from fp8pass.graph.builder import val
from fp8pass.graph.pass_base import Context
from fp8pass.passes.common.patterns import as_node, aten, first
from fp8pass.quant.ops import WITH_TRANSPOSE


def match(node: fx.Node) -> list[fx.Node]:
    """Return the transposed copies of the result of `with_transpose` that have the strides of its `w_t`."""
    x_t = as_node(node.args[1])
    turned = [u for u in node.users if u.target is aten.permute.default and u.args[1] == [1, 0]]
    copies = [u for t in turned for u in t.users if u.target is aten.clone.default and first(u) is t]
    return [c for c in copies if val(c).stride() == val(x_t).stride()]


class UseTransposes:
    """Replaces all `with_transpose` ops of a graph."""

    name = "use_transposes"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Remove every `with_transpose`, and replace transposed copies of its result; return the number of ops."""
        found = [n for n in graph.nodes if n.target is WITH_TRANSPOSE]
        for node in found:
            for copy in match(node):
                copy.replace_all_uses_with(as_node(node.args[1]))
            node.replace_all_uses_with(first(node))
        graph.eliminate_dead_code()
        return len(found)
