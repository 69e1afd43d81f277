"""Checks of random programs, for the files test_generated.py of several tiers."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from tests.helpers.generated import Program
from tests.helpers.harness import compiled

EXAMPLES = int(os.environ.get("FP8PASS_TEST_PROGRAMS", "20"))
"""How many programs run. FP8PASS_TEST_PROGRAMS=2000 runs more."""


common = settings(
    deadline=None,
    derandomize="FP8PASS_TEST_PROGRAMS" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def check_results(program: Program, actual: Any) -> None:
    """Compare results with float64, at the precision of the narrowest type in the program."""
    for eager, exact, got in zip(*map(tensors, (program.run(*program.inputs), program.exactly(), actual)), strict=True):
        assert (eager.dtype, eager.shape) == (got.dtype, got.shape)
        here = eager.float().isfinite() & exact.isfinite()  # float16 overflows
        error, spread = (got.double() - exact).abs()[here], exact[here].abs().amax() + 1 if here.any() else 1
        bound = 1e-4 if not program.loose else 2**-4 if eager.dtype.itemsize == 1 else 0.03
        assert (error <= bound * (spread + exact[here].abs())).all(), (error.max(), spread)


def check_compiled(program: Program) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # from Inductor
        actual = compiled(program.run, recipe=None, lowering="inductor")(*program.inputs)
    check_results(program, actual)
