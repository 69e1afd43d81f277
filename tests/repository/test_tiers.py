"""Test the order of the tests themselves: each has one tier, a subject has one file, and fast ones load no compiler."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ORDER, tier_of
from tests.helpers import ROOT

pytestmark = pytest.mark.tools

FILES = sorted((ROOT / "tests").rglob("test_*.py"))
NOT_FOR_FAST_TESTS = ("torch._inductor", "triton", "transformers", "torchao", "lightning", "accelerate", "safetensors")


def marked(*names: str) -> Any:
    """Return a test with these marks."""
    marks = [SimpleNamespace(name=name) for name in names]
    return SimpleNamespace(nodeid="tests/test_a.py::test_b", iter_markers=lambda: iter(marks))


@pytest.mark.parametrize("names", [(), ("variant",), ("passes", "compiled"), ("ranks", "ranks")])
def test_a_test_without_a_tier_or_with_several_is_an_error(names: tuple[str, ...]) -> None:
    with pytest.raises(pytest.UsageError, match="test_b needs one mark of ranks, gpu_code, tools,"):
        tier_of(marked(*names))


def test_the_tier_is_the_mark() -> None:
    assert [tier_of(marked("variant", tier)) for tier in ORDER] == list(ORDER)


def test_a_subject_has_one_file() -> None:
    names = [file.name for file in FILES]
    assert len(names) > 100 and [name for name in set(names) if names.count(name) > 1] == []


def imported(file: Path) -> set[str]:
    """Return the modules that a file imports when it is imported itself."""
    tree = ast.parse(file.read_text())
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    found = [n for n in ast.walk(tree) if n not in inside]
    modules = {n.module or "" for n in found if isinstance(n, ast.ImportFrom)}
    return modules | {a.name for n in found if isinstance(n, ast.Import) for a in n.names}


def test_files_with_fast_tests_do_not_import_the_compiler() -> None:
    fast = [file for file in FILES if "pytest.mark.passes" in file.read_text() and file != Path(__file__)]
    assert len(fast) > 50
    assert [f"{f.name}: {m}" for f in fast for m in sorted(imported(f)) if m.startswith(NOT_FOR_FAST_TESTS)] == []
    assert "torch._inductor" in imported(ROOT / "tests" / "compiler" / "test_order.py")
