"""The save_scales pass: the scales of tensors that are saved in FP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fp8pass.base import scaling
from fp8pass.base.node_meta import SAVED, SAVED_FP8
from fp8pass.passes.joint.save_scales import SaveScales
from tests.helpers.harness import E4M3, apply, capture, scale, text

pytestmark = pytest.mark.passes


def saved_in_fp8(x: Tensor, s: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    scale_inv = scaling.inverse_unless_nonfinite(s, scaling.amax(x))
    copy = scaling.dequantize(scaling.quantize(x, s, E4M3), scale_inv, x.dtype)
    return x.relu(), tangents * copy


def marks(marked: bool, s: Tensor) -> tuple[list[str], fx.GraphModule]:
    module = capture(saved_in_fp8, torch.randn(64, 32), s, torch.randn(64, 32))
    for node in module.graph.nodes:
        if marked and node.op == "call_function":
            node.meta["custom"] = {SAVED_FP8: True}
    before = text(module)
    apply(module, SaveScales())
    assert text(module) == before
    return [str(n.target) for n in module.graph.nodes if SAVED in n.meta], module


def test_the_scale_is_saved_not_what_it_is_computed_from() -> None:
    found, module = marks(True, scale())
    assert found == ["aten.where.self"]
    apply(module, SaveScales())  # again: finds nothing new
    assert sum(SAVED in n.meta for n in module.graph.nodes) == 1


def test_other_scales_are_left_to_the_partitioner() -> None:
    assert marks(False, scale())[0] == []
