"""Test verdicts of matmuls that run outside of compiled graphs, as `fp8pass.explain` and train steps see them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.compiler.not_compiled import OUTSIDE, missed
from fp8pass.graph.verdict import Gemm
from fp8pass.inspect.cli import main
from fp8pass.report.report import Report

pytestmark = pytest.mark.compiled

KINDS = ("output", "grad_input", "grad_weight")


def linear() -> nn.Linear:
    return nn.Linear(32, 32)


def x(requires_grad: bool = True) -> Tensor:
    return torch.randn(16, 32, requires_grad=requires_grad)


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def outside(report: Report) -> list[Gemm]:
    return [g for g in report.gemms if g.rule in OUTSIDE]


def expect_outside(report: Report, names: dict[str, int], reason: str) -> None:
    """Check that all three matmuls of these calls ran outside, for this reason, and nothing else did."""
    found = outside(report)
    assert Counter((g.name, g.kind) for g in found) == {(n, k): times for n, times in names.items() for k in KINDS}
    for g in found:
        assert reason in g.reason, g.reason
        assert g.status == "declined" and g.flops == 2 * 16 * 32 * 32 and g.dtypes == ("f32", "f32", "f32")
        assert g.source.startswith("test_not_compiled.py:")
    assert f"{len(found)} outside" in report.summary()
    share = report.fp8_flops / report.flops
    assert share < 1 and f"{share:.0%} of matmul FLOPs" in report.summary()


class Items(nn.Module):
    """Dynamo gives up a frame that breaks the graph within `try`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        try:
            most = x.max().item()
        except ValueError:
            most = 1.0
        y: Tensor = self.b(x) / most
        return y


def test_item_within_try() -> None:
    report = fp8pass.explain(Items(), x())
    expect_outside(report, {"a": 1, "b": 1}, "Dynamo can't compile forward (test_not_compiled.py:")
    assert "Tensor.item()" in outside(report)[0].reason
    assert report.graphs == 0 and "Dynamo compiled nothing: all matmuls ran op by op" in str(report)
    again = fp8pass.explain(Items(), x())  # Dynamo knows by now that it can't compile the frame
    expect_outside(again, {"a": 1, "b": 1}, "Tensor.item()")


