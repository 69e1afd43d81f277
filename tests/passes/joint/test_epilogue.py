"""Epilogues: ops after a matmul that are folded into its kernel, beyond the cases of XLA's rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass.compiler import order
from fp8pass.hardware import output_saturates
from fp8pass.options.config import Config
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from tests.helpers.harness import (
    BF16,
    E4M3,
    E5M2,
    F32,
    apply,
    aten,
    capture,
    check_legal_on_cuda,
    compiled,
    detect,
    dq,
    fp8,
    scale,
    sqnr,
    verdicts,
)

BIASES: dict[str, tuple[torch.dtype, tuple[int, ...], dict[str, Any], bool]] = {
    "vector": (BF16, (48,), {}, True),
    "vector, unaligned": (BF16, (40,), {}, True),
    "float16 vector": (torch.float16, (48,), {}, True),
    "float32 vector": (F32, (48,), {}, False),  # no kernel takes a float32 bias
    "matrix": (BF16, (32, 48), {}, False),
    "column": (BF16, (32, 1), {}, False),
    "alpha and beta": (BF16, (48,), {"alpha": 2, "beta": 0.5}, False),
    "beta 0": (BF16, (48,), {"beta": 0}, False),
}


@pytest.mark.passes
@pytest.mark.parametrize("case", BIASES)
def test_addmm(case: str) -> None:
    dtype, shape, factors, in_kernel = BIASES[case]
    bias = torch.randn(shape).to(dtype)
    if factors.get("beta") == 0:
        bias.fill_(float("nan"))
    n = 40 if "unaligned" in case else 48

    def product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(bias, dq(a, 0.5, dtype), dq(b, 0.25, dtype), **factors)

    inputs = bias, fp8(32, 64), fp8(64, n)
    module, _ = detect(product, *inputs)
    (call,) = (node for node in module.graph.nodes if node.target is aten._scaled_mm.default)
    assert (call.args[4] is not None) == in_kernel
    check_legal_on_cuda(module.graph)
    assert sqnr(product(*inputs), module(*inputs)) > {F32: 120, BF16: 48, torch.float16: 60}[dtype]


@pytest.mark.passes
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (y := dq(a, 0.5, BF16) @ dq(b, 0.25, BF16)) + y,  # the product is a row, the shape of a bias
        lambda a, b: (y := dq(a, 0.5) @ dq(b, 0.25)) * y.sum(),
        lambda a, b: (y := dq(a, 0.5) @ dq(b, 0.25)) / y.abs().amax(),
    ],
)
def test_a_product_is_never_folded_into_itself(function: Callable[..., Tensor]) -> None:
    inputs = fp8(1, 64), fp8(64, 48)
    module, (gemm,) = detect(function, *inputs)
    assert gemm.status == "rewritten"
    assert check_legal_on_cuda(module.graph) == 1
    assert sqnr(function(*inputs), module(*inputs)) > 40


@pytest.mark.passes
def test_one_number_is_not_its_own_scale() -> None:
    """The graph is captured for CUDA, because on CPUs Inductor decomposes this matmul."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        y = dq(a, 0.5) @ dq(b, 0.25)
        return y * y

    module = capture(function, fp8(1, 64), fp8(64, 1), device="cuda")
    (gemm,) = apply(module, ListMatmuls(), ScaledMM(), config=Config(recipe=None, target="h100"))
    assert gemm.status == "rewritten"
    assert [n.target for n in module.graph.nodes][-2:] == [aten.mul.Tensor, "output"]


