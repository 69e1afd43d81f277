"""Let the backward of an op read its result in FP8, where a matmul reads that anyway: `save_fp8`.

before   o: bf16[B, H, M, D] = attention(q, k, v)                     its backward reads o
         x_: bf16[B, M, H * D] = dequantize(quantize(view(permute(o))))    as the operand of a matmul
after    attention's backward reads clone(permute(view(x_))), which has the strides of o
changes  gradients: the op's are taken at the quantized result, as in the annotated graph

The save_fp8 pass has marked the quantize and the dequantize. Runs before the rewrites, which remove the dequantize.

What replaces a result has its strides. torch makes cuDNN's plan for the backward of attention once for the
strides of q, k and v, and the plan knows the strides of the result that attention has for those: it would read a result
in another layout as if it were in that one. So if another library runs the op, its forward and its backward get a note,
by which `keep_strides` makes Inductor give both calls the strides that the graph has.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import hint_of
from fp8pass.base.node_meta import SAVED_RESULT, STRIDES
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.other_libraries import has_strides, runs_elsewhere, tensors_of
from fp8pass.graph.pass_base import JointContext
from fp8pass.graph.sizes import alike
from fp8pass.passes.common.patterns import COPIES, RESHAPES, aten, dtype_of, first, reach
from fp8pass.passes.joint.list_matmuls import backward_nodes

_MOVES = {*RESHAPES, *COPIES, aten.permute.default}


@dataclass(frozen=True)
class CopyMatch:
    """The `moves` of a `result` that lead to an operand, last one first, and `copy`, the operand dequantized.

    readers: the nodes of the backward that read the result, each with the node that it reads, perhaps an alias.
    """

    result: fx.Node
    moves: list[fx.Node]
    copy: fx.Node
    readers: list[tuple[fx.Node, fx.Node]]


class ReadCopies:
    """Rewrites all results that the annotated graph marks."""

    name = "read_copies"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Rewrite every match; return the number of reads that changed."""
        backward = backward_nodes(graph)
        matches = [m for node in graph.nodes if (m := match(node, backward)) is not None]
        for m in matches:
            _note_strides(m, backward)
            for reader, alias in m.readers:
                build = context.builder(graph, self.name)
                reader.replace_input_with(alias, _laid_out(build, reader, _moved_back(build, reader, m), val(m.result)))
        return sum(len(m.readers) for m in matches)


def match(copy: fx.Node, backward: set[fx.Node]) -> CopyMatch | None:
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
    if not read or not _is_dense(val(result)):
        return None
    return CopyMatch(result, moves, copy, read)


def _order(x: Tensor) -> list[int]:
    """Return the dimensions of a tensor, those with the largest strides first, without a guard on symbolic ones."""
    return sorted(range(x.dim()), key=lambda d: hint_of(x.stride(d)), reverse=True)


def _is_dense(x: Tensor) -> bool:
    """Return whether a tensor has the strides of a permuted contiguous one, which a copy can have. Adds no guard."""
    stride: Any = 1
    for d in reversed(_order(x)):
        if not alike([x.stride(d)], [stride]) and not alike([x.shape[d]], [1]):
            return False
        stride = stride * x.shape[d]
    return True


def _note_strides(m: CopyMatch, backward: set[fx.Node]) -> None:
    """Note the strides of what the op reads, and of what its backward reads that does not come from a gradient."""
    op = first(m.result) if m.result.target is operator.getitem else m.result
    for node in (op, *(reader for reader, _ in m.readers)):
        if runs_elsewhere(node):
            node.meta[STRIDES] = [None if n in backward else val(n).stride() for n in tensors_of(node)]


def _moved_back(build: Builder, reader: fx.Node, m: CopyMatch) -> fx.Node:
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


def _laid_out(build: Builder, reader: fx.Node, node: fx.Node, like: Tensor) -> fx.Node:
    """Emit a copy of `node` with the strides of `like`, which is dense, if `node` has others."""
    if has_strides(val(node), like.stride()):
        return node
    order = _order(like)
    in_memory = _permuted(build, reader, node, order)
    copy = build.emit(reader, aten.clone.default, in_memory, memory_format=torch.contiguous_format)
    return _permuted(build, reader, copy, [order.index(d) for d in range(len(order))])


def _permuted(build: Builder, reader: fx.Node, node: fx.Node, order: list[int]) -> fx.Node:
    return node if order == sorted(order) else build.emit(reader, aten.permute.default, node, order)


def _is_marked(node: fx.Node) -> bool:
    return (node.meta.get("custom") or {}).get(SAVED_RESULT) == "quantize"
