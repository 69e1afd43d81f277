"""Test `fp8pass demo` with few steps and small models."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8pass.base._torch import inductor_config
from fp8pass.graph.verdict import Gemm
from fp8pass.inspect import demo
from fp8pass.inspect import demo_output as demo_output
from fp8pass.inspect.cli import main
from fp8pass.report.report import Report
from tests.helpers import torchrun

pytestmark = [pytest.mark.tools, pytest.mark.xdist_group("demo")]

STEPS = 3
"""The number of steps: the first two compile, the third does not."""
SIZES = {"WIDTH": 64, "LAYERS": 1, "CONTEXT": 32, "BATCH": 4, "VALIDATION_BATCHES": 2}
LOSSES = re.compile(r"validation loss +BF16 (5\.\d+) +FP8 (5\.\d+)")
REWRITTEN, DECLINED = (Gemm("output", "", 1, 1, 1, ("", "", ""), "", status=s) for s in ("rewritten", "declined"))


def small(patch: pytest.MonkeyPatch, has_bf16: bool = True) -> None:
    """Make models small, without kernels, whose C++ takes a minute to compile. BF16 is slow on a CPU without it."""
    for name, value in SIZES.items():
        patch.setattr(demo, name, value)
    patch.setenv("FP8PASS_LOWERING", "eager")
    patch.setattr(demo, "multiplies_bf16", lambda: (has_bf16, "the test says so"))


@functools.cache
def run_alone() -> tuple[int, str, Path]:
    """Run the demo in this process; return the exit status, what was printed, and the folder."""
    out, printed = Path(tempfile.mkdtemp()), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        small(patch)
        patch.setattr(demo_output, "EVERY", 0.1)
        return main(["demo", "--steps", str(STEPS), "--out", str(out)]), printed.getvalue(), out


def test_a_short_run_says_what_it_does_and_ends_with_what_comes_next() -> None:
    status, printed, out = run_alone()
    assert status == 0
    assert printed.startswith(f"BF16 against FP8, recipe delayed, torch {torch.__version__}, cpu. BF16: the test says")
    assert "15 of 15 matmuls in FP8, 100% of matmul FLOPs" in printed
    for title in ("fp8pass.explain", "steps 1 and 2, which compile", "training", "validation on 2"):
        assert re.search(rf"^{title}.* \.\.\.$", printed, re.MULTILINE), title
        assert re.search(rf"^{title}.*: \d+ s$", printed, re.MULTILINE), title
    assert re.search(r"^  0 s$", printed, re.MULTILINE)  # the thread prints this while the demo compiles
    assert LOSSES.search(printed)
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert [f.name for f in out.iterdir()] == ["loss.png"]
    last = printed.splitlines()[-3:]
    assert last[0] == f"loss curves       {out / 'loss.png'}"
    assert [line[:18].strip() for line in last[1:]] == ["total time", "next"]


@pytest.mark.variant
def test_two_ranks_have_the_losses_of_one_process(tmp_path: Path) -> None:
    result = torchrun.run(2, "-m", "tests.inspect.test_demo", str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("15 of 15 matmuls in FP8") == result.stdout.count("validation loss") == 1
    assert "will be ignored" not in result.stderr  # an optimizer opens a range for the profiler
    assert (tmp_path / "loss.png").exists()
    assert [(tmp_path / f"precision.{rank}").read_text() for rank in range(2)] == ["torch.bfloat16"] * 2
    alone, together = (LOSSES.search(printed) for printed in (run_alone()[1], result.stdout))
    assert alone and together
    for one, two in zip(alone.groups(), together.groups(), strict=True):
        assert float(two) == pytest.approx(float(one), abs=5e-3)


def new_run(name: str, *_: Any, validation: float = float("nan"), **__: Any) -> demo.DemoRun:
    model = torch.nn.Linear(1, 1)
    return demo.DemoRun(name, model, model, torch.optim.SGD(model.parameters()), validation=validation)


@pytest.mark.parametrize(
    ("bf16", "fp8", "gemm", "message"),
    [
        (2.0, 2.019, REWRITTEN, ""),
        (2.0, 2.021, REWRITTEN, "more than 1% above BF16's"),
        (2.0, float("nan"), REWRITTEN, "more than 1% above BF16's"),
        (2.0, 2.0, DECLINED, "no matmul runs in FP8"),
    ],
)
def test_the_exit_status(bf16: float, fp8: float, gemm: Gemm, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [new_run("BF16", validation=bf16), new_run("FP8", validation=fp8)]
    assert demo.verdict(runs, Report([gemm])) == bool(message)
    assert message in capsys.readouterr().out


def test_text_is_split_by_file() -> None:
    text = demo.load_text(limit=1 << 20)
    assert len(text.train) > 10 * len(text.validation) > 10_000
    assert text.train.dtype == torch.uint8


@pytest.mark.parametrize(
    ("says", "milliseconds", "chosen"),
    [(True, (0.1, 0.3), torch.bfloat16), (False, (0.1, 0.3), torch.float32), (True, (14, 0.3), torch.float32)],
)
def test_the_precision_is_what_torch_says_and_a_matmul_confirms(
    says: bool, milliseconds: tuple[float, float], chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    bf16, fp32 = milliseconds
    seconds = {torch.bfloat16: bf16 / 1e3, torch.float32: fp32 / 1e3}
    monkeypatch.setattr(demo, "reference_dtypes", lambda: () if says else (torch.bfloat16,))
    monkeypatch.setattr(demo, "_seconds_of_matmul", seconds.get)
    dtype, why = demo.choose_precision("cpu")
    assert dtype == chosen
    assert f"{bf16} ms in BF16, {fp32} ms in FP32" in why
    assert ("only a reference routine" in why) == (not says)


def test_the_choice_of_precision_leaves_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    demo.choose_precision("cpu")
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_model_computes_in_the_precision_that_was_chosen(dtype: torch.dtype) -> None:
    seen, layer = [], torch.nn.Linear(8, 256)

    def model(tokens: Tensor) -> Tensor:
        logits: Tensor = layer(tokens.float())
        seen.append(logits.dtype)
        return logits

    loss = demo.loss_of(model, torch.zeros(2, 4, 8, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long), dtype)
    assert seen == [dtype] and loss.dtype == torch.float32


def stop_in(step: int, patch: pytest.MonkeyPatch) -> None:
    """Make models train without computing, until somebody types Ctrl-C in the FP8 model's step."""

    def taken(run: demo.DemoRun, *_: Any) -> None:
        if run.name == "FP8" and len(run.losses) == step:
            raise KeyboardInterrupt
        run.losses.append(3.0)

    small(patch, has_bf16=False)
    patch.setattr(demo, "explain", lambda *_: Report([REWRITTEN]))
    patch.setattr(demo, "new_run", new_run)
    patch.setattr(demo.DemoRun, "step", taken)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_ctrl_c_keeps_the_curve_so_far(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_in(step, monkeypatch)
    assert main(["demo", "--steps", "9", "--out", str(tmp_path)]) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"stopped after {step} of 9 steps" + (f"; the losses so far: {tmp_path}/loss.png" if step else "")
    assert [f.name for f in tmp_path.iterdir()] == (["loss.png"] if step else [])


def test_names_follow_the_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_in(1, monkeypatch)
    main(["demo", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.startswith("FP32 against FP8") and "FP32 is eager PyTorch" in printed and "BF16" not in printed


def test_lines_are_not_held_back_in_a_pipe() -> None:
    end, begin = os.pipe()
    with open(begin, "w") as pipe, contextlib.redirect_stdout(pipe):
        demo_output.say("now")
        assert os.read(end, 100) == b"now\n"
    os.close(end)


def test_where_there_is_no_terminal_a_line_says_losses_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_output, "EVERY", 0.02)
    with demo_output.phase("training", range(2, 10)) as show:
        show(6, "FP8 3.1")
        time.sleep(0.1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training ..." and re.fullmatch(r"training: \d s", lines[-1])
    assert re.fullmatch(r"  step 6 of 10   FP8 3\.1   0 s left", lines[1])
    assert demo_output._state(20.0, 6, "FP8 3.1", range(2, 10)) == "step 6 of 10   FP8 3.1   20 s left"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_a_bar_says_losses_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with contextlib.redirect_stdout(Terminal()) as terminal:
        with demo_output.phase("training", range(2, 10)) as show:
            show(6, "FP8 3.1")
            time.sleep(0.15)
        with demo_output.phase("compiling"):
            pass
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert re.search(r"training .* 6/10 .*left FP8 3\.1", shown)
    assert "━" in shown and re.search(r"\btraining: \d s\n", shown) and re.search(r"\bcompiling: \d s\n", shown)


def says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the line, after "fp8pass demo: ", of a demo that ends before it makes a model."""
    monkeypatch.setattr(demo, "load_text", None)  # not callable: the demo ends before it loads text
    assert main(["demo", *arguments]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    start, _, line = printed.err.partition(": ")
    assert start == "fp8pass demo" and line.endswith("\n") and line.count("\n") == 1
    return line.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "fp9"), r"--recipe fp9: .*delayed.*"),
        (("--device", "tpu"), "--device tpu: give cpu or cuda"),
        (("--device", "cuda:99"), "--device cuda:99: torch .* sees no such GPU; leave --device out for the CPU"),
        (("--out", "/dev/null/x"), r"--out /dev/null/x: can't be written \(Not a directory\); name a folder that can"),
        (("--out", "/dev/full"), r"--out /dev/full: can't be written \(File exists\); name a folder that can"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tempfile.mkdtemp())
    assert re.fullmatch(message, says(monkeypatch, capsys, *arguments))
    assert not list(Path().iterdir())


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_without_a_package(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    line = says(monkeypatch, capsys, "--out", str(tmp_path / "out"))
    assert line == f"{package} not installed: pip install 'fp8pass[demo]'"
    assert not list(tmp_path.iterdir())


def test_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with inductor_config.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        line = says(monkeypatch, capsys, "--out", str(tmp_path / "out"))
    assert line == "no C++ compiler, which torch.compile needs: install g++, or name one in CXX"
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    line = says(monkeypatch, capsys, "--out", str(tmp_path / "out"))
    assert line == "no Python.h in /nowhere, which torch.compile needs: install the package python3-dev"
    assert not list(tmp_path.iterdir())


def test_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    usage = shutil.disk_usage(tmp_path)
    temporary = tempfile.gettempdir()
    for full, needs, variable in ((f"{tmp_path}/cache", 64, "TORCHINDUCTOR_CACHE_DIR"), (temporary, 256, "TMPDIR")):
        with monkeypatch.context() as patch:
            patch.setattr(
                shutil, "disk_usage", lambda of, full=full: usage._replace(free=(3 if of == full else 999) << 20)
            )
            line = says(patch, capsys, "--out", str(tmp_path / "out"))
        assert line.startswith(
            f"3 MiB are free in {full}, and compiling needs {needs}: free some, or set {variable} to"
        )
    (tmp_path / "loss.png.part").symlink_to("/dev/full")
    line = says(monkeypatch, capsys, "--out", str(tmp_path))
    assert line == f"--out {tmp_path}: can't be written (No space left on device); name a folder that can"
    assert [f.name for f in tmp_path.iterdir()] == ["cache"]


def test_a_disk_that_fills_while_it_trains_leaves_the_old_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_in(4, monkeypatch)
    (tmp_path / "loss.png").write_text("old")

    def fill(*_: Any) -> Report:
        (tmp_path / "loss.png.part").symlink_to("/dev/full")
        return Report([REWRITTEN])

    monkeypatch.setattr(demo, "explain", fill)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "loss.png can't be written (No space left on device)" in capsys.readouterr().err
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("loss.png", "old")]


def test_ranks_that_cannot_have_equal_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    line = says(monkeypatch, capsys, "--out", str(tmp_path))
    assert line == "3 ranks can't have equal parts of batches of 16; start 2, 4, 8 or 16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["demo", "--steps", "0"],
            "fp8pass demo: argument --steps: must be a number, 1 at least; see fp8pass demo --help",
        ),
        (["demo", "--stepz"], "fp8pass: unrecognized arguments: --stepz; see fp8pass --help"),
    ],
)
def test_wrong_flags(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"


def on_a_rank(out: Path) -> int:
    """Run the demo as a rank. Ranks by themselves would choose unlike precisions; each writes down the one it got."""
    rank, choose, patch = os.environ["RANK"], demo.choose_precision, pytest.MonkeyPatch()

    def noted(device: str) -> tuple[torch.dtype, str]:
        chosen = choose(device)
        (out / f"precision.{rank}").write_text(str(chosen[0]))
        return chosen

    small(patch, has_bf16=rank == "0")
    patch.setattr(demo, "choose_precision", noted)
    return main(["demo", "--steps", str(STEPS), "--out", str(out)])


if __name__ == "__main__":
    sys.exit(on_a_rank(Path(sys.argv[1])))
