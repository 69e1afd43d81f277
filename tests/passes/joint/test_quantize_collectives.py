"""The quantize_collectives pass: graphs, numbers on ranks that one process simulates, and reasons to decline."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, parallelize_module

import fp8pass
from fp8pass.base import scaling
from fp8pass.graph.pass_base import JointContext
from fp8pass.options.config import Config
from fp8pass.passes.joint.quantize_collectives import QuantizeCollectives
from fp8pass.quant import ops
from fp8pass.quant.ops import SHARED
from fp8pass.quant.sharded import amax_over
from tests.helpers.fake_collectives import (
    MOVERS,
    Function,
    bring,
    c10d,
    copied,
    data,
    exchange,
    gather,
    gather_and_slice,
    on_ranks,
    rewritten,
    same_bits,
    sent,
)
from tests.helpers.fake_ranks import GROUPS, HALF, RANKS, WORLD
from tests.helpers.fake_ranks import groups as groups
from tests.helpers.harness import BF16, E4M3, E5M2, F32, aten, capture, count, expect_graph, fp8, run, text


def shared(scales: Tensor, group: str = WORLD) -> Tensor:
    return ops.shared(scales, GROUPS[group])[0]


def delayed(move: Callable[[Tensor], Tensor], dtype: torch.dtype = BF16) -> Function:
    """Return a function that quantizes the collective's result and records its amax, as `ops.Delayed` does."""

    def function(x: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        whole = move(x)
        new, scale = scaling.amax(whole), shared(scales)
        x_q = scaling.quantize(whole, scale, E4M3)
        recorded = ops.record(amax, new, 1, "evict")
        return scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, new), dtype), recorded

    return function


