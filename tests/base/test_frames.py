"""No call of a compilation asks the system for memory for its frame, however deep the stack is."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from fp8pass.base.frames import with_room

pytestmark = pytest.mark.passes

CALLS, DEPTHS = 200, 200


def at_depth(depth: int, function: Callable[[], int]) -> int:
    return at_depth(depth - 1, function) if depth else function()


def page_faults() -> int:
    """Return how often the system gives memory in a loop of calls."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        at_depth(3, int)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_loops_at_any_depth_have_room() -> None:
    @with_room
    def most(function: Callable[[], int]) -> int:
        return max(at_depth(depth, function) for depth in range(DEPTHS))

    assert most(page_faults) < CALLS / 2  # without room, one in each call at some depth


def test_arguments_results_and_errors_pass() -> None:
    @with_room
    def half(x: int, by: int = 2) -> float:
        """Divide."""
        return x / by

    assert half(3) == 1.5
    assert half(3, by=3) == 1
    assert half.__doc__ == "Divide."
    with pytest.raises(ZeroDivisionError):
        half(1, by=0)
