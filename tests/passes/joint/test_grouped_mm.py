"""Test grouped matmuls of experts: numbers against an oracle, experts without tokens, kernels by device, and refusals.

No CPU has the kernel. With a target that has it, a CPU runs its formula, and its calls are repeated on fake CUDA
tensors.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import fp8pass
from fp8pass.graph.verdict import Gemm
from fp8pass.hardware import TARGETS
from fp8pass.options.config import Config
from fp8pass.passes.common.grouped_kernels import why_no_kernel
from fp8pass.passes.joint.grouped_mm import GroupedMM
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.quant import grouped
from fp8pass.recipes import RowwiseScaling
from fp8pass.roofline import predicted_speedup
from tests.helpers.harness import (
    BF16,
    E4M3,
    E5M2,
    annotated,
    aten,
    capture,
    compiled,
    count,
    dq,
    fp8,
    run,
    sqnr,
    verdicts,
)
from tests.helpers.models import Experts
from tests.helpers.oracle import qdq_rows

H100 = {"target": "h100", "min_speedup": 0}


OFFS = torch.tensor([9, 9, 40, 57], dtype=torch.int32)
"""Ends of the groups of 64 rows: 9 tokens, 0, 31, 17; the last 7 rows belong to no expert."""


def tokens(unused: float = 1.0) -> Tensor:
    """Return 64 rows, of which the last 7, which belong to no expert, hold `unused`."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x[57:] = unused
    return x.bfloat16().requires_grad_()


def trained(function: Any, experts: nn.Module, x: Tensor, offs: Tensor = OFFS) -> list[Tensor]:
    """Return a step's output and grad_input of the rows that belong to experts, and the gradients of the weights."""
    y = function(x, offs)
    n = int(offs[-1])
    y[:n].float().square().sum().backward()
    of_weights = [p.grad for p in experts.parameters()]
    assert x.grad is not None
    found = [y[:n].detach(), x.grad[:n], *of_weights]
    for p in (x, *experts.parameters()):
        p.grad = None
    return found


@pytest.mark.passes
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


@pytest.mark.passes
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


@pytest.mark.passes
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


@pytest.mark.passes
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


@pytest.mark.passes
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    function, inputs, rule, reason = REFUSED[case]
    module, gemm = detected(function, *inputs, target="b200" if case == "another GPU" else "h100")
    assert (gemm.status, gemm.rule) == ("declined", rule)
    assert re.search(reason, gemm.reason)
    assert count(module, aten._grouped_mm.default) == 1


@pytest.mark.passes
def test_sizes_and_types() -> None:
    experts, target = torch.empty(4, 64, 48, dtype=BF16), TARGETS["h100"]
    assert why_no_kernel(experts, BF16, target) is None
    assert "the result is float32" in str(why_no_kernel(experts, torch.float32, target))
    assert "multiples of 16" in str(why_no_kernel(experts[:, :24], BF16, target))
    assert "up to 1023 groups" in str(why_no_kernel(experts[:1].expand(1024, 64, 48), BF16, target))


class Layer(nn.Module):
    """One layer of `Experts`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter((torch.randn(4, 96, 64) / 8).bfloat16())

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.up.transpose(-2, -1), offs=offs)


class OfTransformers(nn.Module):
    """One layer of experts in float32, as transformers calls it within torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 96, 64) / 8)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        y: Tensor = torch.ops.transformers.grouped_mm_fallback(x, self.up.transpose(-2, -1), offs)
        return y


class Capacity(nn.Module):
    """Experts with room for equally many tokens each: a batched matmul."""

    def __init__(self, groups: int = 20) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(groups, 64, 48) / 8).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


def gemms(function: Any, *inputs: Any) -> list[Gemm]:
    with verdicts() as found:
        y = function(*inputs)
        if y.requires_grad:
            y.float().square().sum().backward()
    return found.gemms


