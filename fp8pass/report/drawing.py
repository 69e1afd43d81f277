"""Tell whether the graphs that are compiled now are drawn, without loading the code that draws."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch import fx

from fp8pass.report.report import Part

if TYPE_CHECKING:
    from fp8pass.report.graph_view import Drawing

current: ContextVar[Drawing | None] = ContextVar("fp8pass_drawing", default=None)
"""Set by `graph_view.draw`."""


def drawn() -> Drawing | None:
    """Return the `Drawing` that collects pictures, or None outside of `draw`."""
    return current.get()


def part_of(graph: fx.Graph) -> Part:
    """Return whether a graph, partitioned from a joint graph, is the forward or the backward."""
    # AOTAutograd names the gradients of a graph's outputs tangents_1, tangents_2, ...
    return "backward" if any(n.name.startswith("tangents") for n in graph.nodes if n.op == "placeholder") else "forward"
