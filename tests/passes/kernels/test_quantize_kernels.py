"""The quantize_kernels pass: what one kernel computes, what is left to Inductor, and which configurations it has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass.base._torch import kernel_called, triton_kernel_wrapper_functional
from fp8pass.base.scaling import amax, power_of_2_from_amax, quantize
from fp8pass.graph.builder import val
from fp8pass.passes.common import transposed_copies
from fp8pass.passes.kernels import quantize_kernels
from fp8pass.passes.kernels.element_addresses import AddressStep
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.quantize_groups import match, why_not
from fp8pass.passes.kernels.quantize_kernels import QuantizeKernels
from fp8pass.passes.kernels.tiles_source import HEAVY, LIGHT, TilesPlan, source_of
from fp8pass.passes.kernels.triton_epilogue import Read
from fp8pass.quant.kernel_ops import QUANTIZE
from fp8pass.quant.ops import Blockwise
from fp8pass.recipes import BlockwiseScaling, MXFP8Scaling
from tests.compiler.test_triton_numerics import interpreted
from tests.helpers.fused_matmuls import both
from tests.helpers.harness import BF16, E4M3, E5M2, capture, count, on_kernels, run, scale
from tests.helpers.quantize_kernels import CASES, compared, compiled, inputs_of, scaled_by_rows

aten = torch.ops.aten
X = torch.zeros(128, 192, dtype=BF16)


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "pretended_device", torch.device("cuda"))
    monkeypatch.setattr(quantize_kernels, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(transposed_copies, "is_launched", lambda _: True)


def captured(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    module = capture(function, *inputs)
    on_kernels(module, FoldQuantizes())
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
    on_kernels(module, QuantizeKernels())
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


def in_blocks(x: Tensor, dims: tuple[int, ...], recipe: Any = None) -> Any:
    return Blockwise(recipe or BlockwiseScaling(), E4M3, 32 if recipe else 128, dims=dims).parts(x)


def blocks_of_rows(x: Tensor) -> Any:
    return in_blocks(F.gelu(x), (1,))


def small_blocks(x: Tensor) -> Any:
    return in_blocks(x, (0,), MXFP8Scaling())


def each_apart(x: Tensor) -> Any:
    blocks = x.view(128, 1, 192, 1)
    x_q = quantize(blocks, 448 / blocks.abs().amax((1, 3), keepdim=True).float(), E4M3).view(128, 192)
    return x_q, x_q.t().contiguous()


def read_as_it_is(x: Tensor) -> Any:
    """Quantize the transpose, and read it in another layout than its copy's."""
    blocks = x.t().reshape(192, 1, 1, 128)
    x_q = quantize(blocks, 448 / blocks.abs().amax((1, 3), keepdim=True).float(), E4M3)
    return x_q, x_q.view(192, 128).contiguous()


KINDS = {
    "weight": ["amax", "columns", "rows"],
    "siblings": ["amax", "columns", "rows"],
    "gelu": ["amax", "columns", "rows"],
    "gradient": ["amax", "columns", "columns", "rows", "sums"],
    "gated": ["amax", "rows"],
    "gated_gradient": ["amax", "columns", "columns", "rows"],
    "by_rows": ["columns", "rows"],
}


@pytest.mark.passes
@pytest.mark.parametrize("name", KINDS)
def test_one_kernel_computes_all_that_is_made_of_the_same_matrices(name: str) -> None:
    (plan,) = rewritten(CASES[name][0], *inputs_of(name, 128, 192))
    assert sorted(o.kind for o in plan.outputs) == KINDS[name]
    assert (plan.rows, plan.columns) == ((384, 192) if name == "siblings" else (128, 192))


@pytest.mark.passes
def test_amaxes_of_rows_and_columns_are_taken_by_a_kernel_of_their_own() -> None:
    amaxes, both_ways = rewritten(CASES["gated_by_rows"][0], *inputs_of("gated_by_rows", 128, 192))
    assert sorted(o.kind for o in amaxes.outputs) == ["amaxes of columns"] * 2 + ["amaxes of rows"] * 2
    assert sorted(o.kind for o in both_ways.outputs) == ["columns"] * 3 + ["rows"] * 2