def test_a_graph_break_in_a_loop() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = linear()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.a(x)
                torch._dynamo.graph_break()
            return x

    expect_outside(fp8pass.explain(Loop(), x()), {"a": 2}, "graph_break()")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_graph_break_in_a_checkpointed_region(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = linear(), linear(), linear()

        def inside(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            y: Tensor = self.b(x)
            return y

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(checkpoint(self.inside, x, use_reentrant=reentrant))
            return y

    report = fp8pass.explain(Checkpointed(), x())
    expect_outside(report, {"a": 1, "b": 1}, "in the checkpointed region at test_not_compiled.py:")
    assert len(report.rewritten) == 3


class Layouts(nn.Module):
    """A matmul by a parameter in some layout, outside of graphs."""

    def __init__(self, factor: Callable[[Tensor], Tensor], shape: tuple[int, ...], batched: bool = False) -> None:
        super().__init__()
        self.w, self.factor, self.batched = nn.Parameter(torch.randn(shape)), factor, batched

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor(self.w)
        return torch.bmm(x.unflatten(0, (2, -1)), factor) if self.batched else x @ factor


class Matmuls(TorchDispatchMode):
    """Record the sizes M, K, N of the matmuls that run."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.sizes.append((*args[0].shape[-2:], args[1].shape[-1]))
        return func(*args, **(kwargs or {}))


LAYOUTS: dict[str, tuple[Any, ...]] = {
    "as a layer's weight": (lambda w: w.t(), (64, 32)),
    "as it is": (lambda w: w, (32, 64)),
    "columns of a larger weight": (lambda w: w[:, :32].t(), (64, 48)),
    "batches": (lambda w: w.transpose(1, 2), (2, 64, 32), True),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_sizes_are_those_that_autograd_multiplies(case: str) -> None:
    model = Layouts(*LAYOUTS[case])
    with Matmuls() as ran:
        model(x()).sum().backward()
    found = outside(fp8pass.explain(model, x()))
    assert Counter((g.M, g.K, g.N) for g in found) == Counter(ran.sizes)


def test_a_full_backward_hook() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()
            self.a.register_full_backward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x).relu())
            return y

    report = fp8pass.explain(Hooked(), x())
    expect_outside(report, {"a": 1}, "backwards hooks")
    assert len(report.rewritten) == 3 and report.fp8_flops == report.flops / 2


def test_an_exception_in_what_is_traced() -> None:
    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = linear()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            raise ValueError("a batch that it does not take")

    refusing, head = Refusing(), linear()

    def step(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        y: Tensor = head(x)
        try:
            torch._dynamo.graph_break()
            y = refusing(x)
        except ValueError:
            y = y + 1
        return y

    report = fp8pass.explain(step, x())
    found = outside(report)
    assert {g.name: g.reason for g in found if "Observed exception" in g.reason}.keys() == {"a"}, found


def test_torchs_own_modules_under_fsdp() -> None:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(*(nn.Sequential(linear(), nn.ReLU(), linear()) for _ in range(2)))
        for block in (*model, model):
            fully_shard(block)
        report = fp8pass.explain(model, x())
    finally:
        dist.destroy_process_group()
    names = Counter(f"{i}.{j}" for i in range(2) for j in (0, 2))
    assert report.graphs == 0 and Counter((g.name, g.kind) for g in outside(report)) == {
        (name, kind): 1 for name in names for kind in KINDS
    }
    assert "Dynamo starts no graph in torch's own modules" in report.gemms[0].reason


class Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = linear()

    @torch.compiler.disable(reason="for a test")  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.b = Disabled(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.inner(x).relu())
        return y


def test_a_module_under_compiler_disable(tmp_path: Path) -> None:
    report = fp8pass.explain(Around(), x())
    expect_outside(report, {"inner.a": 1}, "Disabled.forward is under torch.compiler.disable: for a test")
    assert "Disabled.forward is under torch.compiler.disable" in report.to_html(tmp_path / "page.html").read_text()


def test_strict_and_what_is_left_out() -> None:
    with pytest.raises(
        fp8pass.Fp8Error, match=r"strict: output of inner\.a at test_not_compiled\.py:\d+, .*compiler\.disable"
    ) as failed:
        fp8pass.explain(Around(), x(), config=fp8pass.Config(strict=True))
    assert failed.value.report is not None and len(outside(failed.value.report)) == 3
    report = fp8pass.explain(Around(), x(), config=fp8pass.Config(strict=True, filter=["inner"]))
    assert {g.rule for g in report.declined} == {"filter"} and len(report.declined) == 3


def test_without_gradients_there_is_no_backward() -> None:
    report = fp8pass.explain(Around(), x(), backward=False)
    assert [(g.name, g.kind) for g in outside(report)] == [("inner.a", "output")]
    model = Around()
    model.inner.a.weight.requires_grad_(False)
    report = fp8pass.explain(model, x(requires_grad=False))
    assert [(g.name, g.kind) for g in outside(report)] == [("inner.a", "output")]


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn, self.head = kind(16, 32, batch_first=True), nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(x)[0])
        return y


GOES_ON = torch.__version__ >= "2.15"
"""Dynamo goes on after the break at a recurrent layer; older ones leave out the whole frame."""


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers(kind: Callable[..., nn.Module], gates: int) -> None:
    """On a CPU the kernels of an LSTM are one op, and those of the others one matmul for each time step.

    Both are left out: `strict` raises for the head alone, which is not compiled either.
    """
    report = fp8pass.explain(Recurrent(kind), torch.randn(4, 8, 16))
    of_kernels = 5 if kind is nn.LSTM and torch.backends.mkldnn.is_available() else 0
    of_head = 3 if GOES_ON else 0
    assert len(report.rewritten) == of_head
    assert report.rules() == Counter(recurrent=5, outside=3 - of_head)
    assert {g.name for g in missed(report.gemms)} == set() if GOES_ON else {"head"}
    found = {(g.name, g.kind): (g.batches, g.M, g.K, g.N) for g in report.gemms}
    assert found[("rnn.weight_ih_l0", "output")] == (1, 4 * 8, 16, gates * 32)
    assert found[("rnn.weight_hh_l0", "output")] == (8, 4, 32, gates * 32)
    assert found[("rnn.weight_hh_l0", "grad_input")] == (8, 4, gates * 32, 32)
    assert found[("rnn.weight_hh_l0", "grad_weight")] == (8, gates * 32, 4, 32)
    assert ("rnn.weight_ih_l0", "grad_input") not in found
    forward = 2 * 4 * 8 * (16 + 32) * gates * 32
    assert sum(g.flops for g in report.gemms if "ih" in g.name) == 2 * 2 * 4 * 8 * 16 * gates * 32
    assert sum(g.flops for g in report.declined if g.name != "head" and g.kind == "output") == forward
    why = "the graph breaks at test_not_compiled.py:" if GOES_ON else "RNN, GRU, or LSTM"
    assert all(why in g.reason for g in report.declined)
    if of_kernels:
        torch._dynamo.reset()
        with torch._dynamo.config.patch(allow_rnn=True):  # then the kernel is in the graph
            report = fp8pass.explain(Recurrent(kind), torch.randn(4, 8, 16))
        assert report.rules() == {"recurrent": 5} and len(report.rewritten) == 3
        assert {(g.name, g.kind): (g.batches, g.M, g.K, g.N) for g in report.declined}.items() <= found.items()
        assert all(g.source.startswith("test_not_compiled.py:") for g in report.declined)


@torch.library.custom_op("fp8pass_tests::experts", mutates_args=())
def experts(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply in an op that no graph shows the inside of."""
    return torch.cat([part @ weight for part, weight in zip(x.chunk(len(weights)), weights, strict=True)])


@experts.register_fake
def _(x: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


experts.register_autograd(
    lambda ctx, g: (g.new_zeros(ctx.shapes[0]), g.new_zeros(ctx.shapes[1])),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shapes", [x.shape for x in inputs]),
)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.weights = linear(), nn.Parameter(torch.randn(2, 32, 48))

    def forward(self, x: Tensor) -> Tensor:
        return experts(self.up(x), self.weights)


def test_a_custom_op_that_multiplies() -> None:
    report = fp8pass.explain(Experts(), x())
    assert [g.name for g in report.rewritten] == ["up"] * 3
    found = outside(report)
    assert Counter((g.name, g.kind, g.rule) for g in found) == {("weights", kind, "custom op"): 2 for kind in KINDS}
    assert {g.flops for g in found} == {2 * 8 * 32 * 48}
    assert "within the custom op fp8pass_tests::experts" in found[0].reason
    assert found[0].source.startswith("test_not_compiled.py:")


@pytest.mark.variant
def test_mixtral() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, num_local_experts=4, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    report = fp8pass.explain(MixtralForCausalLM(config), torch.randint(96, (2, 16)))
    assert (len(report.rewritten), len(report.gemms)) == (18, 24)
    found = [g for g in report.gemms if g.rule == "no kernel"]
    names = [f"model.layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down")]
    assert Counter((g.name, g.kind) for g in found) == {(name, kind): 1 for name in names for kind in KINDS}
    rows = 32 * 2
    assert sum(g.flops for g in found) == 3 * 2 * rows * (32 * 96 + 48 * 32)
    assert not outside(report)
    looped = MixtralForCausalLM._from_config(config, experts_implementation="eager")
    (reason,) = {g.reason for g in outside(fp8pass.explain(looped, torch.randint(96, (2, 16))))}
    assert "model.set_experts_implementation('grouped_mm')" in reason


def test_matmuls_of_user_functions_and_hooks() -> None:
    """Matmuls that a backward hook calls have a verdict; those that autograd computes follow from the forward's."""
    weight, layer = nn.Parameter(torch.randn(32, 32)), linear()

    def step(x: Tensor) -> Tensor:
        y = layer(x)
        y.register_hook(lambda g: g @ weight)
        torch._dynamo.graph_break()
        loss: Tensor = (y @ layer.weight).sum()
        loss.backward()
        return loss

    report = fp8pass.explain(step, x())
    assert all(g.kind == "output" for g in outside(report)), outside(report)


def test_whole_graphs_have_nothing_outside() -> None:
    """Neither attention, nor a convolution, nor a matrix by a vector is a matmul here."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.convolution = linear(), nn.Conv1d(8, 8, 3)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def eager(self, x: Tensor) -> Tensor:
            q = x.reshape(4, 2, 8, 16)
            return nn.functional.scaled_dot_product_attention(q, q, q) @ torch.ones(16) + self.convolution(x).sum()

        def forward(self, x: Tensor) -> Tensor:
            return self.eager(self.layer(x))

    report = fp8pass.explain(Whole(), torch.randn(4, 8, 32))
    assert outside(report) == []


def test_inference_mode() -> None:
    with torch.inference_mode():
        report = fp8pass.explain(Around(), x(False), backward=False)
    assert [(g.name, g.kind, g.flops) for g in outside(report)] == [("inner.a", "output", 2 * 16 * 32 * 32)]


FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)

    @torch.compiler.disable
    def forward(self, x):
        return self.a(x)

def model():
    return Model(), torch.randn(16, 32)
"""


def test_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "factory_of_outside.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "factory_of_outside:model"]) == 1
    printed = capsys.readouterr()
    assert "2 outside" in printed.out and "2 matmuls ran outside of compiled code" in printed.err


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def stepped(model: nn.Module, **config: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)

    @fp8pass.train_step(lowering="eager", **config)
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_a_step_warns_once_of_what_ran_outside() -> None:
    step, inputs = stepped(Around()), x(False)
    with pytest.warns(
        UserWarning, match=r"fp8pass: 2 matmuls of .*step \(test_not_compiled\.py:\d+\) ran in high precision"
    ):
        step(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(inputs)
    assert [(g.name, g.kind) for g in outside(step.report)] == [("inner.a", "output"), ("inner.a", "grad_weight")]
    assert len(step.report.rewritten) == 3 and "2 outside" in step.report.summary()


def test_a_strict_step() -> None:
    with pytest.raises(fp8pass.Fp8Error, match=r"strict: output of inner\.a .* is under torch\.compiler\.disable"):
        stepped(Around(), strict=True)(x(False))


def test_a_step_of_one_graph_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fp8pass")
        step = stepped(nn.Sequential(linear(), nn.ReLU(), linear()))
        step(x(False))
    assert outside(step.report) == [] and len(step.report.rewritten) == 5
