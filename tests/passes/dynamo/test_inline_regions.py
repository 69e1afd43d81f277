"""The inline_regions pass: models with `torch.compiler.nested_compile_region` have the graphs of those without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base.names import module_path, source_name
from fp8pass.graph.annotation import CHECKPOINT
from fp8pass.graph.verdict import Gemm
from fp8pass.passes.dynamo.inline_regions import InlineRegions
from fp8pass.report.report import collect
from tests.helpers.harness import compiled, on_dynamos_graph, train
from tests.helpers.models import batches, make

marked: Any = torch.compiler.nested_compile_region


def unmarked(function: Any) -> Any:
    return function


class Scores(nn.Module):
    """A matmul without parameters: its slots are named after the module alone."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.t()).tanh() @ x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.up = Scores(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.scores(x))
        return y


class Model(nn.Module):
    """Two layers, each of which `step` calls."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.step = step
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.step(layer, x)
        return x


def of_a_function(mark: Any) -> nn.Module:
    return Model(mark(lambda layer, x: layer(x)))


def of_a_method(mark: Any) -> nn.Module:
    class Marked(Layer):
        forward = mark(Layer.forward)

    model = Model(lambda layer, x: layer(x))
    for layer in model.layers:
        layer.__class__ = Marked
    return model


def within_a_region(mark: Any) -> nn.Module:
    inner = mark(lambda scores, x: scores(x))
    return Model(mark(lambda layer, x: layer.up(inner(layer.scores, inner(layer.scores, x)))))


def in_a_checkpoint(mark: Any) -> nn.Module:
    step = mark(lambda layer, x: layer(x))
    return Model(lambda layer, x: checkpoint(step, layer, x, use_reentrant=False))


def around_a_checkpoint(mark: Any) -> nn.Module:
    return Model(mark(lambda layer, x: checkpoint(layer, x, use_reentrant=False)))


def of_two_layers(mark: Any) -> nn.Module:
    """Return a model that calls one body with its two layers in both orders, so that each call has other parameters."""
    model = Model(lambda layer, x: layer(x))
    both = mark(lambda a, b, x: b(a(x)).relu())
    model.forward = lambda x: both(model.layers[1], model.layers[0], both(model.layers[0], model.layers[1], x))  # type: ignore[method-assign]
    return model


PROGRAMS = [of_a_method, of_a_function, within_a_region, in_a_checkpoint, around_a_checkpoint, of_two_layers]


def text(module: fx.GraphModule, inputs: list[str]) -> list[str]:
    """Return the calls of a graph, with the modules that they are in. inputs: names of the graph's inputs."""
    nodes, found = list(module.graph.nodes), []
    names = dict(zip((n for n in nodes if n.op == "placeholder"), inputs, strict=True))
    for node in nodes:
        if node.target is CHECKPOINT:
            body, *handed = node.args
            found += text(getattr(module, body.target), [names[x] for x in handed])
        elif node.op not in ("placeholder", "get_attr"):
            stack = [module_path(source) for source, _ in (node.meta.get("nn_module_stack") or {}).values()]
            args = fx.map_arg(node.args, names.__getitem__)
            found.append(f"{node.target}{args} in {stack}")
        names.setdefault(node, f"%{len(found)}")
    return found


def of_the_graph(program: Callable[[Any], nn.Module], mark: Any) -> list[str]:
    found: list[str] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        inlined, (first, second) = on_dynamos_graph(module, InlineRegions(), InlineRegions())
        assert (first > 0) == (mark is marked) and second == 0
        found.extend(text(inlined, [source_name(n) for n in module.graph.nodes if n.op == "placeholder"]))
        return inlined.forward

    torch._dynamo.reset()
    x = torch.randn(16, 32, requires_grad=True)
    model = make(lambda: program(mark))
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(y, model(x), rtol=0, atol=0)
    return found


@pytest.mark.passes
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_graph_is_that_of_the_unmarked_model(program: Callable[[Any], nn.Module]) -> None:
    """The ops, their arguments, and the modules that they are named after are the same."""
    found = of_the_graph(program, marked)
    assert len(found) >= 8
    assert found == of_the_graph(program, unmarked)


def trained(mark: Any, **options: Any) -> tuple[Any, list[Gemm], dict[str, Tensor]]:
    """Train two steps; return their results, the verdicts, and the state after them."""
    torch._dynamo.reset()
    model = make(lambda: of_a_function(mark))
    with collect() as report:
        steps = list(train(model, compiled(model, **options), batches(2, 16, 32)))
    return steps, report.gemms, fp8pass.state(model).state_dict()


@pytest.mark.compiled
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.variant)])
def test_a_marked_model_trains_as_the_unmarked_one(lowering: str) -> None:
    """Numbers, verdicts, names and state are the same, to the bit."""
    steps, gemms, state = trained(marked, lowering=lowering)
    wanted_steps, wanted_gemms, wanted_state = trained(unmarked, lowering=lowering)
    assert "layers.1.up.weight.scale" in state and all(g.status == "rewritten" for g in gemms)
    assert gemms == wanted_gemms
    torch.testing.assert_close(steps, wanted_steps, rtol=0, atol=0)
    torch.testing.assert_close(state, wanted_state, rtol=0, atol=0)
