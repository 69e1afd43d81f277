"""The outline_layers pass: the functions that it makes, and how the state is divided among their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.base._torch import enter_autocast, exit_autocast, set_grad_enabled
from fp8pass.graph.annotation import Annotation
from fp8pass.quant import ops
from fp8pass.report.report import collect
from tests.helpers.annotate import annotation
from tests.helpers.models import Block, Transformer, make

X = torch.randn(2, 16, 32, requires_grad=True)


def outlined(model: Any, **config: Any) -> Annotation:
    return annotation(model, X, **config)


def calls(made: Annotation) -> list[str]:
    """Return the functions that the graph calls, in order."""
    return [str(n.target) for n in made.module.graph.nodes if n.op == "call_module"]


def shared(made: Annotation) -> Any:
    """Return the graph of the only function that is called more than once."""
    (name,) = {name for name in calls(made) if calls(made).count(name) > 1}
    return made.module.get_submodule(name)


def test_the_graph_is_a_line_of_calls() -> None:
    made = outlined(make(lambda: Transformer(layers=3)))
    assert calls(made) == ["piece_0", "piece_1", "piece_1", "piece_1"]
    assert {n.op for n in made.module.graph.nodes} == {"placeholder", "call_module", "call_function", "output"}
    functions = {n.target for n in made.module.graph.nodes if n.op == "call_function"}
    assert {f.__name__ for f in functions} == {"split_with_sizes", "getitem"}
    begun = [n.target for n in made.module.piece_0.graph.nodes if n.op == "call_function"]  # type: ignore[union-attr]
    assert begun == [ops.begin_step, ops.scales_or_one]  # all slots roll at once


def test_slots_of_a_function_count_from_0() -> None:
    made = outlined(make(lambda: Transformer(layers=3)))
    graph = shared(made).graph
    slots = [a.slot for n in graph.nodes for a in n.args if isinstance(a, ops.Delayed)]
    (table,) = made.tables
    assert len(slots) * 3 == len(table.names)
    forward = table.n_forward // 3
    assert sorted(slots) == sorted([*range(forward), *range(len(slots) - forward)])


def test_the_report_says_what_is_compiled_once() -> None:
    with collect() as report:
        outlined(make(lambda: Transformer(layers=3)))
    assert report.notes == ["3 equal layers, layers.0 to layers.2, are compiled once"]


def test_the_names_of_slots_are_those_of_the_whole_graph() -> None:
    model = make(lambda: Transformer(layers=3))
    (once,), (whole,) = outlined(model).tables, outlined(model, compile_once=False).tables
    assert once == whole


def test_each_call_has_its_own_choices() -> None:
    made = outlined(make(lambda: Transformer(layers=3)))
    (body,) = (b for b in made.bodies.values() if len(b.layers) > 1)
    names = [[made.choices[i].name for i in of] for of in body.choices]
    assert names[0] == [name.replace("layers.1", "layers.0") for name in names[1]]
    assert body.layers == ["layers.0", "layers.1", "layers.2"]


def test_a_layer_with_other_verdicts_is_apart() -> None:
    made = outlined(make(lambda: Transformer(layers=4)), filter=["layers.1.*"])
    assert [b.layers for b in made.bodies.values() if len(b.layers) > 1] == [["layers.0", "layers.2", "layers.3"]]
    assert calls(made) == ["piece_0", "piece_1", "piece_2", "piece_1", "piece_1"]


def test_a_layer_with_another_recipe_is_apart() -> None:
    made = outlined(make(lambda: Transformer(layers=3)), recipe={"layers.2.*": "rowwise", "*": "delayed"})
    assert [b.layers for b in made.bodies.values() if len(b.layers) > 1] == [["layers.0", "layers.1"]]


def test_without_equals_the_graph_stays_in_one_piece() -> None:
    made = outlined(make(lambda: Transformer(layers=2)), filter=["layers.1.0.q"])
    assert made.bodies == {} and calls(made) == []
    names = {n.target for n in made.module.graph.nodes if n.op == "call_function"}
    assert ops.qdq_operand in names


def test_functions_repeat_autocast() -> None:
    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = layers(x)
        return y.float() + x

    layers = nn.Sequential(Block(), Block(), Block())
    made = outlined(model)
    targets = [n.target for n in shared(made).graph.nodes if n.op == "call_function"]
    assert targets[0] is enter_autocast and targets[-1] is exit_autocast
    for name in set(calls(made)):
        graph = made.module.get_submodule(name).graph  # type: ignore[union-attr]
        found = [n.target for n in graph.nodes]  # type: ignore[union-attr]
        assert found.count(enter_autocast) == found.count(exit_autocast)


def test_functions_repeat_grad_mode() -> None:
    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = frozen(x)
        return last(y)  # type: ignore[no-any-return]

    frozen, last = nn.Sequential(Block(), Block(), Block()), Block(32, 64)
    targets = [n.target for n in shared(outlined(model)).graph.nodes if n.op == "call_function"]
    assert targets[0] is set_grad_enabled and targets[-1] is set_grad_enabled
    nodes = [n for n in shared(outlined(model)).graph.nodes if n.target is set_grad_enabled]
    assert [n.args for n in nodes] == [(False,), (True,)]


def test_a_shared_function_relies_on_no_address() -> None:
    """torch does not check the alignment of inputs that are marked static, and parameters of layers may differ in it."""
    made = outlined(make(lambda: Transformer(layers=3)))
    for node in shared(made).graph.find_nodes(op="placeholder"):
        assert node._dynamo_source is None and "tensor_dict" not in node.meta