@pytest.mark.passes
def test_amaxes_of_what_another_amax_scales_are_taken_apart() -> None:
    """One kernel for all of them would wait for itself."""

    def balanced(x: Tensor) -> Any:
        y = x / x.abs().amax(0, keepdim=True)
        return *scaled_by_rows(x), *scaled_by_rows(y)

    kinds = [sorted(o.kind for o in plan.outputs) for plan in rewritten(balanced, X)]
    assert ["columns", "columns", "rows", "rows"] in kinds
    assert all(found.count("amaxes of columns") <= 1 for found in kinds)


@pytest.mark.passes
@pytest.mark.parametrize(("name", "tile"), [("in_blocks", (128, 128)), ("in_columns", (128, 64))])
def test_a_tile_holds_whole_blocks(name: str, tile: tuple[int, int]) -> None:
    (plan,) = rewritten(CASES[name][0], *inputs_of(name, 256, 128))
    assert {(c.rows, c.columns) for c in plan.choices} == {tile}
    assert {o.kind for o in plan.outputs} == {"columns", "numbers"} | ({"rows"} if name == "in_blocks" else set())


@pytest.mark.passes
def test_gradients_in_blocks_of_rows_and_columns_are_quantized_by_one_kernel() -> None:
    name = "in_rows_and_columns"
    (plan,) = rewritten(CASES[name][0], *inputs_of(name, 256, 128))
    assert sorted((b.rows, b.columns) for b in plan.blocks) == [(1, 128)] * 2 + [(128, 1)] * 3
    assert [o.kind for o in plan.outputs].count("numbers") == 5


@pytest.mark.passes
def test_scales_of_blocks_lie_as_matmuls_read_them() -> None:
    """The pass removes the copy that brought the scales into the order in which the matmul reads them."""

    def laid_out(x: Tensor) -> Any:
        x_q, scale_inv = in_blocks(x, (1,))
        return x_q, *in_blocks(x, (0,)), scale_inv.t().contiguous()

    module = captured(laid_out, torch.zeros(256, 384, dtype=BF16))
    on_kernels(module, QuantizeKernels())
    (by_blocks,) = (n for n in module.graph.output_node().args[0] if val(n).shape == (3, 256))  # type: ignore[union-attr]
    assert by_blocks.target is operator.getitem


@pytest.mark.passes
def test_an_amax_of_blocks_that_others_read_is_written_too() -> None:
    def watched(x: Tensor) -> Any:
        blocks = x.t().reshape(128, 1, 2, 128)
        size = blocks.abs().amax((1, 3), keepdim=True)
        x_q = quantize(blocks, power_of_2_from_amax(size.float(), 448.0, 1.0), E4M3)
        return x_q.reshape(128, 256).contiguous(), size

    (plan,) = rewritten(watched, torch.zeros(256, 128, dtype=BF16))
    assert [(o.kind, o.dtype) for o in plan.outputs] == [("columns", E4M3), ("numbers", BF16)]


@pytest.mark.passes
def test_heads_of_attention_are_read_where_they_are() -> None:
    module = captured(CASES["heads"][0], *inputs_of("heads", 128, 192))
    on_kernels(module, QuantizeKernels())
    (plan,) = plans(module)
    # [2, 12, 64, 16] in memory: after 64 positions the next batch, after 16 columns the next head
    ((_, code),) = plan.codes
    steps = AddressStep("column", 16, (64 - 1) * 16), AddressStep("row", 64, (12 - 1) * 64 * 16)
    assert code.reads[0] == Read("x0", 0, BF16, 16, 1, 0, steps)
    assert count(module, aten.clone.default) == 0


@pytest.mark.passes
@pytest.mark.parametrize("name", ["rotated", "rotated_by_rows"])
def test_heads_are_rotated_by_one_kernel_and_halves_computed_together(name: str) -> None:
    """Queries of 128 columns by a cat of halves, keys of 80 by scattered halves, in heads of 16."""
    module = captured(CASES[name][0], *inputs_of(name, 128, 80))
    on_kernels(module, QuantizeKernels())
    for plan in plans(module):
        assert (plan.rows, plan.columns, plan.half) == (128, 104, 8)
        assert [start for start, _ in plan.codes] == [0, 64]
    assert not [n for n in module.graph.nodes if n.target in (aten.cat.default, aten.slice_scatter.default)]


