"""The lift_scale_states pass on Dynamo's graph. The files test_scale_state.py test its numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fp8pass import ScaleState, in_qdq, out_qdq
from fp8pass.compiler.dynamo_passes import annotated
from fp8pass.graph.annotation import Annotation
from fp8pass.graph.inputs import LateAmax
from fp8pass.options.config import Config
from fp8pass.passes.dynamo.lift_scale_states import LiftScaleStates
from fp8pass.quant import ops
from fp8pass.states import scale_state
from tests.helpers.harness import count, on_dynamos_graph
from tests.helpers.models import make

pytestmark = pytest.mark.passes


def lifted(function: Callable[..., Any], *inputs: Tensor, config: Config) -> tuple[fx.GraphModule, Annotation]:
    """Return Dynamo's graph of `function`, and its annotation."""
    found: list[tuple[fx.GraphModule, Annotation]] = []

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        before = module.code
        found.append((module, annotated(module, config)))
        assert module.code == before
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


class Attention(nn.Module):
    """`x @ x.mT`, quantized with one state for both operands and one for the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.x, self.g = ScaleState(), ScaleState()

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return out_qdq(in_qdq(x, self.x) @ in_qdq(x.mT, self.x), self.g)


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_one_roll_per_state_and_a_late_input_per_gradient(recipe: Any) -> None:
    x = torch.randn(16, 32)
    module, annotation = lifted(Attention(), x, config=Config(recipe=recipe))
    assert count(module, scale_state.begin_use) == 3
    after = annotation.module
    assert count(after, scale_state.begin_use) == 0
    assert count(after, scale_state.begin_graph) == 2
    of_slots = 3 if recipe else 0
    assert count(after, ops.qdq_operand) + count(after, ops.qdq_gradient) == 3 + of_slots
    placeholders = [n for n in after.graph.nodes if n.op == "placeholder"]
    (gradient,) = filter(_is_gradient_by_state, after.graph.nodes)
    assert gradient.args[3] is placeholders[-1]
    (late,) = (i for i in annotation.inputs if isinstance(i, LateAmax))
    (begin,) = (n for n in after.graph.nodes if n.target is scale_state.begin_graph and n in gradient.args)
    assert begin.args[2] is placeholders[late.position]
    assert on_dynamos_graph(after, LiftScaleStates())[1] == [0]


def _is_gradient_by_state(node: fx.Node) -> bool:
    return node.target is ops.qdq_gradient and isinstance(node.args[1], scale_state.ByState)


def test_a_graph_without_states_does_not_change() -> None:
    module, annotation = lifted(make(), torch.randn(16, 32), config=Config(recipe=None))
    assert annotation.module.code == module.code
    assert annotation.inputs == []


def test_an_evaluation_graph_does_not_change() -> None:
    with torch.no_grad():
        module, annotation = lifted(Attention(), torch.randn(16, 32), config=Config(recipe=None))
    assert annotation.module.code == module.code
    assert count(module, scale_state.qdq_unrecorded) == 2
