"""The scaled_mm pass: graphs, refusals, numbers, composition."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.config import Config
from fp8pass.passes.matmuls import Matmuls
from fp8pass.passes.scaled_mm import ScaledMM
from tests import oracle
from tests.harness import RefusedByCuda, apply, aten, capture, check_legal_on_cuda, count, expect_graph, sqnr, text

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F32 = torch.bfloat16, torch.float32


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape).mul(4).to(dtype)


def scale(value: float = 0.25) -> Tensor:
    return torch.tensor(value)


def rewrite(function: Callable[..., Any], *inputs: Any, **config: Any) -> tuple[Any, list[Any]]:
    module = capture(function, *inputs)
    gemms = apply(module, Matmuls([]), ScaledMM(), config=Config(recipe=None, **config))
    return module, gemms


def dq(q: Tensor, s: Tensor | float, dtype: torch.dtype = F32) -> Tensor:
    return q.to(dtype) * (s.to(dtype) if isinstance(s, Tensor) else s)


# 1. Graph


def test_graph_of_a_linear_layer() -> None:
    def linear(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        return dq(x, sx, BF16) @ dq(w, sw, BF16).t()

    module, _ = rewrite(linear, fp8(32, 64), scale(), fp8(48, 64), scale())
    expect_graph(
        module,
        """\
x_1: "f8e4m3fn[32, 64]",
sx_1: "f32[]",
w_1: "f8e4m3fn[48, 64]",
sw_1: "f32[]",
convert_element_type_1: "bf16[]" = prims.convert_element_type.default(sx_1, torch.bfloat16)
convert_element_type_3: "bf16[]" = prims.convert_element_type.default(sw_1, torch.bfloat16)
convert_element_type_default: "f32[]" = prims.convert_element_type.default(convert_element_type_1, torch.float32)
convert_element_type_default_1: "f32[]" = prims.convert_element_type.default(convert_element_type_3, torch.float32)
permute_default_1: "f8e4m3fn[64, 48]" = aten.permute.default(w_1, [1, 0])
_scaled_mm_default: "bf16[32, 48]" = aten._scaled_mm.default(x_1, permute_default_1, convert_element_type_default, convert_element_type_default_1, None, None, torch.bfloat16, True)
return _scaled_mm_default
""",
    )


def test_graph_with_a_transposed_copy() -> None:
    def matmul(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor) -> Tensor:
        return dq(x, sx) @ dq(w, sw)

    module, _ = rewrite(matmul, fp8(32, 64), scale(), fp8(64, 48), scale())
    expect_graph(
        module,
        """\