@pytest.mark.passes
def test_equal_parts_that_are_arranged_are_computed_apart() -> None:
    """As queries and keys of as many heads: a tile lies in one of them."""
    module = captured(CASES["rotated"][0], *inputs_of("rotated", 128, 128))
    on_kernels(module, QuantizeKernels())
    (plan,) = plans(module)
    assert [len(code.results) for _, code in plan.codes] == [4, 4]


@pytest.mark.passes
def test_a_small_part_is_written_before() -> None:
    """The gradients of keys that several queries share are sums: Inductor writes them, and the kernel reads."""

    def shared(q: Tensor, k: Tensor, s: Tensor) -> Any:
        keys = k.view(2, 2, 4, 64, 16).sum(2)
        moved = (x.transpose(1, 2).reshape(128, -1) for x in (q.view(2, 12, 64, 16), keys))
        return both(torch.cat(list(moved), -1), s)

    (plan,) = rewritten(shared, torch.zeros(128, 192, dtype=BF16), torch.zeros(128, 128, dtype=BF16), scale())
    assert [start for start, _ in plan.codes] == [0, 192]


@pytest.mark.passes
def test_parts_that_end_within_a_tile_are_left_to_inductor() -> None:
    def ragged(x: Tensor, y: Tensor, s: Tensor) -> Any:
        return both(torch.cat([x.view(2, 2, 64, 16).transpose(1, 2).reshape(128, 32), y], -1), s)

    assert not rewritten(ragged, torch.zeros(128, 32, dtype=BF16), torch.zeros(128, 96, dtype=BF16), scale())


@pytest.mark.passes
def test_what_others_read_is_not_computed_again() -> None:
    def read_twice(x: Tensor, s: Tensor) -> Any:
        y = x.view(2, 12, 64, 16).exp()
        return *both(y.transpose(1, 2).reshape(128, 192), s), y

    assert not rewritten(read_twice, X, scale())


HEADS = torch.zeros(2, 4, 64, 16, dtype=BF16)


