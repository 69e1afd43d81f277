"""Find tensors that are quantized with a scale for each block, which is computed from the block's amax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fp8pass.graph.builder import is_tensor, val
from fp8pass.passes.common.patterns import CONSTANTS, RESHAPES, as_node, aten, first, is_elementwise, reach
from fp8pass.quant.kernel_ops import QUANTIZE

_REDUCED = [1, 3]
"""The dimensions of a view [R / rows, rows, C / columns, columns] that lie within a block."""


@dataclass(frozen=True)
class BlockScales:
    """A quantize of a matrix x, or of its transpose, with a scale for each block.

    rows, columns: of a block, as it lies in x. is_turned: True if the transpose is quantized. stored: the result, as it
    is in memory: the quantize, or the copy of its reshape. amax: of all blocks. numbers: the ops that compute the
    scales and what others read from the amaxes, in order. kept: those, and the amax, that others read.
    """

    x_q: fx.Node
    x: fx.Node
    rows: int
    columns: int
    is_turned: bool
    stored: fx.Node
    amax: fx.Node
    numbers: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]

    @property
    def scale(self) -> fx.Node:
        """The scales, f32[R / rows, 1, C / columns, 1] for a matrix [R, C] that is quantized."""
        return as_node(self.x_q.args[1])

    @property
    def is_moved(self) -> bool:
        """True if a kernel stores the scales of neighbouring blocks side by side, and the graph does not."""
        return self.is_turned != (self.rows == 1)

    def module(self) -> fx.GraphModule:
        """Return the ops as a graph on [1, 1], the amax of a block; it returns the scale, then what is kept."""
        graph = fx.Graph()
        made = {self.amax: graph.placeholder("amax")}
        made[self.amax].meta["val"] = val(self.amax).new_empty([1, 1])
        for node in self.numbers:
            for constant in (n for n in node.all_input_nodes if n not in made):
                made[constant] = graph.node_copy(constant)
                if constant.target is aten.full.default:  # it may have the shape of the amaxes
                    made[constant].update_arg(0, [1, 1])
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[n] for n in (self.scale, *self.kept)))
        return fx.GraphModule({}, graph)


def block_scales(x_q: fx.Node) -> BlockScales | None:
    """Return how a tensor is quantized with a scale for each block; None if it is not quantized, or not in blocks."""
    if x_q.target is not QUANTIZE or val(x_q).dim() != 4:
        return None
    view = first(x_q)
    amax = next((n for n in _computed_from(as_node(x_q.args[1])) if _is_amax_of(n, view)), None)
    x, is_turned = _matrix(view)
    stored = _copy_of(x_q) if is_turned else x_q
    if amax is None or x is None or stored is None:
        return None
    numbers = tuple(_numbers(amax))
    down, across = val(view).shape[1], val(view).shape[3]
    rows, columns = (across, down) if is_turned else (down, across)
    inside = {*numbers, x_q}
    kept = tuple(n for n in (amax, *numbers) if not inside.issuperset(n.users))
    if x_q.args[1] not in numbers or not all(val(n).is_floating_point() for n in kept):
        return None
    return BlockScales(x_q, x, rows, columns, is_turned, stored, amax, numbers, kept)


def _computed_from(scale: fx.Node) -> dict[fx.Node, None]:
    return reach([scale], lambda n: (i for i in n.all_input_nodes if _has_shape(i, scale)), _is_on_numbers)


def _is_on_numbers(node: fx.Node) -> bool:
    return is_elementwise(node) or node.target in (aten.view.dtype, aten.alias.default)


def _is_amax_of(node: fx.Node, view: fx.Node) -> bool:
    if node.target is not aten.amax.default or node.args[1:] != (_REDUCED, True):
        return False
    return first(node).target is aten.abs.default and first(first(node)) is view


def _matrix(view: fx.Node) -> tuple[fx.Node | None, bool]:
    """Return the matrix whose elements a view [R / rows, rows, C / columns, columns] has, and whether transposed.

    The last one on the way: its rows may lie in several dimensions. What it is a reshape of may have its columns in
    several, as the heads of attention.
    """
    matrix: fx.Node | None = None
    shape = val(view).shape
    x, is_turned, rows, columns = view, False, shape[0] * shape[1], shape[2] * shape[3]
    while True:
        if x.target in RESHAPES or (x.target is aten.permute.default and x.args[1] == list(range(val(x).dim()))):
            x = first(x)
        elif x.target is aten.permute.default and not is_turned and _transposes(x, rows):
            matrix, is_turned, columns = None, True, rows
            x = first(x)
        else:
            break
        matrix = x if val(x).shape[-1:] == (columns,) else matrix
    is_static = matrix is not None and all(isinstance(size, int) for size in val(matrix).shape)
    return (matrix, is_turned) if is_static else (None, False)


def _transposes(permute: fx.Node, rows: int) -> bool:
    """Return whether the last dimension becomes the first, in the order of the others, and is that of these rows."""
    dims = val(permute).dim()
    return permute.args[1] == [dims - 1, *range(dims - 1)] and bool(val(permute).shape[0] == rows)


def _copy_of(x_q: fx.Node) -> fx.Node | None:
    """Return the contiguous copy of a reshape of `x_q` if nothing else reads it."""
    views = list(x_q.users)
    copies = contiguous_copies(views[0]) if len(views) == 1 and views[0].target in RESHAPES else []
    return copies[0] if len(copies) == 1 == len(views[0].users) else None


def contiguous_copies(x: fx.Node) -> list[fx.Node]:
    """Return the contiguous copies of a tensor."""
    contiguous = {"memory_format": torch.contiguous_format}
    return [u for u in x.users if u.target is aten.clone.default and u.kwargs == contiguous]


def _numbers(amax: fx.Node) -> Iterator[fx.Node]:
    """Yield the elementwise ops on the amaxes, and on constants, in the graph's order."""
    inside = {amax}
    for node in sorted(reach([amax], lambda n: n.users, lambda n: _has_shape(n, amax))):
        outside = (n for n in node.all_input_nodes if n not in inside)
        if _has_shape(node, amax) and _is_on_numbers(node) and all(n.target in CONSTANTS for n in outside):
            inside.add(node)
            yield node


def _has_shape(node: fx.Node, other: fx.Node) -> bool:
    return is_tensor(node) and val(node).shape == val(other).shape
