"""Test training with layers that are compiled once: numbers, slots and verdicts are those of the graph in one piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.compiler import lower
from fp8pass.compiler.eager import lower_eager
from fp8pass.passes.dynamo.find_layers import FindLayers
from fp8pass.passes.dynamo.outline_layers import OutlineLayers
from fp8pass.report.html import page_data
from fp8pass.report.report import Report, Timing, collect
from tests.helpers.harness import compiled, train
from tests.helpers.models import Attention, Block, Transformer, batches, make

Make = Callable[[], nn.Module]


class Layers(nn.Module):
    """Equal layers of two matmuls each."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Checkpointed(Layers):
    """Layers, each in a checkpointed region within the graph."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class InAutocast(Layers):
    """Layers in autocast, which begins before the first one and ends after the last one."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        return y.float()


class Skips(nn.Module):
    """Layers whose results several later layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(x + kept.pop())
        return x


class Crossing(Block):
    """A layer that reads the result of an encoder, too."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(32, 32)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + self.key(encoded)


class Decoder(nn.Module):
    """Layers that all multiply the result of the last layer of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Crossing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        encoded = x
        for layer in self.encoder:
            encoded = layer(encoded)
        for layer in self.decoder:
            x = layer(x, encoded)
        return x


class Repeated(nn.Module):
    """One layer, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Block()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


class WithDropout(Block):
    """A block with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


MODELS: dict[str, Make] = {
    "transformer": Transformer,
    "checkpointed": Checkpointed,
    "autocast": InAutocast,
    "a layer that is called several times": Repeated,
    "a layer apart": lambda: nn.Sequential(Block(), Block(32, 64), Attention(), Block(), Attention()),
}


def trained(kind: Make, steps: int = 2, **options: Any) -> tuple[list[dict[str, Tensor]], dict[str, Any], Report]:
    """Train a new model; return the numbers of each step, the state after them, and the verdicts."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = make(kind)
    with collect() as report:
        found = list(train(model, compiled(model, on_fault="raise", **options), batches(steps, 2, 16, 32)))
    return found, fp8pass.state(model).state_dict(), report


def expect_the_same(kind: Make, **options: Any) -> Report:
    """Compare layers that are compiled once with the graph in one piece, to the bit; return the former's verdicts."""
    once, state, report = trained(kind, **options)
    whole, wanted, in_one_piece = trained(kind, compile_once=False, **options)
    torch.testing.assert_close(once, whole, rtol=0, atol=0)
    torch.testing.assert_close(state, wanted, rtol=0, atol=0)
    order = sorted(report.gemms, key=lambda g: (g.choice or 0, g.kind))
    assert order == sorted(in_one_piece.gemms, key=lambda g: (g.choice or 0, g.kind))
    assert report.graphs == in_one_piece.graphs
    return report


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.variant] * (n in ("autocast", "a layer apart"))) for n in MODELS]
)
def test_numbers_slots_and_verdicts_are_the_same(name: str) -> None:
    assert expect_the_same(MODELS[name]).rewritten


def test_a_tensor_that_several_layers_read() -> None:
    """Autograd adds up its gradients in another order than in one graph."""
    once, _, report = trained(Skips)
    whole, _, _ = trained(Skips, compile_once=False)
    torch.testing.assert_close(once, whole, rtol=1e-4, atol=1e-6)
    assert len(report.rewritten) == len(report.gemms) == 36


@pytest.mark.parametrize(
    "options",
    [
        {"weight_cache": "fp8+transpose"},
        pytest.param({"recipe": "dynamic"}, marks=pytest.mark.variant),
        pytest.param({"monitor": True}, marks=pytest.mark.variant),
    ],
    ids=str,
)
def test_a_tensor_that_is_quantized_for_several_layers(options: dict[str, Any]) -> None:
    """It has one slot, and is quantized by a function of its own. Its gradients are added up in another order."""
    once, state, report = trained(Decoder, **options)
    whole, wanted, in_one_piece = trained(Decoder, compile_once=False, **options)
    assert "3 equal layers, decoder.0 to decoder.2, are compiled once" in report.notes
    torch.testing.assert_close(once, whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state, wanted, rtol=1e-4, atol=0)
    assert len(report.rewritten) == len(report.gemms) == len(in_one_piece.gemms)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"recipe": "dynamic"}, marks=pytest.mark.variant),
        pytest.param({"recipe": "rowwise"}, marks=pytest.mark.variant),
        {"recipe": {"*.up": "dynamic", "*": "delayed"}},
        pytest.param({"recipe": {"layers.0.*": "rowwise", "*": "delayed"}}, marks=pytest.mark.variant),
        pytest.param({"filter": ["layers.1.up"]}, marks=pytest.mark.variant),
        {"weight_cache": "fp8+transpose"},
        {"monitor": True},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    expect_the_same(Layers, **options)


