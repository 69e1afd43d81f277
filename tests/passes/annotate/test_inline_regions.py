"""The inline_regions pass: models with `torch.compiler.nested_compile_region` have the graphs of those without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fp8pass.base.names import module_path, source_name
from fp8pass.graph.annotation import CHECKPOINT
from fp8pass.passes.dynamo.inline_regions import InlineRegions
from tests.helpers.harness import on_dynamos_graph
from tests.helpers.inline_regions import Layer, Model, marked, of_a_function, unmarked
from tests.helpers.models import make


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


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_graph_is_that_of_the_unmarked_model(program: Callable[[Any], nn.Module]) -> None:
    """The ops, their arguments, and the modules that they are named after are the same."""
    found = of_the_graph(program, marked)
    assert len(found) >= 8
    assert found == of_the_graph(program, unmarked)