def of_delayed(dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return torch.randn(8, 32).to(dtype), torch.tensor([2.0, 1.0]), torch.full((2,), -1.0)


@pytest.mark.passes
def test_graph_of_a_quantize_after_an_all_gather() -> None:
    _, module, context = rewritten(delayed(gather), *of_delayed())
    assert context.notes == ["1 collectives send FP8, 0.00102 MB instead of 0.00205 MB"]
    expect_graph(
        module,
        """\
x_1: "bf16[8, 32]",
scales_1: "f32[2]",
amax_1: "f32[2]",
abs_default: "bf16[8, 32]" = aten.abs.default(x_1)
amax_default: "bf16[8]" = aten.amax.default(abs_default, [-1])
amax_default_1: "bf16[]" = aten.amax.default(amax_default)
convert_element_type_default: "f32[]" = prims.convert_element_type.default(amax_default_1, torch.float32)
select: "f32[]" = aten.select.int(scales_1, 0, 0)
abs_default_1: "bf16[8, 32]" = aten.abs.default(x_1)
eq_scalar: "b8[8, 32]" = aten.eq.Scalar(abs_default_1, inf)
scalar_tensor_default: "bf16[]" = aten.scalar_tensor.default(nan, dtype = torch.bfloat16, layout = torch.strided, device = device(type='cpu'))
where_self: "bf16[8, 32]" = aten.where.self(eq_scalar, scalar_tensor_default, x_1)
convert_element_type_default_1: "f32[8, 32]" = prims.convert_element_type.default(where_self, torch.float32)
mul_tensor: "f32[8, 32]" = aten.mul.Tensor(convert_element_type_default_1, select)
clamp_min_default: "f32[8, 32]" = aten.clamp_min.default(mul_tensor, -448.0)
clamp_max_default: "f32[8, 32]" = aten.clamp_max.default(clamp_min_default, 448.0)
convert_element_type_default_2: "f8e4m3fn[8, 32]" = prims.convert_element_type.default(clamp_max_default, torch.float8_e4m3fn)
view_dtype: "u8[8, 32]" = aten.view.dtype(convert_element_type_default_2, torch.uint8)
all_gather_into_tensor_default: "u8[32, 32]" = _c10d_functional.all_gather_into_tensor.default(view_dtype, 4, '0')
wait_tensor_default: "u8[32, 32]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
view_dtype_1: "f8e4m3fn[32, 32]" = aten.view.dtype(wait_tensor_default, torch.float8_e4m3fn)
record: "f32[2]" = fp8pass.record.default(amax_1, convert_element_type_default, 1, 'evict')
reciprocal: "f32[]" = aten.reciprocal.default(select)
convert_element_type_3: "f32[32, 32]" = prims.convert_element_type.default(view_dtype_1, torch.float32)
mul_1: "f32[32, 32]" = aten.mul.Tensor(convert_element_type_3, reciprocal)
convert_element_type_4: "bf16[32, 32]" = prims.convert_element_type.default(mul_1, torch.bfloat16)
return (convert_element_type_4, record)
""",
    )


def static(move: Callable[[Tensor], Tensor]) -> Function:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (scaling.quantize(move(x), 0.5, E5M2),)

    return function


@pytest.mark.passes
def test_graph_of_a_quantize_after_an_all_to_all() -> None:
    expect_graph(
        rewritten(static(exchange), torch.randn(8, 32))[1],
        """\
x_1: "f32[8, 32]",
mul_tensor: "f32[8, 32]" = aten.mul.Tensor(x_1, 0.5)
clamp_min_default: "f32[8, 32]" = aten.clamp_min.default(mul_tensor, -57344.0)
clamp_max_default: "f32[8, 32]" = aten.clamp_max.default(clamp_min_default, 57344.0)
convert_element_type_default: "f8e5m2[8, 32]" = prims.convert_element_type.default(clamp_max_default, torch.float8_e5m2)
view_dtype: "u8[8, 32]" = aten.view.dtype(convert_element_type_default, torch.uint8)
all_to_all_single_default: "u8[8, 32]" = _c10d_functional.all_to_all_single.default(view_dtype, [2, 2, 2, 2], [2, 2, 2, 2], '0')
wait_tensor_default: "u8[8, 32]" = _c10d_functional.wait_tensor.default(all_to_all_single_default)
view_dtype_1: "f8e5m2[8, 32]" = aten.view.dtype(wait_tensor_default, torch.float8_e5m2)
return (view_dtype_1,)
""",
    )


@pytest.mark.passes
def test_graph_of_a_quantize_after_a_broadcast() -> None:
    expect_graph(
        rewritten(static(bring), torch.randn(8, 32))[1],
        """\
x_1: "f32[8, 32]",
mul_tensor: "f32[8, 32]" = aten.mul.Tensor(x_1, 0.5)
clamp_min_default: "f32[8, 32]" = aten.clamp_min.default(mul_tensor, -57344.0)
clamp_max_default: "f32[8, 32]" = aten.clamp_max.default(clamp_min_default, 57344.0)
convert_element_type_default: "f8e5m2[8, 32]" = prims.convert_element_type.default(clamp_max_default, torch.float8_e5m2)
view_dtype: "u8[8, 32]" = aten.view.dtype(convert_element_type_default, torch.uint8)
broadcast_default: "u8[8, 32]" = _c10d_functional.broadcast.default(view_dtype, 1, '0')
wait_tensor_default: "u8[8, 32]" = _c10d_functional.wait_tensor.default(broadcast_default)
view_dtype_1: "f8e5m2[8, 32]" = aten.view.dtype(wait_tensor_default, torch.float8_e5m2)
return (view_dtype_1,)
""",
    )


@pytest.mark.passes
def test_graph_of_a_dequantize_before_an_all_gather() -> None:
    def function(x_q: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        return (gather(scaling.dequantize(x_q, shared(scales).reciprocal(), BF16).view(4, 64)),)

    expect_graph(
        rewritten(function, fp8(8, 32), torch.ones(2))[1],
        """\
x_q_1: "f8e4m3fn[8, 32]",
scales_1: "f32[2]",
select: "f32[]" = aten.select.int(scales_1, 0, 0)
reciprocal: "f32[]" = aten.reciprocal.default(select)
view_default: "f8e4m3fn[4, 64]" = aten.view.default(x_q_1, [4, 64])
view_dtype: "u8[4, 64]" = aten.view.dtype(view_default, torch.uint8)
all_gather_into_tensor_default: "u8[16, 64]" = _c10d_functional.all_gather_into_tensor.default(view_dtype, 4, '0')
wait_tensor_default: "u8[16, 64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
view_dtype_1: "f8e4m3fn[16, 64]" = aten.view.dtype(wait_tensor_default, torch.float8_e4m3fn)
convert_element_type_default: "f32[16, 64]" = prims.convert_element_type.default(view_dtype_1, torch.float32)
mul_tensor: "f32[16, 64]" = aten.mul.Tensor(convert_element_type_default, reciprocal)
convert_element_type_default_1: "bf16[16, 64]" = prims.convert_element_type.default(mul_tensor, torch.bfloat16)
return (convert_element_type_default_1,)
""",
    )


@pytest.mark.passes
def test_graph_of_a_scale_that_follows_from_what_is_gathered() -> None:
    """The scale is computed after the collective, and moves before it."""
    expect_graph(
        rewritten(dynamic(gather), torch.randn(8, 32))[1],
        """\
x_1: "f32[8, 32]",
abs_default: "f32[8, 32]" = aten.abs.default(x_1)
amax_default: "f32[8]" = aten.amax.default(abs_default, [-1])
amax_default_1: "f32[]" = aten.amax.default(amax_default)
view_dtype: "i32[]" = aten.view.dtype(amax_default_1, torch.int32)
alias_default: "i32[]" = aten.alias.default(view_dtype)
bitwise_and_scalar: "i32[]" = aten.bitwise_and.Scalar(alias_default, 2147483647)
all_reduce_default: "i32[]" = _c10d_functional.all_reduce.default(bitwise_and_scalar, 'max', '0')
wait_tensor_default: "i32[]" = _c10d_functional.wait_tensor.default(all_reduce_default)
view_dtype_1: "f32[]" = aten.view.dtype(wait_tensor_default, torch.float32)
alias_default_1: "f32[]" = aten.alias.default(view_dtype_1)
gt: "b8[]" = aten.gt.Scalar(alias_default_1, 0)
lt: "b8[]" = aten.lt.Scalar(alias_default_1, inf)
bitwise_and: "b8[]" = aten.bitwise_and.Tensor(gt, lt)
scalar_tensor: "f32[]" = aten.scalar_tensor.default(1.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
where: "f32[]" = aten.where.self(bitwise_and, alias_default_1, scalar_tensor)
reciprocal: "f32[]" = aten.reciprocal.default(where)
mul: "f32[]" = aten.mul.Tensor(reciprocal, 448.0)
div: "f32[]" = aten.div.Tensor(mul, 1.0)
clamp_min: "f32[]" = aten.clamp_min.default(div, 1.1754943508222875e-38)
clamp_max: "f32[]" = aten.clamp_max.default(clamp_min, 3.4028234663852886e+38)
scalar_tensor_1: "f32[]" = aten.scalar_tensor.default(1.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
where_1: "f32[]" = aten.where.self(bitwise_and, clamp_max, scalar_tensor_1)
mul_tensor: "f32[8, 32]" = aten.mul.Tensor(x_1, where_1)
clamp_min_default: "f32[8, 32]" = aten.clamp_min.default(mul_tensor, -448.0)
clamp_max_default: "f32[8, 32]" = aten.clamp_max.default(clamp_min_default, 448.0)
convert_element_type_default: "f8e4m3fn[8, 32]" = prims.convert_element_type.default(clamp_max_default, torch.float8_e4m3fn)
view_dtype_2: "u8[8, 32]" = aten.view.dtype(convert_element_type_default, torch.uint8)
all_gather_into_tensor_default: "u8[32, 32]" = _c10d_functional.all_gather_into_tensor.default(view_dtype_2, 4, '0')
wait_tensor_default_1: "u8[32, 32]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
view_dtype_3: "f8e4m3fn[32, 32]" = aten.view.dtype(wait_tensor_default_1, torch.float8_e4m3fn)
lt_1: "b8[]" = aten.lt.Scalar(alias_default_1, inf)
reciprocal_1: "f32[]" = aten.reciprocal.default(where_1)
scalar_tensor_2: "f32[]" = aten.scalar_tensor.default(nan, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'))
where_2: "f32[]" = aten.where.self(lt_1, reciprocal_1, scalar_tensor_2)
convert_element_type_1: "f32[32, 32]" = prims.convert_element_type.default(view_dtype_3, torch.float32)
mul_2: "f32[32, 32]" = aten.mul.Tensor(convert_element_type_1, where_2)
return (mul_2,)
""",
    )


def dynamic(move: Callable[[Tensor], Tensor]) -> Function:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = move(x)
        amax = scaling.amax(whole)
        scale = scaling.scale_from_amax(amax, 448.0, 1.0)
        x_q = scaling.quantize(whole, scale, E4M3)
        return (scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, amax), F32),)

    return function