def test_each_function_is_compiled_once() -> None:
    with mock.patch.object(lower, "lower_eager", wraps=lower_eager) as compile_one:
        *_, report = trained(lambda: Layers(8), steps=2)
    # what begins the step; the first layer, whose input is no result of a layer but equal; and no other function
    assert compile_one.call_count == 2
    around, layers = report.timings
    assert around.what.endswith(": what is around the layers")
    assert layers.what.endswith(": 8 equal layers, layers.0 to layers.7")
    assert layers.tracing > 0 and layers.passes > 0 and not layers.inductor
    assert str(layers) in page_data(report)["notes"]


def test_each_second_counts_once() -> None:
    """Twice: in tracing from 0 to 11, of it in Inductor from 1 to 7, of it in passes from 2 to 4."""
    timing = Timing("a graph")
    for _ in range(2):
        clock = mock.patch.object(time, "perf_counter", side_effect=[0, 1, 2, 4, 7, 11])
        with clock, timing.counting("tracing"), timing.counting("inductor"), timing.counting("passes"):
            pass
    assert (timing.passes, timing.inductor, timing.tracing, timing.total) == (4, 8, 10, 22)


def test_statistics_are_those_of_each_layer() -> None:
    def statistics(**options: Any) -> list[dict[str, Any]]:
        torch._dynamo.reset()
        model = make(Layers)
        list(train(model, compiled(model, monitor=True, **options), batches(2, 2, 16, 32)))
        return fp8pass.stats(model).to_dicts()

    assert statistics() == statistics(compile_once=False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_within_a_checkpointed_region(use_reentrant: bool) -> None:
    """With dropout, so that the repeated forward must draw the same numbers."""

    def run(**options: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(1)
        model = make(lambda: nn.Sequential(WithDropout(), WithDropout(), WithDropout()))
        region = compiled(model, on_fault="raise", **options)
        steps = train(model, lambda x: checkpoint(region, x, use_reentrant=use_reentrant), batches(4, 2, 16, 32))
        return list(steps), fp8pass.state(model).state_dict()

    torch.testing.assert_close(run(), run(compile_once=False), rtol=0, atol=0)


def test_evaluation_and_another_batch_size() -> None:
    def run(**options: Any) -> Any:
        torch._dynamo.reset()
        model = make(Layers)
        run = compiled(model, on_fault="raise", **options)
        steps = list(train(model, run, batches(2, 2, 16, 32)))
        steps += train(model, run, batches(2, 3, 16, 32))  # compiled with symbolic sizes
        with torch.no_grad():
            return steps, run(batches(1, 5, 16, 32)[0]), fp8pass.state(model).state_dict()

    torch.testing.assert_close(run(), run(compile_once=False), rtol=0, atol=0)


def test_state_of_the_graph_in_one_piece_is_loaded() -> None:
    _, state, _ = trained(Layers, compile_once=False)
    model = make(Layers)
    fp8pass.state(model).load_state_dict(state)
    run = compiled(model)
    run(batches(1, 2, 16, 32)[0].requires_grad_())
    loaded = fp8pass.state(model).state_dict()
    assert loaded.keys() == state.keys()
    history = "layers.1.up.weight.amax_history"
    assert torch.equal(loaded[history][1:], state[history][:-1])


@pytest.mark.parametrize("failing", [FindLayers, OutlineLayers])
def test_a_fault_costs_time_only(failing: Any) -> None:
    """The graph is compiled in one piece, to the same numbers."""
    whole, wanted, _ = trained(Layers, compile_once=False)
    torch._dynamo.reset()
    model = make(Layers)
    with (
        mock.patch.object(failing, "run", side_effect=RuntimeError("planted")),
        pytest.warns(UserWarning, match=f"in its pass {failing.name} on graph"),
    ):
        found = list(train(model, compiled(model, on_fault="warn"), batches(2, 2, 16, 32)))
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    torch.testing.assert_close(fp8pass.state(model).state_dict(), wanted, rtol=0, atol=0)


def test_torch_fails_on_a_function() -> None:
    """The graph is compiled in one piece, in FP8."""
    whole, wanted, _ = trained(Layers, compile_once=False)
    torch._dynamo.reset()
    model, failing = make(Layers), lower_eager

    def fail(module: Any, inputs: Any, pipeline: Any, later: Any) -> Any:
        if pipeline.body is not None:
            raise RuntimeError("planted")
        return failing(module, inputs, pipeline, later)

    with (
        mock.patch("fp8pass.compiler.lower.lower_eager", fail),
        pytest.warns(UserWarning, match=r"torch could not compile .* \(RuntimeError: planted\): .* in one piece"),
    ):
        found = list(train(model, compiled(model, on_fault="warn"), batches(2, 2, 16, 32)))
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    torch.testing.assert_close(fp8pass.state(model).state_dict(), wanted, rtol=0, atol=0)
