"""The use_transposes pass: matmuls read the transposed copy that a weight came with instead of making one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.graph.pass_base import JointContext
from fp8pass.options.config import Config
from fp8pass.passes.joint.use_transposes import UseTransposes
from fp8pass.quant.ops import WITH_TRANSPOSE, with_transpose
from tests.helpers.harness import BF16, apply, aten, capture, count, expect_graph, fp8, scale, text

pytestmark = pytest.mark.passes


def product(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, s, s, out_dtype=BF16)


def layer(x_q: Tensor, g_q: Tensor, w_q: Tensor, w_t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and grad_input, which sums over the weight's other dimension."""
    w = with_transpose(w_q, w_t)
    return product(x_q, w.t(), s), product(g_q, w.t().contiguous().t(), s)


def inputs() -> tuple[Tensor, ...]:
    w_q = fp8(48, 32)
    return fp8(64, 32), fp8(64, 48), w_q, w_q.t().contiguous(), scale()


def test_graph() -> None:
    module = capture(layer, *inputs())
    apply(module, UseTransposes())
    expect_graph(
        module,
        """\
x_q_1: "f8e4m3fn[64, 32]",
g_q_1: "f8e4m3fn[64, 48]",
w_q_1: "f8e4m3fn[48, 32]",
w_t_1: "f8e4m3fn[32, 48]",
s_1: "f32[]",
permute: "f8e4m3fn[32, 48]" = aten.permute.default(w_q_1, [1, 0])
_scaled_mm: "bf16[64, 48]" = aten._scaled_mm.default(x_q_1, permute, s_1, s_1, None, None, torch.bfloat16)
permute_2: "f8e4m3fn[48, 32]" = aten.permute.default(w_t_1, [1, 0])
_scaled_mm_1: "bf16[64, 32]" = aten._scaled_mm.default(g_q_1, permute_2, s_1, s_1, None, None, torch.bfloat16)
return (_scaled_mm, _scaled_mm_1)
""",
    )


def of_three_dimensions(x_q: Tensor, g_q: Tensor, w_q: Tensor, w_t: Tensor, s: Tensor) -> Tensor:
    """Return grad_weight of a tensor that was quantized as rows: it sums over these."""
    w = with_transpose(w_q, w_t).view(4, 12, 32).view(48, 32)
    return product(g_q, w.t().contiguous().t(), s)


def test_views_between_rows_and_more_dimensions() -> None:
    args = inputs()
    module = capture(of_three_dimensions, *args)
    wanted = module(*args)
    apply(module, UseTransposes())
    assert count(module, aten.clone.default) == count(module, WITH_TRANSPOSE) == 0
    assert torch.equal(module(*args), wanted)


def two_copies(x_q: Tensor, g_q: Tensor, w_q: Tensor, w_t: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    w = with_transpose(w_q, w_t)
    return w.t().contiguous(), w.t().contiguous().float()


def only_forward(x_q: Tensor, g_q: Tensor, w_q: Tensor, w_t: Tensor, s: Tensor) -> Tensor:
    return product(x_q, with_transpose(w_q, w_t).t(), s)


def otherwise_laid_out(x_q: Tensor, g_q: Tensor, w_q: Tensor, w_t: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """The given copy is not contiguous, so another is made."""
    w = with_transpose(w_q, w_q.t())
    return product(x_q, w.t(), s), product(g_q, w.t().contiguous().t(), s)


def copied_as_it_is(x_q: Tensor, g_q: Tensor, w_q: Tensor, w_t: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    w = with_transpose(w_q, w_t)
    return w.clone(), w.permute(0, 1).clone(), w.float()


def without(x_q: Tensor, g_q: Tensor, w_q: Tensor, w_t: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    return product(x_q, w_q.t(), s), product(g_q, w_q.t().contiguous().t(), s)


CASES: dict[
    str, tuple[Callable[..., Any], int, int]
] = {  # with the number of applications, and of copies that are left
    "a layer": (layer, 1, 0),
    "two copies": (two_copies, 1, 0),
    "no backward": (only_forward, 1, 0),
    "laid out otherwise": (otherwise_laid_out, 1, 1),
    "not transposed": (copied_as_it_is, 1, 2),
    "none was given": (without, 0, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_same_bits(case: str) -> None:
    function, found, left = CASES[case]
    args = inputs()
    module = capture(function, *args)
    before, wanted = text(module), module(*args)
    assert UseTransposes().run(module.graph, JointContext(Config(recipe=None))) == found
    module.recompile()
    assert (text(module) == before) == (found == 0)
    assert (count(module, WITH_TRANSPOSE), count(module, aten.clone.default)) == (0, left)
    pairs = zip(wanted, module(*args), strict=True) if isinstance(wanted, tuple) else [(wanted, module(*args))]
    for a, b in pairs:
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.float(), b.float())
    after = text(module)
    assert UseTransposes().run(module.graph, JointContext(Config(recipe=None))) == 0, "a second run finds something"
    assert text(module) == after


def test_the_copy_is_read_and_not_made() -> None:
    """The given copy is another matrix, so that the numbers show which one is read."""
    x_q, g_q, w_q, _, s = inputs()
    other = fp8(32, 48)
    module = capture(layer, x_q, g_q, w_q, other, s)
    apply(module, UseTransposes())
    forward, backward = module(x_q, g_q, w_q, other, s)
    assert torch.equal(forward, product(x_q, w_q.t(), s))
    assert torch.equal(backward, product(g_q, other.t(), s))


def test_the_op_itself_gives_the_weight() -> None:
    w_q = fp8(48, 32)
    y = with_transpose(w_q, w_q.t().contiguous())
    assert torch.equal(y.float(), w_q.float()) and y.data_ptr() != w_q.data_ptr()
