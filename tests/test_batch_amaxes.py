"""The batch_amaxes pass: last stages of amaxes, with the scales that need them, and their records."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fp8pass import scaling
from fp8pass.graph import RECORDED
from fp8pass.passes.batch_amaxes import BatchAmaxes, Slot, _groups, match
from tests.harness import BF16, E4M3, apply, aten, capture, count


def step(x: Tensor, w: Tensor, h: Tensor, v: Tensor, scales: Tensor, amaxes: Tensor) -> tuple[Tensor, Tensor]:
    """Two layers, of which the second waits for the first, and the records of their four operands."""
    new = []

    def operand(t: Tensor, i: int) -> tuple[Tensor, Tensor]:
        amax = scaling.amax(t)
        new.append(amax)
        return scaling.quantize(t, scales[i], E4M3), scaling.inverse_unless_nonfinite(scales[i], amax)

    (x_q, s_x), (w_q, s_w) = operand(x, 0), operand(w, 1)
    y = torch._scaled_mm(x_q, w_q.t(), s_x, s_w, out_dtype=BF16)
    (h_q, s_h), (v_q, s_v) = operand(y * h, 2), operand(v, 3)
    z = torch._scaled_mm(h_q, v_q.t(), s_h, s_v, out_dtype=BF16)
    amaxes.copy_(scaling.merge_amax(amaxes, torch.stack(new), "evict"))
    return y, z


def inputs(bad: float | None = None) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, w, h, v = (torch.randn(s, dtype=BF16) for s in ((32, 64), (48, 64), (32, 48), (16, 48)))
    if bad is not None:
        w[3, 5] = bad
    return x, w, h, v, torch.tensor([8.0, 16.0, 2.0, 32.0]), torch.tensor([-1.0, 3.0, -1.0, 9.0])


def captured() -> fx.GraphModule:
    module = capture(step, *inputs())
    (copy,) = (n for n in module.graph.nodes if n.target is aten.copy_.default)
    copy.args[1].meta[RECORDED] = "evict"  # as batch_records leaves it
    return module


def slots(module: fx.GraphModule) -> list[Slot]:
    (found,) = (m for n in module.graph.nodes if (m := match(n)) is not None)
    return found.slots


def test_a_weight_goes_with_what_it_is_multiplied_with() -> None:
    module = captured()
    groups = _groups(module.graph, slots(module))
    assert [[slot.index for slot in group] for group in groups] == [[0, 1], [2, 3]]
    assert [slot.depth for slot in slots(module)] == [0, 0, 0, 0]  # before it is asked


def test_one_stage_and_one_record_for_each_group() -> None:
    module = captured()
    apply(module, BatchAmaxes())
    assert count(module, aten.copy_.default) == 2
    whole = [n for n in module.graph.nodes if n.target is aten.amax.default and n.args[1:] == ([1],)]
    assert [n.meta["val"].shape for n in whole] == [(2,), (2,)]
    assert BatchAmaxes().run(module.graph, None) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_same_bits(bad: float | None) -> None:
    module = captured()
    mine, wanted = inputs(bad), inputs(bad)
    apply(module, BatchAmaxes())
    for got, want in zip((*module(*mine), mine[-1]), (*step(*wanted), wanted[-1]), strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        assert got.isnan().sum() == want.isnan().sum()
    assert mine[-1][1] == (3.0 if bad is not None else max(3.0, float(wanted[1].abs().max())))


def test_what_is_no_record_stays() -> None:
    module = capture(step, *inputs())
    before = module.code
    apply(module, BatchAmaxes())
    assert module.code == before
