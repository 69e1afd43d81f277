"""Test bench/whole_models.py without a GPU: one tiny model through its processes, and what a row says of made-up runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_models

pytestmark = pytest.mark.tools

Row = dict[str, Any]
ENVIRONMENT = dict.fromkeys(whole_models.KEPT, "1") | {"gpu": "NVIDIA H200", "dry_run": False}
MEASURED = {"status": "ok", "work": "gpt2", "ms": 10.0, "tokens_s": 1000, "host_ms": 5.0, "loss": [9.0, 8.0]}


def finished(who: str, base: Row | None = None, **figures: Any) -> Row:
    """Return the row of a run with these figures, compared with BF16's."""
    return whole_models.finished({**MEASURED, "who": who, **figures}, ENVIRONMENT, base)


@pytest.mark.gate
@pytest.mark.parametrize("who", ["delayed", "t_delayed"])
def test_a_tiny_model_is_trained(who: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--toy", "--device", "cpu", "--models", "gpt2_50257", "--who", who)
    limit = ("--seconds-to-compile", "900", "--out", str(out))
    command = [sys.executable, whole_models.__file__, *options, *limit]
    environment = {**os.environ, "FP8PASS_LOWERING": "eager"}  # a figure needs no kernel of ours
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[Row] = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(row["work"], row["who"]) for row in rows] == [("gpt2_50257", "bf16"), ("gpt2_50257", who)]
    assert whole_models.printed(rows) in done.stdout
    base, *ours = rows
    for row in rows:
        assert row["status"] == "ok" and row["mark"] == "" and row["toy"], row
        assert row["torch"] == str(torch.__version__) and row["date"] and row["transformers"]
        assert row["gpu"] is row["peak_GB"] is row["host_ms"] is None
        assert row["tokens_s"] > 0 and row["compile_s"] > 0
        assert row["speedup"] == pytest.approx(row["tokens_s"] / base["tokens_s"], abs=1e-3)
        assert row["steps"] == base["steps"] and row["loss_bf16"] == base["loss"]
        assert row["loss"] == pytest.approx(base["loss"], abs=0.02)
    assert base["fp8_share"] is None and [row["fp8_share"] for row in ours] == [1]


@pytest.mark.parametrize(
    ("who", "figures", "mark"),
    [
        ("delayed", {}, ""),
        ("delayed", {"host_ms": 8.99}, ""),
        ("delayed", {"host_ms": 9.0}, "host-bound: 9.0 ms"),
        ("bf16", {"host_ms": 12.34}, "host-bound: 12.3 ms"),
        ("delayed", {"tokens_s": 990}, "a fault of the plan"),
        ("t_delayed", {"tokens_s": 990}, "a fault of the plan"),
        ("delayed", {"tokens_s": 990, "host_ms": 9.5}, "host-bound: 9.5 ms"),
        ("ao_tensorwise", {"tokens_s": 990, "converted": 28}, ""),
        ("ao_tensorwise", {"tokens_s": 1010, "converted": 0}, "nothing converted"),
        ("ao_tensorwise", {"host_ms": 9.1, "converted": 0}, "nothing converted, host-bound: 9.1 ms"),
    ],
)
def test_marks(who: str, figures: Row, mark: str) -> None:
    row = finished(who, finished("bf16"), **figures)
    assert row["mark"] == mark and whole_models.cells(row)[-1] == mark


def test_a_row_is_compared_with_bf16_if_that_was_measured() -> None:
    base = finished("bf16", loss=[9.0, 7.5])
    assert (base["speedup"], base["loss_bf16"]) == (1, 7.5)
    row = finished("delayed", base, tokens_s=1500)
    assert (row["speedup"], row["loss"], row["loss_bf16"]) == (1.5, 8.0, 7.5)
    alone = finished("delayed", tokens_s=1)
    assert alone["speedup"] is alone["loss_bf16"] is None and alone["mark"] == ""


def test_what_has_not_run_says_why() -> None:
    why = "skipped: No module named 'torchao'"
    row = whole_models.finished({"work": "gpt2", "who": "ao_tensorwise", "status": why}, ENVIRONMENT, finished("bf16"))
    assert all(row[name] is None for name in whole_models.FIGURES) and row["mark"] == ""
    text = whole_models.printed([finished("bf16"), row]).splitlines()[-1]
    assert text == f"| GPT-2, 124M | torchao tensorwise |  |  |  |  |  |  |  |  |  | {why} |"


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        whole_models.main(["--device", "cpu"])
    assert "on a CPU there is nothing to measure: add --toy for a dry run" in capsys.readouterr().err