@pytest.mark.passes
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("mover", MOVERS)
def test_delayed_scaling_has_the_same_bits(mover: str, dtype: torch.dtype) -> None:
    before, after, _ = rewritten(delayed(MOVERS[mover], dtype), *of_delayed(dtype))
    scales, amax = torch.tensor([2.0, 1.0]), torch.full((2,), -1.0)
    inputs = [(x, scales, amax) for x in data(8, 32, dtype=dtype)]
    wanted, got = on_ranks(before, inputs), on_ranks(after, inputs)
    for a, b in zip(wanted, got, strict=True):
        same_bits(a[:1], b[:1])
    recorded = torch.stack([b[1] for b in got])
    assert torch.equal(recorded.amax(0), torch.stack([a[1] for a in wanted]).amax(0)), (
        "the maximum over ranks, which the step's reduction computes, differs"
    )
    mine = torch.stack([x[0].abs().amax().float() for x in inputs])
    assert torch.equal(recorded[:, 1], mine[[1] * 4] if mover == "broadcast" else mine)
    assert sent(after)[-1].endswith("uint8")


@pytest.mark.passes
@pytest.mark.parametrize("shape", [(0, 32), (0, 4, 32)])
def test_a_rank_that_sends_nothing_records_nothing(shape: tuple[int, ...]) -> None:
    """It still has the collective in FP8, as ranks that send something have it."""

    def receive(x: Tensor) -> Tensor:
        brought = c10d.all_to_all_single(x, [2] * RANKS, [0] * RANKS, GROUPS[WORLD])
        return c10d.wait_tensor(brought)  # type: ignore[no-any-return]

    inputs = torch.zeros(shape, dtype=BF16), torch.tensor([2.0, 1.0]), torch.tensor([-1.0, 0.5])
    _, after, _ = rewritten(delayed(receive), *inputs)
    assert sent(after) == ["all_to_all_single uint8"]
    assert torch.equal(on_ranks(after, [inputs])[0][1], inputs[2])


@pytest.mark.passes
@pytest.mark.parametrize("mover", MOVERS)
def test_nonfinite_elements_are_nan_afterwards(mover: str) -> None:
    before, after, _ = rewritten(delayed(MOVERS[mover]), *of_delayed())
    parts = data(8, 32)
    moved = capture(lambda x: (MOVERS[mover](x),), parts[0])
    for bad in (math.nan, math.inf, -math.inf):
        parts[1][3, 5] = bad
        inputs = [(x, torch.tensor([2.0, 1.0]), torch.full((2,), -1.0)) for x in parts]
        brought = [w[0] for w in on_ranks(moved, [(x,) for x in parts])]
        assert any(not x.isfinite().all() for x in brought)
        wanted, got = on_ranks(before, inputs), on_ranks(after, inputs)
        for a, b, x in zip(wanted, got, brought, strict=True):
            assert bool(a[0].isnan().all()) == (not x.isfinite().all()), f"the reference is not all NaN, {bad}"
            assert torch.equal(b[0].isnan(), ~x.isfinite()), bad
        recorded = torch.stack([b[1] for b in got])[:, 1]
        assert recorded[1] == 0, f"the rank's amax is not evicted, {bad}"
        finite = max(float(x.abs().max()) for r, x in enumerate(parts) if r != 1)
        assert recorded.max() == (0 if mover == "broadcast" else finite), "the amaxes of other ranks are lost"
        if mover != "all-to-all":
            assert max(float(a[1][1]) for a in wanted) == 0, "the annotated graph records it on a rank"


@pytest.mark.passes
@pytest.mark.parametrize("mover", ["all-gather", "broadcast"])
def test_dynamic_scaling_has_the_same_bits(mover: str) -> None:
    before, after, _ = rewritten(dynamic(MOVERS[mover]), torch.randn(8, 32))
    parts = data(8, 32, dtype=F32)
    for value in (1.0, math.nan, math.inf):
        parts[1][3, 5] = value
        inputs = [(x,) for x in parts]
        for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
            same_bits(a, b)
            assert bool(b[0].isnan().all()) == (value != 1)
    gathers = mover == "all-gather"
    assert sent(after) == (
        ["all_reduce int32", "all_gather_into_tensor uint8"] if gathers else ["broadcast float32", "broadcast uint8"]
    )


