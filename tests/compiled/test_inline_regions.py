"""Test the inline_regions pass: a model with marks of `torch.compiler.nested_compile_region` trains as one without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fp8pass
from fp8pass.graph.verdict import Gemm
from fp8pass.report.report import collect
from tests.helpers.harness import compiled, train
from tests.helpers.inline_regions import marked, of_a_function, unmarked
from tests.helpers.models import batches, make


def trained(mark: Any, **options: Any) -> tuple[Any, list[Gemm], dict[str, Tensor]]:
    """Train two steps; return their results, the verdicts, and the state after them."""
    torch._dynamo.reset()
    model = make(lambda: of_a_function(mark))
    with collect() as report:
        steps = list(train(model, compiled(model, **options), batches(2, 16, 32)))
    return steps, report.gemms, fp8pass.state(model).state_dict()


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_a_marked_model_trains_as_the_unmarked_one(lowering: str) -> None:
    """Numbers, verdicts, names and state are the same, to the bit."""
    steps, gemms, state = trained(marked, lowering=lowering)
    wanted_steps, wanted_gemms, wanted_state = trained(unmarked, lowering=lowering)
    assert "layers.1.up.weight.scale" in state and all(g.status == "rewritten" for g in gemms)
    assert gemms == wanted_gemms
    torch.testing.assert_close(steps, wanted_steps, rtol=0, atol=0)
    torch.testing.assert_close(state, wanted_state, rtol=0, atol=0)
