"""Test that random bits, and what they round, are the same when an update is compiled by Inductor."""

from __future__ import annotations

import torch

from tests.helpers.stochastic_rounding import Training, adamw, gradients


def test_the_compiled_update_has_the_same_bits() -> None:
    """AdamW in bfloat16 with moments in FP8: the last bit of a float32 may decide whether a number is rounded up."""
    eager = Training(adamw, optimizer_state="fp8")
    wanted = eager.run(*gradients(3))
    torch._dynamo.reset()
    compiled = Training(adamw, optimizer_state="fp8", lowering="inductor")
    assert (wanted != compiled.run(*gradients(3))).float().mean() < 1e-3
    for name in ("exp_avg", "exp_avg_sq"):
        a, b = (of.optimizer.state[of.of.w][name].x_q.float() for of in (eager, compiled))
        assert (a != b).float().mean() < 1e-3, name