def by_position(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(128, -1)


def two_orders(x: Tensor, s: Tensor) -> Any:
    """Scale heads by position, and the matrix by the same table."""
    table = s.view(1, 1, 1).expand(2, 64, 1).contiguous()
    return both((by_position(x * table.unsqueeze(1)).view(2, 64, 64) * table).view(128, 64), s)


def only_some(x: Tensor, s: Tensor) -> Any:
    """Take amaxes of one matrix of heads, in a group that reads two."""
    a, b = by_position(x), by_position(x.exp())
    return *both(a * b, s), *scaled_by_rows(a)


def unlike_types(x: Tensor, s: Tensor) -> Any:
    heads = torch.cat([x[..., :8].int(), x[..., 8:].float()], -1)
    return both(by_position(heads).to(BF16), s)


def a_part_of_zeros(x: Tensor, s: Tensor) -> Any:
    return both(torch.cat([by_position(x), torch.zeros(128, 64, dtype=BF16)], -1), s)


@pytest.mark.passes
@pytest.mark.parametrize("function", [two_orders, only_some, unlike_types, a_part_of_zeros])
def test_unusual_heads_are_no_fault(function: Callable[..., Any]) -> None:
    module = captured(function, HEADS, scale())
    on_kernels(module, QuantizeKernels())
    if function is unlike_types:  # the part of integers is promoted before it is joined
        assert "tmp0 = x0.to(tl.int32)\n    tmp1 = tmp0.to(tl.float32)" in source_of(plans(module)[0])
    if function is a_part_of_zeros:  # both branches have results of the tile's shape
        assert "r0_0 = tl.broadcast_to(r0_0, [ROWS // 4, COLUMNS])" in source_of(plans(module)[0])


@pytest.mark.passes
def test_heads_that_are_scaled_by_a_size_or_on_another_device_are_left_to_inductor() -> None:
    module = captured(lambda x, t, s: both(by_position(x * t), s), HEADS, torch.tensor(2.0), scale())
    (_, table, _) = module.graph.find_nodes(op="placeholder")
    table.meta["val"] = table.meta["val"].to("meta")
    on_kernels(module, QuantizeKernels())
    assert not plans(module)


@pytest.mark.passes
def test_the_kernel_is_the_same_in_each_process() -> None:
    """Results that only differ in their scale keep the order of the graph: ranks then compile one kernel."""
    found: list[str] = []
    for _ in range(4):
        module = captured(CASES["by_rows"][0], *inputs_of("by_rows", 128, 192))
        on_kernels(module, QuantizeKernels())
        found += map(source_of, plans(module))
    assert len(set(found)) == 1


@pytest.mark.passes
@pytest.mark.parametrize(
    ("shape", "axes", "n"),
    [((128, 12, 16), (2, 0, 1), 12), ((126, 12, 16), (1, 0, 2), 16)],
)
def test_other_orders_are_left_to_inductor(shape: tuple[int, ...], axes: tuple[int, ...], n: int) -> None:
    """A tile can't read columns that are apart, or four rows of which some are in the next group."""

    def moved(x: Tensor, s: Tensor) -> Any:
        return both(x.permute(axes).reshape(-1, n), s)

    assert not rewritten(moved, torch.zeros(shape, dtype=BF16), scale())


def heads_that_grow(x: Tensor, s: Tensor) -> Any:
    return quantize(x.view(2, 12, 64, 16).transpose(1, 2).reshape(128, 192), s, E4M3), x + 1


def what_is_computed_again(x: Tensor, s: Tensor) -> Any:
    y = x * 2
    return quantize(y, s, E4M3).t().contiguous(), y


@pytest.mark.passes
@pytest.mark.parametrize("function", [heads_that_grow, what_is_computed_again])
def test_a_kernel_runs_before_its_input_is_overwritten(function: Callable[..., Any]) -> None:
    """AOTAutograd ends such a graph with a copy of the last result into the input."""
    module = captured(function, X, scale())
    (x, *_), output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    x_q, new = output.args[0]  # type: ignore[misc, str-unpack]
    with module.graph.inserting_before(output):
        write = module.graph.call_function(aten.copy_.default, (x, new))
    write.meta["val"] = val(x)  # type: ignore[arg-type]
    output.update_arg(0, (x_q,))
    on_kernels(module, QuantizeKernels())
    (kernel,) = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    assert kernel < write


@pytest.mark.passes
def test_an_unlike_block_is_quantized_apart() -> None:
    def two(x: Tensor) -> Any:
        return *in_blocks(x, (0,)), *small_blocks(x)

    (plan,) = rewritten(two, torch.zeros(128, 192, dtype=BF16))
    assert [(b.rows, b.columns) for b in plan.blocks] == [(128, 1)]


@pytest.mark.passes
def test_numbers_that_two_quantizes_share_are_written_once() -> None:
    def shared(x: Tensor) -> Any:
        blocks = x.view(2, 128, 2, 128)
        inverse = blocks.abs().amax((1, 3), keepdim=True).float() / 448
        made = [quantize(blocks, 1 / inverse, dtype).view(256, 256) for dtype in (E4M3, E5M2)]
        return *made, *(x_q.t().contiguous() for x_q in made), inverse

    module = captured(shared, torch.zeros(256, 256, dtype=BF16))
    m = match(module.graph.find_nodes(op="call_function", target=QUANTIZE)[0])
    assert m is not None and len(m.group.quantizes) == 2
    assert len({o.instead_of for o in m.made}) == len(m.made)


@pytest.mark.passes
def test_a_constant_may_have_the_shape_of_the_amaxes() -> None:
    def chosen(x: Tensor) -> Any:
        blocks = x.view(2, 128, 2, 128)
        size = blocks.abs().amax((1, 3), keepdim=True).float()
        x_q = quantize(blocks, torch.where(size == 0, torch.ones_like(size), 448 / size), E4M3).view(256, 256)
        return x_q, x_q.t().contiguous()

    (plan,) = rewritten(chosen, torch.zeros(256, 256, dtype=BF16))
    assert [(b.rows, b.columns) for b in plan.blocks] == [(128, 128)]


@pytest.mark.passes
def test_a_view_that_mixes_rows_and_columns_is_not_in_blocks() -> None:
    def mixed(x: Tensor) -> Any:
        blocks = x.t().view(2, 128, 2, 128)  # of 512 rows by 128 columns
        x_q = quantize(blocks, 448 / blocks.abs().amax((1, 3), keepdim=True).float(), E4M3)
        return x_q.reshape(512, 128).contiguous(), x

    assert not rewritten(mixed, torch.zeros(128, 512, dtype=BF16))


@pytest.mark.passes
def test_amaxes_of_columns_take_rows_by_fours() -> None:
    def apart(x: Tensor) -> Any:
        y = x * 2
        by_row, by_column = y.abs().amax(1).amax(), y.abs().amax(0).amax()
        return quantize(y, 448 / by_row.float(), E4M3), quantize(y, 400 / by_column.float(), E4M3), amax(y)

    kinds = [o.kind for plan in rewritten(apart, torch.zeros(126, 192, dtype=BF16)) for o in plan.outputs]
    assert "amaxes of columns" not in kinds


@pytest.mark.passes
def test_addresses_of_heads_are_as_wide_as_they_must_be() -> None:
    """The kernel computes addresses in 32 bits where the tensor has less than 2**31 elements."""

    def attention(x: Tensor, s: Tensor) -> Any:
        return both(x.transpose(1, 2).reshape(16384, 2048), s)

    (plan,) = rewritten(attention, torch.empty(8, 32, 2048, 64, dtype=BF16), scale())
    assert "int64" not in source_of(plan)


@pytest.mark.passes
@pytest.mark.parametrize("function", [small_blocks, read_as_it_is])
def test_other_blocks_are_left_to_inductor(function: Callable[..., Any]) -> None:
    assert not rewritten(function, torch.zeros(128, 192, dtype=BF16))


@pytest.mark.passes
def test_rows_may_have_several_dimensions() -> None:
    def deep(x: Tensor) -> Any:
        size = x.abs()
        by_row = 448 / size.amax(2, keepdim=True).float()
        by_column = 448 / size.amax((0, 1), keepdim=True).float()
        return quantize(x, by_row, E4M3), quantize(x, by_column, E4M3).view(128, 192).t().contiguous()

    amaxes, both_ways = rewritten(deep, X.view(2, 64, 192))
    assert [o.kind for o in amaxes.outputs] == ["amaxes of rows", "amaxes of columns"]
    assert (both_ways.rows, both_ways.columns) == (128, 192)


@pytest.mark.passes
def test_a_tanh_is_a_sigmoid_only_where_1_is_added() -> None:
    """By itself it is small near 0, where a sum with 1 has no digits left for it."""
    for name, is_sigmoid in (("gelu", True), ("gradient", True), ("tanh", False)):
        (plan,) = rewritten(CASES[name][0], *inputs_of(name, 128, 192))
        assert ("tanh_of(" in source_of(plan)) is not is_sigmoid


@pytest.mark.passes
def test_no_other_node_quantizes_or_copies() -> None:
    module = captured(CASES["gated_gradient"][0], *inputs_of("gated_gradient", 128, 192))
    assert QuantizeKernels().run(module.graph, run(module)) == 2
    assert not any(
        count(module, target) for target in (QUANTIZE, aten.clone.default, aten.cat.default, aten.sigmoid.default)
    )


@pytest.mark.passes
def test_siblings_are_read_where_they_are() -> None:
    (plan,) = rewritten(CASES["siblings"][0], *inputs_of("siblings", 128, 192))
    assert plan.piles == ((0, (128, 128, 128)),)
    assert list(plan.parameters)[:4] == ["in0_0", "in0_1", "in0_2", "in1"]


@pytest.mark.passes
def test_kernels_that_read_more_have_configurations_with_fewer_registers() -> None:
    (light,) = rewritten(lambda x, s: both(x, s), X, scale())
    (heavy,) = rewritten(lambda x, y, s: both(x * y, s), X, X.clone(), scale())
    assert (light.choices, heavy.choices) == (LIGHT, HEAVY)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.passes
@pytest.mark.usefixtures("_deterministic")
def test_deterministic_fixes_the_choice_where_sums_depend_on_it() -> None:
    (sums,) = rewritten(lambda x, s: (*both(x, s), x.sum(0)), X, scale())
    (amaxes,) = rewritten(lambda x, s: both(x, s), X, scale())
    assert sums.choices == LIGHT[:1]
    assert amaxes.choices == LIGHT


@pytest.mark.passes
def test_a_scale_made_of_the_amax_leaves_the_amax_outside() -> None:
    def dynamic(x: Tensor) -> Any:
        y = F.relu(x)
        own = 448.0 / amax(y).float()
        q = quantize(y, own, E4M3)
        return q, q.t().contiguous()

    (plan,) = rewritten(dynamic, X)
    assert sorted(o.kind for o in plan.outputs) == ["columns", "rows"]


@pytest.mark.passes
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
    "transposed": (turned, (X, scale()), "do not lie as in a matrix|by a kernel that can quantize it too"),
    "reduced": (summed_rows, (X, scale()), "by a kernel that can quantize it too"),
    "in place": (in_place, (X, scale(), X.to(E4M3)), "written in place"),
    "quantize alone": (nothing_else, (X, scale()), "nothing to compute but the quantize"),
    "rows alone": (rows_alone, (X, torch.ones(128, 1)), "quantizes rows in the kernel that takes their amaxes"),
    "odd rows": (odd_rows, (X, scale()), "126 rows are not a multiple of 4"),
    "float64": (in_float64, (X, scale()), "float64"),
    "elements as blocks": (each_apart, (X,), "the blocks are 1x1"),
    "rows of blocks": (blocks_of_rows, (X[:, :128],), "quantizes rows in the kernel that takes their amaxes"),
    "other reader": (read_by_a_matmul, (X, scale()), "reads what the kernel computes"),
}