@pytest.mark.passes
@pytest.mark.parametrize(
    ("bias", "folded"),
    [
        (lambda v: v, True),
        (lambda v: v[:48], True),
        (lambda v: v[8:56], True),  # begins at a multiple of 16 bytes
        (lambda v: v[3:51], False),
        (lambda v: v[::2], False),
        (lambda v: v[:1].expand(48), False),
    ],
)
def test_a_bias_is_folded_if_kernels_can_read_it(bias: Callable[[Tensor], Tensor], folded: bool) -> None:
    def function(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        v = bias(v)
        return dq(a, 0.5, BF16) @ dq(b, 0.25, BF16)[:, : v.shape[0]] + v

    inputs = fp8(32, 64), fp8(64, 96), torch.randn(96, dtype=BF16)
    module, _ = detect(function, *inputs)
    (call,) = (node for node in module.graph.nodes if node.target is aten._scaled_mm.default)
    assert (call.args[4] is not None) == folded
    assert sqnr(function(*inputs), module(*inputs)) > 45


@pytest.mark.passes
@pytest.mark.parametrize("part", [lambda p: p[::2], lambda p: p[3:51], lambda p: p[:1].expand(48)])
def test_a_widened_bias_is_folded_only_if_kernels_can_read_the_narrow_one(part: Callable[[Tensor], Tensor]) -> None:
    def function(a: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        y = dq(a, 0.5) @ dq(b, 0.25) + part(p).float()
        return y.bfloat16(), F.linear(dq(a, 0.5), dq(b.t(), 0.25), part(p).float()).clamp(-448, 448).to(E4M3)

    inputs = fp8(32, 64), fp8(64, 48), torch.randn(96, dtype=BF16)
    module, gemms = detect(function, *inputs)
    calls = [node for node in module.graph.nodes if node.target is aten._scaled_mm.default]
    assert [call.args[4] for call in calls] == [None, None]
    assert gemms[1].note
    assert sqnr(function(*inputs)[0], module(*inputs)[0]) > 45


@pytest.mark.passes
def test_one_layer_hands_float8_to_the_next() -> None:
    """On CUDA the second matmul reads what the first kernel wrote, and nothing runs in between."""

    def function(x: Tensor, up: Tensor, down: Tensor, s: Tensor) -> Tensor:
        hidden = dq(x, 0.5, BF16) @ dq(up, 0.25, BF16).t()
        hidden_q = (hidden.float() * s).clamp(-448, 448).to(E4M3)
        return (hidden_q.to(BF16) / s) @ dq(down, 0.25, BF16).t()

    inputs = fp8(32, 64), fp8(96, 64), fp8(48, 96), scale(0.5)
    module = capture(function, *inputs, device="cuda")
    gemms = apply(module, ListMatmuls(), ScaledMM(), config=Config(recipe=None, target="h100"))
    assert [g.dtypes[2] for g in gemms] == ["e4m3", "bf16"]
    first, second = (node for node in module.graph.nodes if node.target is aten._scaled_mm.default)
    assert second.args[0] is first
    module, gemms = detect(function, *inputs)
    assert (gemms[0].dtypes[2] == "e4m3") == output_saturates(torch.device("cpu"), E4M3)
    assert sqnr(function(*inputs), module(*inputs)) > 35


@pytest.mark.passes
def test_a_cast_that_cpu_kernels_do_not_saturate_stays_outside() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return (dq(a, 0.5) @ dq(b, 0.25)).clamp(-57344, 57344).to(E5M2)

    _, (gemm,) = detect(function, fp8(32, 64, dtype=E5M2), fp8(64, 48))
    assert re.search(r"after the kernel: the cpu kernel of torch \S+ does not saturate float8_e5m2$", gemm.note)


@pytest.mark.compiled
@pytest.mark.parametrize("limit", [448.0, 400.0])
def test_bounds_that_are_tensors(limit: float) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        high, low = torch.tensor(limit), torch.tensor(-limit)
        return torch.maximum(torch.minimum(dq(a, 0.5) @ dq(b, 0.25), high), low).to(E4M3)

    with verdicts() as report:
        compiled(function, recipe=None)(fp8(32, 64), fp8(64, 48))
    (gemm,) = report.gemms
    saturates = output_saturates(torch.device("cpu"), E4M3)
    assert (gemm.dtypes[2] == "e4m3") == (limit == 448 and saturates)
    assert ("is clamped to [-400, 400]" in gemm.note) == (limit == 400)


@pytest.mark.compiled
def test_the_bias_of_an_annotated_layer_goes_into_the_kernel() -> None:
    model, x = nn.Linear(64, 48, dtype=BF16), torch.randn(32, 64, dtype=BF16)
    calls: list[Any] = []

    class Looking(ScaledMM):
        def run(self, graph: Any, context: Any) -> int:
            applied = super().run(graph, context)
            calls.extend(n.args for n in graph.nodes if n.target is aten._scaled_mm.default)
            return applied

    joint = tuple(Looking() if p.name == Looking.name else p for p in order.JOINT)
    with mock.patch.object(order, "JOINT", joint), torch.no_grad():
        compiled(model, recipe="dynamic")(x)
    (args,) = calls
    assert args[4] is not None
