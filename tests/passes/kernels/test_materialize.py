"""The materialize pass: vectors of slots and operands of several matmuls are stored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8pass.base import scaling
from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.base.node_meta import ONE_STAGE
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.options.config import Config
from fp8pass.passes.kernels.materialize import MAX_AMAX_INPUT, MAX_ELEMENTS, Materialize
from tests.helpers.harness import BF16, E4M3, aten, capture, compiled, count, expect_graph, fp8, on_kernels, scale, text


def begin(buffer: Tensor, forward: Tensor, backward: Tensor) -> tuple[Tensor, Tensor]:
    """Begin a step: compute scales from the amaxes of forward and backward, write them back, and read two slots."""
    scales = 448 / torch.cat([forward, backward])
    buffer.copy_(scales)
    return scales[0], scales[2]


def vectors() -> tuple[Tensor, ...]:
    return torch.zeros(3), torch.tensor([2.0, 4.0]), torch.tensor([8.0])


@pytest.mark.passes
def test_graph_of_the_scales_of_a_step() -> None:
    module = capture(begin, *vectors())
    expect_graph(
        module,
        """\
buffer_1: "f32[3]",
forward_1: "f32[2]",
backward_1: "f32[1]",
cat: "f32[3]" = aten.cat.default([forward_1, backward_1])
reciprocal: "f32[3]" = aten.reciprocal.default(cat)
mul: "f32[3]" = aten.mul.Tensor(reciprocal, 448)
copy_: "f32[3]" = aten.copy_.default(buffer_1, mul)
select: "f32[]" = aten.select.int(mul, 0, 0)
select_1: "f32[]" = aten.select.int(mul, 0, 2)
return (select, select_1)
""",
    )
    on_kernels(module, Materialize())
    expect_graph(
        module,
        """\
buffer_1: "f32[3]",
forward_1: "f32[2]",
backward_1: "f32[1]",
joined_default: "f32[3]" = fp8pass.joined.default([forward_1, backward_1])
reciprocal: "f32[3]" = aten.reciprocal.default(joined_default)
mul: "f32[3]" = aten.mul.Tensor(reciprocal, 448)
inductor_force_stride_order_default: "f32[3]" = prims.inductor_force_stride_order.default(mul, [1])
copy_: "f32[3]" = aten.copy_.default(buffer_1, inductor_force_stride_order_default)
select: "f32[]" = aten.select.int(inductor_force_stride_order_default, 0, 0)
select_1: "f32[]" = aten.select.int(inductor_force_stride_order_default, 0, 2)
return (select, select_1)
""",
    )


def product(x_q: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch._scaled_mm(x_q, w, s, s, out_dtype=BF16)


def two_matmuls(x: Tensor, w: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    x_q = scaling.quantize(x, s, E4M3)
    return product(x_q, w.t(), s), product(x_q.view(32, 64), v.t(), s)


@pytest.mark.passes
def test_graph_of_an_operand_of_two_matmuls() -> None:
    module = capture(two_matmuls, torch.randn(32, 64), fp8(16, 64), fp8(48, 64), scale())
    on_kernels(module, Materialize())
    expect_graph(
        module,
        """\
