"""What fp8pass raises of its own accord, and how it warns."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8pass.report import Report


class Fp8Error(RuntimeError):
    """A matmul that should run in FP8 can't, under `strict=True`; or saved state does not fit. Says what to do."""

    report: Report | None = None
    """Of `fp8pass.explain`: what was known when compilation failed."""


@functools.cache
def warn_once(message: str) -> None:
    """Warn of something, once per process and message, at the user's line that led to it."""
    warnings.warn(message, stacklevel=_users_level())


def _users_level() -> int:
    """How many frames above `warn_once` the first is that is the user's; 2, its caller, if none is.

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
