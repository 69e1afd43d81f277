"""Test `fp8pass.explain` and the report that it returns."""

from __future__ import annotations

import gc
import json
import logging
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fp8pass
from fp8pass.base._torch import FakeTensorMode, inductor_lowering
from fp8pass.inspect.cli import main
from fp8pass.report.report import Report, collect
from tests.helpers.harness import compiled, expect_text
from tests.helpers.models import Block, Parts, make


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.dropout(self.norm(self.up(x)), 0.5, train=True)
        y: Tensor = self.head(hidden)
        return y


@pytest.fixture(scope="module")
def small() -> Report:
    """Return the report on `Small`."""
    return fp8pass.explain(Small(), torch.randn(16, 32))


@pytest.mark.compiled
def test_the_table(small: Report) -> None:
    expect_text(
        str(small),
        """\
matmul  gemm         M x K x N     dtypes              scaling  status        source
------------------------------------------------------------------------------------------------
up      output       16 x 32 x 64  e4m3 @ e4m3 -> f32  delayed  rewritten     test_explain.py:33
head    output       16 x 64 x 1   f32 @ f32 -> f32             declined [1]  test_explain.py:34
head    grad_input   16 x 1 x 64   f32 @ f32 -> f32             declined [1]  test_explain.py:34
head    grad_weight  1 x 16 x 64   f32 @ f32 -> f32             declined [1]  test_explain.py:34
up      grad_weight  64 x 16 x 32  e5m2 @ e4m3 -> f32  delayed  rewritten     test_explain.py:33

[1] N=1: no matrix product, each operand element is used once

2 of 5 matmuls in FP8, 96% of matmul FLOPs (1 graph); declined: 3 vector
""",
    )


class Nested(nn.Module):
    """A model whose layers are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Parts()])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


@pytest.mark.compiled
def test_rows_and_totals() -> None:
    report = fp8pass.explain(make(Nested), torch.randn(2, 8, 32, requires_grad=True))
    assert len(report.gemms) == len(report.rewritten) == 2 * 3
    assert report.summary() == "6 of 6 matmuls in FP8, 100% of matmul FLOPs (1 graph)"
    row = report.gemms[0]
    assert (row.name, row.kind, row.M, row.K, row.N, row.status, row.reason) == (
        "layers.0.a",
        "output",
        16,
        32,
        32,
        "rewritten",
        "",
    )
    assert row.source.startswith("models.py:")
    assert json.loads(json.dumps(report.to_dict()))["gemms"][0]["name"] == "layers.0.a"


@pytest.mark.compiled
def test_nothing_of_the_users_changes_and_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Small(), torch.randn(16, 32, requires_grad=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with caplog.at_level(logging.DEBUG, "fp8pass"):
        fp8pass.explain(model, x)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert fp8pass.state(model).state_dict() == {}
    assert model.training
    lines = [r.getMessage() for r in caplog.records if r.name == "fp8pass.report.report"]
    assert any(
        line.startswith("up output [16,32,64] (test_explain.py:") and line.endswith("rewritten ") for line in lines
    )
    assert any("declined N=1: no matrix product" in line for line in lines)
    assert any("3 of 6 matmuls in FP8" in line for line in lines)


@pytest.mark.compiled
def test_forward_only() -> None:
    report = fp8pass.explain(make(), torch.randn(16, 32), backward=False)
    assert [g.kind for g in report.gemms] == ["output", "output"]


@pytest.mark.compiled
def test_compiled_models_and_graph_breaks() -> None:
    model = nn.Linear(32, 32)

    def step(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        out: Tensor = model(y).sum()
        return out

    assert fp8pass.explain(torch.compile(model), torch.randn(16, 32), backward=False).graphs == 1
    assert fp8pass.explain(torch.compile(step), torch.randn(16, 32), backward=False).graphs == 2


@pytest.mark.compiled
@torch._dynamo.config.patch(recompile_limit=1)
def test_layers_that_share_the_code_of_a_graph_have_their_own_verdicts() -> None:
    """Dynamo compiles a layer that breaks the graph once for all its instances; the report has each one's own name."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            torch._dynamo.graph_break()
            return x + self.down(h)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    report = fp8pass.explain(Layers(), torch.randn(16, 32, requires_grad=True))
    assert [(g.name, g.kind) for g in report.rewritten] == [
        (f"layers.{i}.{name}", kind)
        for i in range(3)
        for name in ("up", "down")
        for kind in ("output", "grad_weight", "grad_input")
    ]
    assert report.flops == 3 * 2 * 3 * 2 * 16 * 32 * 64


