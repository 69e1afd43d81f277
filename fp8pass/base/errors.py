"""The errors that fp8pass raises, and its warnings."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Fp8Error(RuntimeError):
    """An error whose message says what to do.

    Raised, for example, for a matmul that cannot run in FP8 under `strict=True`, and for saved state that does not fit.
    """

    report: Any = None
    """The `Report` of the verdicts found before compilation failed; set by `fp8pass.explain`."""


class Fault(Fp8Error):
    """An internal error of fp8pass. place: the name of the pass, or "choices" or "combine", which change Inductor."""

    def __init__(self, place: str, error: Exception) -> None:
        super().__init__(
            f"a fault of fp8pass in its pass {place}: {first_line(error)}. Please report it, with what "
            "FP8PASS_DUMP=dir writes. To go on, leave the matmul out with filter=, or set on_fault='warn'."
        )
        self.place = place


gone_on_after: list[str] = []
"""The faults after which this process went on, one sentence each."""


@contextlib.contextmanager
def faults_of(place: str) -> Iterator[None]:
    """Raise errors of a part of fp8pass as `Fault`, except Fp8Error and Warning, which are meant for the user."""
    try:
        yield
    except (Fp8Error, Warning):
        raise
    except Exception as error:
        raise Fault(place, error) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type and place if the message is empty: a bare assertion."""
    if lines := str(error).strip().splitlines():
        return lines[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = "".join(f" in {f.name} ({Path(f.filename).name}:{f.lineno})" for f in frames[-1:])
    return type(error).__name__ + where


# the cache is the set of messages: a warning that filters raise as an error is not cached, and is raised again
@functools.cache
def warn_once(message: str) -> None:
    """Warn once per process and message, at the user's line that led to the call."""
    warn(message)


def warn(message: str) -> None:
    """Warn at the user's line that led to the call."""
    warnings.warn(message, stacklevel=_users_level())


def _users_level() -> int:
    """Return the stacklevel of the first frame in the user's code; 2 (the caller of `warn`) if there is none.

    Frames of fp8pass, torch and Python's import system are not the user's. `warnings.warn` does not count frames of
    `import` statements.
    """
    level, frame = 1, sys._getframe(1)
    while (back := frame.f_back) is not None:
        frame = back
        level += "importlib._bootstrap" not in frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("fp8pass", "torch", "importlib"):
            return level
    return 2
