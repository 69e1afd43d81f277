"""Test that a call that Dynamo can't compile does not end FP8 for the other calls of the function."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.compiler import retry

pytestmark = pytest.mark.compiled


class Layer(nn.Module):
    """A layer that refuses some batches, and returns others as they are, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: Tensor, how: str = "") -> Tensor:
        if how == "drop":
            return x
        y: Tensor = self.up(x)
        if how == "refuse":
            raise ValueError("a batch that it does not take")
        return y


class Trained:
    """A layer that is compiled and trained."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.layer = Layer()
        self.run = torch.compile(self.layer, backend="fp8pass", options={"lowering": "eager"})

    def step(self, factor: float, how: str = "") -> float:
        """Run a step on inputs of this size; return the amax of the input that the FP8 state has recorded last."""
        try:
            y = self.run(torch.full((16, 32), factor), how)
        except ValueError:
            assert how == "refuse"
        else:
            if y.requires_grad:
                y.sum().backward()
        return float(fp8pass.state(self.layer).state_dict()["up.input.amax"])


@pytest.mark.parametrize("how", ["refuse", "drop"])
def test_one_such_call(how: str) -> None:
    trained = Trained()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [trained.step(2.0), trained.step(3.0), trained.step(9.0, how), trained.step(4.0)] == [2.0, 3.0, 3.0, 4.0]
        trained.step(9.0, how)
        assert trained.step(5.0) == 5.0
    said = [str(w.message) for w in caught if "fp8pass" in str(w.message)]
    assert len(said) == (how == "refuse") and all("a call of forward (test_retry.py:" in text for text in said)


def test_many_such_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is compiled already stays in use."""
    monkeypatch.setattr(retry, "MAX_FAILED_CALLS", 2)
    trained = Trained()
    trained.step(2.0)
    trained.step(9.0, "drop")
    with pytest.warns(UserWarning, match=r"2 calls of forward \(test_retry\.py:\d+\) could not be compiled"):
        trained.step(9.0, "drop")
    assert trained.step(3.0) == 3.0