@pytest.mark.compiled
def test_a_model_that_was_explained_is_not_kept() -> None:
    model = Small()
    kept = weakref.ref(model.up.weight)
    fp8pass.explain(model, torch.randn(16, 32))
    del model
    gc.collect()
    assert kept() is None


@pytest.mark.compiled
def test_many_times() -> None:
    """That is more often than Dynamo's limit of recompilations."""
    model = nn.Linear(32, 32)
    for rows in range(8, 11):
        assert len(fp8pass.explain(model, torch.randn(rows, 32), backward=False).gemms) == 1


@pytest.mark.compiled
def test_nothing_compiled() -> None:
    report = fp8pass.explain(lambda x: 3, torch.randn(4, 4))
    assert "Dynamo compiled nothing" in str(report)


@pytest.mark.compiled
def test_strict() -> None:
    config = fp8pass.Config(recipe=None, strict=True)
    with pytest.raises(fp8pass.Fp8Error, match="no GPU has a kernel") as failed:
        fp8pass.explain(lambda a: a.float() @ a.float(), torch.ones(16, 16).to(torch.float8_e5m2), config=config)
    assert failed.value.report is not None and len(failed.value.report.declined) == 1
    assert failed.value.report.error.startswith("strict: output of a matmul at test_explain.py:")


@pytest.mark.compiled
def test_branches_are_separate_graphs() -> None:
    def double(a: Tensor, b: Tensor) -> Tensor:
        return a.float() @ b.float() * 2

    def function(a: Tensor, b: Tensor, p: Tensor) -> Any:
        return torch.cond(p, lambda a, b: a.float() @ b.float(), double, (a, b))

    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(32, 16).to(torch.float8_e4m3fn)
    report = fp8pass.explain(function, a, b, torch.tensor(True), config=fp8pass.Config(recipe=None))
    assert [g.status for g in report.gemms] == ["rewritten"] * 2
    assert report.graphs == 1
    run = compiled(function, recipe=None)
    for flag in (True, False):
        torch.testing.assert_close(run(a, b, torch.tensor(flag)), function(a, b, torch.tensor(flag)))


@pytest.mark.compiled
def test_a_schedule_is_explained_as_it_ends() -> None:
    schedule = fp8pass.recipes.Schedule({0: None, 5: "delayed", 9: {"up": "rowwise"}})
    report = fp8pass.explain(make(), torch.randn(16, 32), config=fp8pass.Config(recipe=schedule))
    assert {(g.name, g.scaling) for g in report.gemms} == {("up", "rowwise"), ("down", "")}
    assert report.notes == ["the verdicts are those of the schedule from step 9 on"]


@pytest.mark.compiled
def test_with_a_monitor_of_some_steps() -> None:
    config = fp8pass.Config(monitor=True, monitor_interval=4)
    report = fp8pass.explain(nn.Linear(32, 32), torch.randn(16, 32), config=config)
    assert len(report.rewritten) == 2 and report.graphs == 1


@pytest.mark.compiled
def test_where_graphs_break_and_what_is_compiled_again() -> None:
    layer = nn.Linear(32, 32)

    def scaled(x: Tensor, by: int) -> Tensor:
        y: Tensor = layer(x) * by
        return y

    def function(x: Tensor) -> Tensor:
        for by in (1, 2):
            x = scaled(x, by)
            torch._dynamo.graph_break()
        return x

    line = scaled.__code__.co_firstlineno + 1

    report = fp8pass.explain(function, torch.randn(16, 32, requires_grad=True))
    assert report.breaks == []  # Dynamo compiles nothing of a frame that breaks in a loop
    assert [(r.name, r.source, r.guards) for r in report.recompiles] == [
        ("scaled", f"test_explain.py:{line}", ["by == 1"])
    ]
    assert "scaled (test_explain.py:" in str(report) and "was compiled again once: by == 1" in str(report)

    def straight(x: Tensor) -> Tensor:
        x = layer(x)
        torch._dynamo.graph_break()
        return scaled(x, 3)

    report = fp8pass.explain(straight, torch.randn(16, 32), backward=False)
    assert [b.source.split(":")[0] for b in report.breaks] == ["test_explain.py"]
    assert "torch._dynamo.graph_break" in report.breaks[0].reason
    assert report.recompiles == []
    for rows in (16, 8):  # neither another call of explain nor its arguments are a reason
        assert fp8pass.explain(straight, torch.randn(rows, 32), backward=False).recompiles == []
    assert json.loads(json.dumps(report.to_dict()))["breaks"][0]["nbytes"] == 16 * 32 * 4


