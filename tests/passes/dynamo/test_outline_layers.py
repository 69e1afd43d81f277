"""Test training with layers that are compiled once: numbers, slots and verdicts are those of the graph in one piece."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.base._torch import enter_autocast, exit_autocast, set_grad_enabled
from fp8pass.compiler import lower
from fp8pass.compiler.eager import lower_eager
from fp8pass.compiler.through_inductor import lower_through_inductor
from fp8pass.graph.annotation import Annotation
from fp8pass.passes.dynamo.find_layers import FindLayers
from fp8pass.passes.dynamo.outline_layers import OutlineLayers
from fp8pass.quant import ops
from fp8pass.report.html import page_data
from fp8pass.report.report import Report, Timing, collect
from tests.helpers import ROOT, forked
from tests.helpers.annotate import annotation
from tests.helpers.harness import compiled, train
from tests.helpers.models import Attention, Block, Transformer, batches, make

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


@pytest.mark.passes
def test_the_graph_is_a_line_of_calls() -> None:
    made = outlined(make(lambda: Transformer(layers=3)))
    assert calls(made) == ["piece_0", "piece_1", "piece_1", "piece_1"]
    assert {n.op for n in made.module.graph.nodes} == {"placeholder", "call_module", "call_function", "output"}
    functions = {n.target for n in made.module.graph.nodes if n.op == "call_function"}
    assert {f.__name__ for f in functions} == {"split_with_sizes", "getitem"}
    begun = [n.target for n in made.module.piece_0.graph.nodes if n.op == "call_function"]  # type: ignore[union-attr]
    assert begun == [ops.begin_step, ops.scales_or_one]  # all slots roll at once


@pytest.mark.passes
def test_slots_of_a_function_count_from_0() -> None:
    made = outlined(make(lambda: Transformer(layers=3)))
    graph = shared(made).graph
    slots = [a.slot for n in graph.nodes for a in n.args if isinstance(a, ops.Delayed)]
    (table,) = made.tables
    assert len(slots) * 3 == len(table.names)
    forward = table.n_forward // 3
    assert sorted(slots) == sorted([*range(forward), *range(len(slots) - forward)])


@pytest.mark.passes
def test_the_report_says_what_is_compiled_once() -> None:
    with collect() as report:
        outlined(make(lambda: Transformer(layers=3)))
    assert report.notes == ["3 equal layers, layers.0 to layers.2, are compiled once"]


@pytest.mark.passes
def test_the_names_of_slots_are_those_of_the_whole_graph() -> None:
    model = make(lambda: Transformer(layers=3))
    (once,), (whole,) = outlined(model).tables, outlined(model, compile_once=False).tables
    assert once == whole


@pytest.mark.passes
def test_each_call_has_its_own_choices() -> None:
    made = outlined(make(lambda: Transformer(layers=3)))
    (body,) = (b for b in made.bodies.values() if len(b.layers) > 1)
    names = [[made.choices[i].name for i in of] for of in body.choices]
    assert names[0] == [name.replace("layers.1", "layers.0") for name in names[1]]
    assert body.layers == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.passes
def test_a_layer_with_other_verdicts_is_apart() -> None:
    made = outlined(make(lambda: Transformer(layers=4)), filter=["layers.1.*"])
    assert [b.layers for b in made.bodies.values() if len(b.layers) > 1] == [["layers.0", "layers.2", "layers.3"]]
    assert calls(made) == ["piece_0", "piece_1", "piece_2", "piece_1", "piece_1"]


@pytest.mark.passes
def test_a_layer_with_another_recipe_is_apart() -> None:
    made = outlined(make(lambda: Transformer(layers=3)), recipe={"layers.2.*": "rowwise", "*": "delayed"})
    assert [b.layers for b in made.bodies.values() if len(b.layers) > 1] == [["layers.0", "layers.1"]]


@pytest.mark.passes
def test_without_equals_the_graph_stays_in_one_piece() -> None:
    made = outlined(make(lambda: Transformer(layers=2)), filter=["layers.1.0.q"])
    assert made.bodies == {} and calls(made) == []
    names = {n.target for n in made.module.graph.nodes if n.op == "call_function"}
    assert ops.qdq_operand in names


@pytest.mark.passes
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


@pytest.mark.passes
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


@pytest.mark.passes
def test_a_shared_function_relies_on_no_address() -> None:
    """torch does not check the alignment of inputs that are marked static, and parameters of layers may differ in it."""
    made = outlined(make(lambda: Transformer(layers=3)))
    for node in shared(made).graph.find_nodes(op="placeholder"):
        assert node._dynamo_source is None and "tensor_dict" not in node.meta


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


@pytest.mark.compiled
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.variant] * (n in ("autocast", "a layer apart"))) for n in MODELS]
)
def test_numbers_slots_and_verdicts_are_the_same(name: str) -> None:
    assert expect_the_same(MODELS[name]).rewritten


@pytest.mark.compiled
def test_a_tensor_that_several_layers_read() -> None:
    """Autograd adds up its gradients in another order than in one graph."""
    once, _, report = trained(Skips)
    whole, _, _ = trained(Skips, compile_once=False)
    torch.testing.assert_close(once, whole, rtol=1e-4, atol=1e-6)
    assert len(report.rewritten) == len(report.gemms) == 36


@pytest.mark.compiled
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


@pytest.mark.compiled
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


@pytest.mark.compiled
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


@pytest.mark.compiled
def test_each_second_counts_once() -> None:
    """Twice: in tracing from 0 to 11, of it in Inductor from 1 to 7, of it in passes from 2 to 4."""
    timing = Timing("a graph")
    for _ in range(2):
        clock = mock.patch.object(time, "perf_counter", side_effect=[0, 1, 2, 4, 7, 11])
        with clock, timing.counting("tracing"), timing.counting("inductor"), timing.counting("passes"):
            pass
    assert (timing.passes, timing.inductor, timing.tracing, timing.total) == (4, 8, 10, 22)


@pytest.mark.compiled
def test_statistics_are_those_of_each_layer() -> None:
    def statistics(**options: Any) -> list[dict[str, Any]]:
        torch._dynamo.reset()
        model = make(Layers)
        list(train(model, compiled(model, monitor=True, **options), batches(2, 2, 16, 32)))
        return fp8pass.stats(model).to_dicts()

    assert statistics() == statistics(compile_once=False)


@pytest.mark.compiled
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


@pytest.mark.compiled
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


@pytest.mark.compiled
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


@pytest.mark.compiled
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


@pytest.mark.compiled
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


def trained_through_inductor(by_block: bool) -> tuple[Any, dict[str, Any]]:
    """Train; return the numbers of each step, and the state."""
    torch._dynamo.reset()
    model = make(lambda: nn.Sequential(Block(), Block()))
    options = {"on_fault": "raise"}
    for block in model if by_block else ():
        block.compile(backend="fp8pass", options=options)
    run = model if by_block else torch.compile(model, backend="fp8pass", options=options)
    return list(train(model, run, batches(3, 16, 32))), fp8pass.state(model).state_dict()


@pytest.mark.inductor
def test_numbers_and_slots_are_those_of_compilation_block_by_block() -> None:
    before: list[float] = []
    backward = torch.Tensor.backward

    def timed(loss: torch.Tensor) -> None:
        before.append(sum(t.inductor for t in report.timings))
        backward(loss)

    with (
        mock.patch.object(lower, "lower_through_inductor", wraps=lower_through_inductor) as compile_one,
        mock.patch.object(torch.Tensor, "backward", timed),
        collect() as report,
    ):
        once = trained_through_inductor(by_block=False)
    assert compile_one.call_count == 2  # what begins the step, and the block
    # the first step runs op by op; the backward is compiled when it runs in the second, and counts from then on
    assert 0 < before[0] == before[1] < before[2] == sum(t.inductor for t in report.timings)
    torch.testing.assert_close(once, trained_through_inductor(by_block=True), rtol=0, atol=0)


PROGRAM = """
import os, sys, torch, fp8pass
from pathlib import Path
from torch import nn
from torch._dynamo.utils import counters