@pytest.mark.compiled
@pytest.mark.shares_code
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_the_numbers_are_those_of_an_oracle(lowering: str) -> None:
    """The oracle computes one expert after the other in float64, each with scales of its own rows and columns.

    What Inductor makes for the GPU that has the kernel: tests/compiler/test_sm90.py.
    """
    torch.manual_seed(0)
    weight = nn.Parameter((torch.randn(4, 64, 48) / 8).bfloat16())
    x, gradient = tokens(), torch.randn(64, 48).bfloat16()
    options = {"recipe": "rowwise", "lowering": lowering, **H100}
    function = compiled(lambda x, w, offs: torch._grouped_mm(x, w, offs=offs), **options)
    y = function(x, weight, OFFS)
    y.backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None
    starts = [0, *OFFS.tolist()]
    for g, (i, j) in enumerate(itertools.pairwise(starts)):
        a, b, c = x.detach()[i:j], weight.detach()[g], gradient[i:j]
        if i == j:
            assert weight.grad[g].abs().max() == 0
            continue
        wanted = qdq_rows(a, 1) @ qdq_rows(b, 0), qdq_rows(c, 1) @ qdq_rows(b, 1).T, qdq_rows(a, 0).T @ qdq_rows(c, 0)
        for want, got in zip(wanted, (y[i:j], x.grad[i:j], weight.grad[g]), strict=True):
            assert sqnr(want, got) > 50


@pytest.mark.compiled
@pytest.mark.shares_code
@pytest.mark.parametrize("options", [{"recipe": "rowwise", **H100}, H100], ids=["rowwise", "delayed"])
def test_a_step_is_that_of_the_annotated_graph(options: dict[str, Any]) -> None:
    """A tensorwise recipe, such as the default, gives the same: the kernels scale rowwise."""
    torch.manual_seed(0)
    experts, x = Experts(), tokens()
    with verdicts() as found:
        got = trained(compiled(experts, **options), experts, x)
    rows = [(g.name, g.kind, g.scaling, g.status, g.dtypes) for g in found.gemms]
    assert not found.notes  # no dequantized tensor is without a matmul
    kinds = ("output", "grad_input", "grad_weight")
    assert sorted(rows) == sorted(
        (name, kind, "rowwise", "rewritten", ("e4m3", "e4m3", "bf16"))
        for name, kind in itertools.product(("up", "down"), kinds)
    )
    wanted = trained(annotated(experts, **options), experts, x)
    for a, b in zip(wanted, got, strict=True):
        assert sqnr(a, b) > 45  # bfloat16: the reference rounds operands to it, and the kernel does not
    for a, b in zip(trained(experts, experts, x), got, strict=True):
        assert sqnr(a, b) > 20


