"""Divide the state tensors of a graph among its pieces, so that the slots of each piece count from 0.

before   scales: f32[T];  amax_forward: f32[F];  amax_backward_late: f32[T-F]
after    scales_0, scales_1, ... = split_with_sizes(scales, [2, 4, 4, ..., 1, 2, 2, ...])    forward, then gradients
         amax_forward_0, ... = split_with_sizes(amax_forward, [2, 4, 4, ...])
changes  nothing: pieces of equal layers read equal parts, so that outline_layers finds them equal
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import fx

from fp8pass.base.node_meta import IS_STATE, PIECE
from fp8pass.passes.common.checkpoint_regions import Region
from fp8pass.states.slots import SlotKind

PieceNumber = int | None
"""The number of a piece; None for all nodes if the graph is not divided."""
FIRST_PIECE = -1
"""The piece that begins the step, whose scales the others read."""


class PieceOf:
    """Returns the piece that a node, of the graph or of a region's graph, belongs to."""

    def __init__(self, graph: fx.Graph, regions: Sequence[Region]) -> None:
        self._of_region: dict[fx.Graph, PieceNumber] = {}
        self._graph = graph
        for region in regions:  # outer ones come first
            self._of_region[region.body.graph] = self(region.call)

    def __call__(self, node: fx.Node) -> PieceNumber:
        """Return the piece of a node; None if the graph is not divided."""
        return node.meta.get(PIECE) if node.graph is self._graph else self._of_region[node.graph]


class _Segment(NamedTuple):
    """Entries in a row that are of one kind and belong to one piece. first: the position of the first one."""

    kind: SlotKind
    piece: PieceNumber
    first: int
    length: int


class StateDivision:
    """How the entries of state tensors are divided among the pieces of a graph.

    rows: the kind and the piece of each entry, one kind after the other. dim: the dimension that the entries lie along.
    """

    def __init__(self, rows: Sequence[tuple[SlotKind, PieceNumber]], dim: int = -1) -> None:
        self._dim = dim
        self._segments = list[_Segment]()
        for (kind, piece), entries in groupby(range(len(rows)), key=rows.__getitem__):
            indices = list(entries)
            self._segments.append(_Segment(kind, piece, indices[0], len(indices)))
        self._first = {(s.kind, s.piece): s.first for s in self._segments}
        self._first_of_kind = {s.kind: s.first for s in reversed(self._segments)}  # of equal keys the last one counts
        # a piece's entries lie together unless a pass has moved its calls among those of others
        together = len(self._first) == len(self._segments)
        self.is_divided = together and all(s.piece is not None for s in self._segments)

    def first(self, kind: SlotKind, piece: PieceNumber) -> tuple[int, int]:
        """Return the positions of the first entry of a piece: in tensors with entries of all kinds, and of one kind."""
        first_of_piece = self._first[kind, piece]
        return (first_of_piece, first_of_piece) if self.is_divided else (0, self._first_of_kind[kind])

    def scales_of(self, kind: SlotKind, name: str) -> str:
        """Return the name under which a piece finds its scales in the result of `divide`. name: of all scales."""
        return f"{kind}_{name}" if self.is_divided else name

    def divide(self, graph: fx.Graph, state: Mapping[str, fx.Node]) -> dict[PieceNumber, dict[str, fx.Node]]:
        """Return the parts of each piece by name. state: the state tensors of the whole graph, by name."""
        divided: dict[PieceNumber, dict[str, fx.Node]] = {s.piece: {} for s in self._segments}
        if not self.is_divided:
            return {piece: dict(state) for piece in divided}
        for name, node in state.items():
            kind = _KINDS.get(name)
            segments = [s for s in self._segments if kind is None or s.kind == kind]
            parts = _split(graph, name, node, [s.length for s in segments], self._dim)
            for segment, part in zip(segments, parts, strict=True):
                divided[segment.piece][self.scales_of(segment.kind, name) if kind is None else name] = part
        return divided


_KINDS: Mapping[str, SlotKind] = {
    "amax_forward": "forward",
    "weight_copy_scales": "weight",
    "amax_backward_late": "gradient",
    "numerics_forward": "forward",
    "numerics_backward": "gradient",
}
"""The kind of the entries of a state tensor; a tensor whose name is missing has entries of all kinds."""


def _split(graph: fx.Graph, name: str, node: fx.Node, lengths: list[int], dim: int) -> list[fx.Node]:
    """Split a state tensor of the graph; return the parts, which belong to no piece."""
    if not lengths:
        return []
    last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last_input if node.op == "placeholder" else node):
        split = graph.call_function(torch.split_with_sizes, (node, lengths, dim))  # `torch.split` takes longer
    with graph.inserting_before(split.next):
        parts = [
            graph.create_node("call_function", operator.getitem, (split, i), name=f"fp8pass_{name}_{i}")
            for i in range(len(lengths))
        ]
    for new in (split, *parts):
        new.meta.update({PIECE: None, IS_STATE: True})
    return parts
