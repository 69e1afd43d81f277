"""Test random programs: every matmul runs in FP8 or is declined with a reason, and all results are right."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from fp8pass.options.config import Config
from fp8pass.passes.common.patterns import MATMULS
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from tests.helpers.generated import Program, programs
from tests.helpers.harness import aten, capture, check_legal_on_cuda, compiled, count, run

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


def check_detected(program: Program) -> None:
    module = capture(program.run, *program.inputs)
    matmuls = sum(n.target in MATMULS for n in module.graph.nodes)
    context = run(module, ListMatmuls(), ScaledMM(), config=Config(recipe=None))
    gemms = list(context.gemms.values())
    assert len(gemms) == matmuls
    assert all(g.reason and g.rule for g in gemms if g.status == "declined")
    if not program.unclear:
        assert all(g.status == ("declined" if program.bad else "rewritten") for g in gemms), [g.reason for g in gemms]
    assert gemms or context.notes, "an FP8 tensor is dequantized, and the report does not mention it"
    calls = check_legal_on_cuda(module.graph)
    assert calls == count(module, aten._scaled_mm.default)
    assert bool(calls) == any(g.status == "rewritten" for g in gemms)
    actual = module(*program.inputs)
    if calls:
        assert [t.stride() for t in tensors(actual)] == [t.stride() for t in tensors(program.run(*program.inputs))]
    check_results(program, actual)


@pytest.mark.compiled
@settings(common, max_examples=EXAMPLES)
@given(programs())
def test_detected_and_right(program: Program) -> None:
    check_detected(program)


@pytest.mark.compiled
@pytest.mark.variant
@settings(common, max_examples=60)
@given(programs())
def test_more_are_detected_and_right(program: Program) -> None:
    check_detected(program)


@pytest.mark.compiled
@pytest.mark.variant
@settings(common, max_examples=4)
@given(programs())
def test_more_are_compiled(program: Program) -> None:
    check_compiled(program)


@pytest.mark.inductor
@settings(common, max_examples=max(2, EXAMPLES // 20))
@given(programs())
def test_compiled(program: Program) -> None:
    check_compiled(program)