x_1: "f32[32, 64]",
w_1: "f8e4m3fn[16, 64]",
v_1: "f8e4m3fn[48, 64]",
s_1: "f32[]",
mul: "f32[32, 64]" = aten.mul.Tensor(x_1, s_1)
clamp_min: "f32[32, 64]" = aten.clamp_min.default(mul, -448.0)
clamp_max: "f32[32, 64]" = aten.clamp_max.default(clamp_min, 448.0)
convert_element_type: "f8e4m3fn[32, 64]" = prims.convert_element_type.default(clamp_max, torch.float8_e4m3fn)
inductor_force_stride_order_default: "f8e4m3fn[32, 64]" = prims.inductor_force_stride_order.default(convert_element_type, [64, 1])
permute: "f8e4m3fn[64, 16]" = aten.permute.default(w_1, [1, 0])
_scaled_mm: "bf16[32, 16]" = aten._scaled_mm.default(inductor_force_stride_order_default, permute, s_1, s_1, None, None, torch.bfloat16)
view: "f8e4m3fn[32, 64]" = aten.view.default(inductor_force_stride_order_default, [32, 64])
permute_1: "f8e4m3fn[64, 48]" = aten.permute.default(v_1, [1, 0])
_scaled_mm_1: "bf16[32, 48]" = aten._scaled_mm.default(view, permute_1, s_1, s_1, None, None, torch.bfloat16)
return (_scaled_mm, _scaled_mm_1)
""",
    )


SAME: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], int]] = {
    "scales of a step": (begin, vectors, 1),
    "two matmuls": (two_matmuls, lambda: (torch.randn(32, 64), fp8(16, 64), fp8(48, 64), scale()), 1),
    "three parts": (lambda *parts: torch.cat(parts), lambda: (torch.rand(3), torch.rand(1), torch.rand(5)), 0),
    "by the last dimension": (lambda a, b: torch.cat([a, b], -1), lambda: (torch.rand(3), torch.rand(2)), 0),
    "parts without elements": (
        lambda a, b, c: torch.cat([a, b, c]), lambda: (torch.rand(0), torch.rand(2), torch.rand(0)), 0,
    ),
    "nothing at all": (lambda a, b: torch.cat([a, b]), lambda: (torch.rand(0), torch.rand(0)), 0),
    "integers": (lambda a, b: torch.cat([a, b]), lambda: (torch.arange(3), torch.arange(4)), 0),
    "a slice": (lambda x: (x.exp()[1:], x.exp().sum()), lambda: (torch.rand(5),), 1),
    "columns": (lambda x: x.t().exp()[1] + 1, lambda: (torch.rand(3, 4),), 0),
}  # fmt: skip


@pytest.mark.passes
@pytest.mark.parametrize("case", SAME)
def test_same_bits(case: str) -> None:
    function, make, forced = SAME[case]
    inputs = make()
    module = capture(function, *inputs)
    on_kernels(module, Materialize())
    assert count(module, aten.cat.default) == 0
    assert count(module, FORCE_STRIDE_ORDER) == forced
    copies = [x.clone() for x in inputs]
    wanted, got = function(*inputs), module(*copies)
    pairs = zip(wanted, got, strict=True) if isinstance(wanted, tuple) else [(wanted, got)]
    for a, b in [*pairs, *zip(inputs, copies, strict=True)]:
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.float(), b.float())
    before = text(module)
    assert Materialize().run(module.graph, KernelsContext(Config(recipe=None))) == 0
    module.recompile()
    assert text(module) == before, "a second run finds something"


UNTOUCHED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "large": (lambda a, b: torch.cat([a, b]), (torch.rand(MAX_ELEMENTS), torch.rand(1))),
    "matrices": (lambda a, b: torch.cat([a, b]), (torch.rand(2, 3), torch.rand(2, 3))),
    "many parts": (lambda *parts: torch.cat(parts), tuple(torch.rand(9, 2))),
    "parts of several types": (lambda a, b: torch.cat([a, b]), (torch.rand(2), torch.arange(2))),
    "float8": (lambda a, b: torch.cat([a, b]), (fp8(2), fp8(3))),
    "a part of an input": (lambda x: x[1] + x[2:].sum(), (torch.rand(5),)),
    "a part of a large value": (lambda x: x.exp()[0], (torch.rand(2, MAX_ELEMENTS),)),
    "written, and read nowhere else": (lambda b, x: b.copy_(x.exp()), (torch.rand(3), torch.rand(3))),
    "an operand of one matmul": (
        lambda x, w, s: product(scaling.quantize(x, s, E4M3), w.t(), s), (torch.randn(32, 64), fp8(16, 64), scale()),
    ),
    "an input of two matmuls": (
        lambda x, w, v, s: (product(x, w.t(), s), product(x, v.t(), s)), (fp8(32, 64), fp8(16, 64), fp8(48, 64), scale()),
    ),
}  # fmt: skip


@pytest.mark.passes
@pytest.mark.parametrize("case", UNTOUCHED)
def test_graphs_that_would_gain_nothing_do_not_change(case: str) -> None:
    function, inputs = UNTOUCHED[case]
    module = capture(function, *inputs)
    before = text(module)
    assert Materialize().run(module.graph, KernelsContext(Config(recipe=None))) == 0
    module.recompile()
    assert text(module) == before


@pytest.mark.passes
def test_graphs_with_symbolic_sizes_do_not_change() -> None:
    module = capture(lambda a, b: torch.cat([a, b]).exp()[1:], torch.rand(3), torch.rand(2), dynamic=True)
    before = text(module)
    on_kernels(module, Materialize())
    assert text(module) == before


@pytest.mark.passes
def test_amaxes_that_must_be_one_launch() -> None:
    """The amax of a history and that of the amaxes of rows are marked; that of a model's tensor is not."""

    def function(history: Tensor, rows: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return history.amax(0), rows.amax(), x.amax(1), rows.view(8, -1).sum(1)

    module = capture(function, torch.rand(16, 24), torch.rand(64), torch.rand(1, 1).expand(2, MAX_AMAX_INPUT))
    on_kernels(module, Materialize())
    amaxes = [n for n in module.graph.nodes if n.op == "call_function"]
    assert [ONE_STAGE in n.meta for n in amaxes if n.target is aten.amax.default] == [True, True, False]
    assert not any(ONE_STAGE in n.meta for n in amaxes if n.target is not aten.amax.default)


@pytest.mark.passes
def test_an_expanded_number_whose_parts_are_read_is_not_stored() -> None:
    def gradient_of_a_sum_of_a_cat(g: Tensor) -> tuple[Tensor, Tensor]:
        expanded = (g * 2).expand(8)
        return expanded[:3] + 1, expanded[3:] + 1

    module = capture(gradient_of_a_sum_of_a_cat, torch.ones(()))
    on_kernels(module, Materialize())
    assert count(module, FORCE_STRIDE_ORDER) == 0 and count(module, aten.slice.Tensor) == 2


@pytest.mark.passes
def test_an_operand_of_several_matmuls_with_a_symbolic_size() -> None:
    def twice(x: Tensor, w: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x_q = scaling.quantize(x, s, E4M3)
        rows = x_q.view(-1, 64)
        return tuple(torch._scaled_mm(rows, b.t(), s, s, out_dtype=BF16) for b in (w, v))  # type: ignore[return-value]

    def inputs(length: int) -> tuple[Tensor, ...]:
        return torch.randn(2, length, 64), fp8(32, 64), fp8(48, 64), scale()

    module = capture(twice, *inputs(8), dynamic=True)
    on_kernels(module, Materialize())
    assert count(module, FORCE_STRIDE_ORDER) == 1
    module.graph.lint()
    for length in (8, 12):
        given = inputs(length)
        assert all(torch.equal(a, b) for a, b in zip(module(*given), twice(*given), strict=True))


@pytest.mark.compiled
def test_small_parameters_in_one_sum_train_next_to_fp8() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 32)
            self.p, self.q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x).sum() + torch.cat([self.p, self.q]).sum()
            return y

    model = Model()
    compiled(model, recipe="dynamic", strict=True)(torch.randn(16, 32)).backward()
    assert model.p.grad is not None and torch.equal(model.p.grad, torch.ones(3))


@pytest.mark.inductor
def test_vectors_of_a_user_compile() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return torch.cat([a, b]), torch.cat([c, c]), torch.cat([a.to(E4M3), b.to(E4M3)])

    inputs = torch.rand(3), torch.rand(5), torch.tensor([True, False])
    for wanted, got in zip(
        function(*inputs), compiled(function, recipe=None, lowering="inductor")(*inputs), strict=True
    ):
        assert torch.equal(wanted.float(), got.float())
