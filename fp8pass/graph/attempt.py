"""`Attempt`: how a graph is compiled, first with all passes, and after a fault without some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Form = Literal["fp8", "declined", "plain"]
"""One of: FP8; all matmuls listed and declined; compiled by torch without fp8pass."""
NEEDED = ("annotate", "list_matmuls", "scaled_mm")
"""Passes without which no matmul that the recipe selects runs in FP8."""
LOWERING = "lowering"
"""Stands for the pass in a fault whose pass is not known: AOTAutograd or Inductor fails on the graph of fp8pass."""
FUNCTIONS = "functions"
"""Stands for the pass in such a fault if the graph is cut into functions, see `lowering_functions`."""


@dataclass(frozen=True)
class Attempt:
    """How a graph is compiled. without: passes to leave out. reason: why its matmuls are declined."""

    form: Form = "fp8"
    without: frozenset[str] = frozenset()
    reason: str = ""

    def runs(self, name: str) -> bool:
        """Return whether a pass, or another part with a name, runs."""
        return name not in self.without

    def after(self, place: str, reason: str) -> Attempt:
        """Return the next attempt after a fault in a pass, at FUNCTIONS or at LOWERING."""
        if place == FUNCTIONS:
            return replace(self, without=self.without | {"find_layers", "outline_strands"})
        # False, too, if it failed although it was left out already: to leave it out again would not end
        can_leave_out = place != LOWERING and self.runs(place)
        if self.form == "fp8" and (not can_leave_out or place in NEEDED):
            return Attempt("declined", self.without | ({place} if can_leave_out else set()), reason)
        return replace(self, without=self.without | {place}) if can_leave_out else Attempt("plain")


FIRST = Attempt()
