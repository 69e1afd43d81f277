"""What is installed is what is here."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

import fp8pass

ROOT = Path(__file__).parent.parent
SOURCES = [*ROOT.glob("fp8pass/*.py"), *ROOT.glob("passes/*.py")]


def test_entry_points() -> None:
    (backend,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fp8pass")
    assert callable(backend.load())
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="fp8pass")
    assert callable(script.load())
    assert importlib.metadata.version("fp8pass") == fp8pass.__version__


def test_public_names_have_docstrings() -> None:
    assert sorted(fp8pass.__all__) == [
        "Config",
        "Fp8Error",
        "ScaleState",
        "accumulate",
        "bisect",
        "calibrate",
        "cast_to_representable",
        "dequantize",
        "explain",
        "fsdp",
        "in_qdq",
        "out_qdq",
        "qdq",
        "quantize",
        "recipes",
        "state",
        "stats",
        "train_step",
    ]
    assert all(getattr(fp8pass, name).__doc__ for name in fp8pass.__all__)


def imports(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    return modules | {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}


def test_private_torch_modules_are_named_in_two_files() -> None:
    for file in SOURCES:
        private = {m for m in imports(file) if re.match(r"torch\..*(^|\.)_|torch\._", m)}
        assert not private or file.name in ("_torch.py", "pretend.py"), (file, private)


def test_passes_know_the_frame_and_never_the_backend() -> None:
    for file in ROOT.glob("passes/*.py"):
        assert not imports(file) & {"fp8pass.backend", "fp8pass.pipeline", "fp8pass.explain"}, file
    importers = {f.name for f in ROOT.glob("fp8pass/*.py") if any(m.startswith("fp8pass.passes") for m in imports(f))}
    assert importers == {"pipeline.py"}


def test_every_file_of_the_package_is_installed() -> None:
    """setuptools takes Python files by itself, and others as they are listed."""
    listed = re.search(r"^fp8pass = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed
    others = {f.name for f in (ROOT / "fp8pass").iterdir() if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert {name.strip().strip('"') for name in listed[1].split(",")} == others