@pytest.mark.passes
@pytest.mark.parametrize("mover", MOVERS)
def test_a_scale_that_is_a_number_still_saturates_infinities(mover: str) -> None:
    before, after, _ = rewritten(static(MOVERS[mover]), torch.randn(8, 32))
    parts = data(8, 32, dtype=F32)
    parts[1][3, 5], parts[1][2, 2] = float("inf"), float("nan")
    inputs = [(x,) for x in parts]
    for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
        same_bits(a, b)


def q(x: Tensor) -> Tensor:
    return scaling.quantize(x, 0.5, E4M3)


def dq(x_q: Tensor) -> Tensor:
    return scaling.dequantize(x_q, 2.0, BF16)


def columns(x: Tensor) -> Tensor:
    """Gather by columns, as DTensor does it."""
    return torch.cat(gather(x).split(len(x)), 1)


AFTER: dict[str, Function] = {
    "to FP8": lambda x: (gather(x).to(E4M3),),
    "div": lambda x: ((gather(x).float() / 3.0).clamp(-448, 448).to(E4M3),),
    "mul, the other way round": lambda x: ((torch.full((1, 1), 0.5) * gather(x).float()).clamp(-448, 448).to(E4M3),),
    "mul in bfloat16": lambda x: ((gather(x) * 0.3).clamp(-448, 448).to(E4M3),),
    "reshape": lambda x: (q(gather(x).view(4, 8, 32).reshape(32, 4, 8)),),
    "permute": lambda x: (q(gather(x).t()),),
    "permute, after": lambda x: (q(gather(x)).t().contiguous(),),
    "slice": lambda x: (q(gather(x)[3:, :16]),),
    "expand": lambda x: (q(gather(x).unsqueeze(1).expand(32, 2, 32)),),
    "copy": lambda x: (q(gather(x).t().contiguous()),),
    "columns": lambda x: (q(columns(x)),),
    "index": lambda x: (q(gather(x)[torch.tensor([3, 1, 30])]),),
    "select": lambda x: (q(gather(x)[5]),),
    "two of a kind": lambda x: (q(gather(x)), dq(q(gather(x).t()))),
    "twice the same": lambda x: both(gather(x)),
}


def both(x: Tensor) -> tuple[Tensor, ...]:
    return q(x), q(x.t()), dq(q(x[:7]))


@pytest.mark.passes
@pytest.mark.parametrize("case", AFTER)
def test_quantized_after(case: str) -> None:
    parts = data(8, 32)
    before, after, _ = rewritten(AFTER[case], parts[0], times=2 if case == "two of a kind" else 1)
    assert set(sent(after)) == {"all_gather_into_tensor uint8"}
    inputs = [(x,) for x in parts]
    for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
        same_bits(a, b)


BEFORE: dict[str, Function] = {
    "from FP8": lambda x_q: (gather(x_q.float()),),
    "div": lambda x_q: (gather((x_q.float() / 3.0).to(BF16)),),
    "mul, the other way round": lambda x_q: (gather(torch.full((1,), 0.5) * x_q.float()),),
    "reshape": lambda x_q: (gather(dq(x_q).view(16, 16)),),
    "permute, copy": lambda x_q: (gather(dq(x_q.t()).contiguous()),),
    "slice": lambda x_q: (gather(dq(x_q[:, :16])),),
    "slice, after": lambda x_q: (gather(dq(x_q)[2:4]),),
    "expand": lambda x_q: (gather(dq(x_q.unsqueeze(1).expand(8, 2, 32)) + 0.0),),
    "pad": lambda x_q: (gather(aten.constant_pad_nd(dq(x_q), [0, 0, 0, 2])),),
    "exchange": lambda x_q: (exchange(dq(x_q)),),
    "broadcast": lambda x_q: (bring(dq(x_q)),),
    "read elsewhere": lambda x_q: two(dq(x_q)),
    "one collective after another": lambda x_q: (bring(gather(dq(x_q))),),
}


def two(x: Tensor) -> tuple[Tensor, ...]:
    """Return the collective's result, and another reader of its argument in high precision."""
    return gather(x), x + 1


@pytest.mark.passes
@pytest.mark.parametrize("case", BEFORE)
def test_dequantized_before(case: str) -> None:
    parts = [fp8(8, 32) for _ in range(RANKS)]
    before, after, _ = rewritten(BEFORE[case], parts[0], times=2 if "another" in case else 1)
    assert {s.split()[1] for s in sent(after)} == {"uint8"}
    inputs = [(x,) for x in parts]
    for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
        same_bits(a, b)


@pytest.mark.passes
def test_a_collective_permute_is_an_all_to_all() -> None:
    ring = [1, 2, 3, 0]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (q(functional_collectives.permute_tensor(x, ring, dist.group.WORLD)),)

    _, after, _ = rewritten(function, torch.randn(64))
    (node,) = [n for n in after.graph.nodes if n.target is c10d.all_to_all_single.default]
    assert node.meta["val"].dtype == torch.uint8 and node.args[1:3] == ([0, 0, 0, 64], [0, 64, 0, 0])


@pytest.mark.passes
def test_quantized_after_two_collectives() -> None:
    parts = data(8, 32)
    before, after, _ = rewritten(lambda x: (q(bring(gather(x))),), parts[0], times=2)
    assert sent(after) == ["all_gather_into_tensor uint8", "broadcast uint8"]
    inputs = [(x,) for x in parts]
    for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
        same_bits(a, b)


