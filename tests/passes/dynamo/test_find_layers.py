"""The find_layers pass: which layers are equal, which cannot be functions, and what the report says of these."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fp8pass.base._torch import set_grad_enabled
from fp8pass.base.names import Names
from fp8pass.options.config import Config
from fp8pass.passes.common.equal_structure import frozen
from fp8pass.passes.dynamo.find_layers import Piece, Refusal, check
from fp8pass.report.report import collect
from tests.helpers.annotate import annotation
from tests.helpers.models import Block, Transformer, make

pytestmark = pytest.mark.passes

X = torch.randn(2, 16, 32, requires_grad=True)


class Layers(nn.Module):
    """Layers that run one after the other; `call` may run them in another way."""

    def __init__(self, *layers: nn.Module, call: Callable[[nn.Module, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(layer, x)
        return x


def layers_of(model: Any, *inputs: Any, **config: Any) -> list[list[str]]:
    """Return the layers that share a function, function by function."""
    made = annotation(model, *(inputs or (X,)), **config)
    return [body.layers for body in made.bodies.values() if len(body.layers) > 1]


def notes_of(model: Any, *inputs: Any) -> list[str]:
    """Return what the report says of layers that are compiled in place; no layers may be shared."""
    with collect() as report:
        assert layers_of(model, *inputs) == []
    return report.notes


def test_equal_layers() -> None:
    assert layers_of(make(lambda: Transformer(layers=3))) == [["layers.0", "layers.1", "layers.2"]]


def test_a_layer_that_quantizes_the_result_of_another() -> None:
    assert layers_of(Layers(*(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(3)))) == [
        ["layers.0", "layers.1", "layers.2"]
    ]


def test_one_layer_is_not_shared() -> None:
    assert annotation(make(lambda: Transformer(layers=1)), X).bodies == {}


def test_names_do_not_matter() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n, self.first, self.second = nn.RMSNorm(32), nn.Linear(32, 56), nn.Linear(56, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(nn.functional.gelu(self.first(self.n(x))))
            return x + y

    assert layers_of(Layers(Block(), Other())) == [["layers.0", "layers.1"]]


class Scaled(Block):
    """A block whose result is multiplied by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def test_layers_that_differ_in_a_constant_are_apart() -> None:
    alternate = Layers(*(Scaled(factor) for factor in (1.5, 2.5, 1.5, 2.5)))
    assert layers_of(alternate) == [["layers.0", "layers.2"], ["layers.1", "layers.3"]]
    assert layers_of(Layers(Scaled(1.5), Scaled(2.5))) == []


def test_layers_that_differ_in_one_shape_are_apart() -> None:
    assert layers_of(Layers(Block(), Block(32, 64), Block())) == [["layers.0", "layers.2"]]


def test_layers_that_differ_in_what_is_trained_are_apart() -> None:
    model = Layers(*(Block() for _ in range(4)))
    model.layers[1].requires_grad_(False)
    assert layers_of(model) == [["layers.0", "layers.2", "layers.3"]]


def test_layers_within_stages() -> None:
    stages = Layers(Layers(Block(), Block(), Block(32, 64)), Layers(Block(), Block(), Block(32, 80)))
    found = layers_of(stages)
    assert found == [["layers.0.layers.0", "layers.0.layers.1", "layers.1.layers.0", "layers.1.layers.1"]]


def test_the_outermost_equal_calls_are_layers() -> None:
    assert layers_of(Layers(*(Layers(Block(), Block()) for _ in range(2)))) == [["layers.0", "layers.1"]]


def test_a_module_with_one_matmul_is_not_a_layer() -> None:
    assert layers_of(Layers(*(nn.Linear(32, 32) for _ in range(3)))) == []


def test_layers_are_found_in_checkpointed_regions() -> None:
    model = Layers(*(Block() for _ in range(3)), call=lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert [len(found) for found in layers_of(model)] == [3]


def test_the_option_turns_it_off_and_cuda_graphs_with_updates_in_the_backward() -> None:
    model = make(lambda: Transformer(layers=3))
    assert layers_of(model, compile_once=False) == []
    assert layers_of(model, mode="reduce-overhead") != []
    assert layers_of(model, mode="reduce-overhead", update_in_backward=True) == []
    assert layers_of(model, mode="max-autotune-no-cudagraphs") != []
    assert layers_of(model, mode="reduce-overhead", compile_once=True) != []


class Crossing(nn.Module):
    """A layer of a decoder: it reads the result of the encoder, too."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        return torch.tanh(self.q(x)) + self.k(encoded)


class Decoder(nn.Module):
    """An encoder and three layers of a decoder, which all read its result."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.layers = encoder, nn.ModuleList(Crossing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        encoded = self.encoder(x)
        for layer in self.layers:
            y = layer(y, encoded)
        return y


DECODER = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("recipe", ["delayed", "dynamic"])
def test_a_tensor_that_is_quantized_for_several_layers(recipe: str) -> None:
    assert layers_of(Decoder(nn.LayerNorm(32)), recipe=recipe) == [DECODER]


def test_the_result_of_a_layer_that_is_quantized_for_others() -> None:
    encoder = nn.Sequential(Block(), Block())
    assert layers_of(Decoder(encoder)) == [["encoder.0", "encoder.1"], DECODER]


def test_a_tensor_with_several_scales_that_is_quantized_for_several_layers() -> None:
    """Only one scale is handed from function to function."""
    with collect() as report:
        assert layers_of(Decoder(nn.LayerNorm(32)), recipe="rowwise") == []
    (note,) = report.notes
    assert note.startswith("3 layers, layers.0 to layers.2, are compiled in place, not once for all: the result of")
    assert note.endswith("is quantized once for all of them")


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Block()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.layer(x))
        return result


