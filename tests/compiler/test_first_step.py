"""Test what is said, and done, if the first training step of a compiled model has next to nothing in FP8."""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.report.report import Report, collect
from tests.helpers.harness import sqnr

pytestmark = pytest.mark.compiled

NO_INPUT_GRADIENT = "ignore:Full backward hook is firing when gradients are computed with respect to module outputs"
SMALL = {"target": "h100"}
"""Options under which the models below are too small for FP8."""


class Hooked(nn.Module):
    """Layers with full backward hooks, at which Dynamo breaks the graph. gradients: {name: what its hook has got}."""

    def __init__(self, hooked: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gradients: dict[str, list[Any]] = {"a": [], "b": []}
        for name in self.gradients if hooked else ():
            getattr(self, name).register_full_backward_hook(self.note(name))

    def note(self, name: str) -> Callable[..., None]:
        return lambda _, *of: self.gradients[name].append([x if x is None else x.clone() for g in of for x in g])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).relu())
        return y


class Experts(nn.Module):
    """A loop over experts whose tokens `nonzero` finds, for which Dynamo skips the whole function.

    as_layers: False if the experts' weights are two parameters, so that the loop itself multiplies.
    """

    def __init__(self, as_layers: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        if not as_layers:
            self.up, self.down = nn.Parameter(torch.randn(4, 64, 32) / 6), nn.Parameter(torch.randn(4, 32, 64) / 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(4 * as_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i in range(4):
            token, place = (chosen == i).nonzero(as_tuple=True)
            y = (
                self.experts[i](x[token])
                if len(self.experts)
                else F.linear(F.linear(x[token], self.up[i]), self.down[i])
            )
            out = out.index_add(0, token, y * weights[token, place, None])
        return out


def layers(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))


def fp8(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="fp8pass", options={"lowering": "eager", **options})


def data() -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


class Training:
    """Training steps of a compiled model. said: the warnings of fp8pass so far, by step. report: the verdicts."""

    def __init__(self, model: nn.Module, run: Callable[[Tensor], Tensor], steps: int = 3) -> None:
        self.said: list[list[str]] = []
        self.losses: list[float] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with collect() as self.report:
            for _ in range(steps):
                with warnings.catch_warnings(record=True) as found:
                    warnings.simplefilter("always")
                    loss = run(data()).square().mean()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                self.losses.append(loss.item())
                self.said.append([str(w.message) for w in found if "fp8pass" in str(w.message)])

    def says(self, expected: str, step: int = 0) -> None:
        """Check that the only warning came in this step, line by line."""
        assert [len(of) for of in self.said] == [int(i == step) for i in range(len(self.said))], self.said
        found = self.said[step][0]
        assert re.fullmatch(expected, found), f"{found}\n---\n{expected}"


LAST = r"\nprint\(fp8pass\.explain\(model, \*inputs\)\) lists all of them"


def test_a_model_that_is_too_small() -> None:
    model = layers()
    Training(model, fp8(model, **SMALL)).says(
        r"fp8pass: 0 of 5 matmuls run in FP8 in the first training step of Sequential \(container\.py:\d+\)\. "
        r"Declined, by rule:"
        r"\n  5 min_speedup, such as output of 0, \[64, 32\] by \[32, 64\]: predicted speed-up on h100 is 0\.\d+, below "
        r"min_speedup=1: \[64, 32\] by \[32, 64\] is too small to pay for its quantization\. "
        r"What to do: larger batches or layers; min_speedup=0 runs it in FP8 anyway" + LAST
    )


def test_experts_of_parameters_are_told() -> None:
    """The layer that the loop calls is compiled; no module could be compiled for the others."""
    model = Experts(as_layers=False)
    training = Training(model, fp8(model))
    training.says(
        r"fp8pass: 2 of 22 matmuls run in FP8 in the first training step of Experts \(test_first_step\.py:\d+\); "
        r"9\d% of the FLOPs ran outside of what is compiled\. Declined, by rule:"
        r"\n  20 outside, such as output of up, \[\d+, 32\] by \[32, 64\]: outside of any graph: Dynamo can't compile "
        r"forward \(test_first_step\.py:\d+\): .*\. What to do: .*" + LAST,
        step=1,
    )


@pytest.mark.filterwarnings(NO_INPUT_GRADIENT)
def test_hooked_layers_that_stay_in_high_precision_are_told() -> None:
    """A forward that was replaced in the layer itself may be anything."""
    model = Hooked()
    for layer in (model.a, model.b):
        layer.forward = layer.forward  # type: ignore[method-assign]
    Training(model, fp8(model)).says(
        r"fp8pass: 0 of 5 matmuls run in FP8 in the first training step of Hooked \(test_first_step\.py:\d+\); 100% of "
        r"the FLOPs ran outside of what is compiled\. Declined, by rule:"
        r"\n  5 outside, such as output of a, \[64, 32\] by \[32, 64\]: outside of any graph: the graph breaks at "
        r"test_first_step\.py:\d+: Module-level backwards hooks require compiled autograd.* What to do: .*" + LAST
    )
    assert [len(of) for of in model.gradients.values()] == [3, 3]


def test_hooks_get_right_gradients_as_often_as_in_eager() -> None:
    """Bit for bit those of a model that is one graph, whose hooks belong to tensors, not to layers."""
    torch.manual_seed(0)
    model, whole = Hooked(), Hooked(hooked=False)
    whole.load_state_dict(model.state_dict())
    run, x = fp8(model, recipe="dynamic"), data().requires_grad_()
    run(x).sum().backward()  # in high precision: Dynamo skips the layers
    got = gradients(run, model, x)
    assert [len(of) for of in model.gradients.values()] == [2, 2]
    torch._dynamo.reset()
    assert torch.equal(got["x"], model.gradients["a"][-1][0])
    for name, wanted in gradients(fp8(whole, recipe="dynamic"), whole, x).items():
        torch.testing.assert_close(got[name], wanted, rtol=0, atol=0)
    grad_input, grad_output = model.gradients["b"][-1]
    hidden = whole.a(x).relu().detach().requires_grad_()
    loss = whole.b(hidden).square().mean()
    loss.backward()
    assert sqnr(hidden.grad, grad_input) > 20 and grad_output.shape == (64, 32)


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return the gradients of the parameters and of the input."""
    x.grad = None
    model.zero_grad()
    run(x).square().mean().backward()  # type: ignore[no-untyped-call]
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def test_what_runs_one_by_one() -> None:
    for make, count in ((Hooked, 5), (Experts, 12)):  # two compilations serve all experts
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        eager, run = copy.deepcopy(model), fp8(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training, plain = Training(model, run), Training(eager, eager)
        assert training.said == [[], [], []]
        assert len(training.report.rewritten) == count and not training.report.declined, training.report
        torch.testing.assert_close(training.losses, plain.losses, rtol=0.02, atol=0)
        names = {name.rpartition(".")[0].rpartition(".")[0] for name in fp8pass.state(model).state_dict()} - {""}
        assert names == {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def test_names_of_the_whole_model_choose() -> None:
    model = Experts()
    training = Training(model, fp8(model, filter=["gate", "experts.1.*"]))
    assert training.said == [[], [], []]
    assert {g.name for g in training.report.rewritten} == {f"experts.{i}.{j}" for i in (0, 2, 3) for j in (0, 2)}
    with pytest.raises(ValueError, match=r"filter: 'expert\.1' matches no module or matmul of Experts"):
        fp8(Experts(), filter=["expert.1"])(data())


def test_a_checkpoint_recomputes_as_it_ran() -> None:
    """A checkpoint recomputes in the backward, outside of the compiled call, as it ran in the forward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Experts()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.moe, x, use_reentrant=False)
            return y

    torch.manual_seed(0)
    model = Checkpointed()
    eager = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training, plain = Training(model, fp8(model)), Training(eager, eager)
    torch.testing.assert_close(training.losses, plain.losses, rtol=0.02, atol=0)


def stepped(model: nn.Module) -> Any:
    """Return a `train_step` of the model that has run once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @fp8pass.train_step(lowering="eager")
    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    step(data())
    return step


def test_elsewhere_a_model_runs_as_before() -> None:
    """Calls of the model itself stay in high precision, and a `train_step` compiles its layers in its own way."""
    model = Experts()
    Training(model, fp8(model))
    eager = copy.deepcopy(model)
    assert torch.equal(model(data()), eager(data()))
    assert "_compiled_call_impl" not in vars(eager.gate)

    step = stepped(model)
    assert step.report.rewritten and not step.report.declined


@pytest.mark.filterwarnings(NO_INPUT_GRADIENT)
def test_a_step_compiles_hooked_layers_too() -> None:
    model = Hooked()
    step = stepped(model)
    assert len(step.report.rewritten) == 5 and not step.report.declined
    assert all(g.source.startswith("test_first_step.py:") for g in step.report.rewritten)
    assert [len(of) for of in model.gradients.values()] == [1, 1]


def test_strict_raises_for_what_no_module_compiles() -> None:
    run = fp8(Experts(as_layers=False), strict=True)
    run(data())
    with pytest.raises(fp8pass.Fp8Error, match=r"strict: output of up at test_first_step\.py:\d+, .* does not run in"):
        run(data())
    torch._dynamo.reset()
    model = Experts()
    assert Training(model, fp8(model, strict=True)).said == [[], [], []]


class Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    @torch.compiler.disable(reason="for a test")  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def test_what_the_user_disables_is_told_at_once() -> None:
    model = Disabled()
    said = Training(model, fp8(model)).said
    assert [len(of) for of in said] == [1, 0, 0] and "0 of 5" in said[0][0]
    assert "Disabled.forward is under torch.compiler.disable: for a test" in said[0][0]


@pytest.mark.parametrize("options", [{"recipe": None}, {"filter": ["*"]}, {"filter": lambda *_: False}, {}])
def test_silence_where_nothing_is_wrong(options: dict[str, Any]) -> None:
    model = layers()
    assert Training(model, fp8(model, **options)).said == [[], [], []]


def test_silence_without_gradients() -> None:
    model = layers(48)
    run = fp8(model, filter=lambda name, *_: name != "0", **SMALL)
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        run(data())
    assert not [w for w in found if "first training step" in str(w.message)]
    with fp8pass.enabled(False):
        run(data()).sum().backward()
    said = Training(model, run).said
    assert [len(of) for of in said] == [1, 0, 0]
    assert "0 of 3 matmuls run in FP8" in said[0][0] and "\n  3 min_speedup, such as output of 2," in said[0][0]


class Block(nn.Module):
    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.inner = layers(width)
        self.compile(backend="fp8pass", options={"lowering": "eager", **options})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Blocks(nn.ModuleList):
    """Blocks that are compiled one by one."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


def test_one_warning_for_many_blocks() -> None:
    model = Blocks(Block(width, **SMALL) for width in (64, 72, 80, 88, 96))
    said = Training(model, model).said
    assert [len(of) for of in said] == [1, 0, 0]
    assert said[0][0].count("\n") == 2
    assert "\n  29 min_speedup, such as output of inner.0, [64, 32] by [32, 64]:" in said[0][0]


def test_one_block_in_fp8_is_enough() -> None:
    model = Blocks([Block(64, **SMALL), Block(72)])
    training = Training(model, model)
    assert training.said == [[], [], []]
    assert (len(training.report.rewritten), len(training.report.declined)) == (6, 5)


def test_without_an_eager_optimizer_the_next_call_tells() -> None:
    run = fp8(layers(56), **SMALL)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if _:
                with pytest.raises(UserWarning, match="0 of 5 matmuls run in FP8"):
                    run(data())
            else:
                run(data()).sum().backward()


def test_a_compiled_function_in_a_compiled_function() -> None:
    """Dynamo traces into it; where it can't, the outer call judges both."""
    inner = layers()
    compiled = fp8(inner)

    def traced(x: Tensor) -> Tensor:
        y: Tensor = compiled(x)
        return y * 2

    with collect() as report:
        fp8(traced)(data()).sum().backward()
    assert (report.graphs, len(report.rewritten)) == (1, 5)
    torch._dynamo.reset()
    inner = layers(40)
    small = fp8(inner, **SMALL)

    def in_a_loop(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = small(x)
        return x

    said = Training(inner, fp8(in_a_loop, **SMALL)).said
    assert [len(of) for of in said] == [1, 0, 0]
    assert "test_a_compiled_function_in_a_compiled_function.<locals>.in_a_loop (test_first_step.py:" in said[0][0]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_ddp() -> None:
    for make, count in ((layers, 5), (Experts, 12)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        eager = copy.deepcopy(model)
        run = DistributedDataParallel(model)
        training, plain = Training(model, fp8(run)), Training(eager, eager)
        assert training.said == [[], [], []] and len(training.report.rewritten) == count, training.report
        torch.testing.assert_close(training.losses, plain.losses, rtol=0.02, atol=0)


def test_the_second_step_compiles_nothing_again() -> None:
    """The dispatch mode of the first step leaves no trace in Dynamo's guards."""
    model = layers()
    run = fp8(model)
    Training(model, run, steps=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = Training(model, run)
    assert again.report == Report() and Counter(map(len, again.said)) == {0: 3}


class Shared(nn.Module):
    """A model of which two functions call the same layer, each in a loop that Dynamo skips."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(32, 32), nn.Linear(32, 32)


def looped(model: Shared) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = model.head(x)
        return x

    return run


def test_two_functions_compile_the_same_layer() -> None:
    model = Shared()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [fp8(looped(model), recipe="dynamic") for _ in range(2)]
        for run in (*runs, *runs, *runs):  # watched, compiled for each, and again
            run(data()).sum().backward()
        exact = looped(model)(data())
        quantized = [run(data()) for run in runs]
    assert torch.equal(*quantized) and not torch.equal(quantized[0], exact)


def test_a_pattern_for_what_a_function_does_not_call_is_no_error() -> None:
    model = Shared()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fp8(looped(model), recipe={"encoder": None, "*": "dynamic"})
        for _ in range(3):
            run(data()).sum().backward()
    assert not torch.equal(run(data()), looped(model)(data()))
