"""Test the annotate pass in a compiled model: its numbers against the float64 oracle, and torch's attention module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fp8pass.recipes import DelayedScaling, DynamicScaling
from tests.helpers import oracle
from tests.helpers.annotate import annotation
from tests.helpers.harness import annotated, sqnr


@pytest.mark.parametrize("recipe", ["dynamic", "delayed"])
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_a_linear_layer_against_the_float64_oracle(recipe: str, fp8_format: str) -> None:
    """Every scale of a first step is that of the tensor's own amax: the oracle quantizes by these, in float64."""
    layer = nn.Linear(32, 48)
    x, g = torch.randn(16, 32, requires_grad=True), torch.randn(16, 48) * 1e-6
    kind = {"dynamic": DynamicScaling, "delayed": DelayedScaling}[recipe]
    y = annotated(layer, recipe=kind(fp8_format=fp8_format))(x)
    y.backward(g)

    def own(t: Tensor, fmt: str) -> Tensor:
        t = t.detach()
        return oracle.qdq(t, oracle.scale_of(float(t.abs().max()), fmt), fmt)

    gradients = "e5m2" if fp8_format == "hybrid" else "e4m3"
    xq, wq, gq = own(x, "e4m3"), own(layer.weight, "e4m3"), own(g, gradients)
    assert x.grad is not None
    for actual, expected in (
        (y, xq @ wq.t() + layer.bias.double()),
        (x.grad, gq @ wq),
        (layer.weight.grad, gq.t() @ xq),
        (layer.bias.grad, g.double().sum(0)),  # made from the unquantized gradient
    ):
        assert sqnr(expected, actual) > 110


def test_multi_head_attention_is_opened() -> None:
    attention = nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 8, 32)
    a = annotation(lambda x: attention(x, x, x)[0], x)
    assert [c.reason for c in a.choices] == [""] * 4
    assert {"in_proj_weight", "out_proj"} <= {c.name for c in a.choices}
    actual, expected = annotated(lambda x: attention(x, x, x)[0])(x), attention(x, x, x)[0]
    assert sqnr(expected, actual) > 22
