"""Runs statements where fp8pass is not imported yet: a process to `ask`, which has imported torch, and forks each time."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import torch._inductor.compile_fx  # noqa: F401  takes longest, and belongs to torch

from tests.helpers.asked import answer_all


def found(statements: str) -> dict[str, Any]:
    """Run statements. Return "found", what they assign to that name, and "loaded", the modules of fp8pass in use."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(statements, "user.py", "exec"), scope)
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "fp8pass")
    return {"found": scope.get("found"), "loaded": loaded}


def in_a_fork(statements: str) -> dict[str, Any]:
    """Return the answer of `found` from a fork."""
    assert "fp8pass" not in sys.modules
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(found, (statements,))


if __name__ == "__main__":
    answer_all(in_a_fork)
