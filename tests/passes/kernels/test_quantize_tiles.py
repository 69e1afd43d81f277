"""The quantize_tiles pass: both orientations of a quantized tensor, its amax and the sums of its columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass.base import scaling
from fp8pass.base.node_meta import WITH_AMAX
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.options.config import Config
from fp8pass.passes.common import transposed_copies as tiles
from fp8pass.passes.common.transposed_copies import COLUMNS, ROWS
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.quantize_tiles import QuantizeTiles
from fp8pass.quant.kernel_ops import CONCATENATED, JOINED, QUANTIZE, REPEATED
from tests.helpers import harness
from tests.helpers.harness import BF16, E4M3, E5M2, F16, F32, aten, count, expect_graph, on_kernels, scale, text

pytestmark = pytest.mark.passes


def capture(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    """Capture a graph and run fold_quantizes, the pass before this one."""
    module = harness.capture(function, *inputs, dynamic=dynamic)
    on_kernels(module, FoldQuantizes())
    return module


def both(x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix, and return both orientations."""
    x_q = scaling.quantize(x, s, E4M3)
    return x_q, x_q.t().contiguous()


def with_amax(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return scaling.amax(x), *both(x, s)


def gradient(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Return amax, quantized copies and column sums, as the backward of a layer with a bias computes them."""
    return *with_amax(x, s), x.sum(0)


def tiled(module: fx.GraphModule) -> bool:
    return count(module, aten.reshape.default) > 0


def test_graph() -> None:
    module = capture(gradient, torch.randn(128, 32, dtype=BF16), scale())
    expect_graph(
        module,
        """\
x_1: "bf16[128, 32]",
s_1: "f32[]",
abs_1: "bf16[128, 32]" = aten.abs.default(x_1)
amax: "bf16[128]" = aten.amax.default(abs_1, [-1])
amax_1: "bf16[]" = aten.amax.default(amax)
convert_element_type: "f32[]" = prims.convert_element_type.default(amax_1, torch.float32)
quantize_default: "f8e4m3fn[128, 32]" = fp8pass.quantize.default(x_1, s_1, torch.float8_e4m3fn)
permute: "f8e4m3fn[32, 128]" = aten.permute.default(quantize_default, [1, 0])
clone: "f8e4m3fn[32, 128]" = aten.clone.default(permute, memory_format = torch.contiguous_format)
sum_1: "bf16[32]" = aten.sum.dim_IntList(x_1, [0])
return (convert_element_type, quantize_default, clone, sum_1)
""",
    )
    on_kernels(module, QuantizeTiles())
    expect_graph(
        module,
        """\
x_1: "bf16[128, 32]",
s_1: "f32[]",
reshape_default: "bf16[2, 64, 32]" = aten.reshape.default(x_1, [2, 64, 32])
abs_default: "bf16[2, 64, 32]" = aten.abs.default(reshape_default)
amax_default: "bf16[2, 32]" = aten.amax.default(abs_default, [1])
amax_default_1: "bf16[]" = aten.amax.default(amax_default)
convert_element_type: "f32[]" = prims.convert_element_type.default(amax_default_1, torch.float32)
permute_default: "bf16[32, 2, 64]" = aten.permute.default(reshape_default, [2, 0, 1])
clone_default: "bf16[32, 2, 64]" = aten.clone.default(permute_default, memory_format = torch.contiguous_format)
quantize_default_1: "f8e4m3fn[32, 2, 64]" = fp8pass.quantize.default(clone_default, s_1, torch.float8_e4m3fn)
inductor_force_stride_order_default: "f8e4m3fn[32, 2, 64]" = prims.inductor_force_stride_order.default(quantize_default_1, [128, 64, 1])
quantize_default_2: "f8e4m3fn[2, 64, 32]" = fp8pass.quantize.default(reshape_default, s_1, torch.float8_e4m3fn)
inductor_force_stride_order_default_1: "f8e4m3fn[2, 64, 32]" = prims.inductor_force_stride_order.default(quantize_default_2, [2048, 32, 1])
reshape_default_2: "f8e4m3fn[32, 128]" = aten.reshape.default(inductor_force_stride_order_default, [32, 128])
reshape_default_3: "f8e4m3fn[128, 32]" = aten.reshape.default(inductor_force_stride_order_default_1, [128, 32])
sum_dim_int_list: "f32[2, 32]" = aten.sum.dim_IntList(reshape_default, [1], dtype = torch.float32)
sum_dim_int_list_1: "f32[32]" = aten.sum.dim_IntList(sum_dim_int_list, [0])
reshape_default_1: "f32[32]" = aten.reshape.default(sum_dim_int_list_1, [32])
convert_element_type_default: "bf16[32]" = prims.convert_element_type.default(reshape_default_1, torch.bfloat16)
return (convert_element_type, reshape_default_3, reshape_default_2, convert_element_type_default)
""",
    )
    quantized = [n.name for n in module.graph.nodes if WITH_AMAX in n.meta]
    assert len(quantized) == 2


def test_graph_without_tiles() -> None:
    """The number of rows is not a multiple of 64, so the copy is made right after the tensor is quantized."""
    module = capture(with_amax, torch.randn(60, 32, dtype=BF16), scale())
    on_kernels(module, QuantizeTiles())
    expect_graph(
        module,
        """\
x_1: "bf16[60, 32]",
s_1: "f32[]",
abs_1: "bf16[60, 32]" = aten.abs.default(x_1)
amax: "bf16[60]" = aten.amax.default(abs_1, [-1])
amax_1: "bf16[]" = aten.amax.default(amax)
convert_element_type: "f32[]" = prims.convert_element_type.default(amax_1, torch.float32)
quantize_default: "f8e4m3fn[60, 32]" = fp8pass.quantize.default(x_1, s_1, torch.float8_e4m3fn)
permute_default: "f8e4m3fn[32, 60]" = aten.permute.default(quantize_default, [1, 0])
clone_default: "f8e4m3fn[32, 60]" = aten.clone.default(permute_default, memory_format = torch.contiguous_format)
inductor_force_stride_order_default: "f8e4m3fn[32, 60]" = prims.inductor_force_stride_order.default(clone_default, [60, 1])
reshape_default: "f8e4m3fn[32, 60]" = aten.reshape.default(inductor_force_stride_order_default, [32, 60])
return (convert_element_type, quantize_default, reshape_default)
""",
    )


def cases() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    x, s = torch.randn(128, 48, dtype=BF16), scale(8.0)

    def e5m2(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        x_q = scaling.quantize(x, s, E5M2)
        return x_q, x_q.t().contiguous()

    def batched(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        x_q = scaling.quantize(x, s, E4M3)
        return scaling.amax(x), x_q, x_q.reshape(-1, x.shape[-1]).t().contiguous()

    def computed(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = torch.sigmoid(x) * 2
        return *with_amax(y, s), y + 1

    def two_copies(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        x_q = scaling.quantize(x, s, E4M3)
        return x_q, x_q.t().contiguous(), (x_q.t().contiguous().float() * 2), scaling.amax(x)

    def two_scales(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return *with_amax(x, s), *both(x, s * 2)

    def copy_only(x: Tensor, s: Tensor) -> Tensor:
        return both(x, s)[1]

    return {
        "bfloat16": (with_amax, (x, s)),
        "float32": (with_amax, (x.float(), s)),
        "float16": (with_amax, (x.half(), s)),
        "e5m2": (e5m2, (x, s)),
        "no amax": (both, (x, s)),
        "scale with a dimension": (both, (x, s[None, None])),
        "batched": (batched, (torch.randn(4, 32, 48, dtype=BF16), s)),
        "computed, and read elsewhere": (computed, (x, s)),
        "two copies": (two_copies, (x, s)),
        "two scales": (two_scales, (x, s)),
        "the copy alone": (copy_only, (x, s)),
    }


@pytest.mark.parametrize("case", cases())
def test_same_bits(case: str) -> None:
    function, inputs = cases()[case]
    module = capture(function, *inputs)
    wanted = module(*inputs)
    on_kernels(module, QuantizeTiles())
    assert tiled(module)
    got = module(*inputs)
    for a, b in zip(wanted, got, strict=True) if isinstance(wanted, tuple) else [(wanted, got)]:
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.float(), b.float())
    before = text(module)
    on_kernels(module, QuantizeTiles())
    assert text(module) == before, "a second run finds something"


DECLINED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rows not a multiple of 64": (both, (torch.randn(96, 32), scale())),
    "statistics of rows on the way": (
        lambda x, s: both(x * x.square().mean(-1, keepdim=True).rsqrt(), s),
        (torch.randn(128, 32), scale()),
    ),
    "after a cast and a view": (
        lambda x, s: both((x / x.abs().amax(-1, keepdim=True)).to(BF16).view(128, 32), s),
        (torch.randn(2, 64, 32), scale()),
    ),
    "x not contiguous": (lambda x, s: both(x[:, :32], s), (torch.randn(128, 64), scale())),
}


@pytest.mark.parametrize("case", DECLINED)
def test_without_tiles_the_copy_comes_right_after_the_quantize(case: str) -> None:
    function, inputs = DECLINED[case]
    module = capture(function, *inputs)
    wanted = module(*inputs)
    on_kernels(module, QuantizeTiles())
    quantize = next(n for n in module.graph.nodes if n.meta["val"].dtype == E4M3)
    assert (quantize.next.target, quantize.next.next.target) == (aten.permute.default, aten.clone.default)
    assert list(quantize.meta["val"].shape) == list(wanted[0].shape), "has tiles"
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(wanted, module(*inputs), strict=True))
    before = text(module)
    on_kernels(module, QuantizeTiles())
    assert text(module) == before, "a second run finds something"


def padded(x: Tensor, s: Tensor) -> Tensor:
    """Return a copy of the padded tensor, not of the quantized one."""
    return torch.nn.functional.pad(scaling.quantize(x, s, E4M3).view(torch.uint8), (0, 8)).view(E4M3).t().contiguous()


UNKNOWN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "an input that is FP8 already": (lambda x_q: x_q.t().contiguous(), (torch.randn(128, 32).to(E4M3),)),
    "padded": (padded, (torch.randn(128, 24), scale())),
    "cast without a scale": (lambda x: x.clamp(-448, 448).to(E4M3).t().contiguous(), (torch.randn(128, 32),)),
    "a scale for each row": (lambda x, s: both(x, s), (torch.randn(128, 32), torch.rand(128, 1))),
    "a scale with more dimensions": (
        lambda x, s: scaling.quantize(x, s, E4M3)[0, 0].t().contiguous(), (torch.randn(128, 32), scale()[None, None, None, None]),
    ),
    "a batch of matrices": (
        lambda x, s: scaling.quantize(x, s, E4M3).transpose(1, 2).contiguous(), (torch.randn(2, 64, 32), scale()),
    ),
    "no FP8": (lambda x: (x * 2).t().contiguous(), (torch.randn(128, 32),)),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_other_copies_do_not_change(case: str) -> None:
    function, inputs = UNKNOWN[case]
    module = capture(function, *inputs)
    before = text(module)
    assert QuantizeTiles().run(module.graph, KernelsContext(Config(recipe=None))) == 0
    module.recompile()
    assert text(module) == before


def test_graphs_with_symbolic_sizes_do_not_change() -> None:
    module = capture(both, torch.randn(128, 32), scale(), dynamic=True)
    before = text(module)
    on_kernels(module, QuantizeTiles())
    assert text(module) == before


def test_a_matrix_without_rows() -> None:
    """0 rows are a multiple of 64."""
    module = capture(both, torch.randn(0, 32), scale())
    on_kernels(module, QuantizeTiles())
    assert [list(x.shape) for x in module(torch.randn(0, 32), scale())] == [[0, 32], [32, 0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_amax_of_nonfinite_elements(bad: float) -> None:
    x = torch.randn(128, 32, dtype=BF16)
    x[70, 3] = bad
    module = capture(with_amax, x, scale())
    on_kernels(module, QuantizeTiles())
    amax, x_q, x_t = module(x, scale())
    assert torch.equal(amax.isnan(), torch.tensor(bad != bad))
    torch.testing.assert_close(amax, scaling.amax(x), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x_q.float(), scaling.quantize(x, scale(), E4M3).float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x_t.float(), x_q.float().t(), rtol=0, atol=0, equal_nan=True)


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "keepdim": lambda x: x.sum([0], keepdim=True),
    "view": lambda x: x.view(-1, x.shape[-1]).sum(0),
    "float32": lambda x: x.sum(0, dtype=F32),
    "batch": lambda x: x.view(8, -1, x.shape[-1]).sum([0, 1]),
}


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_column_sums_are_exact_up_to_the_last_rounding(case: str, dtype: torch.dtype) -> None:
    """The gradient of a bias is summed in float32 over all tiles, and rounded once."""
    x = (torch.randn(1024, 32) + 0.5).to(dtype)
    module = capture(lambda x, s: (*with_amax(x, s), SUMS[case](x)), x, scale())
    on_kernels(module, QuantizeTiles())
    sums = [n for n in module.graph.nodes if n.target is aten.sum.dim_IntList]
    assert [list(n.meta["val"].shape) for n in sums] == [[16, 32], [32]]
    assert {n.meta["val"].dtype for n in sums} == {F32}
    got, exact = module(x, scale())[-1], x.double().sum(0)
    assert (got.dtype, got.shape) == (SUMS[case](x).dtype, SUMS[case](x).shape)
    error = (got.double().reshape(-1) - exact).abs() / x.double().abs().sum(0)
    assert error.max() < 2**-20 + torch.finfo(got.dtype).eps / 2


def test_sums_other_than_of_columns_in_float32_stay() -> None:
    def function(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return *both(x, s), x.sum(1), x.sum(0, dtype=torch.float64), x.sum([0, 1], keepdim=True)

    x = torch.randn(128, 128)
    module = capture(function, x, scale())
    wanted = module(x, scale())
    on_kernels(module, QuantizeTiles())
    assert [n.args[1:] for n in module.graph.nodes if n.target is aten.sum.dim_IntList] == [
        ([1],),
        ([0],),
        ([0, 1], True),
    ]
    assert tiled(module)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(wanted, module(x, scale()), strict=True))


def test_sums_over_more_elements_than_a_tile_has() -> None:
    """Each sum runs over the rows of a chunk; the more columns a matrix has, the fewer chunks it is cut into."""
    for rows, columns, chunks in (
        (64, 16, 1),
        (1024, 16, 16),
        (1024, COLUMNS // 8, 8),
        (128, COLUMNS, 1),
        (192, 32, 3),
    ):
        assert rows % ROWS == 0
        module = capture(both, torch.randn(rows, columns), scale())
        on_kernels(module, QuantizeTiles())
        tiles = next(n for n in module.graph.nodes if n.target is aten.reshape.default)
        assert list(tiles.meta["val"].shape) == [chunks, rows // chunks, columns]


@pytest.mark.parametrize(("own", "waiting"), [(True, 0), (False, 2)])
def test_a_quantize_with_its_own_amax_is_not_marked(own: bool, waiting: int) -> None:
    """Dynamic scaling writes both orientations in one kernel after the amax; delayed, in one kernel with the amax."""

    def both(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        amax = scaling.amax(x)
        x_q = scaling.quantize(x, scaling.scale_from_amax(amax, 448.0, 1.0) if own else scale, E4M3)
        return amax, x_q, x_q.permute(1, 0).clone(memory_format=torch.contiguous_format)

    module = capture(both, torch.randn(128, 64, dtype=BF16), torch.ones(()))
    on_kernels(module, QuantizeTiles())
    assert sum(WITH_AMAX in n.meta for n in module.graph.nodes) == waiting


def gradients_of_swiglu(dy: Tensor, gate: Tensor, up: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of gate and up as one layer; both parts are computed from the same tensors."""
    sigmoid = torch.sigmoid(gate)
    return gradient(torch.cat([dy * up * (sigmoid * (1 + gate * (1 - sigmoid))), dy * gate * sigmoid], -1), s)


def gradients_of_others(dy: Tensor, gate: Tensor, up: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Return a gradient whose two parts read different tensors."""
    return gradient(torch.cat([gate.exp(), up.exp()], -1), s)


def parts(rows: int = 128) -> tuple[Tensor, ...]:
    return (*(torch.randn(rows, 32, dtype=BF16) for _ in range(3)), scale(8.0))


def test_parts_of_a_cat_are_written_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor computes a cat element by element, which would read the inputs common to gate and up twice."""
    monkeypatch.setattr(tiles, "is_launched", lambda x: True)
    inputs = parts()
    module = capture(gradients_of_swiglu, *inputs)
    wanted = module(*inputs)
    on_kernels(module, QuantizeTiles())
    made = [n for n in module.graph.nodes if n.target is CONCATENATED]
    shapes = sorted((list(n.meta["val"].shape), len(n.args[0])) for n in made)
    # sums and amaxes of the columns of two tiles; the quantized tensor and its transpose
    assert shapes == [([2, 64], 2), ([2, 64], 2), ([2, 64, 64], 2), ([64, 2, 64], 2)]
    assert count(module, aten.cat.default) == 0
    for a, b in zip(wanted, module(*inputs), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-2 * (a is wanted[-1]), atol=1e-2 * (a is wanted[-1]))
    before = text(module)
    on_kernels(module, QuantizeTiles())
    assert text(module) == before, "a second run finds something"


def gradients_of_rotary_positions(q: Tensor, v: Tensor, cos: Tensor, sin: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of a projection to q, which is rotated, and v, which is not."""
    a, b = q.float().chunk(2, -1)
    turned = torch.cat([a * cos + b * sin, b * cos - a * sin], -1).to(q.dtype)
    return with_amax(torch.cat([turned, v.neg()], -1), s)


def test_a_part_that_takes_many_ops_is_computed_for_each_of_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor gives a value with several readers a buffer if it takes many ops."""
    monkeypatch.setattr(tiles, "is_launched", lambda x: True)
    inputs = (
        *(torch.randn(128, 32, dtype=BF16) for _ in range(2)),
        torch.rand(128, 16),
        torch.rand(128, 16),
        scale(8.0),
    )
    module = capture(gradients_of_rotary_positions, *inputs)
    wanted = module(*inputs)
    on_kernels(module, QuantizeTiles())
    (repeated,) = (n for n in module.graph.nodes if n.target is REPEATED)
    assert repeated.args[1] == len(repeated.users) == 3  # an amax, and both orientations
    assert (count(module, CONCATENATED), count(module, aten.cat.default)) == (3, 1)
    for a, b in zip(wanted, module(*inputs), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.float(), b.float())


def test_weights_joined_by_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "is_launched", lambda x: True)
    inputs = torch.randn(64, 32, dtype=BF16), torch.randn(128, 32, dtype=BF16) * 3, scale(8.0)
    module = capture(lambda q, k, s: with_amax(torch.cat([q, k]), s), *inputs)
    wanted = module(*inputs)
    on_kernels(module, QuantizeTiles())
    assert (count(module, JOINED), count(module, aten.cat.default), count(module, QUANTIZE)) == (1, 0, 2)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(wanted, module(*inputs), strict=True))


WHOLE: dict[str, Callable[..., Any]] = {
    "nothing in common": gradients_of_others,
    "rows below each other": lambda dy, gate, up, s: gradient(torch.cat([dy * gate, dy * up]), s),
    "a part that is a view": lambda dy, gate, up, s: gradient(torch.cat([dy[:, :16], (dy * up)], -1), s),
}


@pytest.mark.parametrize("case", WHOLE)
def test_cats_that_stay_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "is_launched", lambda x: True)
    inputs = parts()
    module = capture(WHOLE[case], *inputs)
    wanted = module(*inputs)
    on_kernels(module, QuantizeTiles())
    assert (count(module, CONCATENATED), count(module, aten.cat.default)) == (0, 1)
    assert tiled(module)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(wanted[:3], module(*inputs)[:3], strict=True))
