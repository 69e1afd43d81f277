"""The batch_amaxes pass: last stages of amaxes, their scales and their records become groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass.base import scaling
from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.base.node_meta import RECORDED
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.options.config import Config
from fp8pass.passes.kernels.batch_amaxes import BatchAmaxes, RecordSlot, _groups, match
from tests.helpers.harness import BF16, E4M3, aten, capture, count, on_kernels

pytestmark = pytest.mark.passes


def step(x: Tensor, w: Tensor, h: Tensor, v: Tensor, scales: Tensor, amaxes: Tensor) -> tuple[Tensor, Tensor]:
    """Run two layers, of which the second waits for the first, and record the amaxes of their four operands."""
    return _step(x, w, h, v, scales, amaxes, (0, 1, 2, 3))


def crossed(x: Tensor, w: Tensor, h: Tensor, v: Tensor, scales: Tensor, amaxes: Tensor) -> tuple[Tensor, Tensor]:
    """Run `step` with other slots: 0 and 2 belong to the same layer."""
    return _step(x, w, h, v, scales, amaxes, (0, 2, 1, 3))


def recorded_early(x: Tensor, w: Tensor, h: Tensor, v: Tensor, scales: Tensor, amaxes: Tensor) -> tuple[Tensor, Tensor]:
    """Run `crossed` with a record before the second matmul, as in a backward."""
    return _step(x, w, h, v, scales, amaxes, (0, 2, 1, 3), early=True)


def read_early(x: Tensor, w: Tensor, h: Tensor, v: Tensor, scales: Tensor, amaxes: Tensor) -> tuple[Tensor, Tensor]:
    """Run two layers, of which the second's input also depends on its own dequantized weight."""
    return _step(x, w, h, v, scales, amaxes, (0, 1, 2, 3), dequantized=True)