@pytest.mark.passes
@pytest.mark.parametrize("order", ["gather, broadcast", "broadcast, gather", "gather, exchange"])
def test_delayed_scaling_after_two_collectives(order: str) -> None:
    """The pass reaches the first collective through the mark that it has made at the second."""
    orders: dict[str, Callable[[Tensor], Tensor]] = {
        "gather, broadcast": lambda x: bring(gather(x)),
        "broadcast, gather": lambda x: gather(bring(x)),
        "gather, exchange": lambda x: exchange(gather(x)),
    }
    before, after, _ = rewritten(delayed(orders[order]), *of_delayed(), times=2)
    assert not any(s.endswith("bfloat16") for s in sent(after))
    parts = data(8, 32)
    moved = capture(lambda x: (orders[order](x),), parts[0])
    for value in (1.0, math.nan, math.inf):
        parts[1][3, 5] = value
        inputs = [(x, torch.tensor([2.0, 1.0]), torch.full((2,), -1.0)) for x in parts]
        brought = [w[0] for w in on_ranks(moved, [(x,) for x in parts])]
        wanted, got = on_ranks(before, inputs), on_ranks(after, inputs)
        for a, b, x in zip(wanted, got, brought, strict=True):
            if value == 1:
                same_bits(a[:1], b[:1])
            assert torch.equal(b[0].isnan(), ~x.isfinite()), value
        if value == 1:
            assert max(float(b[1][1]) for b in got) == max(float(a[1][1]) for a in wanted)


@pytest.mark.passes
def test_a_weight_that_was_quantized_in_the_graph() -> None:
    """Its scale_inv is NaN for a part of this rank that isn't finite; after the collective, elements carry the NaN."""

    def function(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        new, scale = scaling.amax(x), shared(scales)
        x_q = scaling.quantize(x, scale, E4M3)
        return (gather(scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, new), BF16)),)

    parts = data(8, 32)
    before, after, _ = rewritten(function, parts[0], torch.ones(2))
    for value in (1.0, math.nan, math.inf):
        parts[2][3, 5] = value
        inputs = [(x, torch.ones(2)) for x in parts]
        for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
            if value == 1:
                same_bits(a, b)
            assert b[0].isnan().sum() == (value != 1) and a[0].isnan().sum() == 8 * 32 * (value != 1)


