"""Tracks what of a graph's amaxes is to be reduced over ranks. Only this file writes the fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class ReductionState:
    """What has happened to one graph of an instance since the last reduction over ranks was started."""

    recorded: bool = False
    """A forward has recorded amaxes that ranks share."""
    unreduced: bool = False
    """And they are complete, for its backward has come, or never will: they may be reduced."""
    step_started: bool = False
    """A forward has begun, or gone on with, a step."""

    def record(self, is_complete: bool) -> None:
        """Note that a forward has recorded amaxes. is_complete: it has no backward."""
        self.recorded = True
        self.unreduced |= is_complete

    def complete(self) -> None:
        """Note that a backward has come."""
        self.unreduced = True

    def start_step(self) -> None:
        """Note that a forward begins a step, or goes on with one."""
        self.step_started = True

    def take(self, other: ReductionState) -> None:
        """Take over what another graph with the same slots has noted."""
        self.recorded |= other.recorded
        self.unreduced |= other.unreduced

    def clear(self) -> None:
        """Begin anew: a reduction is started."""
        self.recorded = self.unreduced = self.step_started = False

    @property
    def awaits_backward(self) -> bool:
        """True if slots can't roll yet: a forward has recorded, perhaps here alone, and no backward has come."""
        return self.recorded and not self.unreduced
