"""Let an update quantize a weight that it has written, where scales are known only after that.

before   new: bf16[N, K] = ...;  amax: f32[] = amax(abs(new));  scale = 448 / amax
         x_q: f8[N, K]   = quantize(new, scale)
         copy_(weight, new);  copy_(copy, x_q)
after    written: bf16[N, K] = copy_(weight, new)
         x_q: f8[N, K]       = quantize(written, scale);  copy_(copy, x_q)
changes  nothing: the weight in memory is `new`

The kernel that quantizes must wait for the amax of the whole weight. It then reads the weight itself; otherwise the
kernel of the update would write `new` twice, into the weight and for this reader. An amax of rows or columns reads the
weight too: its kernel also quantizes, or reads in another order.
"""

from __future__ import annotations

import itertools

from torch import fx

from fp8pass.graph.builder import val
from fp8pass.passes.common.patterns import as_node, aten, first, has_one_element, reach
from fp8pass.quant.kernel_ops import QUANTIZE, ROUNDED


def read_written(graph: fx.Graph) -> int:
    """Rewrite all readers that `match` finds, for each parameter that is written; return their number."""
    writes = [n for n in graph.nodes if n.target is aten.copy_.default and first(n).op == "placeholder"]
    readers_of = {write: readers for write in writes if (readers := match(write))}
    for write, readers in readers_of.items():
        same, last = _same(write), write
        for node in filter(_is_computed, _chain(readers)):  # in order, so that each stays after its inputs
            last.append(node)
            last = node
        for reader, x in itertools.product(readers, same):
            reader.replace_input_with(x, write)
    return sum(map(len, readers_of.values()))


def match(write: fx.Node) -> list[fx.Node]:
    """Return the readers of a new weight that are to read it from memory; [] if their results are needed earlier."""
    new, into = val(as_node(write.args[1])), val(first(write))
    if write.users or new.dtype != into.dtype or new.shape != into.shape:
        return []
    users = [u for x in _same(write) for u in x.users]
    made_of = {q: set(reach([as_node(q.args[1])], lambda n: n.all_input_nodes)) for q in users if q.target is QUANTIZE}
    waiting = {q: makers for q, makers in made_of.items() if as_node(write.args[1]) in makers}
    amaxes = [
        u for q, makers in waiting.items() if not has_one_element(as_node(q.args[1])) for u in users if u in makers
    ]
    readers = list(dict.fromkeys(u for u in (*amaxes, *waiting) if u.target is not ROUNDED))
    return readers if all(_is_computed(n) or write < n for n in _chain(readers)) else []


def _same(write: fx.Node) -> list[fx.Node]:
    """Return the nodes that have the value which is written."""
    new = as_node(write.args[1])
    return [new, *(u for u in new.users if u.target is ROUNDED)]


def _chain(readers: list[fx.Node]) -> list[fx.Node]:
    """Return readers, and all nodes that are computed from them, in order, with the `copy_` that write them."""
    return sorted(reach(readers, lambda n: n.users))


def _is_computed(node: fx.Node) -> bool:
    return node.target is not aten.copy_.default and node.op != "output"