@pytest.mark.compiled
def test_totals(small: Report) -> None:
    assert (small.flops, small.fp8_flops) == (2 * 16 * 32 * 64 * 2 + 3 * 2 * 16 * 64, 2 * 16 * 32 * 64 * 2)
    assert small.to_dict()["fp8_flops"] == small.fp8_flops
    assert "pictures" not in small.to_dict()


class Checkpointed(nn.Module):
    """A region, both of whose matmuls the backward needs, and a layer outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.narrow, self.head = nn.Linear(32, 64), nn.Linear(64, 1), nn.Linear(1, 48)
        self.reentrant = False

    def region(self, x: Tensor) -> Tensor:
        return self.narrow(self.up(x).sin()).sin()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(checkpoint(self.region, x, use_reentrant=self.reentrant))
        return y


@pytest.mark.compiled
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_what_checkpoints_recompute_is_listed_and_counted_twice(reentrant: bool) -> None:
    """The region is inside of a compiled model, or around compiled code; FLOPs are those that torch counts."""
    x = torch.randn(16, 32, requires_grad=True)
    model = make(Checkpointed)
    model.reentrant = reentrant
    with FlopCounterMode(display=False) as counted:
        model(x).sum().backward()
    inside = fp8pass.explain(model, x)
    assert [g.name for g in inside.gemms if g.recomputed] == ["up", "narrow"]
    assert [g.kind for g in inside.gemms if g.recomputed] == ["output"] * 2
    assert inside.flops == counted.get_total_flops()
    assert inside.fp8_flops == 4 * 2 * 16 * 32 * 64
    assert "rewritten, recomputed" in str(inside) and "declined [1], recomputed" in str(inside)
    assert "its FLOPs count twice" in "".join(inside.footnotes())
    model.region = compiled(model.region)  # type: ignore[method-assign]
    with collect() as around:
        model(x).sum().backward()
    head = 3 * 2 * 16 * 48  # not compiled here
    assert around.flops == counted.get_total_flops() - head


@pytest.mark.compiled
def test_names_are_without_what_compiling_a_part_puts_into_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)))
    model[0] = torch.compile(model[0])  # type: ignore[assignment]
    assert {g.name for g in fp8pass.explain(model, torch.randn(16, 32)).gemms} == {"0.0"}


class Fails(nn.Module):
    """A model with one graph that compiles, and one that does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(32, 32), nn.Linear(32, 16), kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        if self.kind == "shapes":
            return x @ self.second.weight  # 32 by 16
        y: Tensor = self.second(x)
        return y


@pytest.mark.compiled
def test_a_model_that_dynamo_can_not_trace() -> None:
    with pytest.raises(
        fp8pass.Fp8Error, match=r"at test_explain\.py:\d+\. Before the error: 2 of 2 matmuls in FP8"
    ) as failed:
        fp8pass.explain(Fails("shapes"), torch.randn(16, 32))
    report = failed.value.report
    assert report is not None and isinstance(failed.value.__cause__, RuntimeError)
    assert [g.name for g in report.gemms] == ["first", "first"]
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# 32 by 16" in text)
    assert f"test_explain.py:{line}" in report.error
    assert f"compilation ended here: {report.error}" in str(report)
    assert [p.part for p in report.pictures] == ["before", "forward", "backward"]
    assert [b.source.split(":")[0] for b in report.breaks] == ["test_explain.py"]


