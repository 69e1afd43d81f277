"""Test `fp8pass env`, which prints what a bug report needs, on this machine and on pretended ones."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import torch

import fp8pass
from fp8pass.base._torch import inductor_config
from fp8pass.base.versions import TESTED
from fp8pass.hardware import TARGETS, sizes
from fp8pass.inspect.cli import main
from tests.helpers.gpus import LABELS, there

pytestmark = pytest.mark.tools

NATIVE = {"delayed", "dynamic", "rowwise", "rowwise_gw_hp"}


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return {name: value} of the lines that the command prints."""
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    column = next(i for i in range(len(lines[0])) if lines[0].startswith(fp8pass.__version__, i))
    assert all(line[column - 2 : column] == "  " for line in lines)  # aligned
    return {line[:column].strip(): line[column:] for line in lines}


def test_it_tells_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys)
    assert found["fp8pass"] == fp8pass.__version__
    assert found["torch"].startswith(torch.__version__) and str(torch.version.git_version)[:12] in found["torch"]
    assert found["tested with"] == f"torch {', '.join(TESTED)}"
    assert found["Python"] == platform.python_version()
    assert torch.backends.cpu.get_cpu_capability() in found["CPU"]
    assert found["C++ compiler"].rpartition(" ")[2][0].isdigit()  # "g++ (Debian 12.2.0-14) 12.2.0"
    assert {"Triton", "system", "C++ compiler", "GPU", "BF16 matmuls", "FP16 matmuls", "FP8 matmuls"} <= set(found)


def test_it_names_no_folder_of_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FP8PASS_DUMP", str(tmp_path))
    monkeypatch.setenv("FP8PASS_RECIPE", "rowwise")
    found = printed(capsys)
    assert (found["FP8PASS_DUMP"], found["FP8PASS_RECIPE"]) == ("a path", "rowwise")
    folders = {str(Path.home()), str(Path(fp8pass.__file__).parent), sys.prefix, str(Path.cwd())}
    assert not any(folder in value for folder in folders for value in found.values())


def test_without_triton_and_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        found = printed(capsys)
    assert found["Triton"] == "none"
    assert found["C++ compiler"] == "none: torch compiles nothing for CPUs; install g++, or set CXX"


def test_on_a_cpu_that_has_no_short_types(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_int8": True})
    found = printed(capsys)
    assert found["BF16 matmuls"] == found["FP16 matmuls"] == "by a reference routine: slow, train in float32"
    assert found["FP8 matmuls"].startswith("in float32: with AMX")
    assert found["CPU"].startswith(f"{platform.machine()}, ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="that of the GPU is printed")
def test_recipes_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8pass.hardware._CPU_SCALES_ROWS", False)
    found = printed(capsys)
    assert (found["GPU"], found["recipes on"]) == ("none", "cpu")
    assert found["delayed"] == "native"
    assert found["rowwise"] == "native, scales of rows applied after the matmul"
    assert found["blockwise"].startswith("dequantized: ") and found["mxfp8"].startswith("dequantized: ")


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("a100", set()),
        ("l40s", NATIVE),
        ("h100", NATIVE | {"blockwise"}),
        ("b200", NATIVE | {"mxfp8"}),
        ("rtx5090", NATIVE | {"mxfp8"}),
    ],
)
def test_recipes_on_gpus(
    name: str, native: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = TARGETS[name]
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr("fp8pass.hardware.pretended_device", torch.device("cuda", 0))
    with there(tmp_path, name, available=True, count=8):
        found = printed(capsys)
    assert found["torch"].endswith("CUDA 12.9")
    assert found["GPU"] == f"8 x {LABELS[name]}, {target.sm}, {sizes(target).memory >> 30} GiB"
    assert {recipe for recipe in (*NATIVE, "blockwise", "mxfp8") if found[recipe].startswith("native")} == native
    assert found["delayed"].startswith("declined: ") == (name == "a100")
