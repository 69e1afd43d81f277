"""Test the list_matmuls pass: every matmul gets a name, a kind and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
from torch import Tensor

from fp8pass.graph.verdict import Gemm
from tests.helpers.harness import compiled, verdicts
from tests.helpers.models import Attention, Block, make

pytestmark = pytest.mark.compiled


def listed(function: object, *inputs: Tensor, **options: object) -> list[Gemm]:
    with verdicts() as report:
        compiled(function, **options)(*inputs).sum().backward()
    return report.gemms


def test_three_products_per_layer() -> None:
    gemms = listed(make(Block), torch.randn(2, 8, 32))
    assert [(g.name, g.kind, g.M, g.K, g.N) for g in gemms] == [
        ("up", "output", 16, 32, 56),
        ("down", "output", 16, 56, 32),
        ("down", "grad_weight", 32, 16, 56),
        ("down", "grad_input", 16, 32, 56),
        ("up", "grad_weight", 56, 16, 32),
        ("up", "grad_input", 16, 56, 32),
    ]  # fmt: skip
    assert {g.dtypes for g in gemms if g.kind == "output"} == {("e4m3", "e4m3", "f32")}
    assert {g.dtypes for g in gemms if g.kind != "output"} == {("e5m2", "e4m3", "f32")}
    assert all(g.source.startswith("models.py:") for g in gemms)


@pytest.mark.parametrize("recipe", [None, "delayed", "dynamic"])
def test_kinds_do_not_depend_on_what_is_rewritten(recipe: str | None) -> None:
    gemms = listed(make(Attention), torch.randn(2, 8, 32, requires_grad=True), recipe=recipe)
    assert sorted(g.kind for g in gemms) == ["grad_input"] * 4 + ["grad_weight"] * 4 + ["output"] * 4


def test_batches_and_flops() -> None:
    (gemm, *_) = listed(lambda a, b: torch.bmm(a, b), torch.randn(3, 8, 16, requires_grad=True), torch.randn(3, 16, 32))
    assert (gemm.batches, gemm.M, gemm.K, gemm.N, gemm.flops) == (3, 8, 16, 32, 2 * 3 * 8 * 16 * 32)
    size = sympy.Symbol("s27")
    assert replace(gemm, M=size).flops == 2 * 3 * size * 16 * 32
    assert gemm.bytes == 3 * (8 * 16 + 16 * 32 + 4 * 8 * 32)  # operands in FP8, the result in float32


@torch._dynamo.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    """A call that Dynamo does not look into."""
    return x @ x


def test_a_matmul_that_the_user_did_not_call() -> None:
    def function(x: Tensor) -> Tensor:
        return opaque(x) + 1

    x = torch.randn(32, 32)
    with verdicts() as report:
        compiled(function)(x)
    assert [(g.rule, g.reason) for g in report.gemms] == [
        ("composite", "comes from opaque, which fp8pass does not quantize; write it as a matmul")
    ]
    with pytest.raises(Exception, match=r"strict: output of a matmul at .* comes from opaque"):
        compiled(function, strict=True)(x)


@pytest.mark.parametrize("function", [lambda x: torch.cdist(x, x), torch.inverse, torch.linalg.cond])
def test_linear_algebra_keeps_its_digits(function: Callable[[Tensor], Tensor]) -> None:
    gemms = listed(function, torch.randn(32, 32, requires_grad=True), strict=True)
    assert gemms
    assert {g.rule for g in gemms} == {"linear algebra"}


def test_parts_of_one_tensor_are_separate_tensors() -> None:
    """q and k are split from one projection; their gradients are grad_input or grad_weight as for any two operands."""

    def function(qkv: Tensor) -> Tensor:
        q, k = qkv.split(32, -1)
        return q @ k.t()

    with verdicts() as report:
        compiled(function, recipe="dynamic")(torch.randn(16, 64, requires_grad=True)).sum().backward()
    assert sorted(g.kind for g in report.rewritten) == ["grad_input", "grad_weight", "output"]


def test_a_tensor_that_is_the_first_factor_of_one_matmul_and_the_second_of_another() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a @ b).sum() + (c @ a).sum()

    a, b, c = torch.randn(64, 32), torch.randn(32, 16), torch.randn(48, 64)
    with verdicts() as report:
        compiled(function, recipe="dynamic")(*(t.requires_grad_() for t in (a, b, c))).backward()
    kinds = {(g.M, g.K, g.N): g.kind for g in report.rewritten if g.kind != "output"}
    assert kinds == {
        (32, 64, 16): "grad_weight",  # gradient of b
        (64, 16, 32): "grad_input",  # gradient of a, as first operand
        (64, 48, 32): "grad_weight",  # gradient of a, as second operand
        (48, 32, 64): "grad_input",  # gradient of c
    }
