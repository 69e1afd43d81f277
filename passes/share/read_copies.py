"""Let the backward of an op read its result in FP8, where a matmul reads that anyway: `save_fp8`.

before   o: bf16[B, H, M, D] = attention(q, k, v)                     its backward reads o
         x_: bf16[B, M, H * D] = dequantize(quantize(view(permute(o))))    as the operand of a matmul
after    attention's backward reads permute(view(x_))
changes  gradients: the op's are taken at the quantized result, as in the annotated graph

The save_fp8 pass has marked the quantize and the dequantize. Runs before the rewrites, which remove the dequantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.pass_base import Context
from fp8pass.graph.sizes import alike
from fp8pass.node_meta import SAVED_RESULT
from fp8pass.passes.common.patterns import COPIES, RESHAPES, aten, dtype_of, first, reach
from fp8pass.passes.rewrite.list_matmuls import backward_nodes
from fp8pass.scaling import FP8_DTYPES

_MOVES = {*RESHAPES, *COPIES, aten.permute.default}


@dataclass(frozen=True)
class Match:
    """The `moves` of a result that lead to an operand, last one first, and `copy`, the operand dequantized.

    readers: the nodes of the backward that read the result, each with the node, an alias say, by which it does.
    """

    moves: list[fx.Node]
    copy: fx.Node
    readers: list[tuple[fx.Node, fx.Node]]


class ReadCopies:
    """Rewrites all results that the annotated graph marks."""

    name = "read_copies"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Rewrite every match; return the number of reads that changed."""
        backward = backward_nodes(graph)
        found = [m for node in graph.nodes if (m := match(node, backward)) is not None]
        for m in found:
            for reader, alias in m.readers:
                reader.replace_input_with(alias, _moved_back(context.builder(graph, self.name), reader, m))
        return sum(len(m.readers) for m in found)


def match(copy: fx.Node, backward: set[fx.Node]) -> Match | None:
    """Return how a marked `copy` dequantizes a result that the backward reads; None for any other node."""
    if not _is_marked(copy) or copy in backward or not is_tensor(copy):
        return None
    if any(_is_marked(user) for user in copy.users):
        return None  # a step on the way
    made = reach([copy], lambda n: filter(is_tensor, n.all_input_nodes), _is_marked)
    if dtype_of(copy) in FP8_DTYPES or not any(dtype_of(n) in FP8_DTYPES for n in made):
        return None
    operands = [
        n for n in made if not _is_marked(n) and alike(val(n).shape, val(copy).shape) and dtype_of(n) == dtype_of(copy)
    ]
    if len(operands) != 1:
        return None
    (result,), moves = operands, list[fx.Node]()
    while result.target in _MOVES and result not in backward:
        moves.append(result)
        result = first(result)
    aliases = reach([result], lambda n: (u for u in n.users if u.target is aten.alias.default))
    read = [(user, alias) for alias in aliases for user in alias.users if user in backward and user.op != "output"]
    return Match(moves, copy, read) if read else None


def _moved_back(build: Builder, reader: fx.Node, m: Match) -> fx.Node:
    """Emit the inverse of each move, last one first."""
    node = m.copy
    for move in m.moves:
        before = val(first(move))
        if move.target is aten.permute.default:
            order: Any = move.args[1]
            dims = [d % before.dim() for d in order]
            node = build.emit(reader, aten.permute.default, node, [dims.index(d) for d in range(len(dims))])
        elif move.target not in COPIES:
            node = build.emit(reader, aten.reshape.default, node, list(before.shape))
    return node


def _is_marked(node: fx.Node) -> bool:
    return (node.meta.get("custom") or {}).get(SAVED_RESULT) == "quantize"
