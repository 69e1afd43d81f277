"""The smooth_swiglu pass: scales of channels move from a gated activation into the weight, and change no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass.base.scaling import channel_scales
from fp8pass.options.config import Config
from fp8pass.passes.dynamo.smooth_swiglu import SmoothSwiglu
from tests.helpers.harness import expect_graph, on_dynamos_graph

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

GATED: dict[str, Function] = {
    "silu": lambda a, b, w: F.linear(F.silu(a) * b, w),
    "gelu, second": lambda a, b, w: F.linear(b * F.gelu(a, approximate="tanh"), w),
    "x * sigmoid(x)": lambda a, b, w: F.linear(a * torch.sigmoid(a) * b, w),
    "dropout": lambda a, b, w: F.linear(F.dropout(torch.mul(F.silu(a), b), 0.0), w),
}
OTHERS: dict[str, Function] = {
    "no gate": lambda a, b, w: F.linear(F.silu(a), w) + b.sum(),
    "no activation": lambda a, b, w: F.linear(a * b, w),
    "a number": lambda a, b, w: F.linear(F.silu(a) * 2, w) + b.sum(),
    "one for each row": lambda a, b, w: F.linear(F.silu(a) * b[..., :1], w),
}


def after(function: Function, config: Config | None = None) -> tuple[fx.GraphModule, list[int], list[Tensor]]:
    """Compile; return the graph, how often the pass was applied twice, and the result with all gradients."""
    found: list[Any] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        config_ = config or Config(smooth_swiglu=True)
        found[:] = on_dynamos_graph(module, SmoothSwiglu(), SmoothSwiglu(), config=config_)
        run: Callable[..., Any] = found[0].forward
        return run

    torch._dynamo.reset()
    inputs = leaves()
    y = torch.compile(function, backend=backend)(*inputs)
    return (*found, [y, *torch.autograd.grad(y.sin().sum(), inputs)])  # type: ignore[return-value]


def leaves() -> list[Tensor]:
    """Return gate and up, of channels with magnitudes from 0 to 1e6, and a weight."""
    torch.manual_seed(0)
    size = torch.tensor([0.0, 1e-6, 1.0, 1e6]).repeat(8)
    a, b, w = torch.randn(2, 16, 32), torch.randn(2, 16, 32) * size, torch.randn(24, 32) / (1 + size)
    return [t.requires_grad_() for t in (a, b, w)]


@pytest.mark.parametrize("name", GATED)
def test_not_a_bit_differs(name: str) -> None:
    _, applied, ours = after(GATED[name])
    assert applied == [1, 0]
    inputs = leaves()
    y = GATED[name](*inputs)
    for got, expected in zip(ours, [y, *torch.autograd.grad(y.sin().sum(), inputs)], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_left_alone(name: str) -> None:
    assert after(OTHERS[name])[1] == [0, 0]


@pytest.mark.parametrize(
    "options",
    [{}, {"smooth_swiglu": ["nothing"]}, {"smooth_swiglu": True, "filter": ["*"]}],
    ids=["off", "name", "out"],
)
def test_layers_that_are_not_selected_or_not_in_fp8_are_left_alone(options: dict[str, Any]) -> None:
    assert after(GATED["silu"], Config(**options))[1] == [0, 0]


def test_the_graph() -> None:
    module, *_ = after(GATED["silu"])
    expect_graph(
        module,
        """\
L_a_: "f32[2, 16, 32]",
L_b_: "f32[2, 16, 32]",
L_w_: "f32[24, 32]",
l_a_ = L_a_
l_b_ = L_b_
l_w_ = L_w_
silu: "f32[2, 16, 32]" = torch.nn.functional.silu(l_a_)
mul: "f32[2, 16, 32]" = silu * l_b_
channel_scales: "f32[32]" = fp8pass_base_scaling_channel_scales(mul)
reciprocal: "f32[32]" = torch.reciprocal(channel_scales)
to: "f32[32]" = torch_Tensor_to(reciprocal, torch.float32)
mul_1: "f32[2, 16, 32]" = mul * to
to_1: "f32[32]" = torch_Tensor_to(channel_scales, torch.float32)
mul_2: "f32[24, 32]" = l_w_ * to_1
linear: "f32[2, 16, 24]" = torch._C._nn.linear(mul_1, mul_2)
return (linear,)
""",
    )


def test_scales_are_powers_of_two_and_finite() -> None:
    """A channel of zeros, or with an infinity or a NaN, keeps its numbers; none overflows."""
    x = torch.tensor([[0.0, 3.0, -0.3, math.inf, math.nan, 1e38, 1e-38], [0.0, 1.0, 0.1, 1.0, 1.0, 1.0, 0.0]])
    expected = [1.0, 2.0, 0.25, 1.0, 1.0, 2.0**60, 2.0**-60]
    assert channel_scales(x).tolist() == expected
    assert channel_scales(x.to(torch.bfloat16)).dtype == torch.float32
    assert channel_scales(torch.full((2, 1), 6e4, dtype=torch.float16)).tolist() == [2.0**10]
    assert channel_scales(x[:0]).tolist() == [1.0] * 7
