"""Keep Dynamo from skipping a function for good when it cannot compile one call of it.

Dynamo skips it even if it has compiled other calls of the function before. After one exception that the user catches,
or one call of a layer that returns its input unchanged, the whole function would run op by op, in high precision, and
nothing would update its FP8 state. After `watch_compilations`, a function with graphs of fp8pass is skipped only for
the call that cannot be compiled. After `MAX_FAILED_CALLS` such calls Dynamo compiles no more calls, and continues to
use what it compiled.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from fp8pass.base._torch import around_compilations, compilations, context_of, only_run_what_is_compiled, skips_for_good
from fp8pass.base.errors import warn_once
from fp8pass.base.names import location_of

MAX_FAILED_CALLS = 64
"""The most failed calls per function. Each costs the time to trace the function up to the failure."""

FAILED = "fp8pass_failed"
"""Key in Dynamo's context of a code object with graphs of fp8pass: the number of its calls that were not compiled."""
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
"""The folder of torch's optimizers, which are left out: they do not compute in FP8, and fused optimizers share the code
of `step` with those that Dynamo can trace."""
_has_graphs = False
"""True if the current compilation of Dynamo has graphs of fp8pass. Dynamo compiles one at a time, under a lock."""


@functools.cache
def watch_compilations() -> None:
    """Keep Dynamo from skipping functions with graphs of fp8pass for good, from now on."""
    around_compilations(_begin, _end)


def take_note_of_graph() -> None:
    """Record that the function which Dynamo is compiling has a graph of fp8pass, so it is never skipped for good."""
    global _has_graphs
    _has_graphs = True


def _begin() -> None:
    global _has_graphs
    _has_graphs = False


def _end(code: CodeType, result: Any) -> None:
    """Change Dynamo's result for a function that it could not compile, so that it skips only this call."""
    context = context_of(code)
    if result.guarded_code is not None:
        # `setdefault`, because a function may be compiled again after failed calls.
        if _has_graphs and not code.co_filename.startswith(_OPTIMIZERS):
            context.setdefault(FAILED, 0)
        return
    if FAILED not in context or not skips_for_good(result):
        return
    context[FAILED] += 1
    name = f"{code.co_name} ({location_of(code.co_filename, code.co_firstlineno)})"
    if context[FAILED] < MAX_FAILED_CALLS:
        result.apply_to_code = False  # Dynamo then skips this call only, not the code object
        if why := _why(code):
            warn_once(
                f"fp8pass: a call of {name}, which is compiled for other calls, could not be compiled: {why}. It runs "
                "op by op, in high precision, and records nothing in the FP8 state. Calls that are compiled go on as "
                "before"
            )
        return
    only_run_what_is_compiled(result)
    warn_once(
        f"fp8pass: {MAX_FAILED_CALLS} calls of {name} could not be compiled. Calls that are compiled go on as "
        "before; all others run op by op from now on, in high precision"
    )


def _why(code: CodeType) -> str:
    """Return why the latest compilation failed; "" if it did not fail because it had nothing to compile."""
    latest = compilations()[-1:]
    # the latest record may be of another function: Dynamo makes none for a frame that it does not try to trace
    said = latest[0].fail_reason if latest and latest[0].co_name == code.co_name else ""
    return (said or "").strip().partition("\n")[0].rstrip(".")
