"""Dynamo skips a function for good when it can't compile one call of it; here it tries again.

It does so even where it has compiled other calls of the function before: one exception that the user catches, or a
layer that once hands its input on as it is, and from then on all of that function runs op by op, in high precision,
with an FP8 state that nothing writes. So a function that has graphs of ours is skipped only for the call that can't be
compiled. After `MOST` calls of that kind Dynamo compiles it no further, and what is compiled goes on being used.
"""

from __future__ import annotations

from pathlib import Path
from types import CodeType
from typing import Any

import torch

from fp8pass._torch import around_compilations, compilations, context_of, only_run_what_is_compiled, skips_for_good
from fp8pass.errors import warn_once
from fp8pass.names import base_name

MOST = 64
"""Each try takes as long as to trace the function up to where that ends."""

FAILED = "fp8pass_failed"
"""What Dynamo keeps with the code of a function that has graphs of ours: how many of its calls were not compiled."""
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
"""What optimizers of torch compute is not in FP8, and one `step` serves those that Dynamo can trace and fused ones."""
_has_graphs = False
"""Whether what Dynamo compiles now has graphs of ours."""


def take_note_of_graph() -> None:
    """While a graph of Dynamo's is compiled: the function that it belongs to is not to be skipped for good."""
    global _has_graphs
    _has_graphs = True


def _begin() -> None:
    global _has_graphs
    _has_graphs = False


def _end(code: CodeType, result: Any) -> None:
    """Dynamo has tried to compile a function, and returns how it is to run."""
    known = context_of(code)
    if result.guarded_code is not None:
        if _has_graphs and not code.co_filename.startswith(_OPTIMIZERS):
            known.setdefault(FAILED, 0)
        return
    if FAILED not in known or not skips_for_good(result):
        return
    known[FAILED] += 1
    name = f"{code.co_name} ({base_name(code.co_filename)}:{code.co_firstlineno})"
    if known[FAILED] < MOST:
        result.apply_to_code = False
        if why := _why(code):
            warn_once(
                f"fp8pass: a call of {name}, which is compiled for other calls, could not be compiled: {why}. It runs "
                "op by op, in high precision, and records nothing in the FP8 state. Calls that are compiled go on as "
                "before"
            )
        return
    only_run_what_is_compiled(result)
    warn_once(
        f"fp8pass: {MOST} calls of {name} could not be compiled. Calls that are compiled go on as before; all others "
        "run op by op from now on, in high precision"
    )


def _why(code: CodeType) -> str:
    """Return why the latest compilation failed; "" if it did not: there was nothing to compile."""
    latest = compilations()[-1:]
    said = latest[0].fail_reason if latest and latest[0].co_name == code.co_name else ""
    return (said or "").strip().partition("\n")[0].rstrip(".")


around_compilations(_begin, _end)
