"""Test files that earlier code wrote, as this code reads them: a checkpoint, and a report's fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.golden.make import STEPS, Run, report
from tests.helpers import ROOT

pytestmark = pytest.mark.tools

GOLDEN = ROOT / "tests" / "golden"


def described(value: Any) -> Any:
    """Return keys, in order, with shape and dtype of tensors, and other values."""
    if isinstance(value, dict):
        return [(key, described(v)) for key, v in value.items()]
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested dicts, in order."""
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("commit", ["2b879f7"])
def test_a_run_goes_on_from_an_earlier_checkpoint(commit: str) -> None:
    """Keys are the same, in order; the numbers are close to those of a run of today, and so are the next losses."""
    saved = torch.load(GOLDEN / f"checkpoint_{commit}.pt", weights_only=True)
    losses = saved.pop("losses")
    today = Run()
    assert today.train(range(STEPS)) == pytest.approx(losses, rel=1e-3)
    made = today.checkpoint()
    assert described(made) == described(saved)
    for now, then in zip(tensors(made), tensors(saved), strict=True):
        torch.testing.assert_close(now.float(), then.float(), rtol=0.1, atol=2e-3)  # CPUs differ in the last bits
    resumed = Run()
    resumed.load(saved)
    assert resumed.train(range(STEPS, STEPS + 2)) == pytest.approx(today.train(range(STEPS, STEPS + 2)), rel=1e-3)


def test_a_report_is_what_it_was() -> None:
    """Every field of `explain`'s report is there, in order, and each field of a row of `stats`."""
    then, now = json.loads((GOLDEN / "report.json").read_text()), report()
    assert json.dumps(now["explain"], indent=1) == json.dumps(then["explain"], indent=1)
    assert [list(row) for row in now["stats"]] == [list(row) for row in then["stats"]]