def returned(x: Tensor, w: Tensor, h: Tensor, v: Tensor, scales: Tensor, amaxes: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize and record in a forward for the backward: only the output reads the inverse scales."""
    (h_q, s_h), a_h = _operand(h, scales[0])
    (v_q, s_v), a_v = _operand(v, scales[1])
    amaxes.copy_(scaling.merge_amax(amaxes, torch.stack([a_h, a_v, a_h, a_v]), "evict"))
    return h_q.float() + s_h, v_q.float() + s_v


def _operand(t: Tensor, scale: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    amax = scaling.amax(t)
    return (scaling.quantize(t, scale, E4M3), scaling.inverse_unless_nonfinite(scale, amax)), amax


def _step(
    x: Tensor,
    w: Tensor,
    h: Tensor,
    v: Tensor,
    scales: Tensor,
    amaxes: Tensor,
    order: tuple[int, ...],
    early: bool = False,
    dequantized: bool = False,
) -> tuple[Tensor, Tensor]:
    (x_q, s_x), a_x = _operand(x, scales[0])
    (w_q, s_w), a_w = _operand(w, scales[1])
    y = torch._scaled_mm(x_q, w_q.t(), s_x, s_w, out_dtype=BF16)
    (v_q, s_v), a_v = _operand(v, scales[3])
    h = h * (v_q.float() * s_v).sum().to(BF16) if dequantized else h
    (h_q, s_h), a_h = _operand(y * h, scales[2])

    def merged() -> Tensor:
        new = torch.stack([(a_x, a_w, a_h, a_v)[i] for i in order])
        return scaling.merge_amax(amaxes, new, "evict")

    before = merged() if early else None
    z = torch._scaled_mm(h_q, v_q.t(), s_h, s_v, out_dtype=BF16)
    amaxes.copy_(merged() if before is None else before)
    return y, z


def inputs(bad: float | None = None) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, w, h, v = (torch.randn(s, dtype=BF16) for s in ((32, 64), (48, 64), (32, 48), (16, 48)))
    if bad is not None:
        w[3, 5] = bad
    return x, w, h, v, torch.tensor([8.0, 16.0, 2.0, 32.0]), torch.tensor([-1.0, 3.0, -1.0, 9.0])


def captured(function: Callable[..., Any] = step) -> fx.GraphModule:
    module = capture(function, *inputs())
    (copy,) = (n for n in module.graph.nodes if n.target is aten.copy_.default)
    copy.args[1].meta[RECORDED] = "evict"  # the mark that batch_records sets
    return module


def slots(module: fx.GraphModule) -> list[RecordSlot]:
    (found,) = (m for n in module.graph.nodes if (m := match(n)) is not None)
    return found.slots


def test_a_weight_is_in_the_group_of_its_matmul() -> None:
    module = captured()
    groups = _groups(module.graph, slots(module))
    assert [[slot.index for slot in group] for group in groups] == [[0, 1], [2, 3]]
    assert [slot.depth for slot in slots(module)] == [0, 0, 0, 0]  # slots of a new match have no depth yet


def test_one_stage_and_one_record_for_each_group() -> None:
    module = captured()
    on_kernels(module, BatchAmaxes())
    assert count(module, aten.copy_.default) == 2
    whole = [n for n in module.graph.nodes if n.target is aten.amax.default and n.args[1:] == ([1],)]
    assert [n.meta["val"].shape for n in whole] == [(2,), (2,)]
    assert BatchAmaxes().run(module.graph, KernelsContext(Config(recipe=None))) == 0


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_same_bits(bad: float | None) -> None:
    module = captured()
    mine, wanted = inputs(bad), inputs(bad)
    on_kernels(module, BatchAmaxes())
    check_bits(module, step, bad)
    module(*mine)
    assert mine[-1][1] == (3.0 if bad is not None else max(3.0, float(wanted[1].abs().max())))


@pytest.mark.parametrize("bad", [None, float("nan")])
@pytest.mark.parametrize("function", [crossed, recorded_early], ids=lambda f: f.__name__)
def test_a_group_of_slots_that_do_not_follow_one_another(function: Callable[..., Any], bad: float | None) -> None:
    """A model that is called twice has such slots: its first layer has 0 and 2. One record writes them all."""
    module = captured(function)
    on_kernels(module, BatchAmaxes())
    assert count(module, aten.copy_.default) == 1
    assert count(module, aten.amax.default) == 4 + 2  # the first stages, and one last stage for each group
    check_bits(module, function, bad)


@pytest.mark.parametrize("function", [read_early, returned], ids=lambda f: f.__name__)
def test_the_first_reader_of_an_inverse_scale(function: Callable[..., Any]) -> None:
    """It may be an op other than a matmul, before the tensors of other amaxes of that depth, or only the output."""
    module = captured(function)
    on_kernels(module, BatchAmaxes())
    check_bits(module, function)


def check_bits(module: fx.GraphModule, function: Callable[..., Any], bad: float | None = None) -> None:
    module.graph.lint()
    mine, wanted = inputs(bad), inputs(bad)
    for got, want in zip((*module(*mine), mine[-1]), (*function(*wanted), wanted[-1]), strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        assert torch.equal(got.isnan(), want.isnan())


def test_updates_without_the_mark_stay() -> None:
    module = capture(step, *inputs())
    before = module.code
    on_kernels(module, BatchAmaxes())
    assert module.code == before


def vectors(module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes with the scales of groups."""
    return [n for n in module.graph.nodes if n.target is FORCE_STRIDE_ORDER]


def test_kernels_of_equal_layers_have_equal_indices() -> None:
    """The second group reads elements 0 and 1 of its own vector, not 2 and 3 of the vector of all slots."""
    module = captured()
    wanted = module(*inputs())
    on_kernels(module, BatchAmaxes())
    (vector,) = vectors(module)
    elements = [n for n in module.graph.nodes if n.target is aten.select.int and n.args[0] is vector]
    assert [n.args[1:] for n in elements] == [(0, 0), (0, 1)]
    assert all(any(u.target is aten.mul.Tensor for u in n.users) for n in elements)
    assert all(torch.equal(a, b) for a, b in zip(wanted, module(*inputs()), strict=True))


def test_kernels_do_not_wait_for_scales_of_this_step() -> None:
    """A slot without history has a scale of its own amax, which no vector of a group holds."""

    def function(x: Tensor, w: Tensor, h: Tensor, v: Tensor, scales: Tensor, amaxes: Tensor) -> tuple[Tensor, ...]:
        own = scaling.scale_from_amax(scaling.amax(v), 448.0, 1.0)
        return step(x, w, h, v, torch.where(scales == 0, own, scales), amaxes)

    module = capture(function, *inputs())
    (copy,) = (n for n in module.graph.nodes if n.target is aten.copy_.default)
    copy.args[1].meta[RECORDED] = "evict"
    for node in list(module.graph.nodes):  # as in graphs that choose each slot's scale separately
        if node.target is aten.select.int:
            with module.graph.inserting_before(node.next):
                chosen = module.graph.call_function(aten.clone.default, (node,))
            chosen.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(chosen, delete_user_cb=lambda user, chosen=chosen: user is not chosen)
    wanted = module(*inputs())
    on_kernels(module, BatchAmaxes())
    assert vectors(module) == []
    assert all(torch.equal(a, b) for a, b in zip(wanted, module(*inputs()), strict=True))