x_1: "f8e4m3fn[32, 64]",
sx_1: "f32[]",
w_1: "f8e4m3fn[64, 48]",
sw_1: "f32[]",
permute_default: "f8e4m3fn[48, 64]" = aten.permute.default(w_1, [1, 0])
clone_default: "f8e4m3fn[48, 64]" = aten.clone.default(permute_default, memory_format = torch.contiguous_format)
permute_default_1: "f8e4m3fn[64, 48]" = aten.permute.default(clone_default, [1, 0])
_scaled_mm_default: "f32[32, 48]" = aten._scaled_mm.default(x_1, permute_default_1, sx_1, sw_1, None, None, torch.float32, True)
return _scaled_mm_default
""",
    )


def test_unaligned_sizes_are_padded_with_zeros_and_the_result_is_sliced_back() -> None:
    inputs = fp8(32, 60), fp8(60, 40)
    module, _ = rewrite(lambda x, w: dq(x, 1.0) @ dq(w, 1.0), *inputs)
    (call,) = (n for n in module.graph.nodes if n.target is aten._scaled_mm.default)
    assert [list(n.meta["val"].shape) for n in (call.args[0], call.args[1], call)] == [[32, 64], [64, 48], [32, 48]]
    actual = module(*inputs)
    assert (actual.shape, actual.stride()) == ((32, 40), (40, 1))
    torch.testing.assert_close(actual, inputs[0].float() @ inputs[1].float(), rtol=1e-5, atol=1e-3)


def test_no_copies_for_blackwell() -> None:
    function, inputs = (lambda a, b: dq(a.t(), 0.5) @ dq(b, 0.5)), (fp8(64, 32), fp8(64, 48))
    hopper, _ = rewrite(function, *inputs, target="sm_90")
    blackwell, _ = rewrite(function, *inputs, target="sm_100")
    assert count(hopper, aten.clone.default) == 2
    assert count(blackwell, aten.clone.default) == 0


def test_operands_are_prepared_once() -> None:
    def two(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        wide = dq(x, 0.5).t()
        return wide @ dq(w, 0.5), wide @ dq(v, 0.5)

    module, gemms = rewrite(two, fp8(64, 32), fp8(64, 48), fp8(64, 16))
    assert [g.status for g in gemms] == ["rewritten"] * 2
    assert count(module, aten.clone.default) == 3  # one for x, one for each of w and v


def test_a_dequantize_with_another_user_stays() -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = dq(x, 0.5)
        return wide @ dq(w, 0.5), wide.relu()

    inputs = fp8(32, 64), fp8(64, 48)
    module, _ = rewrite(both, *inputs)
    assert count(module, aten.relu.default) == 1
    torch.testing.assert_close(module(*inputs), both(*inputs))


# 2. Refusals

REFUSALS: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], str]] = {
    "e5m2 twice": (
        lambda a, b: dq(a, 0.5) @ dq(b, 0.5),
        (fp8(32, 64, dtype=E5M2), fp8(64, 48, dtype=E5M2)),
        "both operands are float8_e5m2, for which no GPU has a kernel",
    ),
    "one side": (
        lambda a, b: dq(a, 0.5) @ b,
        (fp8(32, 64), torch.randn(64, 48)),
        r"operand b_1: float32 is not dequantized from float8$",
    ),
    "reached through a view": (
        lambda a, b: dq(a, 0.5) @ b.t(),
        (fp8(32, 64), torch.randn(48, 64)),
        r"operand b_1: float32 is not dequantized from float8 \(reached through permute",
    ),
    "scaled twice": (
        lambda a, b: dq(a, 0.5) * 2 @ dq(b, 0.5),
        (fp8(32, 64), fp8(64, 48)),
        r"mul_1 is scaled twice, by mul_1 and mul",
    ),
    "one scale per row": (
        lambda a, s, b: a.float() * s @ dq(b, 0.5),
        (fp8(32, 64), torch.rand(32, 1), fp8(64, 48)),
        r"mul scales by a tensor of shape \[32, 1\]; only one scale per tensor is known",
    ),
    "fnuz": (
        lambda a, b: dq(a, 0.5) @ dq(b, 0.5),
        (torch.randn(32, 64).to(torch.float8_e4m3fnuz), fp8(64, 48)),
        "casts from float8_e4m3fnuz, which no NVIDIA GPU multiplies",
    ),
    "empty": (
        lambda a, b: dq(a, 0.5) @ dq(b, 0.5),
        (fp8(0, 64), fp8(64, 48)),
        r"the matmul of \[0, 64\] by \[64, 48\] is empty",
    ),
    "many batches": (
        lambda a, b: torch.bmm(dq(a, 0.5), dq(b, 0.5)),
        (fp8(17, 32, 64), fp8(17, 64, 48)),
        r"17 products of \[32, 64\] by \[64, 48\]: `_scaled_mm` has no batch dimension, and more than 16 launches",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_leave_the_graph_alone(case: str) -> None:
    function, inputs, reason = REFUSALS[case]
    before = text(capture(function, *inputs))
    module, (gemm,) = rewrite(function, *inputs)
    assert text(module) == before
    assert gemm.status == "declined"
    assert re.search(reason, gemm.reason), gemm.reason
    assert count(module, aten._scaled_mm.default) == 0


# 3. Numbers: in float32 the rewrite is exact up to the order of the sums


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "mul": lambda a, s, b, t: (a.float() * s) @ (b.float() * t),
    "mul, scale first": lambda a, s, b, t: (s * a.float()) @ (t * b.float()),
    "div": lambda a, s, b, t: (a.float() / s) @ (b.float() / t),
    "one-element scale": lambda a, s, b, t: (a.float() * s.view(1)) @ (b.float() * t.view(1, 1)),
    "bfloat16 scale": lambda a, s, b, t: (a.float() * s.bfloat16()) @ (b.float() * t),
    "number": lambda a, s, b, t: (a.float() * 0.5) @ (b.float() / 3),
    "no scale": lambda a, s, b, t: a.float() @ (b.float() * t),
    "cast, scale, cast": lambda a, s, b, t: (a.bfloat16().float() * s).half().float() @ b.float(),
    "views": lambda a, s, b, t: (a.float().view(4, 8, 64) * s).reshape(32, 64) @ (b.float().t() * t).t(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    function = SPELLINGS[spelling]
    inputs = fp8(32, 64), scale(0.25), fp8(64, 48), scale(2.0)
    module, (gemm,) = rewrite(function, *inputs)
    assert (gemm.status, gemm.reason, gemm.scaling, gemm.dtypes) == ("rewritten", "", "user", ("e4m3", "e4m3", "f32"))
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)
    assert check_legal_on_cuda(module.graph) == 1


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("out", [F32, BF16, torch.float16])
def test_against_the_float64_oracle(dtypes: tuple[torch.dtype, torch.dtype], out: torch.dtype) -> None:
    a, b = torch.randn(32, 64), torch.randn(64, 48)
    a_q, b_q = (oracle.round_to(x * 16, n) for x, n in zip((a, b), map(_name, dtypes), strict=True))
    exact = (a_q / 16) @ (b_q / 16)
    inputs = a_q.to(dtypes[0]), b_q.to(dtypes[1])
    module, _ = rewrite(lambda a, b: dq(a, 1 / 16, out) @ dq(b, 1 / 16, out), *inputs)
    assert count(module, aten._scaled_mm.default) == 1
    assert sqnr(exact, module(*inputs)) > {F32: 130, BF16: 50, torch.float16: 65}[out]


def _name(dtype: torch.dtype) -> str:
    return {E4M3: "e4m3", E5M2: "e5m2"}[dtype]


SHAPES = [(32, 64, 48), (31, 64, 48), (32, 63, 48), (32, 64, 47), (7, 5, 3), (1, 64, 48), (32, 1, 48), (32, 64, 1)]


@pytest.mark.parametrize("a_columns", [False, True], ids=["a rows", "a columns"])
@pytest.mark.parametrize("b_columns", [False, True], ids=["b rows", "b columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes_and_layouts(shape: tuple[int, int, int], a_columns: bool, b_columns: bool) -> None:
    m, k, n = shape
    a = fp8(k, m).t() if a_columns else fp8(m, k)
    b = fp8(n, k).t() if b_columns else fp8(k, n)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return aten.mm.default(dq(a, 0.5), dq(b, 0.25))

    module, (gemm,) = rewrite(product, a, b)
    assert gemm.status == "rewritten", gemm.reason
    assert check_legal_on_cuda(module.graph) == 1
    actual = module(a, b)
    assert actual.shape == (m, n)
    torch.testing.assert_close(actual, product(a, b), rtol=1e-5, atol=1e-4)


def test_unrewritten_layouts_are_illegal_on_cuda() -> None:
    """The check has teeth: what CPU accepts as it is, CUDA refuses."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, torch.tensor(1.0), torch.tensor(1.0), out_dtype=BF16)

    for inputs in ((fp8(32, 64), fp8(64, 48)), (fp8(32, 40), fp8(48, 40).t()), (fp8(32, 64), fp8(47, 64).t())):
        assert product(*inputs).isfinite().all()
        with pytest.raises(RefusedByCuda):
            check_legal_on_cuda(capture(product, *inputs).graph)


