"""`fp8pass.explain` and the report that it returns."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from tests.harness import compiled, expect_text
from tests.models import Transformer, make


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.dropout(self.norm(self.up(x)), 0.5, train=True)
        y: Tensor = self.head(hidden)
        return y


def test_the_table() -> None:
    report = fp8pass.explain(Small(), torch.randn(16, 32))
    expect_text(
        str(report),
        """\
matmul  gemm         M x K x N     dtypes              scaling  status        source
------------------------------------------------------------------------------------------------
up      output       16 x 32 x 64  e4m3 @ e4m3 -> f32  delayed  rewritten     test_explain.py:24
head    output       16 x 64 x 1   f32 @ f32 -> f32             declined [1]  test_explain.py:25
head    grad_input   16 x 1 x 64   f32 @ f32 -> f32             declined [1]  test_explain.py:25
head    grad_weight  1 x 16 x 64   f32 @ f32 -> f32             declined [1]  test_explain.py:25
up      grad_weight  64 x 16 x 32  e5m2 @ e4m3 -> f32  delayed  rewritten     test_explain.py:24

[1] N=1: no matrix product, each operand element is used once

2 of 5 matmuls in FP8, 96% of matmul FLOPs (1 graph); declined: 3 vector
""",
    )


def test_rows_and_totals() -> None:
    report = fp8pass.explain(make(Transformer), torch.randn(2, 8, 32, requires_grad=True))
    assert len(report.gemms) == len(report.rewritten) == 2 * 6 * 3
    assert report.summary() == "36 of 36 matmuls in FP8, 100% of matmul FLOPs (1 graph)"
    row = report.gemms[0]
    assert (row.name, row.kind, row.M, row.K, row.N, row.status, row.reason) == (
        "layers.0.0.q",
        "output",
        16,
        32,
        32,
        "rewritten",
        "",
    )
    assert row.source.startswith("models.py:")
    assert json.loads(json.dumps(report.to_dict()))["gemms"][0]["name"] == "layers.0.0.q"


def test_nothing_of_the_users_changes() -> None:
    model, x = Small(), torch.randn(16, 32, requires_grad=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    fp8pass.explain(model, x)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    assert fp8pass.state(model).state_dict() == {}
    assert model.training


def test_forward_only() -> None:
    report = fp8pass.explain(make(), torch.randn(16, 32), backward=False)
    assert [g.kind for g in report.gemms] == ["output", "output"]


def test_compiled_models_and_graph_breaks() -> None:
    model = make()

    def step(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        out: Tensor = model(y).sum()
        return out

    assert fp8pass.explain(torch.compile(model), torch.randn(16, 32)).graphs == 1
    assert fp8pass.explain(torch.compile(step), torch.randn(16, 32)).graphs == 2


@torch._dynamo.config.patch(recompile_limit=2)
def test_many_times() -> None:
    """More often than Dynamo's limit of recompilations."""
    model = make()
    for rows in range(8, 12):
        assert len(fp8pass.explain(model, torch.randn(rows, 32)).gemms) == 6


def test_nothing_compiled() -> None:
    report = fp8pass.explain(lambda x: 3, torch.randn(4, 4))
    assert "Dynamo compiled nothing" in str(report)


def test_strict() -> None:
    config = fp8pass.Config(recipe=None, strict=True)
    with pytest.raises(Exception, match="no GPU has a kernel"):
        fp8pass.explain(lambda a: a.float() @ a.float(), torch.ones(16, 16).to(torch.float8_e5m2), config=config)


def test_branches_are_graphs_of_their_own() -> None:
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


def test_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fp8pass"):
        fp8pass.explain(Small(), torch.randn(16, 32))
    lines = [r.getMessage() for r in caplog.records if r.name == "fp8pass.report"]
    assert any(
        line.startswith("up output [16,32,64] (test_explain.py:") and line.endswith("rewritten ") for line in lines
    )
    assert any("declined N=1: no matrix product" in line for line in lines)
    assert any("2 of 5 matmuls in FP8" in line for line in lines)


def test_a_schedule_is_explained_as_it_ends() -> None:
    schedule = fp8pass.recipes.Schedule({0: None, 5: "delayed", 9: {"up": "rowwise"}})
    report = fp8pass.explain(make(), torch.randn(16, 32), config=fp8pass.Config(recipe=schedule))
    assert {(g.name, g.scaling) for g in report.gemms} == {("up", "rowwise"), ("down", "")}
    assert report.notes == ["the verdicts are those of the schedule from step 9 on"]
