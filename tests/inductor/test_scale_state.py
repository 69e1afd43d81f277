"""`in_qdq`, `out_qdq` and `ScaleState`: a step's numbers eagerly and under every backend, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.scale_state import EVERY_DAY, HOW, Product

pytestmark = pytest.mark.shares_code


@pytest.mark.parametrize("how", [*HOW[:-1], EVERY_DAY[-1]], ids=lambda f: f.__name__)
def test_the_numbers_that_a_step_uses(how: Callable[..., Any]) -> None:
    """Step k uses scales from the amaxes before k, forward and backward, as the oracle in float64 does."""
    model = Product(amax_history_len=4)
    run = how(model)
    slots = oracle.Slot("e4m3", 4), oracle.Slot("e5m2", 4)
    for amax in [1.0, 4.0, 0.01, 0.01, 0.01, 0.01, 0.01, 3.0]:
        x, gradient = ((torch.rand(16, 16) * 2 - 1) * amax for _ in range(2))
        x.requires_grad_()
        y = run(x)
        y.backward(gradient)
        (of_x,), (of_gradient,) = (
            s.step([float(t.detach().abs().max())]) for s, t in zip(slots, (x, gradient), strict=True)
        )
        x_, gradient_ = oracle.qdq(x.detach(), of_x, "e4m3"), oracle.qdq(gradient, of_gradient, "e5m2")
        torch.testing.assert_close(y.double(), x_, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(x.grad.double(), gradient_, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(model.weight.grad.double(), x_.T @ gradient_, rtol=1e-5, atol=1e-6)
        model.weight.grad = None
