"""`fp8pass.explain` of a function that AOTAutograd or Inductor can't compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.base._torch import inductor_lowering


@pytest.mark.parametrize("kernels", [False, True])
def test_a_model_that_can_not_be_compiled(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd fails on a user's autograd function; with kernels, Inductor fails on an op that it has to lower."""
    if kernels:
        broken = inductor_lowering.lowerings.copy()

        def lower(*_: Any) -> Any:
            raise NotImplementedError("no such lowering")

        broken[torch.ops.aten.erf.default] = lower
        monkeypatch.setattr(inductor_lowering, "lowerings", broken)
        monkeypatch.setattr("torch._inductor.graph.lowerings", broken)

    class OnlyForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g[:, :3]

    layer, second = nn.Linear(32, 32), nn.Linear(32, 32)

    def function(x: Tensor) -> Tensor:
        x = layer(x)
        torch._dynamo.graph_break()
        if kernels:
            return torch.erf(second(x))
        y: Tensor = OnlyForward.apply(second(x))
        return y

    with pytest.raises(fp8pass.Fp8Error, match="Before the error: ") as failed:
        fp8pass.explain(function, torch.randn(16, 32), kernels=kernels)
    report = failed.value.report
    assert report is not None and failed.value.__cause__ is not None
    assert len(report.rewritten) >= 2
    assert ("no such lowering" in report.error) == kernels
    assert report.to_dict()["error"] == report.error
