"""What fp8pass raises of its own accord, and how it warns."""

from __future__ import annotations

import functools
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
    """Warn of something, once per process and message."""
    warnings.warn(message, stacklevel=2)
