"""The fuse_matmuls pass: what goes into a matmul's kernel, what stays out, and when two kernels are better than one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass.base import scaling
from fp8pass.base._torch import kernel_called, triton_kernel_wrapper_functional
from fp8pass.graph.builder import val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.hardware import TARGETS
from fp8pass.options.config import Config
from fp8pass.passes.common.gpu import Gpu
from fp8pass.passes.common.patterns import as_node
from fp8pass.passes.kernels import fused_matmul, when_to_fuse
from fp8pass.passes.kernels.element_addresses import CannotFuse
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.fuse_matmuls import FuseMatmuls
from fp8pass.passes.kernels.fused_matmul import match, plan_of, tiled, why_other
from fp8pass.passes.kernels.tile_sizes import candidates
from fp8pass.passes.kernels.when_to_fuse import Decide
from fp8pass.quant.kernel_ops import QUANTIZE
from tests.helpers.harness import BF16, E4M3, E5M2, F32, capture, count, on_kernels, scale

pytestmark = pytest.mark.passes

H100 = Gpu(90, 132, 232448)
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_matmul, "shared_memory", lambda _: 0)
    monkeypatch.setattr(fused_matmul, "gpu_of", lambda _: H100)
    monkeypatch.setattr(hardware, "pretended_device", torch.device("cuda"))
    monkeypatch.setattr(fused_matmul, "target_of", lambda *_: TARGETS["h100"])


def captured(
    function: Callable[..., Any], *more: Tensor, m: int = 128, n: int = 256, k: int = 64, dtype: Any = BF16
) -> fx.GraphModule:
    """Return the graph of function(product, scale, *more), where the product is of a matmul in FP8 on a GPU."""

    def whole(a: Tensor, b: Tensor, s: Tensor, scale: Tensor, *rest: Tensor) -> Any:
        return function(torch._scaled_mm(a, b.t(), s, s, None, None, dtype, True), scale, *rest)

    a, b = torch.zeros(m, k, dtype=E4M3), torch.zeros(n, k, dtype=E4M3)
    module = capture(whole, a, b, torch.tensor(1.0), torch.tensor(2.0), *more)
    on_kernels(module, FoldQuantizes())
    return module


def matched(module: fx.GraphModule) -> Any:
    """Return the match of the first matmul."""
    (node, *_) = module.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    return match(node)


def both(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    q = scaling.quantize(x, scale, dtype)
    return q, q.t().contiguous(), scaling.amax(x)


def fused(module: fx.GraphModule, **options: Any) -> Any:
    """Run the pass, and return its context."""
    return on_kernels(module, FuseMatmuls(), config=Config(recipe=None, **{"epilogues": "always", **options}))


def test_one_kernel_writes_fp8_in_both_orientations_and_an_amax_for_each_tile() -> None:
    module = captured(lambda y, s: both(F.relu(y) * 2, s), m=8192, n=4096)
    context = fused(module)
    assert count(module, aten._scaled_mm.default) == count(module, QUANTIZE) == 0
    (call,) = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    plan, outputs = kernel_called(call).plan, call.meta["val"]
    down, across = 8192 // plan.tile.rows, 4096 // plan.tile.columns
    assert {name: (x.dtype, tuple(x.shape)) for name, x in outputs.items() if name.startswith("out")} == {
        "out0": (BF16, (down * across * plan.tile.parts,)),
        "out1": (E4M3, (8192, 4096)),
        "out2": (E4M3, (4096, 8192)),
    }
    assert count(module, aten.amax.default) == 1
    # the kernel after the matmul would read 2 bytes, which the matmul would have written
    assert list(context.fused.values()) == [
        f"its kernel computes the ops after it and quantizes to e4m3, which moves {4 * 8192 * 4096 / 1e6:.0f} MB less"
    ]


def saved(y: Tensor, s: Tensor) -> Any:
    return *both(F.silu(y), s), y


def later(y: Tensor, s: Tensor) -> Any:
    x = F.silu(y)
    return *both(x, s), x


def statistic(y: Tensor, s: Tensor) -> Any:
    x = y + 1
    return *both(x * 2, s), x.float().mean(-1), x


def several(y: Tensor, s: Tensor) -> Any:
    return *both(y * 2, s), y * 2, y * 3


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda y, s: both(F.silu(y), s), None),
        (saved, "_scaled_mm"),
        (later, "convert_element_type"),  # silu in float32, cast
        (statistic, "add"),  # the mean is computed from the sum
        (several, "_scaled_mm"),
    ],
)
def test_the_kernel_writes_one_tensor_that_others_read(function: Any, kept: str | None) -> None:
    found = matched(captured(function)).epilogue.kept
    assert found is None if kept is None else found.name.startswith(kept) and found.meta["val"].dtype == BF16


def test_random_numbers_are_not_stored_for_the_kernel() -> None:
    m = matched(captured(lambda y, s: both(y * (torch.rand_like(y) > 0.5), s)))
    matrices = [n.meta["val"].dtype for n in m.epilogue.inputs if n.meta["val"].numel() > 1]
    assert matrices == [torch.bool]  # the mask, which the backward needs, too


def test_a_norms_ops_stay_out() -> None:
    def normed(y: Tensor, s: Tensor) -> Any:
        return both(F.layer_norm(y, (256,)), s)

    assert matched(captured(normed)) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda y, s: both(F.silu(y), 448 / scaling.amax(y)),  # dynamic scaling
        lambda y, s: y.softmax(-1),
        lambda y, s: y + 0,  # reads nothing else
        lambda y, s: y.float(),
        lambda y, s: scaling.quantize(y.view(128, 16, 16), torch.ones(128, 16, 1), E4M3),  # by blocks
    ],
)
def test_what_can_not_be_fused(function: Any) -> None:
    module = captured(function)
    assert matched(module) is None
    fused(module)
    assert count(module, triton_kernel_wrapper_functional) == 0


def _for_blocks(matmul: fx.Node) -> None:
    as_node(matmul.args[2]).meta["val"] = torch.ones(128, 2)


def _for_short_sums(matmul: fx.Node) -> None:
    as_node(matmul.args[2]).meta["val"] = torch.ones(128, 1)  # as blocks of 128 have along a sum of 128


def _in_fp8(matmul: fx.Node) -> None:
    matmul.meta["val"] = val(matmul).to(E4M3)


def _by_name(matmul: fx.Node) -> None:
    matmul.args, matmul.kwargs = matmul.args[:4], {"out_dtype": BF16}


def _row_major(matmul: fx.Node) -> None:
    as_node(matmul.args[1]).meta["val"] = val(as_node(matmul.args[1])).contiguous()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_for_blocks, "its scales are those of blocks"),
        (_for_short_sums, "its scales are those of blocks"),
        (_in_fp8, "it scales its result"),
        (_by_name, "it scales its result"),
        (_row_major, "its operands are not contiguous along the sum"),
    ],
)
def test_matmuls_that_the_kernel_does_not_compute(change: Callable[[fx.Node], None], reason: str) -> None:
    module = captured(lambda y, s, x: x + y, torch.zeros(128, 256, dtype=BF16))
    (matmul,) = module.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    assert why_other(matmul) == ""
    change(matmul)
    assert why_other(matmul) == reason


def test_matmuls_of_symbolic_size() -> None:
    """M may be symbolic, see test_inspector.py; K and N may not."""

    def whole(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return F.relu(torch._scaled_mm(a, b.t(), s, s, None, None, BF16, True))

    module = capture(whole, torch.zeros(128, 64, dtype=E4M3), torch.zeros(32, 64, dtype=E4M3), scale(1.0), dynamic=True)
    (matmul,) = module.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    assert why_other(matmul) == "its K or N is symbolic"


def test_a_sum_with_a_residual_is_fused_unless_a_later_kernel_reads_the_residual_again() -> None:
    x = torch.zeros(128, 256, dtype=BF16)
    assert matched(captured(lambda y, s, x: x + y, x)).epilogue.kept is not None
    assert matched(captured(lambda y, s, x: (x + y) * (x + y).sum(-1, keepdim=True) + x, x)) is None


def test_tensors_that_the_kernel_reads_anyway_are_quantized_too() -> None:
    def backward(y: Tensor, s: Tensor, saved: Tensor) -> Any:
        hidden = F.silu(saved)
        return *both(y * torch.sigmoid(saved), s, E5M2), scaling.quantize(hidden, s, E4M3).t().contiguous()

    m = matched(captured(backward, torch.zeros(128, 256, dtype=BF16)))
    assert {o.dtype for o in m.made if o.kind == "columns"} == {E4M3, E5M2}
    assert [n.name for n in m.epilogue.inputs] == ["arg4_1", "arg3_1"]  # both read the saved tensor, and one scale


def test_a_tensor_with_scales_by_rows_is_not_quantized_there() -> None:
    def backward(y: Tensor, s: Tensor, saved: Tensor, rows: Tensor) -> Any:
        return *both(y * saved, s, E5M2), scaling.quantize(F.silu(saved), rows, E4M3)

    m = matched(captured(backward, torch.zeros(128, 256, dtype=BF16), torch.ones(128, 1)))
    assert len(m.epilogue.quantizes) == 1


def test_a_copy_that_turns_a_flattened_tensor_around_is_made_of_the_rows() -> None:
    def flattened(y: Tensor, s: Tensor) -> Any:
        q = scaling.quantize(F.relu(y), s, E4M3)
        return q.view(32, 1024).t().contiguous()

    module = captured(flattened, m=128, n=256)
    fused(module)
    (call,) = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    assert [o.kind for o in kernel_called(call).plan.outputs] == ["rows"]
    assert count(module, aten.clone.default) == 1


def test_a_tensor_whose_quantized_copy_the_matmul_waits_for_stays_out() -> None:
    def function(a: Tensor, b: Tensor, s: Tensor, scale: Tensor, saved: Tensor) -> Any:
        q = scaling.quantize(saved, scale, E4M3)
        y = torch._scaled_mm(q, b.t(), s, s, None, None, BF16, True)
        return scaling.quantize(y * saved, scale, E4M3)

    a, saved = torch.zeros(64, 64, dtype=E4M3), torch.zeros(64, 64, dtype=BF16)
    module = capture(function, a, a, torch.tensor(1.0), torch.tensor(1.0), saved)
    on_kernels(module, FoldQuantizes())
    assert len(matched(module).epilogue.quantizes) == 1
    fused(module)
    assert count(module, QUANTIZE) == 1


@pytest.mark.parametrize(
    "split", [lambda y: y.chunk(2, -1), lambda y: (y[:, :128], y[:, 128:]), lambda y: y.view(2, 64, 256).chunk(2, -1)]
)
def test_two_halves_of_the_product_are_computed_side_by_side(split: Any) -> None:
    def gated(y: Tensor, s: Tensor) -> Any:
        gate, up = split(y)
        return scaling.quantize(F.silu(gate) * up, s, E4M3), y

    m = matched(captured(gated))
    assert len(m.epilogue.products.parts) == 2 and m.epilogue.kept is m.epilogue.matmul
    plan = plan_of(m, H100)
    assert (plan.matmul.products, plan.matmul.n, plan.bytes_per_element) == (2, 128, 1 + 2 * 2)


def test_columns_are_summed_for_the_gradient_of_a_bias() -> None:
    module = captured(lambda y, s: (*both(F.silu(y), s), F.silu(y).sum(0)))
    fused(module)
    (call,) = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    plan = kernel_called(call).plan
    assert [o.kind for o in plan.outputs] == ["amax", "sums", "rows", "columns"]
    assert count(module, aten.sum.dim_IntList) == 1


def test_an_epilogue_that_fits_no_tile_is_declined_with_numbers() -> None:
    m = matched(captured(lambda y, s: both(F.silu(y), s)))
    with pytest.raises(CannotFuse, match="no tile whose epilogue moves 2 bytes per element fits into 1024 bytes"):
        next(tiled(plan_of(m, H100), Gpu(90, 132, 1024)))


def test_always_says_why_a_matmul_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_matmul, "gpu_of", lambda _: Gpu(90, 132, 1024))
    context = fused(captured(lambda y, s: both(F.silu(y), s)))
    assert list(context.fused.values()) == [
        "its kernel does not compute the ops after it: no tile whose epilogue moves 2 bytes per element fits into 1024 "
        "bytes"
    ]


def test_off_fuses_nothing() -> None:
    module = captured(lambda y, s: both(F.silu(y), s))
    fused(module, epilogues="off")
    assert count(module, aten._scaled_mm.default) == 1


def _plan(function: Callable[..., Any] = lambda y, s: both(F.relu(y).square(), s), *more: Tensor, **sizes: int) -> Any:
    m = matched(captured(function, *more, **{"m": 8192, "n": 14336, "k": 4096, **sizes}))
    return fused_matmul.with_code(plan_of(m, H100), m)


def _saving(y: Tensor, s: Tensor) -> Any:
    return *both(F.relu(y).square(), s), y


def _gated(y: Tensor, s: Tensor) -> Any:
    gate, up = y.chunk(2, -1)
    return both(gate * up, s)


def _in_two_formats(y: Tensor, s: Tensor) -> Any:
    return scaling.quantize(F.relu(y).square(), s, E4M3), scaling.quantize(y, s, E5M2)


WIDE = torch.empty(8192, 14336, dtype=BF16)
PAYS = {
    "ReLU squared": (lambda y, s: both(F.relu(y).square(), s),),
    "ReLU squared, as in inference": (lambda y, s: scaling.quantize(F.relu(y).square(), s, E4M3),),
}
DOES_NOT_PAY = {
    "the product is saved": ("writes 16 bits per element too", _saving),
    "the product is saved in FP8": ("writes more than one tensor", _in_two_formats),
    "gate and up": ("combines two products", _gated),
    "GELU": ("computes exp, erf, tanh or the like", lambda y, s: both(F.gelu(y), s)),
    "SiLU": ("computes exp, erf, tanh or the like", lambda y, s: both(F.silu(y), s)),
    "a backward": ("reads another matrix", lambda y, s, x: both(y * x, s, E5M2), WIDE),
    "a residual": ("reads another matrix", lambda y, s, x: y + x, WIDE),
    "the gradient of a bias": ("writes more than one tensor", lambda y, s: (*both(y * 2, s), (y * 2).sum(0))),
}


@pytest.mark.parametrize("target", ["h100", "h200"])
def test_auto_fuses_what_was_measured_to_be_faster(target: str) -> None:
    auto = Decide("auto", TARGETS[target])
    assert {name: auto.why_apart(_plan(*of)) for name, of in PAYS.items()} == dict.fromkeys(PAYS, "")
    reasons = {name: auto.why_apart(_plan(*of)) for name, (_, *of) in DOES_NOT_PAY.items()}
    assert reasons == {
        name: f"it {more}, and no such kernel was faster than separate ones; epilogues='always' fuses it"
        for name, (more, *_) in DOES_NOT_PAY.items()
    }
    assert auto.why_apart(_plan(m=128, n=256, k=64)) == (
        "no product as small as [128, 64] x [64, 256] was measured; epilogues='always' fuses it"
    )
    always = Decide("always", TARGETS[target])
    assert not any(always.why_apart(_plan(*of)) for _, *of in DOES_NOT_PAY.values())


def test_auto_fuses_nothing_where_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, kept = Decide("auto", TARGETS["b200"]), _plan(_saving)
    assert auto.may_fuse() and auto.why_apart(kept) == ""  # without the GPU, the roofline predicts
    monkeypatch.setattr(hardware, "pretended_device", None)
    ways = auto, Decide("auto", TARGETS["h100"]), Decide("always", None), Decide("off", TARGETS["h100"])
    assert [way.may_fuse() for way in ways] == [False, True, True, False]
    assert [way.may_fuse(times=True) for way in ways] == [True, True, True, False]


@pytest.mark.parametrize(("seconds", "fuses"), [(1e-13, True), (1e-11, False)])
def test_auto_reads_the_table(monkeypatch: pytest.MonkeyPatch, seconds: float, fuses: bool) -> None:
    monkeypatch.setitem(when_to_fuse.MEASURED, "b200", seconds)
    assert (Decide("auto", TARGETS["b200"]).why_apart(_plan()) == "") == fuses


class Clock:
    """Times graphs as told: those with a `_scaled_mm`, and those with a kernel, by its tile."""

    def __init__(self, apart: float, fused: Callable[[int], float]) -> None:
        self.apart, self.fused = apart, fused
        self.plans: list[Any] = []

    def __call__(self, module: fx.GraphModule) -> float:
        calls = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
        assert len(calls) + count(module, aten._scaled_mm.default) == 1
        self.plans += [kernel_called(call).plan for call in calls]
        return self.fused(self.plans[-1].tile.columns) if calls else self.apart


def timed(clock: Any, times: int = 1, **options: Any) -> tuple[fx.GraphModule, Any]:
    """Run the pass with timings on as many equal graphs; return the last, and its context."""
    fused_matmul._fastest.clear()
    for _ in range(times):
        module = captured(lambda y, s: both(F.relu(y) * 2, s), m=512, n=512)
        context = KernelsContext(Config(recipe=None, **{"epilogues": "auto", **options}), seconds_of=clock)
        FuseMatmuls().run(module.graph, context)
    return module, context


def test_the_tile_that_took_least_time_is_chosen() -> None:
    clock = Clock(apart=30e-6, fused=lambda columns: 20e-6 if columns == 128 else 25e-6)
    module, context = timed(clock, times=2)
    (call,) = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    assert kernel_called(call).plan.tile.columns == 128
    tiles = [plan.tile for plan in clock.plans]
    assert len(set(tiles)) == len(tiles) > 2  # equal matmuls are timed once
    assert next(iter(context.fused.values())).startswith("its kernel computes the ops after it")


def test_separate_kernels_that_took_less_time_stay(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    module, _ = timed(Clock(apart=10e-6, fused=lambda _: 20e-6))
    assert count(module, aten._scaled_mm.default) == 1
    assert "one kernel takes 20 us as timed, and separate ones 10 us" in caplog.text


def test_a_matmul_that_can_not_be_timed_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_: fx.GraphModule) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")

    module, _ = timed(fails)
    assert count(module, aten._scaled_mm.default) == 1
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert record.message.endswith("could not be timed, and stays as it is: CUDA out of memory.")


def test_always_times_nothing() -> None:
    clock = Clock(apart=10e-6, fused=lambda _: 20e-6)
    module, _ = timed(clock, epilogues="always")
    assert count(module, aten._scaled_mm.default) == len(clock.plans) == 0


def test_an_epilogue_in_float32_counts_its_bytes() -> None:
    plan = plan_of(matched(captured(lambda y, s: (*both(y * 2, s), y), dtype=F32)), H100)
    assert (plan.bytes_per_element, plan.bytes_apart) == (6, 6 * 128 * 256)


def test_tiles_for_99_kilobytes_of_shared_memory() -> None:
    """sm_120 and sm_89 have less than half of the shared memory of GPUs of data centres, whose tiles would not fit."""
    plan = _plan()
    for capability in (89, 120):
        tiles = [*candidates(replace(plan, capability=capability), 99 << 10)]
        assert tiles and all(tile.depth == 64 and tile.rows * tile.columns <= 128 * 128 for tile in tiles)
    large = [*candidates(replace(plan, capability=100), 227 << 10)]
    assert any(tile.depth == 128 for tile in large)
