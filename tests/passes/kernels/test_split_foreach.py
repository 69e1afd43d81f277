"""The split_foreach pass: large tensors of an optimizer's `_foreach_` ops get separate ops."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass.base import scaling
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.options.config import Config
from fp8pass.passes.common.foreach import SPLITS
from fp8pass.passes.kernels.combo_kernels import SMALL_KERNEL_BYTES
from fp8pass.passes.kernels.split_foreach import SplitForeach, match
from tests.helpers.harness import BF16, E4M3, F32, aten, capture, expect_graph, on_kernels, scale, text

pytestmark = pytest.mark.passes

ROUNDS_TWICE = torch.__version__.startswith("2.11.")
"""torch 2.11 decomposes a product plus a tensor into two ops, where its kernels and newer versions round once."""
LARGE, LITTLE = (1024, 300), (8,)
"""Shapes of float32 tensors with more than `SMALL_KERNEL_BYTES` bytes, and with less."""


def both(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` on lists of a large and a small tensor and quantizes the large result."""

    def update(s: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        results = function(*([flat[i], flat[i + 1]] for i in range(0, len(flat), 2)))
        return *results, scaling.quantize(results[0], s, E4M3)

    return update


def inputs(lists: int, dtype: torch.dtype = F32) -> tuple[Tensor, ...]:
    """Return a scale, and the tensors of lists of a large and a small tensor, all positive."""
    return scale(), *((torch.rand(shape) + 0.5).to(dtype) for _ in range(lists) for shape in (LARGE, LITTLE))


def sizes(module: fx.GraphModule) -> list[list[int]]:
    """Return, for each `_foreach_` op, the numbers of elements of its results."""
    lists = (n for n in module.graph.nodes if "_foreach_" in str(n.target))
    return [sorted(u.meta["val"].numel() for u in n.users) for n in lists]


def test_graph() -> None:
    def update(p_0: Tensor, p_1: Tensor, g_0: Tensor, g_1: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        p, g = [p_0, p_1], [g_0, g_1]
        updated = torch._foreach_mul(torch._foreach_add(p, g, alpha=0.5), g)
        return *updated, scaling.quantize(updated[0], s, E4M3)

    s, *tensors = inputs(2)
    module = capture(update, *tensors, s)
    expect_graph(
        module,
        """\
p_0_1: "f32[1024, 300]",
p_1_1: "f32[8]",
g_0_1: "f32[1024, 300]",
g_1_1: "f32[8]",
s_1: "f32[]",
_foreach_add = aten._foreach_add.List([p_0_1, p_1_1], [g_0_1, g_1_1], alpha = 0.5)
getitem: "f32[1024, 300]" = _foreach_add[0]
getitem_1: "f32[8]" = _foreach_add[1]
_foreach_mul = aten._foreach_mul.List([getitem, getitem_1], [g_0_1, g_1_1])
getitem_2: "f32[1024, 300]" = _foreach_mul[0]
getitem_3: "f32[8]" = _foreach_mul[1]
mul: "f32[1024, 300]" = aten.mul.Tensor(getitem_2, s_1)
clamp_min: "f32[1024, 300]" = aten.clamp_min.default(mul, -448.0)
clamp_max: "f32[1024, 300]" = aten.clamp_max.default(clamp_min, 448.0)
convert_element_type: "f8e4m3fn[1024, 300]" = prims.convert_element_type.default(clamp_max, torch.float8_e4m3fn)
return (getitem_2, getitem_3, convert_element_type)
""",
    )
    on_kernels(module, SplitForeach())
    expect_graph(
        module,
        """\
p_0_1: "f32[1024, 300]",
p_1_1: "f32[8]",
g_0_1: "f32[1024, 300]",
g_1_1: "f32[8]",
s_1: "f32[]",
_foreach_add_list = aten._foreach_add.List([p_1_1], [g_1_1], alpha = 0.5)
add_tensor: "f32[1024, 300]" = aten.add.Tensor(p_0_1, g_0_1, alpha = 0.5)
getitem_4: "f32[8]" = _foreach_add_list[0]
_foreach_mul_list = aten._foreach_mul.List([getitem_4], [g_1_1])
mul_tensor: "f32[1024, 300]" = aten.mul.Tensor(add_tensor, g_0_1)
getitem_5: "f32[8]" = _foreach_mul_list[0]
mul: "f32[1024, 300]" = aten.mul.Tensor(mul_tensor, s_1)
clamp_min: "f32[1024, 300]" = aten.clamp_min.default(mul, -448.0)
clamp_max: "f32[1024, 300]" = aten.clamp_max.default(clamp_min, 448.0)
convert_element_type: "f8e4m3fn[1024, 300]" = prims.convert_element_type.default(clamp_max, torch.float8_e4m3fn)
return (mul_tensor, getitem_5, convert_element_type)
""",
    )


CASES: dict[str, tuple[int, Callable[..., Any]]] = {
    **{op: (1, getattr(torch, f"_foreach_{op}")) for op in ("abs", "exp", "neg", "reciprocal", "sign", "sqrt", "rsqrt")},
    "add a number": (1, lambda x: torch._foreach_add(x, 2.5)),
    "add numbers": (1, lambda x: torch._foreach_add(x, [2.5, 0.5])),
    "add": (2, torch._foreach_add),
    "add, alpha": (2, lambda x, y: torch._foreach_add(x, y, alpha=-0.25)),
    "add one tensor": (1, lambda x: torch._foreach_add(x, torch.tensor(2.5), alpha=3)),
    "sub a number": (1, lambda x: torch._foreach_sub(x, 2.5)),
    "sub numbers": (1, lambda x: torch._foreach_sub(x, [2.5, 0.5])),
    "sub, alpha": (2, lambda x, y: torch._foreach_sub(x, y, alpha=0.75)),
    "mul a number": (1, lambda x: torch._foreach_mul(x, 2.5)),
    "mul numbers": (1, lambda x: torch._foreach_mul(x, [2.5, 0.5])),
    "mul": (2, torch._foreach_mul),
    "mul one tensor": (1, lambda x: torch._foreach_mul(x, torch.tensor(2.5))),
    "div a number": (1, lambda x: torch._foreach_div(x, 3.0)),
    "div numbers": (1, lambda x: torch._foreach_div(x, [3.0, 7.0])),
    "div": (2, torch._foreach_div),
    "div one tensor": (1, lambda x: torch._foreach_div(x, torch.tensor(3.0))),
    "addcdiv, value": (3, lambda x, y, z: torch._foreach_addcdiv(x, y, z, -0.1)),
    "addcdiv": (3, torch._foreach_addcdiv),
    "addcdiv, values": (3, lambda x, y, z: torch._foreach_addcdiv(x, y, z, [-0.1, 0.3])),
    "addcmul, value": (3, lambda x, y, z: torch._foreach_addcmul(x, y, z, value=-0.1)),
    "addcmul, values": (3, lambda x, y, z: torch._foreach_addcmul(x, y, z, [-0.1, 0.3])),
    "clamp_max a number": (1, lambda x: torch._foreach_clamp_max(x, 1.0)),
    "clamp_max numbers": (1, lambda x: torch._foreach_clamp_max(x, [1.0, 0.7])),
    "clamp_max": (2, torch._foreach_clamp_max),
    "clamp_min a number": (1, lambda x: torch._foreach_clamp_min(x, 1.0)),
    "clamp_min numbers": (1, lambda x: torch._foreach_clamp_min(x, [1.0, 0.7])),
    "clamp_min": (2, torch._foreach_clamp_min),
    "lerp": (3, torch._foreach_lerp),
    "lerp, weight": (2, lambda x, y: torch._foreach_lerp(x, y, 0.1)),
    "lerp, weights": (2, lambda x, y: torch._foreach_lerp(x, y, [0.1, 0.9])),
    "pow": (2, torch._foreach_pow),
    "pow, a number": (1, lambda x: torch._foreach_pow(x, 3.0)),
    "pow, numbers": (1, lambda x: torch._foreach_pow(x, [3.0, 0.5])),
    "pow of a number": (1, lambda x: torch._foreach_pow(2.0, x)),
}  # fmt: skip


def test_every_op_has_a_case() -> None:
    assert {case.split()[0].rstrip(",") for case in CASES} == SPLITS


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str, dtype: torch.dtype) -> None:
    """The results are those of torch's op; the large tensor has a separate op, the small one stays in the list."""
    lists, op = CASES[case]
    rows = 2 if dtype == BF16 else 1  # as many bytes as in float32
    s, *tensors = inputs(lists, dtype)
    tensors = [x.repeat(rows, 1) if x.dim() == 2 else x for x in tensors]
    module = capture(both(op), s, *tensors)
    wanted = module(s, *tensors)
    ops = len(sizes(module))
    torch_splits = torch.__version__ >= "2.14" and (case, dtype) == ("lerp, weight", BF16)  # as it traces
    assert bool(ops) != torch_splits and sizes(module) == [[8, 1024 * 300 * rows]] * ops
    on_kernels(module, SplitForeach())
    assert sizes(module) == [[8]] * ops
    for a, b in zip(wanted, module(s, *tensors), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        if ROUNDS_TWICE and dtype == F32 and case.startswith(("addcmul", "lerp")):
            torch.testing.assert_close(a.float(), b.float(), rtol=2**-22, atol=2**-22)
        else:
            assert torch.equal(a.float(), b.float())
    before = text(module)
    assert SplitForeach().run(module.graph, KernelsContext(Config(recipe=None))) == 0, "a second run finds something"
    assert text(module) == before


def test_an_op_on_large_tensors_alone_is_removed() -> None:
    def update(s: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        x, y = torch._foreach_mul([a, b], [2.0, 3.0])
        return x, y, scaling.quantize(y, s, E4M3)

    a, b, s = torch.randn(LARGE), torch.randn(LARGE), scale()
    module = capture(update, s, a, b)
    on_kernels(module, SplitForeach())
    assert sizes(module) == []
    x, y, _ = module(s, a, b)
    assert torch.equal(x, a * 2) and torch.equal(y, b * 3)


def test_positions_of_small_tensors() -> None:
    """Small tensors keep their numbers, although large ones before them leave the list."""

    def update(s: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        results = torch._foreach_mul(xs, [1.0, 2.0, 3.0, 4.0, 5.0])
        return *results, scaling.quantize(results[1], s, E4M3)

    xs = [torch.full(shape, 1.0) for shape in (LITTLE, LARGE, LITTLE, LARGE, LITTLE)]
    module = capture(update, scale(), *xs)
    on_kernels(module, SplitForeach())
    assert sizes(module) == [[8, 8, 8]]
    assert [float(y.mean()) for y in module(scale(), *xs)[:5]] == [1, 2, 3, 4, 5]


def test_a_large_argument_counts_as_well() -> None:
    """A small bfloat16 parameter with large float32 state is split off."""
    shape = SMALL_KERNEL_BYTES // 4 + 1, 1
    p, m = torch.randn(shape, dtype=BF16), torch.randn(shape)

    def update(s: Tensor, p: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        (y,) = torch._foreach_add([p], [m])
        return y, scaling.quantize(y, s, E4M3)

    module = capture(update, scale(), p, m)
    on_kernels(module, SplitForeach())
    assert sizes(module) == []


def read_as_a_list(s: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    norms = torch._foreach_norm([x, y])
    return *norms, scaling.quantize(x, s, E4M3)


def in_place(s: Tensor, x: Tensor, y: Tensor) -> Tensor:
    torch._foreach_mul_([x, y], 2.0)
    return scaling.quantize(x, s, E4M3)


def small(s: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return *torch._foreach_mul([x[:9], y[:9]], 2.0), scaling.quantize(x, s, E4M3)


def without_fp8(s: Tensor, x: Tensor, y: Tensor) -> Any:
    return tuple(torch._foreach_mul([x, y], 2.0))


UNTOUCHED = {
    "a reduction": read_as_a_list,
    "in place": in_place,
    "small tensors": small,
    "no FP8": without_fp8,
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_other_ops_do_not_change(case: str) -> None:
    module = capture(UNTOUCHED[case], scale(), torch.randn(1024, 300), torch.randn(1024, 300))
    assert any("_foreach_" in str(n.target) for n in module.graph.nodes)
    before = text(module)
    assert SplitForeach().run(module.graph, KernelsContext(Config(recipe=None))) == 0
    module.recompile()
    assert text(module) == before


def test_match() -> None:
    """Ops that take a tensor with a number for each list element are not split."""
    graph = fx.Graph()
    x, numbers = graph.placeholder("x"), graph.placeholder("numbers")
    calls = [
        graph.call_function(aten._foreach_addcmul.Scalar, ([x], [x], [x], 2.0)),
        graph.call_function(aten._foreach_addcmul.Tensor, ([x], [x], [x], numbers)),
        graph.call_function(aten._foreach_addcdiv.Tensor, ([x], [x], [x], numbers)),
        graph.call_function(aten._foreach_norm.Scalar, ([x],)),
        graph.call_function(aten._foreach_add_.Scalar, ([x], 1.0)),
        graph.call_function(aten.add.Tensor, (x, x)),
        graph.call_function(operator.add, (x, x)),
    ]
    assert list(map(match, [x, *calls])) == ["", "addcmul", *[""] * 6]