@pytest.mark.passes
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_to_inductor(case: str) -> None:
    function, inputs, reason = REFUSED[case]
    found = refused(function, *inputs)
    assert any(part in found for part in reason.split("|")), found


@pytest.mark.passes
def test_a_copy_that_turns_a_flattened_tensor_around_is_left_to_inductor() -> None:
    def heads(x: Tensor, s: Tensor) -> Any:
        x_q = quantize(x * 2, s, E4M3)
        return x_q, x_q.view(32, 768).t().contiguous()

    assert rewritten(heads, X.view(32, 4, 192), scale()) == []
    assert rewritten(heads, X.view(32, 4, 192), torch.ones(32, 4, 1)) == []


@pytest.mark.passes
def test_small_tensors_are_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_kernels, "LEAST_ELEMENTS", X.numel() + 1)
    assert rewritten(lambda x, s: both(x, s), X, scale()) == []


@pytest.mark.passes
def test_cpus_have_no_such_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "pretended_device", None)
    assert rewritten(lambda x, s: both(x, s), X, scale()) == []


SIZES = {
    "tiles divide": (128, 128, ""),
    "tiles do not divide": (144, 80, ""),
    "NaN and infinities": (144, 80, "nan"),
    "zero scales": (64, 80, "nan zero"),
}
IN_BLOCKS = {
    "tiles divide": (256, 128, ""),
    "NaN and infinities": (128, 256, "nan"),
    "tiles do not divide": (256, 80, ""),
}
"""Sizes for cases with a scale for each block: only `in_columns` takes those that no row of blocks divides."""
CHOICES = "64 64 4", "64 64 8", "128 64 8"
BLOCKS = "128 64 8", "128 128 8", "128 128 32"
EVERYDAY = {
    ("weight", "tiles do not divide", "128 64 8"),
    ("siblings", "tiles do not divide", "128 64 8"),
    ("gelu", "NaN and infinities", "64 64 4"),
    ("exact_gelu", "tiles do not divide", "64 64 8"),
    ("tanh", "tiles do not divide", "64 64 4"),
    ("gradient", "NaN and infinities", "128 64 8"),
    ("gradient", "tiles do not divide", "64 64 8"),
    ("heads", "tiles do not divide", "64 64 4"),
    ("rotated", "NaN and infinities", "64 64 8"),
    ("rotated_by_rows", "tiles do not divide", "128 64 8"),
    ("padded", "tiles do not divide", "128 64 8"),
    ("gated", "zero scales", "64 64 8"),
    ("gated_gradient", "tiles do not divide", "64 64 8"),
    ("by_rows", "NaN and infinities", "64 64 4"),
    ("gated_by_rows", "tiles do not divide", "64 64 8"),
    ("in_blocks", "tiles divide", "128 128 8"),
    ("in_columns", "tiles do not divide", "128 64 8"),
    ("in_rows_and_columns", "NaN and infinities", "128 128 32"),
}
WORK = {
    "weight": (0, 2),
    "siblings": (0, 2),
    "gelu": (1, 2),
    "exact_gelu": (1, 2),
    "tanh": (1, 2),
    "gradient": (1, 3),
    "heads": (0, 2),
    "rotated": (0, 4),
    "rotated_by_rows": (0, 4),
    "padded": (0, 4),
    "gated": (1, 1),
    "gated_gradient": (1, 5),
    "by_rows": (0, 2),
    "gated_by_rows": (1, 5),
    "in_blocks": (0, 2),
    "in_columns": (0, 1),
    "in_rows_and_columns": (1, 5),
}
"""Exponentials, and casts to FP8 of each element: one for each FP8 tensor that is written."""
SPILLS = {("rotated_by_rows", 120): 8}
"""Bytes of local memory: ptxas decides for 80 registers, to run three programs at once, and one value is too many."""
WRITES = {
    "weight": ["amax", "columns", "rows"],
    "siblings": ["amax", "columns", "rows"],
    "gradient": ["amax", "columns", "columns", "rows", "sums"],
    "gated": ["amax", "rows"],
    "gated_gradient": ["amax", "columns", "columns", "rows"],
    "padded": ["amax", "columns", "rows", "sums"],
    "by_rows": ["columns", "rows"],
    "rotated_by_rows": ["amaxes of columns", "amaxes of rows", "columns", "rows"],
    "gated_by_rows": [
        *["amaxes of columns"] * 2,
        *["amaxes of rows"] * 2,
        *["columns"] * 3,
        *["rows"] * 2,
    ],
    "in_blocks": ["columns", "numbers", "rows"],
    "in_columns": ["columns", "numbers"],
    "in_rows_and_columns": [*["columns"] * 3, *["numbers"] * 5, *["rows"] * 2],
}
"""The kinds of a kernel's outputs: amaxes, FP8 in rows and in columns, and sums."""


