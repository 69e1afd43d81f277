"""The smooth_swiglu pass: scales of channels move from a gated activation into the weight, and change no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.base.scaling import channel_scales
from fp8pass.options.config import Config
from fp8pass.passes.dynamo.smooth_swiglu import SmoothSwiglu
from tests.helpers.harness import annotated, compiled, expect_graph, on_dynamos_graph, sqnr, train, verdicts

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


@pytest.mark.passes
@pytest.mark.parametrize("name", GATED)
def test_not_a_bit_differs(name: str) -> None:
    _, applied, ours = after(GATED[name])
    assert applied == [1, 0]
    inputs = leaves()
    y = GATED[name](*inputs)
    for got, expected in zip(ours, [y, *torch.autograd.grad(y.sin().sum(), inputs)], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.passes
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_left_alone(name: str) -> None:
    assert after(OTHERS[name])[1] == [0, 0]


@pytest.mark.passes
@pytest.mark.parametrize(
    "options",
    [{}, {"smooth_swiglu": ["nothing"]}, {"smooth_swiglu": True, "filter": ["*"]}],
    ids=["off", "name", "out"],
)
def test_layers_that_are_not_selected_or_not_in_fp8_are_left_alone(options: dict[str, Any]) -> None:
    assert after(GATED["silu"], Config(**options))[1] == [0, 0]


@pytest.mark.passes
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


@pytest.mark.passes
def test_scales_are_powers_of_two_and_finite() -> None:
    """A channel of zeros, or with an infinity or a NaN, keeps its numbers; none overflows."""
    x = torch.tensor([[0.0, 3.0, -0.3, math.inf, math.nan, 1e38, 1e-38], [0.0, 1.0, 0.1, 1.0, 1.0, 1.0, 0.0]])
    expected = [1.0, 2.0, 0.25, 1.0, 1.0, 2.0**60, 2.0**-60]
    assert channel_scales(x).tolist() == expected
    assert channel_scales(x.to(torch.bfloat16)).dtype == torch.float32
    assert channel_scales(torch.full((2, 1), 6e4, dtype=torch.float16)).tolist() == [2.0**10]
    assert channel_scales(x[:0]).tolist() == [1.0] * 7


class Layer(nn.Module):
    """A SwiGLU layer whose gate and up are aligned in channel 0, so that it is quadratic in the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            self.gate.weight[0] = self.up.weight[0] = 1 / 32**0.5

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, 32]."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def batches() -> list[Tensor]:
    """Return two usual batches, and one with tokens along the aligned weights, whose elements are no larger."""
    torch.manual_seed(1)
    usual = [torch.randn(48, 32) for _ in range(3)]
    usual[2][:8] = 3.0
    return usual


@pytest.mark.compiled
@pytest.mark.parametrize("smooth", [True, False])
def test_an_outlier_saturates_without_it(smooth: bool) -> None:
    """The last batch comes after two with small amaxes: gradients and output are good with it, and bad without."""
    model, exact = Layer(), Layer()
    ours = list(train(model, annotated(model, smooth_swiglu=smooth), batches(), rate=0.0))
    wanted = list(train(exact, exact, batches(), rate=0.0))
    assert sqnr(wanted[1]["output"], ours[1]["output"]) > 20
    error = sqnr(wanted[2]["output"], ours[2]["output"])
    assert error > 20 if smooth else error < 8


@pytest.mark.compiled
def test_compiled_layers_are_the_annotated_ones() -> None:
    ours, reference = Layer(), Layer()
    with verdicts() as report:
        steps = list(train(ours, compiled(ours, smooth_swiglu=["down"], strict=True), batches()))
    for step, expected in zip(
        steps, train(reference, annotated(reference, smooth_swiglu=True), batches()), strict=True
    ):
        assert min(sqnr(expected[name], step[name]) for name in step) > 60
    assert len(report.rewritten) == 9 and not report.declined
    assert {g.note for g in report.gemms if (g.name, g.kind) == ("down", "output")} == {
        "smooth_swiglu scales its weight by channels of the input: it is quantized in each forward"
    }
    assert "down.weight" not in fp8pass.state(ours).slots and "down.input" in fp8pass.state(ours).slots


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("dynamic", marks=pytest.mark.variant)])
def test_other_recipes(recipe: str) -> None:
    model, x = Layer(), batches()[2]
    assert sqnr(model(x), annotated(model, recipe=recipe, smooth_swiglu=True)(x)) > 20


@pytest.mark.compiled
@pytest.mark.variant
def test_a_whole_step_keeps_no_copy_of_the_weight() -> None:
    model = Layer()

    @fp8pass.train_step(smooth_swiglu=True, lowering="eager")
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = [float(step(model, optimizer, x)) for x in batches() * 2]
    assert found[3] < found[0] and found[5] < found[2]
    assert len(step.report.rewritten) == 9


@pytest.mark.compiled
def test_a_pattern_without_a_match_is_an_error() -> None:
    with pytest.raises(Exception, match=r"smooth_swiglu: 'dwn' matches no module or matmul of Layer; .*'down'"):
        compiled(Layer(), smooth_swiglu=["dwn"])(batches()[0])
