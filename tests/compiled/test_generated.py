"""Test random programs: every matmul runs in FP8 or is declined with a reason, and all results are right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from fp8pass.options.config import Config
from fp8pass.passes.common.patterns import MATMULS
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from tests.helpers.generated import Program, programs
from tests.helpers.generated_cases import EXAMPLES, check_compiled, check_results, common, tensors
from tests.helpers.harness import aten, capture, check_legal_on_cuda, count, run


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


@settings(common, max_examples=EXAMPLES)
@given(programs())
def test_detected_and_right(program: Program) -> None:
    check_detected(program)


@pytest.mark.variant
@settings(common, max_examples=60)
@given(programs())
def test_more_are_detected_and_right(program: Program) -> None:
    check_detected(program)


@pytest.mark.variant
@settings(common, max_examples=4)
@given(programs())
def test_more_are_compiled(program: Program) -> None:
    check_compiled(program)