os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
saved = Path(sys.argv[2])
if saved.exists():
    torch.compiler.load_cache_artifacts(saved.read_bytes())
torch.manual_seed(0)
layers = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
model = nn.Sequential(*layers)
run = torch.compile(model, backend="fp8pass")
x = torch.randn(16, 32, requires_grad=True)
for _ in range(2):
    run(x).square().mean().backward()
found = counters["aot_autograd"]
print(found["autograd_cache_hit"], found["autograd_cache_miss"])
if not saved.exists():
    artifacts, _ = torch.compiler.save_cache_artifacts()
    saved.write_bytes(artifacts)
"""


@pytest.mark.gate
@pytest.mark.inductor
def test_a_second_machine_starts_with_saved_caches(tmp_path: Path) -> None:
    """`torch.compiler.save_cache_artifacts`, loaded where the folder of caches is empty."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    folders = (str(tmp_path / name) for name in ("first", "second"))
    done = forked.run([forked.Program(file, [f, str(tmp_path / "saved")], root=ROOT) for f in folders], os.environ)
    assert [each.returncode for each in done] == [0, 0], done
    hits, misses = zip(*(each.stdout.split() for each in done), strict=True)
    assert misses == ("2", "0")  # what begins the step, and the layer
    assert hits == ("0", "2")


class Ending(nn.Module):
    """Layers and what comes after them, whose backward may overwrite other ones of its inputs than a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)), torch.zeros(16, dtype=torch.long))


@pytest.mark.inductor
def test_a_backward_overwrites_what_its_own_graph_allows() -> None:
    """A layer's backward is compiled after the graphs that follow it, and must not go by what is known of those."""
    allowed, compiled = {}, {}
    from torch._inductor.graph import GraphLowering

    collect_idxs, init = graph_compile.collect_bw_donated_buffer_idxs, GraphLowering.__init__

    def names(module: fx.GraphModule) -> tuple[str, ...]:
        return tuple(n.name for n in module.graph.find_nodes(op="placeholder"))

    def collected(forward: fx.GraphModule, backward: fx.GraphModule, *args: Any) -> Any:
        allowed[names(backward)] = found = collect_idxs(forward, backward, *args)
        return found

    def lowered(self: GraphLowering, module: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        init(self, module, *args, **kwargs)
        if kwargs.get("is_backward"):
            compiled[names(module)] = self.bw_donated_idxs

    with (
        mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", collected),
        mock.patch.object(GraphLowering, "__init__", lowered),
        collect() as report,
    ):
        model = make(Ending)
        run = torch.compile(model, backend="fp8pass", options={"on_fault": "raise"})
        for x in batches(2, 16, 32):
            run(x).backward()
    assert len(report.timings) > 2  # a layer, and what is around the layers
    assert len(allowed) >= 2 and compiled == allowed
