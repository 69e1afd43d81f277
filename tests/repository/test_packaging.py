"""Test what the package installs: entry points, public names, files, and which modules import what."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

import fp8pass
from tests.helpers import ROOT

pytestmark = pytest.mark.tools

SOURCES = [*ROOT.glob("fp8pass/**/*.py"), *ROOT.glob("passes/**/*.py")]


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
        "Moments",
        "ScaleState",
        "accumulate",
        "autocast",
        "bisect",
        "calibrate",
        "cast_to_representable",
        "ddp",
        "dequantize",
        "enabled",
        "explain",
        "export_fp8",
        "export_onnx",
        "freeze",
        "fsdp",
        "in_qdq",
        "load_frozen",
        "out_qdq",
        "qdq",
        "quantize",
        "recipes",
        "register_recipe",
        "rewrite",
        "state",
        "stats",
        "train_step",
        "unfreeze",
    ]
    assert all(getattr(fp8pass, name).__doc__ for name in fp8pass.__all__)


def imports(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    return modules | {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}


def torch_names(code: str) -> set[str]:
    """Return what the code imports of torch, and the attributes that it spells out: {"torch.nn.Module", ...}."""
    nodes = list(ast.walk(ast.parse(code)))
    imported = {f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    modules = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    attributes = {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)}
    return {name for name in imported | modules | attributes if re.fullmatch(r"torch(\.\w+)+", name)}


def is_private(name: str) -> bool:
    """Return whether a part of the name begins with an underscore. Operators are public, even `torch._scaled_mm`."""
    _, first, *_ = name.split(".")
    return first != "ops" and not hasattr(torch.ops.aten, first) and re.search(r"\._(?!_)", name) is not None


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("from torch._dynamo import config", True),
        ("from torch.utils import _pytree as pytree", True),
        ("import torch._inductor.ir", True),
        ("print(torch._C._nn.linear(x))", True),
        ("torch.Tensor._make_wrapper_subclass(cls)", True),
        ("from torch.nn import Module; torch.nn.Module.__call__", False),
        ("torch._scaled_mm(a, b); torch.ops._c10d_functional.wait_tensor(x); model._fp8pass", False),
    ],
)
def test_private_names_are_told_from_public_ones(code: str, private: bool) -> None:
    assert any(map(is_private, torch_names(code))) == private


def test_private_torch_names_are_in_one_file() -> None:
    private = {f.name: {name for name in torch_names(f.read_text()) if is_private(name)} for f in SOURCES}
    assert [name for name, found in private.items() if found] == ["_torch.py"]


def test_every_file_of_the_package_is_installed() -> None:
    """setuptools finds Python files by itself, and other files by their list. `.ci/wheel.py` looks into archives."""
    settings = (ROOT / "pyproject.toml").read_text()
    for package, folder in (("fp8pass", "fp8pass"), ('"fp8pass.passes"', "passes")):
        listed = re.search(rf"^{package} = (\[.*\])$", settings, re.MULTILINE)
        others = {f.name for f in (ROOT / folder).iterdir() if f.is_file() and f.suffix not in (".py", ".pyc")}
        assert listed and set(ast.literal_eval(listed[1])) == others
