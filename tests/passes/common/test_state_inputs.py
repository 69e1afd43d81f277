"""State as inputs of the annotated graph: which inputs there are, their order, and those of regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fp8pass.compiler.dynamo_passes import annotated as annotate
from fp8pass.graph.annotation import STATE_INPUTS, Annotation
from fp8pass.options.config import Config
from fp8pass.passes.common.state_inputs import INPUTS
from fp8pass.quant import ops
from fp8pass.recipes import DelayedScaling, StaticScaling
from fp8pass.weights.prequantized import PrequantizedInput
from fp8pass.weights.weight_cache import CachedWeight, CachedWeightInput

pytestmark = pytest.mark.passes


def annotation(model: nn.Module, recipe: Any, training: bool = True, cache: str = "off") -> Annotation:
    made: list[Annotation] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        made.append(annotate(module, Config(recipe=recipe, weight_cache=cache)))
        return module.forward

    with torch.set_grad_enabled(training):
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(16, 32))
    (only,) = made
    return only


def state_inputs(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.op == "placeholder" and n.name.startswith("fp8pass_")]


def test_a_recipe_without_state_has_no_inputs() -> None:
    for recipe in ("dynamic", "rowwise"):
        a = annotation(nn.Linear(32, 48), recipe)
        assert (a.tables, state_inputs(a.module.graph)) == ([], [])


def test_each_recipe_has_its_own_inputs() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    a = annotation(model, {"0": DelayedScaling(margin=1), "1": DelayedScaling(), "*": None})
    names = [f"fp8pass_{n}" for n in INPUTS]
    assert state_inputs(a.module.graph) == [*names, *(f"{n}_1" for n in names)]
    assert [t.names for t in a.tables] == [
        ("0.input", "0.weight", "0.grad_output"), ("1.input", "1.weight", "1.grad_output"),
    ]  # fmt: skip
    steps = [n for n in a.module.graph.nodes if n.target is ops.begin_step]
    assert {n.args[0] for n in steps} == {DelayedScaling(margin=1), DelayedScaling()}


def test_a_region_gets_the_inputs_that_it_reads() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x)
            return checkpoint(lambda y: checkpoint(self.b, y, use_reentrant=False).sin(), y, use_reentrant=False) + 1

    a = annotation(Inner(), "delayed")
    bodies = [m for m in a.module.modules() if isinstance(m, fx.GraphModule)][1:]
    assert len(bodies) == 2
    for body in bodies:
        read = ["amax_forward", "amax_backward_late", "scales", "scales_or_one"]
        assert state_inputs(body.graph) == [f"fp8pass_{name}" for name in read]
        assert body.meta[STATE_INPUTS] == 4
    (table,) = a.tables
    assert table.names == ("a.input", "a.weight", "b.input", "b.weight", "a.grad_output", "b.grad_output")
    assert table.anchors == (0, 0, 2, 2, 0, 2)
    placed = {n.args[1].slot for m in (a.module, *bodies) for n in m.graph.nodes if n.target is ops.qdq_operand}
    assert placed == {0, 1, 2, 3}


def test_slots_without_history_are_usable() -> None:
    """One op turns all their scales into 1; a bootstrapped graph reads the 0 and scales by the tensor's amax."""
    scales = torch.tensor([0.0, 2.0, float("nan"), float("inf")])
    wanted = torch.tensor([1.0, 2.0, float("nan"), float("inf")])
    torch.testing.assert_close(ops.scales_or_one(scales), wanted, rtol=0, atol=0, equal_nan=True)
    a = annotation(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "delayed")
    (scales_or_one,) = (n for n in a.module.graph.nodes if n.target is ops.scales_or_one)
    assert len(scales_or_one.users) == 6
    cold = a.bootstrapped.module.graph
    assert all(not n.users for n in cold.nodes if n.target is ops.scales_or_one)
    assert len(scales_or_one.users) == 6


def test_static_scales_and_prequantized_weights() -> None:
    scales = {"weight.input": 2.0, "weight.weight": 4.0}
    a = annotation(nn.Linear(32, 48), StaticScaling(scales), training=False)
    assert state_inputs(a.module.graph) == ["fp8pass_scales", "fp8pass_prequantized_0"]
    assert a.inputs[1:] == [PrequantizedInput("prequantized_0", position=0, table=0, slot=1, by_columns=False)]
    training = annotation(nn.Linear(32, 48), StaticScaling(scales))
    # training changes weights, so they are not prequantized
    assert state_inputs(training.module.graph) == ["fp8pass_scales"]


def cached(a: Annotation) -> list[CachedWeight]:
    return list(dict.fromkeys(x.weight for x in a.inputs if isinstance(x, CachedWeightInput)))


def test_cached_weights() -> None:
    """Copies come after all state; a copy that is scaled by itself brings its scales; gradients decide about `x_t`."""
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False))
    own = [["scales", "x_q"], ["scales", "x_q", "x_t"]]
    wanted = {
        "delayed": [["x_q"], ["x_q", "x_t"]],
        "dynamic": own,
        "rowwise": [["scales", "x_q"], ["scales", "x_q"], ["scales", "x_t"]],
    }
    for recipe, inputs in wanted.items():
        a = annotation(model, recipe, cache="fp8+transpose")
        assert [list(c.fields) for c in cached(a)] == inputs, recipe
        names = [f"fp8pass_weight_{i}_{name}" for i, of in enumerate(inputs) for name in of]
        assert state_inputs(a.module.graph)[-len(names) :] == names
        assert a.has_state and bool(a.tables) == (recipe == "delayed")
    static = annotation(model, StaticScaling(2.0), cache="fp8+transpose")
    assert [(c.stored, c.table, c.slot) for c in cached(static)] == [(("x_q",), 0, 1), (("x_q", "x_t"), 0, 3)]
    one = annotation(model, "rowwise", cache="fp8")
    assert [c.stored for c in cached(one)] == [("x_q",), ("x_q",)], "one copy of each weight"
    assert not annotation(model, "dynamic", training=False, cache="fp8").inputs


@pytest.mark.filterwarnings("ignore:fp8pass. mxfp8 kernels")
def test_no_copies_of_weights_with_scales_of_blocks() -> None:
    a = annotation(nn.Linear(32, 64), "mxfp8", cache="fp8+transpose")
    assert [c.scaling for c in a.choices] == ["mxfp8"] and not a.inputs
