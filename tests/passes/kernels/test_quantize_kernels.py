"""The quantize_kernels pass: what one kernel computes, what is left to Inductor, and which configurations it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass._torch import kernel_called, triton_kernel_wrapper_functional
from fp8pass.fused.tiles_source import HEAVY, LIGHT, TilesPlan, source_of
from fp8pass.graph.builder import val
from fp8pass.passes.common import tiles
from fp8pass.passes.kernels import quantize_kernels
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.quantize_kernels import QuantizeKernels, match, why_not
from fp8pass.quant.kernel_ops import QUANTIZE
from fp8pass.scaling import amax, quantize
from tests.helpers.fused_matmuls import both
from tests.helpers.harness import BF16, E4M3, E5M2, apply, capture, count, run, scale
from tests.helpers.quantize_kernels import CASES, inputs_of, scaled_by_rows

aten = torch.ops.aten
X = torch.zeros(128, 192, dtype=BF16)


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "pretended_device", torch.device("cuda"))
    monkeypatch.setattr(quantize_kernels, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(tiles, "is_launched", lambda _: True)


def captured(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    module = capture(function, *inputs)
    apply(module, FoldQuantizes())
    return module


def plans(module: fx.GraphModule) -> list[TilesPlan]:
    """Return the plans of the kernels that the graph calls."""
    calls = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    return [kernel_called(call).tiles for call in calls]


def rewritten(function: Callable[..., Any], *inputs: Tensor) -> list[TilesPlan]:
    """Return the plans after the pass, which must leave shapes, strides and dtypes of all results as they were."""
    module = captured(function, *inputs)

    def results() -> list[Any]:
        return [(r.shape, r.stride(), r.dtype) for r in map(val, module.graph.output_node().args[0])]  # type: ignore[arg-type]

    before = results()
    run(module, QuantizeKernels())
    assert results() == before
    return plans(module)


def refused(function: Callable[..., Any], *inputs: Tensor) -> str:
    """Return the reason against a kernel for the first quantize; the pass must leave the graph as it is."""
    module = captured(function, *inputs)
    (x_q, *_) = module.graph.find_nodes(op="call_function", target=QUANTIZE)
    before = str(module.graph)
    assert QuantizeKernels().run(module.graph, run(module)) == 0
    assert str(module.graph) == before
    m = match(x_q)
    assert m is not None
    return why_not(m)


KINDS = {
    "weight": ["amax", "columns", "rows"],
    "siblings": ["amax", "columns", "rows"],
    "gelu": ["amax", "columns", "rows"],
    "gradient": ["amax", "columns", "columns", "rows", "sums"],
    "gated": ["amax", "rows"],
    "gated_gradient": ["amax", "columns", "columns", "rows"],
    "by_rows": ["columns", "rows"],
}


@pytest.mark.parametrize("name", KINDS)
def test_one_kernel_computes_all_that_is_made_of_the_same_matrices(name: str) -> None:
    (plan,) = rewritten(CASES[name][0], *inputs_of(name, 128, 192))
    assert sorted(o.kind for o in plan.outputs) == KINDS[name]
    assert (plan.rows, plan.columns) == ((384, 192) if name == "siblings" else (128, 192))


def test_amaxes_of_rows_and_columns_are_taken_by_a_kernel_of_their_own() -> None:
    amaxes, both_ways = rewritten(CASES["gated_by_rows"][0], *inputs_of("gated_by_rows", 128, 192))
    assert sorted(o.kind for o in amaxes.outputs) == ["amaxes of columns"] * 2 + ["amaxes of rows"] * 2
    assert sorted(o.kind for o in both_ways.outputs) == ["columns"] * 3 + ["rows"] * 2


def test_amaxes_of_what_another_amax_scales_are_taken_apart() -> None:
    """One kernel for all of them would wait for itself."""

    def balanced(x: Tensor) -> Any:
        y = x / x.abs().amax(0, keepdim=True)
        return *scaled_by_rows(x), *scaled_by_rows(y)

    kinds = [sorted(o.kind for o in plan.outputs) for plan in rewritten(balanced, X)]
    assert ["columns", "columns", "rows", "rows"] in kinds
    assert all(found.count("amaxes of columns") <= 1 for found in kinds)


def test_rows_may_have_several_dimensions() -> None:
    def deep(x: Tensor) -> Any:
        size = x.abs()
        by_row = 448 / size.amax(2, keepdim=True).float()
        by_column = 448 / size.amax((0, 1), keepdim=True).float()
        return quantize(x, by_row, E4M3), quantize(x, by_column, E4M3).view(128, 192).t().contiguous()

    amaxes, both_ways = rewritten(deep, X.view(2, 64, 192))
    assert [o.kind for o in amaxes.outputs] == ["amaxes of rows", "amaxes of columns"]
    assert (both_ways.rows, both_ways.columns) == (128, 192)


def test_a_tanh_is_a_sigmoid_only_where_1_is_added() -> None:
    """By itself it is small near 0, where a sum with 1 has no digits left for it."""
    for name, is_sigmoid in (("gelu", True), ("gradient", True), ("tanh", False)):
        (plan,) = rewritten(CASES[name][0], *inputs_of(name, 128, 192))
        assert ("tanh_of(" in source_of(plan)) is not is_sigmoid


def test_no_other_node_quantizes_or_copies() -> None:
    module = captured(CASES["gated_gradient"][0], *inputs_of("gated_gradient", 128, 192))
    assert QuantizeKernels().run(module.graph, run(module)) == 2
    assert not any(
        count(module, target) for target in (QUANTIZE, aten.clone.default, aten.cat.default, aten.sigmoid.default)
    )


def test_siblings_are_read_where_they_are() -> None:
    (plan,) = rewritten(CASES["siblings"][0], *inputs_of("siblings", 128, 192))
    assert plan.piles == ((0, (128, 128, 128)),)
    assert list(plan.parameters)[:4] == ["in0_0", "in0_1", "in0_2", "in1"]


def test_kernels_that_read_more_have_configurations_with_fewer_registers() -> None:
    (light,) = rewritten(lambda x, s: both(x, s), X, scale())
    (heavy,) = rewritten(lambda x, y, s: both(x * y, s), X, X.clone(), scale())
    assert (light.choices, heavy.choices) == (LIGHT, HEAVY)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
def test_deterministic_fixes_the_choice_where_sums_depend_on_it() -> None:
    (sums,) = rewritten(lambda x, s: (*both(x, s), x.sum(0)), X, scale())
    (amaxes,) = rewritten(lambda x, s: both(x, s), X, scale())
    assert sums.choices == LIGHT[:1]
    assert amaxes.choices == LIGHT


def test_a_scale_made_of_the_amax_leaves_the_amax_outside() -> None:
    def dynamic(x: Tensor) -> Any:
        y = F.relu(x)
        own = 448.0 / amax(y).float()
        q = quantize(y, own, E4M3)
        return q, q.t().contiguous()

    (plan,) = rewritten(dynamic, X)
    assert sorted(o.kind for o in plan.outputs) == ["columns", "rows"]


def test_an_amax_that_another_scale_is_made_of_is_taken_before() -> None:

    def chained(x: Tensor, s: Tensor) -> Any:
        first = both(x * 2, s)
        second = quantize(x * 3, 448.0 / first[2].float(), E5M2)
        return *first, second, second.t().contiguous()

    (plan,) = rewritten(chained, X, scale())
    assert sorted(o.kind for o in plan.outputs) == ["columns", "columns", "rows", "rows"]


def normed(x: Tensor, s: Tensor) -> Any:
    return both(F.rms_norm(x, [192]), s)


def turned(x: Tensor, s: Tensor) -> Any:
    return both(F.silu(x.view(4, 32, 192).transpose(0, 1).reshape(128, 192).t()), s)


def summed_rows(x: Tensor, s: Tensor) -> Any:
    return both(x.view(128, 2, 96).sum(1) * 2, s)


def in_place(x: Tensor, s: Tensor, into: Tensor) -> Any:
    return into.copy_(quantize(x * 2, s, E4M3)), amax(x * 2)


def nothing_else(x: Tensor, s: Tensor) -> Any:
    return quantize(x, s, E4M3), x.sum()


def read_by_a_matmul(x: Tensor, s: Tensor) -> Any:
    y = F.silu(x)
    return *both(y, s), y @ y.t()


def rows_alone(x: Tensor, of_rows: Tensor) -> Any:
    y = x * 2
    return quantize(y, of_rows, E4M3), y.abs().amax(1)


def odd_rows(x: Tensor, s: Tensor) -> Any:
    return both(x[:126] * 2, s)


def in_float64(x: Tensor, s: Tensor) -> Any:
    return both((x.double() * 2).to(BF16), s)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "norm": (normed, (X, scale()), "is computed from a reduction along rows"),
    "transposed": (turned, (X, scale()), "do not lie as in a matrix|may as well quantize"),
    "reduced": (summed_rows, (X, scale()), "may as well quantize"),
    "in place": (in_place, (X, scale(), X.to(E4M3)), "written in place"),
    "quantize alone": (nothing_else, (X, scale()), "nothing to compute but the quantize"),
    "rows alone": (rows_alone, (X, torch.ones(128, 1)), "quantizes rows in the kernel that takes their amaxes"),
    "odd rows": (odd_rows, (X, scale()), "126 rows are not a multiple of 4"),
    "float64": (in_float64, (X, scale()), "float64"),
    "other reader": (read_by_a_matmul, (X, scale()), "reads what the kernel computes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_to_inductor(case: str) -> None:
    function, inputs, reason = REFUSED[case]
    found = refused(function, *inputs)
    assert any(part in found for part in reason.split("|")), found


def test_a_copy_that_turns_a_flattened_tensor_around_is_left_to_inductor() -> None:
    def heads(x: Tensor, s: Tensor) -> Any:
        x_q = quantize(x * 2, s, E4M3)
        return x_q, x_q.view(32, 768).t().contiguous()

    assert rewritten(heads, X.view(32, 4, 192), scale()) == []
    assert rewritten(heads, X.view(32, 4, 192), torch.ones(32, 4, 1)) == []


def test_small_tensors_are_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_kernels, "LEAST_ELEMENTS", X.numel() + 1)
    assert rewritten(lambda x, s: both(x, s), X, scale()) == []


def test_cpus_have_no_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "pretended_device", None)
    assert rewritten(lambda x, s: both(x, s), X, scale()) == []
