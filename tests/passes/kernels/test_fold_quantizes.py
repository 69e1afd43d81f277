"""The fold_quantizes pass: the steps of quantizing become one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.graph.builder import laid_out_alike
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.quant.kernel_ops import QUANTIZE
from tests.helpers.harness import BF16, E4M3, E5M2, F16, F32, capture, count, expect_graph, on_kernels, scale, text

pytestmark = pytest.mark.passes


def test_graph() -> None:
    module = capture(lambda x, s: scaling.quantize(x, s, E4M3), torch.randn(4, 8, dtype=BF16), scale())
    expect_graph(
        module,
        """\
x_1: "bf16[4, 8]",
s_1: "f32[]",
convert_element_type: "f32[4, 8]" = prims.convert_element_type.default(x_1, torch.float32)
mul: "f32[4, 8]" = aten.mul.Tensor(convert_element_type, s_1)
clamp_min: "f32[4, 8]" = aten.clamp_min.default(mul, -448.0)
clamp_max: "f32[4, 8]" = aten.clamp_max.default(clamp_min, 448.0)
convert_element_type_1: "f8e4m3fn[4, 8]" = prims.convert_element_type.default(clamp_max, torch.float8_e4m3fn)
return convert_element_type_1
""",
    )
    on_kernels(module, FoldQuantizes())
    expect_graph(
        module,
        """\
x_1: "bf16[4, 8]",
s_1: "f32[]",
quantize_default: "f8e4m3fn[4, 8]" = fp8pass.quantize.default(x_1, s_1, torch.float8_e4m3fn)
return quantize_default
""",
    )


INPUTS: dict[str, tuple[Tensor, Tensor]] = {
    "bfloat16": (torch.randn(4, 8, dtype=BF16), scale()),
    "float16": (torch.randn(4, 8, dtype=F16), scale()),
    "float32": (torch.randn(4, 8), scale()),
    "a number for each row": (torch.randn(4, 8), torch.rand(4, 1)),
    "blocks": (torch.randn(2, 2, 4, dtype=BF16), torch.rand(2, 1, 4)),
    "transposed": (torch.randn(8, 4).t(), scale()),
    "a dimension of one element, cut out": (torch.randn(2, 4, 2, 32, 16).transpose(1, 2)[:, :-1], scale()),
    "nan, infinite, out of range, zero": (torch.tensor([float("nan"), float("inf"), -float("inf"), 1e9, -0.0]), scale()),
    "an infinite scale": (torch.tensor([1.0, 0.0, -2.0]), torch.tensor(float("inf"))),
    "nothing": (torch.randn(0, 8), scale()),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("case", INPUTS)
def test_same_bits(case: str, dtype: torch.dtype) -> None:
    inputs = INPUTS[case]
    module = capture(lambda x, s: scaling.quantize(x, s, dtype), *inputs)
    wanted = module(*inputs)
    on_kernels(module, FoldQuantizes())
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [QUANTIZE]
    got = module(*inputs)
    assert got.dtype == wanted.dtype and laid_out_alike(got, wanted)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    before = text(module)
    on_kernels(module, FoldQuantizes())
    assert text(module) == before, "a second run finds something"


def test_the_cast_to_float32_may_have_other_readers() -> None:
    def function(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        return scaling.quantize(wide, s, E4M3), wide.exp()

    x = torch.randn(4, 8, dtype=BF16)
    module = capture(function, x, scale())
    wanted = module(x, scale())
    on_kernels(module, FoldQuantizes())
    (folded,) = (n for n in module.graph.nodes if n.target is QUANTIZE)
    assert folded.args[0].op == "placeholder"
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(wanted, module(x, scale()), strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_stay_cast(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (4, 8)).to(dtype)
    module = capture(lambda x, s: scaling.quantize(x.float(), s, E4M3), x, scale())
    wanted = module(x, scale())
    on_kernels(module, FoldQuantizes())
    (folded,) = (n for n in module.graph.nodes if n.target is QUANTIZE)
    assert folded.args[0].target is torch.ops.prims.convert_element_type.default
    assert torch.equal(module(x, scale()).float(), wanted.float())


def step_read(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * s
    return scaled, scaled.clamp(-448, 448).to(E4M3)


UNTOUCHED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "no scale": (lambda x: x.clamp(-448, 448).to(E4M3), (torch.randn(4, 8),)),
    "a number": (lambda x: scaling.quantize(x, 2.0, E4M3), (torch.randn(4, 8),)),
    "another limit": (lambda x, s: (x * s).clamp(-240, 240).to(E4M3), (torch.randn(4, 8), scale())),
    "one limit": (lambda x, s: (x * s).clamp(max=448).to(E4M3), (torch.randn(4, 8), scale())),
    "the limit of another type": (lambda x, s: (x * s).clamp(-448, 448).to(E5M2), (torch.randn(4, 8), scale())),
    "scaled in bfloat16": (lambda x, s: (x * s).clamp(-448, 448).to(E4M3), (torch.randn(4, 8, dtype=BF16), scale())),
    "scaled in float64": (lambda x, s: (x * s).clamp(-448, 448).to(E4M3), (torch.randn(4, 8).double(), scale())),
    "a scale in float64": (lambda x, s: (x * s).clamp(-448, 448).to(E4M3), (torch.randn(4, 8), scale().double())),
    "not clamped": (lambda x, s: (x * s).to(E4M3), (torch.randn(4, 8), scale())),
    "a scale of more elements": (lambda x, s: scaling.quantize(x, s, E4M3), (torch.randn(1, 8), torch.rand(4, 1))),
    "a step that is read": (step_read, (torch.randn(4, 8), scale())),
    "no FP8": (lambda x, s: (x * s).clamp(-448, 448).to(F16), (torch.randn(4, 8, dtype=F32), scale())),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_other_patterns_do_not_change(case: str) -> None:
    function, inputs = UNTOUCHED[case]
    module = capture(function, *inputs)
    before = text(module)
    on_kernels(module, FoldQuantizes())
    assert text(module) == before
    assert count(module, QUANTIZE) == 0


def test_symbolic_sizes() -> None:
    module = capture(lambda x, s: scaling.quantize(x, s, E4M3), torch.randn(4, 8), scale(), dynamic=True)
    on_kernels(module, FoldQuantizes())
    assert count(module, QUANTIZE) == 1