BIASES: dict[str, tuple[torch.dtype, tuple[int, ...], dict[str, Any], bool]] = {
    "vector": (BF16, (48,), {}, True),
    "vector, unaligned": (BF16, (40,), {}, True),
    "float16 vector": (torch.float16, (48,), {}, True),
    "float32 vector": (F32, (48,), {}, False),  # no kernel takes one
    "matrix": (BF16, (32, 48), {}, False),
    "column": (BF16, (32, 1), {}, False),
    "alpha and beta": (BF16, (48,), {"alpha": 2, "beta": 0.5}, False),
    "beta 0": (BF16, (48,), {"beta": 0}, False),
}


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
    module, _ = rewrite(product, *inputs)
    (call,) = (node for node in module.graph.nodes if node.target is aten._scaled_mm.default)
    assert (call.args[4] is not None) == in_kernel
    check_legal_on_cuda(module.graph)
    assert sqnr(product(*inputs), module(*inputs)) > {F32: 120, BF16: 48, torch.float16: 60}[dtype]


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_bmm(batch: int) -> None:
    inputs = fp8(batch, 8, 24), fp8(batch, 24, 40), torch.randn(batch, 8, 40)

    def product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.baddbmm(c, dq(a, 0.5), dq(b, 0.25), alpha=2)

    module, _ = rewrite(product, *inputs)
    assert check_legal_on_cuda(module.graph) == batch
    torch.testing.assert_close(module(*inputs), product(*inputs), rtol=1e-5, atol=1e-4)


def test_a_matrix_shared_by_the_batch_makes_one_product() -> None:
    inputs = fp8(40, 8, 24), fp8(24, 48)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(dq(a, 0.5), dq(b, 0.25).expand(40, 24, 48))

    module, _ = rewrite(product, *inputs)
    assert check_legal_on_cuda(module.graph) == 1
    torch.testing.assert_close(module(*inputs), product(*inputs), rtol=1e-5, atol=1e-4)


def test_nan_reaches_the_result() -> None:
    a = fp8(32, 64)
    module, _ = rewrite(lambda a, s, b: dq(a, s) @ dq(b, 0.5), a, scale(), fp8(64, 48))
    assert module(a, scale(float("nan")), fp8(64, 48)).isnan().all()
    a.view(torch.uint8)[3, 5] = 0x7F  # NaN in e4m3
    assert module(a, scale(), fp8(64, 48))[3].isnan().all()


# 4. Composition


def test_idempotent() -> None:
    module, _ = rewrite(lambda a, b: dq(a, 0.5) @ dq(b, 0.5), fp8(32, 64), fp8(64, 48))
    once = text(module)
    assert apply(module, Matmuls([]), ScaledMM()) == []
    assert text(module) == once
