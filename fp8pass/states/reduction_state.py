"""Tracks which amaxes of a graph must be reduced over ranks. Only this file writes the fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class ReductionState:
    """The events of one graph of an instance since the last reduction over ranks started."""

    recorded: bool = False
    """True if a forward has recorded amaxes that ranks share."""
    unreduced: bool = False
    """True if the recorded amaxes are complete (the backward ran, or there is none), so that they may be reduced."""
    step_started: bool = False
    """True if a forward has begun or continued a step."""

    def record(self, is_complete: bool) -> None:
        """Note that a forward has recorded amaxes. is_complete: True if it has no backward."""
        self.recorded = True
        self.unreduced |= is_complete

    def complete(self) -> None:
        """Note that a backward has run."""
        self.unreduced = True

    def start_step(self) -> None:
        """Note that a forward begins or continues a step."""
        self.step_started = True

    def take(self, other: ReductionState) -> None:
        """Merge the flags of another graph that shares slots with this one."""
        self.recorded |= other.recorded
        self.unreduced |= other.unreduced

    def clear(self) -> None:
        """Reset all flags when a reduction starts."""
        self.recorded = self.unreduced = self.step_started = False

    @property
    def awaits_backward(self) -> bool:
        """True if slots can't roll yet: a forward has recorded, perhaps on this rank only, and no backward has run."""
        return self.recorded and not self.unreduced