def test_a_layer_that_is_called_several_times() -> None:
    with collect() as report:
        assert layers_of(Twice()) == [["layer", "layer"]]
    assert report.notes == ["2 calls of layer are compiled once"]


def test_a_weight_whose_copy_is_cached_and_that_several_layers_read() -> None:
    with collect() as report:
        assert layers_of(Twice(), weight_cache="fp8") == []
    (note,) = report.notes
    assert note.endswith("layer.up.weight is quantized once for all of them")


class Written(nn.Module):
    """Layers that multiply by a buffer, which is written after the first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = (nn.ModuleList(kind() for _ in range(2)) for kind in (Block, Crossing))
        self.buffer: Tensor
        self.register_buffer("buffer", torch.zeros(2, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = layer(x)
        self.buffer.copy_(x.detach())
        for layer in self.layers:
            x = layer(x, self.buffer)
        return x


def test_a_tensor_that_is_written_before_several_layers_quantize_it() -> None:
    with collect() as report:
        assert layers_of(Written()) == [["first.0", "first.1"]]
    assert any(note.endswith("is quantized once for all of them") for note in report.notes)


class InPlace(Block):
    """A block that adds to its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.down(torch.tanh(self.up(x)))
        return x


def test_a_layer_that_writes_into_what_others_use() -> None:
    model = Layers(InPlace(), InPlace())
    (note, *_) = notes_of(lambda x: model(x * 1))
    assert "is written in place, and others use it" in note


def test_a_write_within_a_layer_does_not_matter() -> None:
    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.down(torch.relu_(self.up(x)))
            y += x
            return y

    assert layers_of(Layers(Inside(), Inside())) == [["layers.0", "layers.1"]]


def test_operators_with_an_underscore_write_nothing() -> None:
    def model(x: Tensor, mask: Tensor) -> Tensor:
        keep = mask & (x > 0)  # a call of operator.and_
        return layers(torch.where(keep, x, 0.0)) * keep

    layers = make(lambda: Layers(Block(), Block()))
    assert layers_of(model, X, torch.ones(2, 16, 32, dtype=torch.bool)) == [["layers.0", "layers.1"]]


def test_what_crosses_a_border_is_a_tensor_or_a_size() -> None:
    class Pair(Block):
        def forward(self, x: Any) -> Any:
            first, second = x
            return torch.chunk(super().forward(torch.cat([first, second], -1)), 2, -1)

    model = Layers(Pair(), Pair())
    assert layers_of(lambda x: torch.cat(model(torch.chunk(x, 2, -1)), -1)) == [["layers.0", "layers.1"]]


def test_a_layer_that_changes_the_mode_for_what_follows() -> None:
    module = nn.Module()
    graph = fx.Graph()
    x = graph.placeholder("x")
    off, y = graph.call_function(set_grad_enabled, (False,)), graph.call_function(torch.neg, (x,))
    on, z = graph.call_function(set_grad_enabled, (True,)), graph.call_function(torch.neg, (y,))
    graph.output(z)
    for node in (x, y, z):
        node.meta["example_value"] = torch.ones(2)
    made, names = fx.GraphModule(module, graph), Names([])
    reason = "the nodes after it run in another grad or autocast mode than those before it"
    assert list(check(made, [Piece([off, y], "a"), Piece([on, z], "b")], names, Config())) == [
        Refusal(0, 0, reason),
        Refusal(1, 1, reason),
    ]
    assert list(check(made, [Piece([off]), Piece([y], "a"), Piece([on]), Piece([z], "b")], names, Config())) == []
    assert list(check(made, [Piece([off, y, on], "a"), Piece([z], "b")], names, Config())) == []


def test_constants_of_different_types_differ() -> None:
    values = (1, 1.0, True, 0.0, -0.0, "1", None, (1,), [1], slice(1, None), torch.float32, math.inf)
    assert len({frozen(v, id) for v in values}) == len(values)
    node = fx.Graph().placeholder("x")
    assert frozen([node, {"a": (node, 2)}], lambda n: n.name) == frozen([node, {"a": (node, 2)}], lambda n: n.name)


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes(dynamic: bool) -> None:
    x = torch.randn(4, 16, 32, requires_grad=True)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    assert layers_of(make(lambda: Transformer(layers=3)), x) == [["layers.0", "layers.1", "layers.2"]]
