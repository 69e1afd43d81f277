"""`fp8pass demo`, at a length that a test can afford."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fp8pass import demo
from fp8pass.cli import main
from fp8pass.report import Gemm, Report
from tests import torchrun

STEPS = 3
"""The second compiles again, for a learning rate that changes; the third does not."""
SIZES = {"WIDTH": 64, "LAYERS": 1, "CONTEXT": 32, "BATCH": 4, "VALIDATION_BATCHES": 2}
LOSSES = re.compile(r"validation loss +BF16 (5\.\d+) +FP8 (5\.\d+)")


def small(patch: pytest.MonkeyPatch) -> None:
    """Small models, and no generated kernels for either: 60 in C++ are two minutes."""
    for name, value in SIZES.items():
        patch.setattr(demo, name, value)
    patch.setenv("FP8PASS_LOWERING", "eager")
    patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # where no backend is named


@functools.cache
def run_alone() -> tuple[int, str, Path]:
    """In this process: the exit status, what was printed, and the folder."""
    out, printed = Path(tempfile.mkdtemp()), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        small(patch)
        return main(["demo", "--steps", str(STEPS), "--out", str(out)]), printed.getvalue(), out


def test_a_short_run() -> None:
    status, printed, out = run_alone()
    assert status == 0
    assert "15 of 15 matmuls in FP8, 100% of matmul FLOPs" in printed
    assert LOSSES.search(printed)
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_two_ranks_have_the_losses_of_one_process(tmp_path: Path) -> None:
    result = torchrun.run(2, "-m", "tests.test_demo", str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("15 of 15 matmuls in FP8") == result.stdout.count("validation loss") == 1
    assert (tmp_path / "loss.png").exists()
    alone, together = (LOSSES.search(printed) for printed in (run_alone()[1], result.stdout))
    assert alone and together
    for one, two in zip(alone.groups(), together.groups(), strict=True):
        assert float(two) == pytest.approx(float(one), abs=5e-3)


def test_ranks_that_cannot_have_equal_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="fp8pass demo: 3 ranks can't have equal parts of batches of 16"):
        main(["demo", "--out", str(tmp_path)])


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


if __name__ == "__main__":  # on each rank
    small(pytest.MonkeyPatch())
    sys.exit(main(["demo", "--steps", str(STEPS), "--out", sys.argv[1]]))
