"""Test ops after a matmul that become part of its kernel, beyond the cases of XLA's rules."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fp8pass.compiler import order
from fp8pass.hardware import output_saturates
from fp8pass.passes.joint.scaled_mm import ScaledMM
from tests.helpers.harness import (
    BF16,
    E4M3,
    aten,
    compiled,
    dq,
    fp8,
    verdicts,
)


@pytest.mark.parametrize("limit", [448.0, 400.0])
def test_bounds_that_are_tensors(limit: float) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        high, low = torch.tensor(limit), torch.tensor(-limit)
        return torch.maximum(torch.minimum(dq(a, 0.5) @ dq(b, 0.25), high), low).to(E4M3)

    with verdicts() as report:
        compiled(function, recipe=None)(fp8(32, 64), fp8(64, 48))
    (gemm,) = report.gemms
    saturates = output_saturates(torch.device("cpu"), E4M3)
    assert (gemm.dtypes[2] == "e4m3") == (limit == 448 and saturates)
    assert ("is clamped to [-400, 400]" in gemm.note) == (limit == 400)


def test_the_bias_of_an_annotated_layer_goes_into_the_kernel() -> None:
    model, x = nn.Linear(64, 48, dtype=BF16), torch.randn(32, 64, dtype=BF16)
    calls: list[Any] = []

    class Looking(ScaledMM):
        def run(self, graph: Any, context: Any) -> int:
            applied = super().run(graph, context)
            calls.extend(n.args for n in graph.nodes if n.target is aten._scaled_mm.default)
            return applied

    joint = tuple(Looking() if p.name == Looking.name else p for p in order.JOINT)
    with mock.patch.object(order, "JOINT", joint), torch.no_grad():
        compiled(model, recipe="dynamic")(x)
    (args,) = calls
    assert args[4] is not None
