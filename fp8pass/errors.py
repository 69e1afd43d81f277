"""What fp8pass raises of its own accord, and how it warns."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any


class Fp8Error(RuntimeError):
    """A matmul that should run in FP8 can't, under `strict=True`; or saved state does not fit. Says what to do."""

    report: Any = None
    """Of `fp8pass.explain`: the `Report` of what was known when compilation failed."""


class Fault(Fp8Error):
    """A part of fp8pass has failed. place: the name of the pass, or "choices" or "combine", which advise Inductor."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__(
            f"a fault of fp8pass in its pass {place}: {first_line(error)}. Please report it, with what "
            "FP8PASS_DUMP=dir writes. To go on, leave the matmul out with filter=, or set on_fault='warn'."
        )
        self.place = place


gone_on_after: list[str] = []
"""The faults, a sentence each, that have not stopped this process."""


@contextlib.contextmanager
def faults_of(place: str) -> Iterator[None]:
    """Around a part of fp8pass that has a name: what it raises becomes a `Fault`, but for what it tells the user."""
    try:
        yield
    except (Fp8Error, Warning):
        raise
    except Exception as error:
        raise Fault(place, error) from error


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; the name of its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@functools.cache
def warn_once(message: str) -> None:
    """Warn of something, once per process and message, at the user's line that led to it."""
    warn(message)


def warn(message: str) -> None:
    """Warn of something at the user's line that led to it."""
    warnings.warn(message, stacklevel=_users_level())


def _users_level() -> int:
    """How many frames above `warn` the first is that is the user's; 2, its caller, if none is.

    fp8pass, torch and Python's import of them are not the user's. `warnings.warn` does not count `import` statements.
    """
    level, frame = 1, sys._getframe(1)
    while (back := frame.f_back) is not None:
        frame = back
        level += "importlib._bootstrap" not in frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("fp8pass", "torch", "importlib"):
            return level
    return 2
