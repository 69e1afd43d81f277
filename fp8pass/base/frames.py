"""Python's memory for frames, the local variables of calls: a compilation has room for its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SLOTS = 1 << 17
"""Pointers in the frame that makes room: 1 MB. Python then gets 2 MB, of which only what is written to takes memory."""


def with_room(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls `function` with room for 1 MB of frames.

    From 3.11 on, Python gets memory for frames in chunks of 16 kB. Where a call does not fit into the last one, it gets
    another, and gives it back when the call returns. So a loop that happens to stand at the end of a chunk asks the
    system for memory in each of its calls (python/cpython#142183; Pythons since March 2026 keep a chunk). In
    compilations, whose stacks are deep, that took up to a quarter of the time. A frame larger than a chunk gets a
    larger one, which has room for the frames after it.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(call)
