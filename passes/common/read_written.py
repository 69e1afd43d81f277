"""Let an update quantize a weight that it has written, where the scale is known only after that.

before   new: bf16[N, K] = ...;  amax: f32[] = amax(abs(new));  scale = 448 / amax
         x_q: f8[N, K]   = quantize(new, scale)
         copy_(weight, new);  copy_(copy, x_q)
after    written: bf16[N, K] = copy_(weight, new)
         x_q: f8[N, K]       = quantize(written, scale);  copy_(copy, x_q)
changes  nothing: the weight in memory is `new`

The kernel that quantizes must wait for the amax of the whole weight. It then reads the weight itself; otherwise the
kernel of the update would write `new` twice, into the weight and for this reader.
"""

from __future__ import annotations

from torch import fx

from fp8pass.graph.builder import val
from fp8pass.passes.common.patterns import as_node, aten, first, reach
from fp8pass.quant.kernel_ops import QUANTIZE, ROUNDED


def read_written(graph: fx.Graph) -> int:
    """Rewrite all quantizes that `match` finds, for each parameter that is written; return their number."""
    writes = [n for n in graph.nodes if n.target is aten.copy_.default and first(n).op == "placeholder"]
    applied = 0
    for write in writes:
        for quantize in match(write):
            _move_behind(write, quantize)
            quantize.replace_input_with(first(quantize), write)
            applied += 1
    return applied


def match(write: fx.Node) -> list[fx.Node]:
    """Return the quantizes of a new weight whose scale depends on it, and whose results nothing else needs earlier."""
    new = as_node(write.args[1])
    if write.users or val(new).dtype != val(first(write)).dtype or val(new).shape != val(first(write)).shape:
        return []
    same = [new, *(u for u in new.users if u.target is ROUNDED)]
    found = [q for x in same for q in x.users if q.target is QUANTIZE and q.args[0] is x]
    return [q for q in found if new in _made_of(as_node(q.args[1])) and all(write < n for n in _ends(q))]


def _made_of(scale: fx.Node) -> set[fx.Node]:
    return set(reach([scale], lambda n: n.all_input_nodes))


def _chain(quantize: fx.Node) -> list[fx.Node]:
    """Return all nodes that are computed from a quantize, in order, and the `copy_` that write them."""
    return sorted(reach([quantize], lambda n: n.users))


def _ends(quantize: fx.Node) -> list[fx.Node]:
    return [n for n in _chain(quantize) if n.target is aten.copy_.default or n.op == "output"]


def _move_behind(write: fx.Node, quantize: fx.Node) -> None:
    last = write
    for node in _chain(quantize):
        if node.target is not aten.copy_.default and node.op != "output":
            last.append(node)
            last = node
