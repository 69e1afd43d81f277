"""The quantize_moments pass: which tensors are moments, how they are read and written, and what numbers come of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fp8pass.quant import ops
from tests.helpers.harness import BF16, expect_graph
from tests.helpers.optimizers import Lion
from tests.helpers.quantize_moments import BOTH, kinds, power_of_2, read, stored
from tests.helpers.quantize_moments import module as module


class Momentum(torch.optim.Optimizer):
    """By hand. kind: what it has beside a moment."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.kind = kind
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum": torch.zeros_like(p), "other": p.detach().clone()}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum, other = self.state[p]["momentum"], self.state[p]["other"]
                momentum.lerp_(p.grad, 0.1)
                if self.kind == "average":
                    p.sub_(momentum, alpha=group["lr"])
                    other.lerp_(p, 0.01)
                elif self.kind == "master":
                    other.mul_(1 - 1e-3).sub_(momentum, alpha=group["lr"])
                    p.copy_(other)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "SGD": (lambda p, **k: torch.optim.SGD(p, lr=0.1, **k), {}),
    "SGD momentum": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **k),
        {"momentum_buffer": "first"},
    ),
    "SGD nesterov": (
        lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k),
        {"momentum_buffer": "first"},
    ),
    "Adam": (lambda p, **k: torch.optim.Adam(p, lr=0.1, **k), BOTH),
    "Adam, weight decay": (lambda p, **k: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **k), BOTH),
    "AdamW": (lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k), BOTH),
    "AdamW, lr in a tensor": (lambda p, foreach: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False), BOTH),
    "AdamW maximize": (lambda p, **k: torch.optim.AdamW(p, lr=0.1, maximize=True, **k), BOTH),
    "amsgrad": (
        lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
        {**BOTH, "max_exp_avg_sq": "second"},
    ),
    "NAdam": (lambda p, **k: torch.optim.NAdam(p, lr=0.1, **k), BOTH),
    "Adamax": (lambda p, **k: torch.optim.Adamax(p, lr=0.1, **k), {"exp_avg": "first"}),
    "RMSprop": (lambda p, **k: torch.optim.RMSprop(p, lr=0.1, **k), {"square_avg": "second"}),
    "Adagrad": (lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k), {}),
    "Adafactor": (lambda p, **k: torch.optim.Adafactor(p, lr=0.1, **k), {}),
}


SISTERS = {"SGD nesterov": "SGD momentum", "Adam, weight decay": "Adam", "AdamW maximize": "AdamW"}
"""Variants, and what differs from them by a term of the formula."""


@pytest.mark.parametrize("foreach", [False, True], ids=["each", "foreach"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.variant] * (case in SISTERS)) for case in OPTIMIZERS]
)
def test_what_is_a_moment(case: str, foreach: bool) -> None:
    make, wanted = OPTIMIZERS[case]
    if case == "Adafactor" and foreach and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 itself fails: its lists have no dtype in Dynamo")
    if case == "amsgrad" and foreach:  # a maximum on lists is not looked into
        wanted = BOTH
    assert kinds(lambda p: make(p, foreach=foreach)) == wanted


def test_of_an_optimizer_that_nobody_knows() -> None:
    assert kinds(Lion) == {"momentum": "first"}


@pytest.mark.parametrize("kind", ["average", "master"])
def test_no_moments(kind: str) -> None:
    """Averages of parameters, and their copies in full precision, that an optimizer has beside its moments."""
    assert kinds(lambda p: Momentum(p, kind)) == {"momentum": "first"}


def test_moments_in_bfloat16() -> None:
    """A square root in float16 is as large: only first ones."""
    assert kinds(lambda p: torch.optim.AdamW(p, foreach=True), BF16) == {"exp_avg": "first"}


