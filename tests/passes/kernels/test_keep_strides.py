"""The keep_strides pass: ops of other libraries get the strides of the graph, where a pass has replaced an argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass.base.node_meta import STRIDES
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.options.config import Config
from fp8pass.passes.common.patterns import aten
from fp8pass.passes.kernels.keep_strides import KeepStrides
from fp8pass.quant.kernel_ops import LAID_OUT
from tests.helpers.harness import capture, count, expect_graph, on_kernels

pytestmark = pytest.mark.passes

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return ATTENTION(q * 2, k, v)[0]


def captured(noted: list[Any], dynamic: bool = False) -> fx.GraphModule:
    """Return a graph in which only q is computed; all three are [2, 4, 8, 16], and q lies with positions first."""
    q, k, v = torch.randn(2, 8, 4, 16).transpose(1, 2), torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
    module = capture(function, q, k, v, dynamic=dynamic)
    (node,) = (n for n in module.graph.nodes if n.target is ATTENTION)
    node.meta[STRIDES] = [
        n.meta["val"].stride() if strides == "own" else strides for n, strides in zip(node.args, noted, strict=True)
    ]
    return module


def test_graph() -> None:
    module = captured(["own", "own", None])
    context = KernelsContext(Config(recipe=None))
    assert [KeepStrides().run(module.graph, context) for _ in range(2)] == [1, 0]
    expect_graph(
        module,
        """\
q_1: "f32[2, 4, 8, 16]",
k_1: "f32[2, 4, 8, 16]",
v_1: "f32[2, 4, 8, 16]",
mul: "f32[2, 4, 8, 16]" = aten.mul.Tensor(q_1, 2)
laid_out_default: "f32[2, 4, 8, 16]" = fp8pass.laid_out.default(mul, [512, 16, 64, 1])
_scaled_dot_product_flash_attention_for_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default(laid_out_default, k_1, v_1)
getitem: "f32[2, 4, 8, 16]" = _scaled_dot_product_flash_attention_for_cpu[0]
getitem_1: "f32[2, 4, 8]" = _scaled_dot_product_flash_attention_for_cpu[1]
return getitem
""",
    )


def test_an_input_with_other_strides_is_copied() -> None:
    module = captured([None, (512, 16, 64, 1), None])
    on_kernels(module, KeepStrides())
    assert count(module, LAID_OUT) == 1
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    torch.testing.assert_close(module(q, k, v), function(q, k, v))


def test_symbolic_strides_become_nodes() -> None:
    module = captured(["own", None, None], dynamic=True)
    on_kernels(module, KeepStrides())
    (made,) = (n for n in module.graph.nodes if n.target is LAID_OUT)
    assert made.meta["val"].stride() == made.args[0].meta["val"].stride()
    assert not any(isinstance(stride, torch.SymInt) for stride in made.args[1])


def test_a_note_that_does_not_fit_is_a_fault() -> None:
    module = captured(["own", "own", "own"])
    (node,) = (n for n in module.graph.nodes if n.target is ATTENTION)
    node.meta[STRIDES].pop()
    with pytest.raises(AssertionError, match="reads 3 tensors, and 2 have a note"):
        on_kernels(module, KeepStrides())


def test_a_graph_without_notes_stays() -> None:
    module = capture(function, *(torch.randn(2, 4, 8, 16) for _ in range(3)))
    before = str(module.graph)
    on_kernels(module, KeepStrides())
    assert str(module.graph) == before
