"""Test a torch that is newer or older than the tested versions, or lacks a name."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import sys
from collections import Counter
from unittest import mock

import pytest
import torch

from fp8pass.base import versions
from fp8pass.base.versions import required_names
from tests.helpers import ROOT
from tests.helpers.asked import ask

pytestmark = pytest.mark.tools

NAMES = ROOT / "fp8pass" / "base" / "_torch.py"
(UP_FRONT,) = (node for node in ast.parse(NAMES.read_text()).body if isinstance(node, ast.With))
IMPORTED = [(n.module, a.name) for n in UP_FRONT.body if isinstance(n, ast.ImportFrom) for a in n.names]
WAYS_IN = {
    "package": "import fp8pass",
    "module": "from fp8pass.base.scaling import quantize",
    "backend": """
import torch
model = torch.compile(torch.nn.Linear(16, 16), backend="fp8pass", options={"lowering": "eager", "strict": True})
model(torch.ones(16, 16)).sum().backward()
""",
}


def asked(statements: str, version: str = "2.13.0", gone: str = "") -> tuple[str, list[list[str]]]:
    found = ask("tests.helpers.other_torch", statements, version, gone)
    return found["error"], found["warnings"]


def test_every_private_name_is_used() -> None:
    """Ruff can't tell: it takes imports of this file for names that others import."""
    files = [
        NAMES,
        *(f for top in ("fp8pass", "passes", "tests") for f in sorted((ROOT / top).rglob("*.py")) if f != NAMES),
    ]
    words = Counter(word for file in files for word in re.findall(r"\w+", file.read_text()))
    tree = ast.parse(NAMES.read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and str(n.module).startswith("torch")]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    assert len(names) > 100
    assert [name for name in sorted(names) if words[name] < 2] == []


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_newer_torch_is_warned_of_once_at_the_users_line_and_works(way: str) -> None:
    text = (
        "fp8pass is tested with torch 2.11 to 2.15; this is 2.16.0.dev20261120+cu130. "
        "If something fails, install a tested one: pip install 'torch==2.15.*'"
    )
    assert asked(WAYS_IN[way], "2.16.0.dev20261120+cu130") == ("", [["user.py", text]])


@pytest.mark.parametrize("way", WAYS_IN)
def test_an_older_torch_is_an_error_that_says_what_to_install(way: str) -> None:
    error = "fp8pass needs torch 2.11 or newer; this is 2.10.1+cu126. Install one: pip install 'torch==2.15.*'"
    assert asked(WAYS_IN[way], "2.10.1+cu126") == (error, [])


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_name_that_is_gone_is_an_error_that_names_it(way: str) -> None:
    error = (
        "fp8pass needs torch._inductor.graph.GraphLowering, which torch 2.13.0 does not have. "
        "It is tested with torch 2.11 to 2.15: pip install 'torch==2.15.*'"
    )
    assert asked(WAYS_IN[way], gone="torch._inductor.graph.GraphLowering") == (error, [])


@pytest.mark.parametrize("version", [*versions.TESTED, "2.11.0a0+nv26.03", "2.14.1", "2.15.3+cu130"])
def test_tested_versions_and_those_between_say_nothing(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    versions.check_version()  # warnings are errors in tests


def without(module: str, name: str) -> mock._patch_dict:
    """Return a stand-in for a module of torch that lacks a name."""
    whole = vars(sys.modules[module])
    less = type(sys)(module)
    vars(less).update({k: v for k, v in whole.items() if k != name})
    submodule = f"{module}.{name}"
    hidden = {submodule: None} if submodule in sys.modules else {}  # if imported, Python finds it by itself
    return mock.patch.dict(sys.modules, {module: less, **hidden})  # type: ignore[dict-item]


@pytest.mark.parametrize(("module", "name"), IMPORTED)
def test_any_name_that_is_imported_may_be_gone(module: str, name: str) -> None:
    with without(module, name), pytest.raises(ImportError, match=rf"needs {re.escape(module)}\.{name}, which torch"):
        runpy.run_path(str(NAMES))


def test_attributes_and_whole_modules_may_be_gone() -> None:
    with pytest.raises(ImportError, match=r"needs torch\._C\._gone, which torch"), required_names():
        torch._C._gone  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match=r"needs torch\._gone, which torch"), required_names():
        importlib.import_module("torch._gone.still")


def test_other_errors_pass() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'absent'"), required_names():
        importlib.import_module("absent")
    with pytest.raises(AttributeError, match="'int' object has no attribute 'x'"), required_names():
        (1).x  # type: ignore[attr-defined]  # noqa: B018


def test_the_files_that_name_versions_agree() -> None:
    assert f'dependencies = ["torch>={versions.OLDEST}"]' in (ROOT / "pyproject.toml").read_text()
    *others, last = versions.TESTED
    assert f"runs on torch {', '.join(others)} and {last}" in (ROOT / "docs" / "versions.md").read_text()
    assert f"torch {versions.OLDEST}" in (ROOT / "README.md").read_text()