def test_graph(module: fx.GraphModule) -> None:
    expect_graph(
        module,
        """\
L_p_: "f32[4, 8]",
L_p_grad: "f32[4, 8]",
L_m_: "f32[4, 8]",
L_v_: "f32[4, 8]",
fp8pass_moment_scales,
fp8pass_moment_0,
fp8pass_moment_1,
l_p_ = L_p_
l_p_grad = L_p_grad
l_m_ = L_m_
l_v_ = L_v_
decode_moment = fp8pass_quant_ops_decode_moment('first', fp8pass_moment_0, fp8pass_moment_scales, 0, torch.float32)
decode_moment_1 = fp8pass_quant_ops_decode_moment('second', fp8pass_moment_1, fp8pass_moment_scales, 1, torch.float32)
_set_grad_enabled = torch._C._set_grad_enabled(False)
lerp_: "f32[4, 8]" = decode_moment.lerp_(l_p_grad, 0.1)
mul_: "f32[4, 8]" = decode_moment_1.mul_(0.9)
mul: "f32[4, 8]" = l_p_grad * l_p_grad
mul_1: "f32[4, 8]" = mul * 0.1
add_: "f32[4, 8]" = mul_.add_(mul_1)
sqrt: "f32[4, 8]" = decode_moment_1.sqrt()
truediv: "f32[4, 8]" = decode_moment / sqrt
sub_: "f32[4, 8]" = l_p_.sub_(truediv, alpha = 0.1)
_set_grad_enabled_1 = torch._C._set_grad_enabled(True)
next_moment_scales = fp8pass_quant_ops_next_moment_scales(('first', 'second'), fp8pass_moment_scales, None)
write_moment = fp8pass_quant_ops_write_moment('first', decode_moment, fp8pass_moment_0, next_moment_scales, 0)
write_moment_1 = fp8pass_quant_ops_write_moment('second', decode_moment_1, fp8pass_moment_1, next_moment_scales, 1)
write_moment_scales = fp8pass_quant_ops_write_moment_scales(fp8pass_moment_scales, next_moment_scales, [write_moment, write_moment_1])
return ()
""",
    )


def test_what_is_written(module: fx.GraphModule) -> None:
    """With the scales that the amaxes of what was stored give; the plain moments, which are inputs still, stay."""
    p, grad = torch.randn(4, 8), torch.randn(4, 8)
    m_q, v_q = stored("first", torch.randn(4, 8), 16.0), stored("second", torch.rand(4, 8), 128.0)
    moment_scales = torch.tensor([[1 / 16, 1 / 128], [5.0, 0.75]])
    given = {"L_p_": p.clone(), "L_p_grad": grad, "L_m_": torch.zeros(4, 8), "L_v_": torch.zeros(4, 8)}
    rest = {
        "fp8pass_moment_scales": moment_scales.clone(),
        "fp8pass_moment_0": m_q.clone(),
        "fp8pass_moment_1": v_q.clone(),
    }
    inputs = {**given, **rest}
    module(*(inputs[str(n.target)] for n in module.graph.nodes if n.op == "placeholder"))
    m = read("first", m_q, 16.0) * 0.9 + grad.double() * 0.1
    v = read("second", v_q, 128.0) * 0.9 + grad.double().square() * 0.1
    torch.testing.assert_close(inputs["L_p_"].double(), p - 0.1 * m / v.sqrt(), rtol=1e-5, atol=1e-6)
    assert not inputs["L_m_"].any() and not inputs["L_v_"].any()
    scales = power_of_2(224, 5.0), power_of_2(256, 0.75)
    assert scales == (32.0, 256.0)
    for kind, x, scale, x_q in (
        ("first", m, scales[0], rest["fp8pass_moment_0"]),
        ("second", v, scales[1], rest["fp8pass_moment_1"]),
    ):
        wanted = stored(kind, x, scale).float()
        assert (x_q.float() - wanted).abs().max() <= wanted.abs().max() * 2**-10, "up to float32's last bit"
    got = rest["fp8pass_moment_scales"]
    assert got[0].tolist() == [1 / 32, 1 / 256]
    amaxes = [rest[f"fp8pass_moment_{i}"].float().abs().max() * got[0, i] for i in range(2)]
    assert torch.equal(got[1], torch.stack(amaxes))


def test_scales_of_a_step_that_is_skipped() -> None:
    moment_scales = torch.tensor([[0.5, 0.25], [100.0, 1e-3]])
    assert ops.next_moment_scales(("first", "second"), moment_scales, torch.tensor(True)).tolist() == [2.0, 4.0]
    assert ops.next_moment_scales(("first", "second"), moment_scales, torch.tensor(False)).tolist() == [2.0, 131072.0]


@pytest.mark.parametrize("amax", [0.0, math.nan, math.inf])
def test_scales_stay_where_the_amax_says_nothing(amax: float) -> None:
    moment_scales = torch.tensor([[0.5], [amax]])
    assert ops.next_moment_scales(("first",), moment_scales, None).tolist() == [2.0]
