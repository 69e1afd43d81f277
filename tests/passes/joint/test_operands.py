"""Dequantized operands, beyond the cases of XLA's rules: exactness, equal scales, reasons to decline."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from tests.helpers.harness import E4M3, aten, capture, compiled, count, detect, fp8, run, scale, sqnr, verdicts


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-8, 9, shape).to(E4M3)


@pytest.mark.passes
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a.float() @ b.float(),
        lambda a, b: (a.float() * 0.5) @ (b.float() / 4),
        lambda a, b: ((a.float() * -0.5 * 8).t() @ b.float()) * 0.25,
        lambda a, b: torch.cat([a.float(), -a.float()], 1)[:, 32:96] @ b.float(),
        lambda a, b: torch.addmm(torch.ones(64, 48), a.float(), b.float(), beta=2, alpha=3),
    ],
)
def test_bit_equal_where_nothing_rounds(function: Callable[..., Tensor]) -> None:
    """Sums of products of whole numbers and powers of two are exact, in any order."""
    inputs = whole_numbers(64, 64), whole_numbers(64, 48)
    module, gemms = detect(function, *inputs)
    assert [g.status for g in gemms] == ["rewritten"]
    assert torch.equal(module(*inputs), function(*inputs))


@pytest.mark.passes
def test_a_chain_of_scales_is_one_scale_to_float32() -> None:
    def function(a: Tensor, b: Tensor, s: Tensor, t: Tensor, u: Tensor) -> Tensor:
        return (a.float() * s / t * 0.3) @ (u * b.float() * 7) / s

    inputs = fp8(32, 64), fp8(64, 48), scale(1.7), scale(0.9).view(1), scale(3.3).view(1, 1)
    module, _ = detect(function, *inputs)
    a, b, s, t, u = (x.double() for x in inputs)
    exact = (a @ b) * (s / t * 0.3 * u * 7 / s)
    assert (module(*inputs) - exact).abs().max() < 1e-6 * exact.abs().max()


SCALES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cast twice": (lambda a, b, s: torch.cat([a.float() * s.bfloat16(), b.float() * s.bfloat16()]), ""),
    "in another order": (lambda a, b, s: torch.cat([a.float() * s * 3, 3 * b.float() * s.view(1)[0]]), "2 different"),
    "same numbers": (lambda a, b, s: torch.cat([a.float() * 2 / s, b.float() * 4 / s / 2]), ""),
    "signs": (lambda a, b, s: torch.cat([a.float() * -s, b.float() * -s]), ""),
    "squared": (lambda a, b, s: torch.cat([a.float() * s * s, b.float() * s]), "2 different scales"),
    "divided": (lambda a, b, s: torch.cat([a.float() * s, b.float() / s]), "2 different scales"),
    "rounded": (lambda a, b, s: torch.cat([a.float() * s, b.float() * s.bfloat16()]), "2 different scales"),
}


@pytest.mark.passes
@pytest.mark.parametrize("case", SCALES)
def test_which_scales_are_the_same(case: str) -> None:
    join, reason = SCALES[case]

    def function(a: Tensor, b: Tensor, s: Tensor, w: Tensor) -> Tensor:
        return join(a, b, s) @ w.float()

    inputs = fp8(16, 64), fp8(32, 64), scale(0.3), fp8(64, 48)
    module, (gemm,) = detect(function, *inputs)
    assert (gemm.status == "rewritten") == (not reason), gemm.reason
    assert reason in gemm.reason
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)


@pytest.mark.passes
def test_a_long_chain() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        x = a.float()
        for _ in range(300):
            x = (x * 2).t() / 2
        return x @ b.float()

    module, (gemm,) = detect(function, fp8(64, 64), fp8(64, 48))
    assert gemm.status == "rewritten"
    assert count(module, aten.clone.default) == 1  # for b


@pytest.mark.passes
@pytest.mark.parametrize(
    "fill",
    [
        lambda: torch.full([], 2.7).int(),
        lambda: torch.full([], 2.7, dtype=torch.int32),
        lambda: torch.full([], 2.0).bool(),
        lambda: torch.full([], 300.0).to(torch.uint8),
        lambda: torch.full([], 0.1, dtype=torch.bfloat16),
    ],
)
def test_a_constant_is_what_its_type_makes_of_it(fill: Callable[[], Tensor]) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return ((a.float() * fill()) @ b.float()) * fill()

    inputs = fp8(32, 64), fp8(64, 48)
    module, (gemm,) = detect(function, *inputs)
    assert gemm.status == "rewritten"
    assert sqnr(function(*inputs), module(*inputs)) > 110


@pytest.mark.passes
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, s, t: ((a.float() * 1e-23) @ (b.float() * 1e30)) * 1e-23 * 1e20,
        lambda a, b, s, t: ((a.float() * s) @ (b.float() * t)) * s * 1e20,
        lambda a, b, s, t: ((a.float() / t) * t) @ b.float(),
        lambda a, b, s, t: torch.addmm(torch.zeros(48), a.float() * s, b.float() * t, alpha=1e5),
    ],
)
def test_scales_far_apart_do_not_leave_the_range(function: Callable[..., Tensor]) -> None:
    inputs = fp8(32, 64), fp8(64, 48), scale(1e-23), scale(1e30)
    module, (gemm,) = detect(function, *inputs)
    assert gemm.status == "rewritten"
    actual, expected = module(*inputs), function(*inputs)
    assert expected.isfinite().all()
    assert sqnr(expected, actual) > 110


@pytest.mark.passes
@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (2j, "scales by a complex number"),
        (0, "scales by 0, which is not a normal float32"),
        (1e39, "scales by 1e+39, which is not a normal float32"),
        (float("inf"), "scales by inf, which is not a normal float32"),
    ],
)
def test_numbers_that_are_not_a_scale(factor: complex, reason: str) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return (a.float() * factor) @ b.to(torch.complex64 if isinstance(factor, complex) else torch.float32)

    _, (gemm,) = detect(function, fp8(32, 64), fp8(64, 48))
    assert reason in gemm.reason


@pytest.mark.passes
def test_one_element_times_one_number() -> None:
    def function(a: Tensor, b: Tensor, s: Tensor, i: Tensor) -> Tensor:
        return (a.float()[i] * s) @ (s * b.float().flip(0))

    inputs = fp8(4, 1), fp8(1, 48), scale().view(1, 1), torch.tensor([2])
    module, (gemm,) = detect(function, *inputs)
    assert gemm.status == "rewritten", gemm.reason
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)


@pytest.mark.passes
def test_ones_in_a_cat_of_a_plain_graph_give_no_reason() -> None:
    _, (gemm,) = detect(lambda a, b: torch.cat([a, torch.ones(4, 8)]) @ b, torch.randn(4, 8), torch.randn(8, 8))
    assert (gemm.rule, gemm.near_miss) == ("not float8", False)


@pytest.mark.passes
def test_a_diamond_of_joins_does_not_take_exponential_time() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        x = a.float() * 0.5
        for _ in range(40):
            x = torch.cat([x[:, 32:], -x[:, :32]], 1)
        return x @ b.float()

    inputs = fp8(32, 64), fp8(64, 48)
    module, (gemm,) = detect(function, *inputs)
    assert gemm.status == "rewritten"
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-4)


@pytest.mark.passes
def test_joins_nested_too_deeply_are_declined() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        x = a.float()
        for _ in range(60):
            x = torch.cat([x[1:], x[:1]])
        return x @ b.float()

    _, (gemm,) = detect(function, fp8(32, 64), fp8(64, 48))
    assert "is one of more than 50 nested joins" in gemm.reason


COLUMNS = fp8(16, 32), torch.rand(1, 32), fp8(32, 16)


@pytest.mark.passes
@pytest.mark.parametrize(
    "function",
    [
        lambda a, s, b: (a.float() * s * s) @ b.float(),
        lambda a, s, b: ((a.float() - s) * s) @ b.float(),
        lambda a, s, b: (a.float() * s).relu() @ b.float(),
    ],
)
def test_two_obstacles_do_not_hide_each_other(function: Callable[..., Tensor]) -> None:
    """The operand still counts as quantized, so that strict raises, and the reason names the nearest obstacle."""
    module = capture(function, *COLUMNS)
    context = run(module, ListMatmuls(), ScaledMM())
    (gemm,) = context.gemms.values()
    assert gemm.quantized
    assert gemm.rule in ("scale shape", "op between")
    assert context.notes == []


@pytest.mark.passes
def test_a_reason_names_all_obstacles() -> None:
    def function(a: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a.float() * s, b.float())

    _, (gemm,) = detect(function, fp8(17, 8, 32), torch.rand(17, 1, 32), fp8(17, 32, 16))
    assert not gemm.near_miss
    assert re.match(r"mul scales by a tensor of shape \[17, 1, 32\].*; and 17 products of", gemm.reason)


@pytest.mark.passes
@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.uint8, 3), (torch.int8, -128), (torch.int8, 3), (torch.float32, 0.3)]
)
def test_a_negated_integer_scale_wraps(dtype: torch.dtype, value: float) -> None:
    def function(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return ((a.float() * -s) @ b.float()) * -s

    inputs = fp8(32, 64), fp8(64, 48), torch.tensor(value, dtype=dtype)
    module, (gemm,) = detect(function, *inputs)
    assert gemm.status == "rewritten"
    assert sqnr(function(*inputs), module(*inputs)) > 110


@pytest.mark.passes
def test_a_number_divided_by_float8() -> None:
    _, (gemm,) = detect(lambda a, b, s: (s / a.float()) @ b.float(), fp8(32, 64), fp8(64, 48), scale())
    assert gemm.reason.startswith("div divides a number by a tensor")


@pytest.mark.passes
def test_float8_of_another_kind() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return a.float() @ b.float()

    inputs: Any = torch.ones(16, 32).to(torch.float8_e8m0fnu), fp8(32, 16)
    _, (gemm,) = detect(function, *inputs)
    assert gemm.rule == "float8 kind"
    assert "comes from float8_e8m0fnu, which no matmul kernel takes" in gemm.reason


@pytest.mark.compiled
def test_a_symbolic_alpha_is_declined() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(c, a.bfloat16(), b.bfloat16(), alpha=x.shape[0])

    with verdicts() as report:
        compiled(function, recipe=None, dynamic=True)(
            fp8(32, 64), fp8(64, 48), torch.zeros(48).bfloat16(), torch.ones(3)
        )
    assert report.rules() == {"alpha": 1}


def columns(a: Tensor, s: Tensor, b: Tensor) -> Tensor:
    return (a.float() * s) @ b.float()


@pytest.mark.compiled
def test_a_near_miss_names_the_condition_and_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with verdicts() as report, caplog.at_level(logging.INFO, "fp8pass"):
        compiled(columns, recipe=None)(*COLUMNS)
    (gemm,) = report.gemms
    assert gemm.near_miss
    assert gemm.quantized
    line = columns.__code__.co_firstlineno + 1
    assert gemm.reason == (
        f"mul (test_operands.py:{line}) scales by a tensor of shape [1, 32], which may change along the sum; no other rule declines it"
    )
    assert report.rules() == {"scale shape": 1}
    summary = "0 of 1 matmuls in FP8, 0% of matmul FLOPs (1 graph); declined: 1 scale shape"
    assert report.summary() == summary
    assert [summary in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.compiled
def test_strict_takes_a_malformed_quantize_for_meant() -> None:
    with pytest.raises(
        Exception, match=r"strict: output of .*, \[16, 32\] by \[32, 16\], .*scales by a tensor of shape"
    ):
        compiled(columns, recipe=None, strict=True)(*COLUMNS)


@pytest.mark.compiled
def test_what_is_dequantized_for_nothing_is_noted() -> None:
    def function(a: Tensor) -> Tensor:
        return (a.float() * 0.5).softmax(-1)

    with verdicts() as report:
        compiled(function, recipe=None)(fp8(16, 32))
    (note,) = report.notes
    assert re.match(r"\w+ is dequantized for amax \(\S+\) and sub \(\S+\), not for mm, addmm, bmm or baddbmm", note)