@pytest.mark.compiled
def test_experts_of_transformers_in_float32() -> None:
    """Under autocast they are as experts in bfloat16; without autocast, their custom op is left as it is."""
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    layer, x = OfTransformers(), tokens().detach().float().requires_grad_()

    def step(function: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return trained(function, layer, x)

    with verdicts() as found:
        got = step(compiled(layer, **H100))
    assert [(g.name, g.kind, g.status, g.scaling) for g in found.gemms] == [
        ("up", kind, "rewritten", "rowwise") for kind in ("output", "grad_weight", "grad_input")
    ]
    assert {y.dtype for y in got} == {torch.float32}
    for a, b in zip(step(annotated(layer, **H100)), got, strict=True):
        assert sqnr(a, b) > 45
    for a, b in zip(step(layer), got, strict=True):
        assert sqnr(a, b) > 20

    plain = trained(layer, layer, x)
    for options, rule in ((H100, "grouped type"), ({}, "no kernel")):
        with verdicts() as found:
            got = trained(compiled(layer, **options), layer, x)
        assert {(g.kind, g.M, g.K, g.N, g.rule) for g in found.gemms} == {
            ("output", 64, 64, 96, rule), ("grad_input", 64, 96, 64, rule), ("grad_weight", 64, 64, 96, rule),
        }  # fmt: skip
        for a, b in zip(plain, got, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.compiled
@pytest.mark.shares_code
def test_rows_of_no_expert_change_nothing() -> None:
    """Rows of no expert hold whatever was in memory: no scale depends on them."""
    torch.manual_seed(0)
    experts = Experts()
    function = compiled(experts, **H100)
    wanted = trained(function, experts, tokens(1.0))
    for nobodys in (1e30, float("inf"), float("nan")):
        for a, b in zip(wanted, trained(function, experts, tokens(nobodys)), strict=True):
            assert torch.equal(a, b), nobodys


@pytest.mark.compiled
@pytest.mark.shares_code
def test_any_router_over_memory_full_of_nan() -> None:
    """By the kernel's formula on a CPU: torch fills new memory with NaN, and none comes out of rows that tokens have."""
    torch.manual_seed(0)
    experts = Experts()
    function = compiled(experts, **H100)
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)  # with which new memory is filled
    try:
        for i in range(100):
            ends = torch.randint(0, 58, (4,), generator=torch.Generator().manual_seed(i)).sort().values
            ends[3] = ends[3].clamp(min=1)
            found = trained(function, experts, tokens(float("nan")), ends.int())
            assert all(x.isfinite().all() for x in found), ends
            sizes = ends.diff(prepend=torch.zeros(1))
            assert all(bool(g[e].any()) == bool(sizes[e] > 0) for g in found[2:] for e in range(4)), ends
    finally:
        torch.set_deterministic_debug_mode(mode)


@pytest.mark.compiled
def test_batches_of_experts_are_one_matmul() -> None:
    """There are more experts than `_scaled_mm` would be called for."""
    torch.manual_seed(0)
    model = Capacity()
    x = torch.randn(20, 32, 64).bfloat16().requires_grad_()
    found = gemms(compiled(model, **H100), x)
    assert [(g.batches, g.status, g.scaling) for g in found] == [(20, "rewritten", "rowwise")] * 3
    got, x.grad, model.weight.grad = (x.grad, model.weight.grad), None, None
    torch._dynamo.reset()
    annotated(model, **H100)(x).float().square().sum().backward()
    for want, have in zip((x.grad, model.weight.grad), got, strict=True):
        assert sqnr(want, have) > 45


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:fp8pass. a graph has no matmul in FP8")
def test_batches_of_experts_elsewhere() -> None:
    """Without the kernel they are as any batches; if there are too many of them, the reason says both."""
    x = torch.randn(20, 32, 64).bfloat16()
    with verdicts() as found:
        compiled(Capacity())(x)
        compiled(Capacity(4))(x[:4])  # compiled again, for any number
    gemm, _, varying, _ = found.gemms
    assert (gemm.status, gemm.rule) == ("declined", "batches")
    assert gemm.reason.endswith("gains; grouped FP8 matmuls with scales for rows exist on sm_90, not on cpu")
    assert varying.reason.startswith("a varying number of products of [32, 64] by [64, 48]: ")
    gemm, _ = gemms(compiled(Capacity(4), dynamic=False), x[:4])
    assert (gemm.status, gemm.scaling) == ("rewritten", "delayed")


@pytest.mark.compiled
@pytest.mark.parametrize("dims", [3, 4])
def test_many_products_are_one_matmul(dims: int) -> None:
    """There are more than `_scaled_mm` would be called for: on sm_90 they are groups of equal size."""
    torch.manual_seed(0)
    shape = (20,) if dims == 3 else (4, 5)
    inputs = [torch.randn(*shape, *size).bfloat16().requires_grad_() for size in ((32, 64), (64, 48))]
    results = []
    for make in (compiled, annotated):
        with verdicts() as found:
            y = make(lambda a, b: a @ b, **H100)(*inputs)
            y.float().square().sum().backward()
        if make is compiled:
            assert [(g.kind, g.batches, g.status, g.scaling) for g in found.gemms] == [
                (kind, 20, "rewritten", "rowwise") for kind in ("output", "grad_weight", "grad_input")
            ]
        results.append([y.detach(), *(x.grad for x in inputs)])
        for x in inputs:
            x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(sqnr(a, b) > 20 for a, b in zip([inputs[0] @ inputs[1]], results[0], strict=False))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:fp8pass. a graph has no matmul in FP8")
@pytest.mark.parametrize(
    ("options", "rows", "rule", "reason"),
    [
        ({**H100, "recipe": "blockwise"}, 32, "batches", "blockwise scales; grouped FP8 matmuls take one for each row"),
        ({**H100, "target": "b200"}, 32, "batches", "exist on sm_90, and b200 is sm_100"),
        (H100, 24, "batches", r"experts \[20, 24, 48\]: grouped FP8 matmuls need K and N that are multiples of 16"),
        ({"target": "h100"}, 32, "min_speedup", "too small to pay"),
    ],
)
def test_many_products_that_stay(options: dict[str, Any], rows: int, rule: str, reason: str) -> None:
    """M counts too: the second operand's gradient sums over it. Under strict, what is left out is no error."""
    a, b = (torch.randn(20, *size).bfloat16().requires_grad_() for size in ((rows, 64), (64, 48)))
    found = gemms(compiled(lambda a, b: a @ b, strict=True, **options), a, b)
    assert {(g.status, g.rule) for g in found} == {("declined", rule)}
    assert re.search(reason, found[0].reason)


@pytest.mark.compiled
def test_attention_as_products_does_not_pay() -> None:
    """Heads of 128 dimensions or fewer never pay: quantizing the scores costs more than their product gains."""
    for length in (512, 2048, 8192, 32768):
        for dim in (64, 128):
            for m, k, n in ((length, dim, length), (length, length, dim)):
                gain = predicted_speedup(TARGETS["h100"], m, k, n, RowwiseScaling())
                assert gain is not None and gain < 1


class Chosen(nn.Module):
    """Experts for the tokens that a mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Layer()

    def forward(self, x: Tensor, keep: Tensor, offs: Tensor) -> Tensor:
        chosen = x[keep]
        torch._check(chosen.shape[0] > 0)
        y: Tensor = self.experts(chosen, offs)
        return y.float().square().sum()


@pytest.mark.compiled
def test_a_number_of_tokens_that_depends_on_data() -> None:
    """All three matmuls of the experts run in FP8, with the numbers of the reference, and are compiled once."""
    results: list[list[Tensor]] = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for make in (annotated, compiled):
            model = Chosen()
            with verdicts() as found:
                run = make(model, **H100)
                for count in (40, 33, 64, 1):
                    x, offs = tokens().detach().requires_grad_(), [count // 3, count // 3, count // 2, count]
                    run(x, torch.arange(64) < count, torch.tensor(offs, dtype=torch.int32)).backward()
                    assert x.grad is not None and model.experts.up.grad is not None
                    results.append([x.grad, model.experts.up.grad.clone()])
                    model.experts.up.grad = None
    assert found.graphs == 1
    assert [(g.kind, g.status, g.scaling) for g in found.gemms] == [
        (kind, "rewritten", "rowwise") for kind in ("output", "grad_weight", "grad_input")
    ]
    assert not any(isinstance(g.flops, int) or g.in_call(g.flops) for g in found.gemms)
    assert found.fp8_share is None and found.sizes == []
    for wanted, got in zip(results[:4], results[4:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:fp8pass. a graph has no matmul in FP8")
def test_a_number_of_tokens_that_may_be_0() -> None:
    """An amax of nothing is an error: torch must know that there are tokens."""
    layer = nn.Linear(64, 48)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), verdicts() as found:
        compiled(lambda x: layer(x[x[:, 0] > 0]))(torch.randn(16, 64)).sum().backward()
    assert {(g.status, g.rule) for g in found.gemms} == {("declined", "data-dependent size")}
    assert "torch._check(x.shape[0] > 0)" in found.gemms[0].reason


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:fp8pass. a graph has no matmul in FP8")
@pytest.mark.parametrize(
    ("options", "rule", "reason"),
    [
        ({}, "no kernel", "grouped FP8 matmuls with scales for rows exist on sm_90, not on cpu"),
        ({"target": "b200"}, "no kernel", "exist on sm_90, and b200 is sm_100"),
        (
            {"target": "h100", "recipe": "mxfp8"},
            "grouped scale",
            "mxfp8 scales; grouped FP8 matmuls take one for each row",
        ),
        ({"target": "h100", "min_speedup": 1}, "min_speedup", r"\[16, 64\] by \[64, 96\] is too small"),
    ],
)
def test_the_recipe_says_why_not(options: dict[str, Any], rule: str, reason: str) -> None:
    """The model runs in high precision."""
    experts, x = Experts(), tokens()
    with verdicts() as found:
        got = trained(compiled(experts, **options), experts, x)
    gemm = found.gemms[0]
    assert (gemm.status, gemm.rule) == ("declined", rule)
    assert re.search(reason, gemm.reason)
    for a, b in zip(trained(experts, experts, x), got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.compiled
def test_strict_raises_with_the_reason() -> None:
    with pytest.raises(
        BackendCompilerFailed, match="grouped FP8 matmuls with scales for rows exist on sm_90, not on cpu"
    ):
        compiled(Experts(), strict=True)(tokens(), OFFS)


@pytest.mark.compiled
def test_experts_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    model, x = Capacity().float(), torch.randn(20, 32, 64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            y: Tensor = model(x)
            return y

    found = gemms(compiled(function, **H100), x)
    assert [(g.batches, g.status, g.scaling) for g in found] == [(20, "rewritten", "rowwise")] * 3
    (got,) = (p.grad for p in model.parameters())
    model.zero_grad()
    function(x).float().square().sum().backward()
    (wanted,) = (p.grad for p in model.parameters())
    assert got is not None
    assert wanted is not None
    assert sqnr(wanted, got) > 20


@pytest.mark.compiled
def test_a_number_of_tokens_that_varies_is_compiled_once() -> None:
    """The room for groups that are moved apart is an expression of the number of tokens."""
    torch.manual_seed(0)
    experts = Layer()
    function = compiled(experts, **H100)
    with verdicts() as found:
        for rows in (80, 112, 100):
            x, offs = torch.randn(rows, 64).bfloat16().requires_grad_(), OFFS + (rows - 80)
            torch._dynamo.mark_dynamic(x, 0)
            for a, b in zip(trained(experts, experts, x, offs), trained(function, experts, x, offs), strict=True):
                assert sqnr(a, b) > 20
    assert [(g.kind, g.status) for g in found.gemms] == [
        (kind, "rewritten") for kind in ("output", "grad_weight", "grad_input")
    ]


@pytest.mark.compiled
def test_monitored() -> None:
    """A gradient's slots are monitored whether it is quantized by rows, for the input's gradient, or by groups."""
    torch.manual_seed(0)
    experts = Layer()
    trained(compiled(experts, monitor=True, **H100), experts, tokens())
    seen = {row.slot for row in fp8pass.stats(experts).rows}
    assert {"up.grad_output", "up.grad_output_1", "up.input", "up.weight"} <= seen


class Own(nn.Module):
    """An expert that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y


@pytest.mark.compiled
def test_an_expert_module_keeps_its_scale_without_tokens() -> None:
    """If an expert gets no tokens or is not called, its slots record nothing; those of the other follow the data."""
    torch.manual_seed(0)
    experts = [Own(), Own()]
    for expert in experts:
        expert.compile(backend="fp8pass", options={"lowering": "eager"})

    def step(of: tuple[int, ...], size: float) -> list[float]:
        for expert, n in zip(experts, of, strict=True):
            if n >= 0:
                expert(torch.randn(n, 32) * size).square().sum().backward()
        return [float(fp8pass.state(e).state_dict()["fc.input.scale"]) for e in experts]

    step((16, 16), 1.0)
    before = step((16, 16), 1.0)
    step((16, 0), 100.0)
    step((16, -1), 100.0)
    after = step((16, 0), 100.0)
    assert after[1] == before[1]
    assert after[0] < before[0] / 50
    assert step((16, 16), 1.0)[1] != 0
