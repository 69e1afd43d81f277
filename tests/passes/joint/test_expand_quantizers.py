"""The expand_quantizers pass, and the op that stands for a quantizer while AOTAutograd traces."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8pass.graph.pass_base import JointContext
from fp8pass.passes.joint.expand_quantizers import ExpandQuantizers
from fp8pass.quant import ops
from fp8pass.quant.one_op import QUANTIZER, Elementwise
from fp8pass.recipes import DelayedScaling, DynamicScaling, RowwiseScaling, StaticScaling
from tests.helpers.harness import BF16, E4M3, E5M2, F32, capture, compiled, count, run, without_caches
from tests.helpers.models import Block, make

DELAYED = ops.Delayed(DelayedScaling(), E4M3, slot=2, index=1, bootstrap=False, record=True)
REQUANTIZING = ops.Delayed(
    DelayedScaling(on_saturation="requantize"), E5M2, slot=1, index=0, bootstrap=True, record=True
)
READING = ops.Delayed(DelayedScaling(), E4M3, slot=0, index=0, bootstrap=False, record=False)
DYNAMIC = ops.Dynamic(DynamicScaling(), E4M3)
ROWWISE = ops.Rowwise(RowwiseScaling(), E4M3, (-1,))
STATIC = ops.Static(StaticScaling(2.0), E4M3, slot=1)
SCALES, AMAX = torch.tensor([2.0, 0.0, 8.0]), torch.tensor([-1.0, 3.0])
CAST = torch.ops.prims.convert_element_type.default
STATE: dict[Elementwise, tuple[Tensor, ...]] = {
    DELAYED: (SCALES, AMAX),
    REQUANTIZING: (SCALES, AMAX),
    READING: (SCALES, AMAX),
    DYNAMIC: (),
    ROWWISE: (),
    STATIC: (torch.tensor([[1.0, 2.0], [1.0, 0.5]]),),
}


def called(module: fx.GraphModule) -> list[Any]:
    """Return what a graph calls, in order; the select that reads a scale may stand anywhere before its use."""
    select = torch.ops.aten.select.int
    return [n.target for n in module.graph.nodes if n.op == "call_function" and n.target is not select]


@pytest.mark.passes
@pytest.mark.parametrize("quantizer", STATE, ids=lambda q: type(q).__name__)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_one_op_becomes_the_ops_of_the_quantizer(quantizer: Elementwise, dtype: torch.dtype) -> None:
    state = STATE[quantizer]
    x = torch.randn(8, 16).to(dtype)
    x[1, 2] = 1e4  # saturates
    module = capture(lambda x, *state: QUANTIZER(quantizer, x, *state), x, *state)
    assert count(module, QUANTIZER) == 1
    op_alone = fx.Interpreter(module).run(x, *state)
    torch.testing.assert_close(tuple(op_alone), quantizer.results(x, *state), rtol=0, atol=0)
    run(module, ExpandQuantizers())
    traced = capture(lambda x, *state: quantizer.results(x, *state), x, *state)
    assert count(module, QUANTIZER) == 0 and called(module) == called(traced)
    torch.testing.assert_close(tuple(module(x, *state)), quantizer.results(x, *state), rtol=0, atol=0)


@pytest.mark.passes
def test_equal_quantizers_are_traced_once_and_keep_their_slots() -> None:
    places = ((0, 0), (2, 1), (2, 0))
    quantizers = [ops.Delayed(DelayedScaling(), E4M3, *place, bootstrap=False, record=True) for place in places]

    def results(quantize: Any, x: Tensor, scales: Tensor, amax: Tensor) -> list[Tensor]:
        found = []
        for quantizer in quantizers:
            x, amax = quantize(quantizer, x, scales, amax)
            found += [x, amax]
        return found

    x = torch.randn(8, 16)
    module = capture(functools.partial(results, QUANTIZER), x, SCALES, AMAX)
    with mock.patch.object(ops.Delayed, "by_scale", autospec=True, side_effect=ops.Delayed.by_scale) as traced:
        run(module, ExpandQuantizers())  # `run` verifies the values of the nodes that were copied
    assert traced.call_count == 1
    expected = results(ops.Delayed.results, x, SCALES, AMAX)
    torch.testing.assert_close(list(module(x, SCALES, AMAX)), expected, rtol=0, atol=0)


def seen_by_aot(run_model: Callable[[], Any]) -> list[Counter[Any]]:
    """Return how often each joint graph, as it comes from AOTAutograd, calls each op."""
    seen = []

    def noted(self: ExpandQuantizers, graph: fx.Graph, context: JointContext) -> int:
        seen.append(Counter(node.target for node in graph.nodes))
        return expand(self, graph, context)

    expand = ExpandQuantizers.run
    with without_caches(), mock.patch.object(ExpandQuantizers, "run", noted):
        run_model()
    return seen


@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_training_step_traces_one_op_for_each_quantizer_and_computes_the_same(recipe: str) -> None:
    x = torch.randn(16, 32)

    def step() -> list[Tensor]:
        model = make(Block)
        run_model, losses = compiled(model, recipe=recipe, lowering="eager"), []
        for _ in range(3):
            run_model(x).square().mean().backward()
            losses += [p.grad.clone() for p in model.parameters()]
        return losses

    results: list[list[Tensor]] = []
    (joint,) = seen_by_aot(lambda: results.append(step()))
    assert joint[QUANTIZER] == (6 if recipe == "delayed" else 12)
    assert not joint[CAST] and not joint[ops.RECORD]
    with mock.patch("fp8pass.quant.ops.is_traced", return_value=False):
        (joint,) = seen_by_aot(lambda: results.append(step()))
    assert not joint[QUANTIZER] and joint[CAST]
    assert all(map(torch.equal, *results))


@pytest.mark.compiled
def test_policies_of_checkpoints_see_the_ops_themselves() -> None:
    ops_seen = set()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ops_seen.add(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    model = make(Block)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def step(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    run_step = compiled(step, lowering="eager")
    (joint,) = seen_by_aot(lambda: run_step(torch.randn(16, 32, requires_grad=True)).sum().backward())
    assert joint[QUANTIZER] == 2  # of gradients: the backward is outside of the region
    assert torch.ops.aten.clamp.default in ops_seen and QUANTIZER not in ops_seen


@pytest.mark.compiled
def test_sizes_that_vary_have_the_ops_themselves() -> None:
    run_model = compiled(make(Block), dynamic=True)
    (joint,) = seen_by_aot(lambda: run_model(torch.randn(16, 32)).sum().backward())
    # the weights have fixed sizes
    assert joint[QUANTIZER] == 2 and joint[CAST]
