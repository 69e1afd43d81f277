"""Test the graph that the pass over traced graphs writes: state, slots, quantized tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fp8pass import recipes
from fp8pass.base.names import Names
from fp8pass.graph.verify import verify
from fp8pass.options.config import Config
from fp8pass.passes.traced.quantize_traced import QuantizeTraced, TracedContext
from tests.helpers.harness import BF16, capture

pytestmark = pytest.mark.passes


def step(x: Tensor, w: Tensor, b: Tensor) -> Any:
    loss = torch.nn.functional.linear(x, w, b).sum()
    return loss, *torch.autograd.grad(loss, [x, w, b])


INPUTS = [torch.randn(s, dtype=BF16, requires_grad=True) for s in ((4, 8, 32), (64, 32), (64,))]


def quantized(function: Any = step, inputs: Any = INPUTS, **config: Any) -> tuple[fx.GraphModule, TracedContext]:
    module = capture(function, *inputs)
    output = module.graph.output_node()
    results: Any = output.args[0]
    output.args = (tuple(results) if isinstance(results, (list, tuple)) else (results,),)
    context = TracedContext(Config(**config), names=Names([]), bootstrap=False)
    QuantizeTraced().run(module.graph, context)
    verify(module.graph)
    return module, context


def test_each_tensor_is_quantized_once() -> None:
    module, context = quantized()
    (table,) = context.tables
    assert table.names == ("addmm.input", "addmm.weight", "addmm.grad_output")
    assert list(table.fp8_max) == [448, 448, 57344]
    casts = [n for n in module.graph.nodes if "convert_element_type" in str(n.target) and n.args[1].itemsize == 1]
    assert len(casts) == 3


def test_state_comes_after_all_inputs_and_outputs() -> None:
    module, _ = quantized(recipe=recipes.DelayedScaling(amax_history_len=4))
    inputs = [n.name for n in module.graph.find_nodes(op="placeholder")]
    assert inputs[-3:] == ["fp8pass_scale", "fp8pass_amax_history", "fp8pass_amax"]
    results: Any = module.graph.output_node().args[0]
    assert [tuple(n.meta["val"].shape) for n in results[-3:]] == [(3,), (4, 3), (3,)]
    assert not [n for n in module.graph.nodes if "copy_" in str(n.target)]


def test_a_forward_records_nothing() -> None:
    module, context = quantized(lambda x, w: x @ w.t(), [x.detach() for x in INPUTS[:2]])
    results: Any = module.graph.output_node().args[0]
    assert [n.name for n in results[1:]] == ["fp8pass_scale", "fp8pass_amax_history", "fp8pass_amax"]
    assert not context.tables[0].training


def test_every_matmul_has_a_choice() -> None:
    def product_with_itself(w: Tensor) -> Any:
        loss = (w @ w.t()).sum()
        return loss, *torch.autograd.grad(loss, [w])

    _, context = quantized(product_with_itself, [torch.randn(32, 32, requires_grad=True)])
    assert [c.rule for c in context.choices] == ["", "product", "product"]
    assert "can't be decided: no matmul of the forward" in context.choices[1].reason


def test_a_scaled_sum_is_declined() -> None:
    _, context = quantized(lambda b, x, w: torch.addmm(b, x, w, alpha=2), [torch.randn(s, s) for s in (32, 32, 32)])
    assert [(c.rule, c.wanted) for c in context.choices] == [("form", True)]