@pytest.mark.passes
def test_one_scale_that_is_computed_twice_is_one() -> None:
    def function(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        whole, given = gather(x), ops.shared(scales, GROUPS[WORLD])
        once, again = (scaling.quantize(whole, given[1].reciprocal(), E4M3) for _ in range(2))
        return once, again.t()

    parts, scales = data(8, 32), torch.tensor([1.0, 4.0])
    before, after, _ = rewritten(function, parts[0], scales)
    assert sent(after) == ["all_gather_into_tensor uint8"]
    inputs = [(x, scales) for x in parts]
    for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
        same_bits(a, b)


@pytest.mark.passes
@pytest.mark.parametrize("mover", ["all-gather", "broadcast"])
def test_a_slot_without_history_is_scaled_by_the_amax_of_the_whole(mover: str) -> None:
    def function(x: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        whole = MOVERS[mover](x)
        new, known = scaling.amax(whole), shared(scales)
        used = torch.where(known == 0, scaling.scale_from_amax(new, 448.0, 1.0), known)
        x_q = scaling.quantize(whole, used, E4M3)
        return scaling.dequantize(x_q, used.reciprocal(), BF16), ops.record(amax, new, 0, "evict")

    before, after, _ = rewritten(function, *of_delayed())
    for scale in (0.0, 2.0):
        inputs = [(x, torch.full((2,), scale), torch.zeros(2)) for x in data(8, 32)]
        for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
            same_bits(a, b)


@pytest.mark.passes
def test_a_weight_that_is_gathered_twice() -> None:
    """It is gathered in the forward and in the backward, and its scale_inv has another shape."""

    def function(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        new, scale = scaling.amax(x), shared(scales)
        x_q = scaling.quantize(x, scale, E4M3)
        scale_inv = scaling.inverse_unless_nonfinite(scale, new).view(1, 1)
        wide = scaling.dequantize(x_q, scale_inv, BF16)
        return gather(wide), gather(wide.view(16, 16)), wide.t()

    parts = data(8, 32)
    before, after, _ = rewritten(function, parts[0], torch.ones(2), times=2)
    for value in (1.0, math.nan, math.inf):
        parts[2][3, 5] = value
        inputs = [(x, torch.ones(2)) for x in parts]
        for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
            same_bits(a[2:], b[2:])
            if value == 1:
                same_bits(a, b)
            assert [int(y.isnan().sum()) for y in b[:2]] == [int(value != 1)] * 2


@pytest.mark.passes
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_gradient_of_a_bias(dtype: torch.dtype) -> None:
    """The sum over ranks is as close to float64 as the sum of the gathered tensor."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = columns(x).view(2, 4, 128)
        return q(whole.view(8, 128)), whole.sum([0, 1]), gather(x.t().contiguous()).sum([0])

    def rows(x: Tensor) -> tuple[Tensor, ...]:
        whole = gather_and_slice(x)
        return q(whole), whole.view(2, 16, 32).sum([0, 1], keepdim=True)

    refused = capture(function, data(8, 32)[0])
    assert not QuantizeCollectives().run(refused.graph, JointContext(Config(recipe=None))), (
        "a sum over other columns than those of the ranks is rewritten"
    )
    parts = data(8, 32, dtype=dtype)
    before, after, _ = rewritten(rows, parts[0])
    assert sent(after) == ["all_gather_into_tensor uint8", "all_reduce float32"]
    inputs = [(x,) for x in parts]
    exact = torch.cat(parts).double().sum(0)
    for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
        same_bits(a[:1], b[:1])
        assert b[1].shape == (1, 1, 32) and b[1].dtype == dtype
        torch.testing.assert_close(b[1].double().view(32), exact, rtol=2**-8 if dtype == BF16 else 1e-5, atol=1e-5)


@pytest.mark.passes
def test_other_readers_of_the_amax_get_that_of_the_whole() -> None:
    def function(x: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x)
        new, scale = scaling.amax(whole), shared(scales)
        x_q = scaling.quantize(whole, scale, E4M3)
        scale_inv = scaling.inverse_unless_nonfinite(scale, new)
        return x_q, ops.record(amax, new, 0, "freeze"), new * 2, whole.abs().amax(), scale_inv

    before, after, _ = rewritten(function, *of_delayed())
    parts = data(8, 32)
    for bad in ("1", "inf"):
        parts[2][1, 1] = float(bad)
        inputs = [(x, torch.ones(2), torch.zeros(2)) for x in parts]
        for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
            same_bits([a[0], *a[2:]], [b[0], *b[2:]])
    assert sent(after).count("all_gather_into_tensor uint8") == 1 and "all_gather_into_tensor bfloat16" not in sent(
        after
    )


@pytest.mark.passes
@pytest.mark.parametrize("reader", ["read", "scaled otherwise", "hidden"])
def test_values_that_are_not_poisoned_for_all_readers_are_not_marked(reader: str) -> None:
    """All readers get the FP8 values of the annotated graph."""

    def function(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x)
        new, scale = scaling.amax(whole), shared(scales)
        x_q = scaling.quantize(whole.sign() if reader == "hidden" else whole, scale, E4M3)
        poisoned = scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, new), BF16)
        if reader == "read":
            return poisoned, x_q.t()
        return poisoned, scaling.dequantize(x_q, scale.reciprocal(), BF16) if reader == "scaled otherwise" else poisoned

    parts = data(8, 32)
    before, after, _ = rewritten(function, parts[0], torch.ones(2))
    for value in (1.0, math.inf, -math.inf, math.nan):
        parts[2][3, 5] = value
        inputs = [(x, torch.ones(2)) for x in parts]
        for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
            same_bits(a, b)
    assert sent(after) == ["all_reduce int32", "all_gather_into_tensor uint8"]


@pytest.mark.passes
def test_an_amax_whose_slot_scales_nothing_is_that_of_the_whole() -> None:
    def function(x: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x)
        return q(whole), ops.record(amax, scaling.amax(whole), 0, "evict")

    before, after, _ = rewritten(function, data(8, 32)[0], torch.zeros(2))
    inputs = [(x, torch.zeros(2)) for x in data(8, 32)]
    for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
        same_bits(a, b)


@pytest.mark.passes
def test_powers_of_two() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x)
        amax = scaling.amax(whole)
        scale = scaling.floor_to_power_of_2(scaling.scale_from_amax(amax, 448.0, 1.0))
        x_q = scaling.quantize(whole, scale, E4M3)
        return (scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, amax), BF16),)

    parts = data(8, 32)
    before, after, _ = rewritten(function, parts[0])
    for value in (1.0, math.inf):
        parts[3][0, 0] = value
        inputs = [(x,) for x in parts]
        for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
            same_bits(a, b)


@pytest.mark.passes
def test_a_format_in_keywords_is_a_format() -> None:
    """Two casts before decomposition differ only in a keyword, their dtype."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        whole = gather(x)
        return whole.to(E4M3), whole.to(E5M2)

    module = capture(function, data(8, 32)[0])
    for node in module.graph.nodes:
        if node.target is torch.ops.prims.convert_element_type.default:
            node.target, node.kwargs = aten._to_copy.default, {"dtype": node.args[1]}
            node.args = node.args[:1]
    before, context = text(module), JointContext(Config(recipe=None))
    assert QuantizeCollectives().run(module.graph, context) == 0
    assert context.notes[0].endswith("is quantized in 2 ways") and text(module) == before


@pytest.mark.passes
def test_one_is_refused_and_another_is_not() -> None:
    """A collective that can't be rewritten stays, whether or not others are rewritten."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        whole = gather(y)
        return q(gather(x)), q(whole), whole.cos()

    module = capture(function, *data(8, 32)[:2])
    context = JointContext(Config(recipe=None))
    assert QuantizeCollectives().run(module.graph, context) == 1
    run(module)
    assert sorted(sent(module)) == ["all_gather_into_tensor bfloat16", "all_gather_into_tensor uint8"]
    assert [n.split(": ")[-1].split()[0] for n in context.notes] == ["cos", "1"]


def by_rows(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return (scaling.quantize(gather(x), scales.expand(32).unsqueeze(1), E4M3),)


def other_reader(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), whole.view(4, 8, 32).cos()


def is_output(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), whole.t()


def amax_in_float64(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x.double())
    return q(whole), whole.abs().amax()


def several(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), scaling.quantize(whole, 0.25, E4M3)


def formats(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return aten._to_copy.default(whole, dtype=E4M3), aten._to_copy.default(whole, dtype=E5M2)


def of_half(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return (scaling.quantize(gather(x), shared(scales, HALF), E4M3),)


def plain(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return (scaling.quantize(gather(x), scales[0], E4M3),)


def plain_before(x_q: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return (gather(scaling.dequantize(x_q, scales[0], BF16)),)


def half_before(x_q: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return (gather(scaling.dequantize(x_q, shared(scales, HALF).reciprocal(), BF16)),)


def rows_before(x_q: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    return (gather(scaling.dequantize(x_q, scales.expand(8).unsqueeze(1), BF16)),)


def padded_by_one(x_q: Tensor) -> tuple[Tensor, ...]:
    return (gather(aten.constant_pad_nd(dq(x_q), [0, 0, 0, 2], 1.0)),)


def padded_after(x: Tensor) -> tuple[Tensor, ...]:
    return (q(aten.constant_pad_nd(gather(x), [0, 0, 0, 2], 1.0)),)


def joined(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), q(torch.cat([whole, x]))


def joined_by_where(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), q(torch.where(whole.float() > 0, whole, torch.ones_like(whole)))


def chosen(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return (torch.where(gather(x) > 0, y, z).to(E4M3),)


def chosen_too(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), torch.where(whole > 0, y, z).to(E4M3)


def chosen_before(x_q: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (gather(torch.where(y > 0, dq(x_q), y)),)


def part_of_amax(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return scaling.quantize(whole, shared(scales), E4M3), scaling.amax(whole[:9])


def amax_of_one_split(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return scaling.quantize(whole, shared(scales), E4M3), scaling.amax(whole.split(16)[0])


def largest(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), whole.amax()


def largest_of_rows(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), whole.amax(-1).abs().amax()


def sum_of_some_rows(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), whole.split(16)[0].sum([0])


def sum_of_rows_twice(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), torch.cat([whole, whole]).sum([0])


def amax_of_nested_joins(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), scaling.amax(torch.cat([torch.cat([whole, whole]), whole]))


def pieces_left_out(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), scaling.amax(torch.cat(whole.split(8)[1:]))


@pytest.mark.passes
def test_an_amax_over_two_groups_is_reduced_over_both() -> None:
    groups = [GROUPS[WORLD], GROUPS[HALF]]
    module = capture(lambda x: amax_over(x, groups), torch.ones(()))
    assert [n.args[1:] for n in module.graph.nodes if n.target is c10d.all_reduce.default] == [
        ("max", g) for g in groups
    ]


def sum_of_columns(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return q(whole), whole.sum([1])


def reduced_by_hand(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    amax = amax_over(scaling.amax(whole), [GROUPS[WORLD]])
    return (scaling.quantize(whole, scaling.scale_from_amax(amax, 448.0, 1.0), E4M3),)


def one_of_all(x: Tensor) -> tuple[Tensor, ...]:
    whole = gather(x)
    return (scaling.quantize(whole, whole[0, 0].float(), E4M3),)


def more_dimensions(x: Tensor) -> tuple[Tensor, ...]:
    return (scaling.quantize(gather(x), torch.full((1, 1, 1), 0.5), E4M3),)


def elsewhere(x_q: Tensor, x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    scale_inv = scaling.inverse_unless_nonfinite(shared(scales), scaling.amax(x))
    return (gather(scaling.dequantize(x_q, scale_inv, BF16)),)


def of_another(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    x_q = scaling.quantize(x + 1, shared(scales), E4M3)
    return (gather(scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(shared(scales), scaling.amax(x)), BF16)),)


def read_elsewhere(x: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    scale = shared(scales)
    x_q = scaling.quantize(x, scale, E4M3)
    wide = scaling.dequantize(x_q, scaling.inverse_unless_nonfinite(scale, scaling.amax(x)), BF16)
    return gather(wide), scaling.dequantize(x_q, scale.reciprocal(), BF16)


X, SCALES = torch.randn(8, 32).to(BF16), torch.ones(1)


WIDE = "{} reads the result of all_gather_into_tensor in bfloat16"


PART = "amax_1 is not known to be the amax of the whole result of all_gather_into_tensor"


REFUSED: dict[str, tuple[Function, tuple[Tensor, ...], str]] = {
    "a plain input": (plain, (X, SCALES), "the scale select after all_gather_into_tensor may differ between ranks"),
    "a smaller group": (
        of_half,
        (X, SCALES),
        "the scale select after all_gather_into_tensor may differ between ranks",
    ),
    "rows": (by_rows, (X, SCALES), "unsqueeze after all_gather_into_tensor is not one scale for all of it"),
    "another reader": (other_reader, (X,), WIDE.format("cos")),
    "an output": (is_output, (X,), WIDE.format("output")),
    "float64": (
        amax_in_float64,
        (X,),
        "abs_1 reads the result of all_gather_into_tensor in float64",
    ),
    "several": (several, (X,), "the result of all_gather_into_tensor is quantized in 2 ways"),
    "two formats": (formats, (X,), "the result of all_gather_into_tensor is quantized in 2 ways"),
    "cat": (joined, (X,), WIDE.format("cat")),
    "where": (joined_by_where, (X,), WIDE.format("convert_element_type_2")),
    "a choice": (chosen_too, (X, torch.randn(32), torch.randn(32)), WIDE.format("gt")),
    "amax of a part": (part_of_amax, (X, SCALES), PART),
    "amax of one piece": (amax_of_one_split, (X, SCALES), PART),
    "the largest": (largest, (X,), WIDE.format("amax")),
    "of the largest": (largest_of_rows, (X,), WIDE.format("amax")),
    "sum of some rows": (sum_of_some_rows, (X,), WIDE.format("sum_1")),
    "sum of rows twice": (sum_of_rows_twice, (X,), WIDE.format("sum_1")),
    "amax of it three times": (amax_of_nested_joins, (X,), PART),
    "amax of some pieces": (pieces_left_out, (X,), PART),
    "sum of columns": (sum_of_columns, (X,), WIDE.format("sum_1")),
    "its amax, reduced": (
        reduced_by_hand,
        (X,),
        "the scale where_1 follows from the result of all_gather_into_tensor, not by its amax",
    ),
    "one of its elements": (one_of_all, (X,), WIDE.format("convert_element_type")),
    "more dimensions": (
        more_dimensions,
        (X,),
        "full after all_gather_into_tensor has 3 dimensions, more than what it scales",
    ),
    "before: a plain input": (
        plain_before,
        (fp8(8, 32), SCALES),
        "select before all_gather_into_tensor may differ between ranks",
    ),
    "before: a smaller group": (
        half_before,
        (fp8(8, 32), SCALES),
        "reciprocal before all_gather_into_tensor may differ between ranks",
    ),
    "before: rows": (
        rows_before,
        (fp8(8, 32), SCALES),
        "unsqueeze before all_gather_into_tensor is not one scale for all of it",
    ),
    "before: padding": (
        padded_by_one,
        (fp8(8, 32),),
        "constant_pad_nd before all_gather_into_tensor adds what is not 0 in FP8",
    ),
    "quantized elsewhere": (
        elsewhere,
        (fp8(8, 32), X, SCALES),
        "x_q_1 was quantized elsewhere, and would hide what is not finite",
    ),
    "poison of another": (
        of_another,
        (X, SCALES),
        "convert_element_type_1 was quantized elsewhere, and would hide what is not finite",
    ),
    "read without poison": (
        read_elsewhere,
        (X, SCALES),
        "what reads convert_element_type_1 elsewhere would see what is not finite as NaN",
    ),
    "dynamic, exchanged": (
        dynamic(exchange),
        (X,),
        "gt reads the amax of the result of all_to_all_single to this rank alone",
    ),
}


@pytest.mark.passes
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """The note has the reason, and the graph does not change, except that `ops.shared` is removed."""
    function, inputs, reason = REFUSED[case]
    module = capture(function, *inputs)
    reference = text(without_shared(copied(module)))
    context = JointContext(Config(recipe=None))
    assert QuantizeCollectives().run(module.graph, context) == 0
    assert len(context.notes) == 1
    assert context.notes[0].split(": ", 1)[1] == reason
    assert text(module) == reference and not count(module, SHARED)


def without_shared(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.nodes:
        if node.target is SHARED:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    return module


SILENT: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "nothing in FP8": (lambda x: (gather(x).cos(),), (X,)),
    "only joined": (lambda x: (q(torch.cat([gather(x), x])),), (X,)),
    "padded": (padded_after, (X,)),
    "FP8 already": (lambda x: (gather(x.view(torch.uint8)).view(E4M3).float(),), (fp8(8, 32),)),
    "a choice of rows": (chosen, (X, torch.randn(32), torch.randn(32))),
    "a choice of numbers": (chosen, (X, torch.randn(()), torch.randn(()))),
    "a choice of elements": (chosen, (X, torch.randn(32, 32), torch.randn(32, 32))),
    "a choice of constants": (lambda x: (torch.where(gather(x) > 0, 1.0, 2.0).to(E4M3),), (X,)),
    "a choice, before": (chosen_before, (fp8(8, 32), X)),
    "a mask of FP8": (lambda x: (gather(torch.where(x.float() > 0, 1.0, 2.0)),), (fp8(8, 32),)),
    "a sum": (lambda x: (q(c10d.wait_tensor(c10d.all_reduce(x, "sum", GROUPS[WORLD]))),), (X,)),
}


@pytest.mark.passes
@pytest.mark.parametrize("case", SILENT)
def test_collectives_that_are_not_quantized_have_no_note(case: str) -> None:
    function, inputs = SILENT[case]
    module = capture(function, *inputs)
    before, context = text(module), JointContext(Config(recipe=None))
    assert QuantizeCollectives().run(module.graph, context) == 0
    assert text(module) == before and not context.notes


@pytest.mark.passes
def test_a_result_read_in_high_precision_may_have_been_fp8_before() -> None:
    def function(x_q: Tensor) -> tuple[Tensor, ...]:
        whole = gather(dq(x_q))
        return q(whole), whole.cos()

    parts = [fp8(8, 32) for _ in range(RANKS)]
    before, after, _ = rewritten(function, parts[0])
    inputs = [(x,) for x in parts]
    for a, b in zip(on_ranks(before, inputs), on_ranks(after, inputs), strict=True):
        same_bits(a, b)


@pytest.mark.passes
def test_symbolic_sizes() -> None:
    def function(x: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        return delayed(lambda x: gather(x).view(4, x.shape[0], 32))(x, scales, amax)

    module = capture(function, *of_delayed(), dynamic=True)
    context = JointContext(Config(recipe=None))
    assert QuantizeCollectives().run(module.graph, context) == 1, context.notes
    run(module)
    assert [s for s in sent(module) if "gather" in s] == ["all_gather_into_tensor uint8"]
    assert context.notes == ["1 collectives send FP8, 0.00102 MB instead of 0.00205 MB"], (
        "the sizes are not those of tracing"
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.q(x) * self.k(x) + self.v(x)
        return y


@pytest.mark.compiled
def test_layers_that_read_it_in_high_precision_are_named() -> None:
    """Small layers do so, for FP8 doesn't pay there; the rule is named, for users may want them in FP8 all the same."""
    mesh = init_device_mesh("cpu", (RANKS,))
    attention = parallelize_module(Attention(), mesh, dict.fromkeys("qkv", ColwiseParallel()))
    parallelize_module(attention, mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()))
    model = nn.Sequential(attention)
    report = fp8pass.explain(model, torch.randn(16, 32), config=Config(filter=["0.k", "0.v"]))
    (note,) = [n for n in report.notes if "the result of all_gather" in n and " in float32" in n]
    readers, _, what = note.split(": ", 1)[1].partition(" read ")
    assert readers == "0.k (filter) and 0.v (filter)" and what.startswith("the result of all_gather_into_tensor")
