"""The insert_monitors pass: its graph, and its counts against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass.base.node_meta import Quantized
from fp8pass.graph.annotation import Annotation
from fp8pass.quant import monitor_ops
from fp8pass.quant.monitor_ops import WatchTable
from fp8pass.weights.monitor_inputs import MonitorInput
from tests.helpers import oracle
from tests.helpers.annotate import annotation
from tests.helpers.harness import expect_graph

E5M2 = "e5m2"


pytestmark = [
    pytest.mark.filterwarnings("ignore:fp8pass. (blockwise|mxfp8) kernels exist"),
    pytest.mark.shares_code,
]


@pytest.mark.parametrize("fmt", ["e4m3", E5M2])
def test_against_float64(fmt: str) -> None:
    """Count small and large elements, zeros of both signs, NaN, infinities, and numbers that almost overflow."""
    dtype = torch.float8_e4m3fn if fmt == "e4m3" else torch.float8_e5m2
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator) * torch.exp2(torch.randint(-20, 12, (64, 1), generator=generator))
    top = oracle.MAX[fmt]
    x[0, :8] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, top / 2, top / 2 * 1.03, top])
    scale = 2.0
    x_q = fp8pass.quantize(x, scale, dtype)
    found = monitor_ops.Numerics(*monitor_ops.numerics_of(x, torch.tensor(scale), x_q).tolist())
    finite = x.double()[torch.isfinite(x)]
    q = oracle.round_to(finite * scale, fmt)
    assert math.isnan(found.amax) and found.scale_inv == 0.5
    assert found.elements == x.numel() and found.nonfinite == 3
    assert found.nonzero == (x != 0).sum()
    assert found.underflowed == ((finite != 0) & (q == 0)).sum() > 0
    step = 2.0 ** (math.floor(math.log2(top)) - oracle.MANTISSA[fmt])
    assert found.saturated == (finite.abs() * scale > top + step / 2).sum() > 0
    assert found.signal == pytest.approx((finite * scale).square().sum().item(), rel=1e-5)
    assert found.noise == pytest.approx((q - finite * scale).square().sum().item(), rel=1e-5)
    assert kurtosis_of(found) == pytest.approx(exact_kurtosis(finite), rel=1e-5)


def kurtosis_of(found: monitor_ops.Numerics) -> float:
    return float((found.elements - found.nonfinite) * found.fourth / found.square**2)


def exact_kurtosis(x: torch.Tensor) -> float:
    x = x.double()
    return float(x.numel() * x.pow(4).sum() / x.square().sum() ** 2)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30])
@pytest.mark.parametrize("scales", ["one", "rows"])
@pytest.mark.parametrize("stale", [1e-3, 1.0, 1e6])
def test_kurtosis_of_any_size(size: float, scales: str, stale: float) -> None:
    """x**4 would overflow or vanish in float32. stale: how far the scale is from that of the tensor's own amax."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * size
    x[3, 5], x[7] = 50 * size, 0.0
    amax = x.abs().amax(-1, keepdim=True) if scales == "rows" else x.abs().amax()
    scale = torch.where(amax > 0, 448 / amax * stale, 1.0)
    found = monitor_ops.Numerics(*monitor_ops.numerics_of(x, scale, fp8pass.quantize(x, scale, torch.float8_e4m3fn)))
    assert kurtosis_of(found) == pytest.approx(exact_kurtosis(x), rel=1e-5)
    assert exact_kurtosis(x) > 500


def test_kurtosis_of_several_uses() -> None:
    """Uses with different scales have different units. The first record is merged into zeros."""
    found, parts = torch.zeros(monitor_ops.N), []
    for i, (size, scale) in enumerate(((1.0, 100.0), (30.0, 2.0), (0.0, 7.0), (1e-3, 1e5))):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) * size
        parts.append(x)
        new = monitor_ops.numerics_of(x, torch.tensor(scale), fp8pass.quantize(x, scale, torch.float8_e4m3fn))
        found = monitor_ops.merge(found, new)
    numerics = monitor_ops.Numerics(*found.tolist())
    assert numerics.elements == 4 * 256 and numerics.scale_inv == 0.5
    assert kurtosis_of(numerics) == pytest.approx(exact_kurtosis(torch.cat(parts)), rel=1e-5)


def test_graph() -> None:
    def of(**options: Any) -> Annotation:
        return annotation(nn.Linear(32, 64, bias=False), torch.randn(16, 32), recipe="dynamic", **options)

    off = str(of().module.graph)
    assert "numerics" not in off and str(of(monitor="nothing").module.graph) == off
    watched = of(monitor=True, monitor_steps=7)
    expect_graph(
        watched.module,
        """\
L_fn_parameters_weight_: "f32[64, 32]",
L_args_0_: "f32[16, 32]",
fp8pass_numerics_forward,
fp8pass_numerics_backward,
l_fn_parameters_weight_ = L_fn_parameters_weight_
l_args_0_ = L_args_0_
watch_operand = fp8pass_quant_monitor_ops_watch_operand(l_args_0_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn), fp8pass_numerics_forward, 0)
qdq_operand: "f32[16, 32]" = fp8pass_quant_ops_qdq_operand(l_args_0_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn))
watch_operand_1 = fp8pass_quant_monitor_ops_watch_operand(l_fn_parameters_weight_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn), fp8pass_numerics_forward, 1)
qdq_operand_1: "f32[64, 32]" = fp8pass_quant_ops_qdq_operand(l_fn_parameters_weight_, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e4m3fn))
linear_1: "f32[16, 64]" = torch._C._nn.linear(qdq_operand, qdq_operand_1, None)
qdq_gradient: "f32[16, 64]" = fp8pass_quant_ops_qdq_gradient(linear_1, Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e5m2))
watch_gradient: "f32[16, 64]" = fp8pass_quant_monitor_ops_watch_gradient(qdq_gradient, (Dynamic(recipe=DynamicScaling(), dtype=torch.float8_e5m2),), fp8pass_numerics_backward, (0,))
return (watch_gradient,)
""",
    )
    names = [Quantized(f"weight.{role}", role, "") for role in ("input", "weight", "grad_output")]
    assert [i.table for i in watched.inputs if isinstance(i, MonitorInput)] == 2 * [
        WatchTable(tuple(names), 2, torch.device("cpu"), 7)
    ]
