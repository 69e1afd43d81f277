"""`fp8pass demo`, at a length that a test can afford."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8pass import demo
from fp8pass.cli import main
from fp8pass.report import Gemm, Report


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 64, "LAYERS": 1, "CONTEXT": 32, "BATCH": 4, "VALIDATION_BATCHES": 2}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setenv("FP8PASS_LOWERING", "eager")  # 30 kernels in C++ are another minute
    assert main(["demo", "--steps", "5", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "15 of 15 matmuls in FP8, 100% of matmul FLOPs" in printed
    assert "validation loss   BF16 5." in printed
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def run(name: str, validation: float) -> demo.Run:
    model = torch.nn.Linear(1, 1)
    return demo.Run(name, model, model, torch.optim.SGD(model.parameters()), validation=validation)


@pytest.mark.parametrize(
    ("bf16", "fp8", "status", "message"),
    [
        (2.0, 2.019, "rewritten", ""),
        (2.0, 2.021, "rewritten", "more than 1% above"),
        (2.0, float("nan"), "rewritten", "more than 1% above"),
        (2.0, 2.0, "declined", "no matmul runs in FP8"),
    ],
)
def test_the_exit_status(
    bf16: float, fp8: float, status: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gemm = Gemm("output", "", 1, 1, 1, ("", "", ""), "", status=status)
    assert demo.verdict([run("BF16", bf16), run("FP8", fp8)], Report([gemm]), Path("out")) == bool(message)
    assert message in capsys.readouterr().out


def test_text_is_split_by_file() -> None:
    text = demo.load_text(limit=1 << 20)
    assert len(text.train) > 10 * len(text.validation) > 10_000
    assert text.train.dtype == torch.uint8


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--steps", "0"])
    assert stopped.value.code == 2
    assert "argument --steps: must be a number, 1 at least" in capsys.readouterr().err