@pytest.mark.compiled
def test_on_a_terminal(small: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small.show()
    assert capsys.readouterr().out == f"{small}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm-256color")
    small.show()
    drawn = capsys.readouterr().out
    assert "━" in drawn and "rewritten" in drawn and "\x1b[" in drawn
    assert small.summary() in drawn and "[1] N=1: no matrix product" in drawn
    monkeypatch.setitem(sys.modules, "rich.console", None)
    small.show()
    assert capsys.readouterr().out == f"{small}\n"


FACTORIES = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(16, 32)

def broken():
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(32, 64)), torch.randn(16, 32)

def no_tuple():
    return nn.Linear(32, 64)
"""


@pytest.mark.compiled
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "factories_of_explain.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "factories_of_explain:model", "--html", "out.html", "--json", "out.json"]) == 0
    assert "2 of 5 matmuls in FP8" in capsys.readouterr().out
    assert len(json.loads(Path("out.json").read_text())["gemms"]) == 5
    assert "2 of 5 matmuls in FP8" in Path("out.html").read_text()
    assert main(["explain", "factories_of_explain:model", "--forward", "--recipe", "rowwise"]) == 0
    assert "rowwise" in capsys.readouterr().out
    assert main(["explain", "factories_of_explain:broken", "--html", "broken.html"]) == 2
    printed = capsys.readouterr()
    assert "compilation ended here" in printed.out and "fp8pass explain: " in printed.err
    assert "what was known before the error" in Path("broken.html").read_text()
    for spec, said in (
        ("factories_of_explain", "does not name a model or function: write module:function"),
        ("no_such_module:x", "can't be imported: No module named"),
        ("factories_of_explain:no_tuple", "returned Linear: write a function that returns a tuple"),
    ):
        assert main(["explain", spec]) == 2
        assert said in capsys.readouterr().err
    assert main(["explain", "factories_of_explain:model", "--recipe", "delayedd"]) == 2
    assert "delayed" in capsys.readouterr().err


@pytest.mark.compiled
def test_an_op_that_fails_says_why() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return a.relu() + b

    with pytest.raises(
        fp8pass.Fp8Error, match=r"fake tensor call: .*\[16, 48\].*, at test_explain.py:\d+\. Before the error"
    ):
        fp8pass.explain(function, torch.randn(16, 32), torch.randn(16, 48))


@pytest.mark.inductor
@pytest.mark.parametrize("kernels", [False, True])
def test_a_model_that_can_not_be_compiled(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd fails on a user's autograd function; with kernels, Inductor fails on an op that it has to lower."""
    if kernels:
        broken = inductor_lowering.lowerings.copy()

        def lower(*_: Any) -> Any:
            raise NotImplementedError("no such lowering")

        broken[torch.ops.aten.erf.default] = lower
        monkeypatch.setattr(inductor_lowering, "lowerings", broken)
        monkeypatch.setattr("torch._inductor.graph.lowerings", broken)

    class OnlyForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g[:, :3]

    layer, second = nn.Linear(32, 32), nn.Linear(32, 32)

    def function(x: Tensor) -> Tensor:
        x = layer(x)
        torch._dynamo.graph_break()
        if kernels:
            return torch.erf(second(x))
        y: Tensor = OnlyForward.apply(second(x))
        return y

    with pytest.raises(fp8pass.Fp8Error, match="Before the error: ") as failed:
        fp8pass.explain(function, torch.randn(16, 32), kernels=kernels)
    report = failed.value.report
    assert report is not None and failed.value.__cause__ is not None
    assert len(report.rewritten) >= 2
    assert ("no such lowering" in report.error) == kernels
    assert report.to_dict()["error"] == report.error


@pytest.mark.compiled
def test_a_model_on_fake_tensors() -> None:
    """A plan needs no memory for the model; its equal layers are compiled once, as real ones are."""
    with FakeTensorMode():
        model = nn.Sequential(*(Block(4096, 8192) for _ in range(3)))
        report = fp8pass.explain(model, torch.randn(512, 4096), config=fp8pass.Config(strict=True, min_speedup=0))
    assert len(report.rewritten) == len(report.gemms) == 18
    assert not report.faults
