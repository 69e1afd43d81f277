"""The grouped_mm pass: matmuls of experts, experts without tokens, and the reasons to decline.

No CPU has the kernel, so with a target that has it, its formula runs on the CPU.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.graph.verdict import Gemm
from fp8pass.hardware import TARGETS
from fp8pass.options.config import Config
from fp8pass.passes.common.grouped_kernels import why_no_kernel
from fp8pass.passes.joint.grouped_mm import GroupedMM
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.quant import grouped
from tests.helpers.grouped_mm import H100, OFFS, tokens, trained
from tests.helpers.harness import (
    BF16,
    E4M3,
    E5M2,
    aten,
    capture,
    compiled,
    count,
    dq,
    fp8,
    run,
    sqnr,
)
from tests.helpers.models import Experts


@pytest.mark.shares_code
def test_a_nan_affects_its_own_expert_alone() -> None:
    torch.manual_seed(0)
    experts, x = Experts(), tokens()
    with torch.no_grad():
        x[12, 3] = torch.nan
    y, _, up, _ = trained(compiled(experts, **H100), experts, x)
    assert y[:9].isfinite().all()
    assert y[40:].isfinite().all()
    assert y[12].isnan().all()
    assert [bool(g.isfinite().all()) for g in up] == [True, True, False, True]


@pytest.mark.shares_code
def test_an_expert_without_tokens_has_the_same_numbers_when_they_come_back() -> None:
    """Steps do not affect each other, because there is no state."""
    torch.manual_seed(0)
    experts, x = Experts(), tokens()
    function = compiled(experts, **H100)
    first = trained(function, experts, x)
    none = trained(function, experts, x, torch.zeros_like(OFFS))
    assert all(not g.any() for g in none[2:])
    again = trained(function, experts, x)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("sizes", [(0,), (1, 2, 3), (16, 0, 32), (0, 0, 17, 0, 5, 0)])
@pytest.mark.parametrize("unused", [0, 5])
def test_groups_are_padded(sizes: tuple[int, ...], unused: int) -> None:
    """Each group begins at a multiple of 16, with zeros after its rows, and no row is lost."""
    rows = sum(sizes) + unused
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x = torch.arange(1, rows + 1)
    row, ends = grouped.rows_apart(offs, rows), grouped.ends_apart(offs)
    assert len(row) == grouped.room(rows, len(sizes))
    assert len(row) % 16 == 0
    assert ends.dtype == torch.int32
    apart = grouped.taken(x.unsqueeze(1), row).squeeze(1) if rows else torch.zeros(len(row))
    starts = [0, *ends.tolist()]
    begins = [0, *offs.tolist()]
    for g, size in enumerate(sizes):
        assert starts[g] % 16 == 0
        assert apart[starts[g] : starts[g] + size].tolist() == x[begins[g] : begins[g] + size].tolist()
        assert not apart[starts[g] + size : starts[g + 1]].any()
    assert not apart[starts[-1] :].any()


def of(m: int, k: int, g: int, n: int, dtype: torch.dtype = E4M3) -> list[Tensor]:
    return [fp8(m, k, dtype=dtype), torch.rand(m, 1), fp8(g, k, n), torch.rand(g, 1, n)]


def rows_by_experts(a: Tensor, a_inv: Tensor, b: Tensor, b_inv: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(dq(a, a_inv, BF16), dq(b, b_inv, BF16), offs=offs)


def detected(function: Any, *inputs: Any, target: str | None = "h100") -> tuple[Any, Gemm]:
    module = capture(function, *inputs)
    context = run(module, ListMatmuls(), GroupedMM(), config=Config(recipe=None, target=target))
    (gemm,) = context.gemms.values()
    return module, gemm


def test_quantized_by_the_user() -> None:
    inputs = *of(64, 64, 4, 48), OFFS
    module, gemm = detected(rows_by_experts, *inputs)
    assert (gemm.status, gemm.scaling, gemm.dtypes) == ("rewritten", "user", ("e4m3", "e4m3", "bf16"))
    assert count(module, aten._grouped_mm.default) == 0
    (y,) = module(*inputs) if isinstance(module(*inputs), (tuple, list)) else (module(*inputs),)
    assert sqnr(rows_by_experts(*inputs)[:57], y[:57]) > 45


REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    "another GPU": (rows_by_experts, (*of(64, 64, 4, 48), OFFS), "no kernel", "on sm_90, and b200 is sm_100"),
    "a scale for all": (
        lambda a, b, offs: torch._grouped_mm(dq(a, torch.tensor(0.5), BF16), dq(b, torch.tensor(0.5), BF16), offs=offs),
        (fp8(64, 64), fp8(4, 64, 48), OFFS),
        "grouped scale",
        "does not have just a scale for each row",
    ),
    "e5m2": (rows_by_experts, (*of(64, 64, 4, 48, E5M2), OFFS), "grouped type", "float8_e5m2; .* float8_e4m3fn alone"),
    "size": (rows_by_experts, (*of(64, 64, 4, 40), OFFS), "grouped size", r"experts \[4, 64, 40\]: .* multiples of 16"),
    "not quantized": (
        lambda a, b, offs: torch._grouped_mm(a, b, offs=offs),
        (torch.randn(64, 64).bfloat16(), torch.randn(4, 64, 48).bfloat16(), OFFS),
        "not float8",
        "is not a float8 tensor times a scale",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    function, inputs, rule, reason = REFUSED[case]
    module, gemm = detected(function, *inputs, target="b200" if case == "another GPU" else "h100")
    assert (gemm.status, gemm.rule) == ("declined", rule)
    assert re.search(reason, gemm.reason)
    assert count(module, aten._grouped_mm.default) == 1


def test_sizes_and_types() -> None:
    experts, target = torch.empty(4, 64, 48, dtype=BF16), TARGETS["h100"]
    assert why_no_kernel(experts, BF16, target) is None
    assert "the result is float32" in str(why_no_kernel(experts, torch.float32, target))
    assert "multiples of 16" in str(why_no_kernel(experts[:, :24], BF16, target))
    assert "up to 1023 groups" in str(why_no_kernel(experts[:1].expand(1024, 64, 48), BF16, target))
