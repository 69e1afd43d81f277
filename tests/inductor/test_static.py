"""Calibrated static scales, compiled op by op and by Inductor, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.recipes import StaticScaling
from fp8pass.weights.prequantized import PrequantizedInput
from tests.helpers import oracle
from tests.helpers.harness import compiled, sqnr
from tests.helpers.static import data, graph_of

LOWERINGS = ["eager", "inductor"]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_output_against_the_float64_oracle(lowering: str) -> None:
    model, (x,) = nn.Linear(32, 48), data(1, 16, 32)
    scales = fp8pass.calibrate(model, [x])
    run = compiled(model, recipe=StaticScaling(scales), lowering=lowering, strict=True)
    if lowering == "inductor":  # static scales need no amax
        with torch.no_grad():
            code = "".join(torch._inductor.utils.run_and_get_code(run, x)[1])
        assert "amax" not in code and "float8_e4m3fn" in code
    for factor in (1.0, 0.25, 3.0):  # with a factor of 3, the input exceeds the calibrated range and saturates
        with torch.no_grad():
            y = run(x * factor)
        x_ = oracle.qdq(x * factor, float(scales["weight.input"]), "e4m3")
        w_ = oracle.qdq(model.weight, float(scales["weight.weight"]), "e4m3")
        torch.testing.assert_close(y.double(), x_ @ w_.t() + model.bias.double(), rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_summed_over_its_first_dimension() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 48))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model, (x,) = Product(), data(1, 16, 32)
    scales = fp8pass.calibrate(model, [x])
    a = graph_of(model, x, scales)
    assert [f.by_columns for f in a.inputs if isinstance(f, PrequantizedInput)] == [True]
    for lowering in LOWERINGS:
        with torch.no_grad():
            assert sqnr(model(x), compiled(model, recipe=StaticScaling(scales), lowering=lowering)(x)) > 27