def _cases() -> list[Any]:
    blocks = {"in_blocks": BLOCKS[1:], "in_columns": BLOCKS[:1], "in_rows_and_columns": BLOCKS[1:]}
    cases = [(name, size, choice) for name in CASES if name not in blocks for size in SIZES for choice in CHOICES]
    cases += [(name, size, choice) for name in blocks for size in IN_BLOCKS for choice in blocks[name]]
    cases = [c for c in cases if c[0] == "in_columns" or c[0] not in blocks or c[1] != "tiles do not divide"]
    return [pytest.param(*c, marks=[] if c in EVERYDAY else pytest.mark.variant) for c in cases]


@pytest.mark.gpu_code
@interpreted
@pytest.mark.parametrize(("name", "size", "choice"), _cases())
def test_it_writes_what_the_graph_computes(name: str, size: str, choice: str) -> None:
    m, n, how = (IN_BLOCKS if name.startswith("in_") else SIZES)[size]
    found = compared(name, m, n, choice, how)
    assert sorted(f["kind"] for f in found) == WRITES.get(name, ["amax", "columns", "rows"])
    for f in found:
        assert f["special"], f
        # what is not computed by the CPU's exponential rounds to another FP8 number here and there
        assert f["steps"] <= 1, f
        assert f["differing"] < 0.01 or f["kind"] == "sums", f
        assert f["sqnr"] > 40, f


@pytest.mark.gpu_code
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(
            n,
            c,
            marks=[] if (n, c) in {("gradient", 90), ("gated_by_rows", 89), ("siblings", 120)} else pytest.mark.variant,
        )
        for n in CASES
        for c in (89, 90, 100, 120)
    ],
)
def test_each_choice_compiles_without_spills(name: str, capability: int) -> None:
    for found in compiled(name, capability):
        assert found["spilled"] <= SPILLS.get((name, capability), 0), found
        assert found["saturates"], found  # `quantize` does not clamp on GPUs
        exponentials, casts = WORK[name]  # whatever the layout of the stores
        assert found["exponentials"] <= exponentials, found
        writes = {"rows", "columns"} & set(found["kinds"])
        assert 0 < found["casts"] <= casts if writes else not found["casts"], found
        assert max(found["stores"]) >= 64 or not writes, found
