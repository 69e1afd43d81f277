"""Test what import-linter does not: few files lie at the top, each folder is installed, no name shadows a public one."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import house
import pytest

import fp8pass
from fp8pass.base.names import _CALLS, PACKAGE
from fp8pass.compiler.not_compiled import RUNS_GRAPHS

pytestmark = pytest.mark.tools


def test_few_files_lie_at_the_top() -> None:
    assert len(list((house.ROOT / "fp8pass").glob("*.py"))) <= 8
    assert len(list((house.ROOT / "passes").glob("*.py"))) <= 1


def test_each_folder_is_in_the_wheel() -> None:
    """`pyproject.toml` lists packages by hand, as two folders at the top are one package."""
    listed = re.search(r"^packages = \[(.*?)\]", (house.ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed
    folders = {name for name, file in house.modules().items() if file.name == "__init__.py"}
    assert set(re.findall(r'"(fp8pass.*)"', listed[1])) == folders


def test_no_file_is_named_like_a_public_function() -> None:
    """`fp8pass.state` is a function: nothing could be imported from a folder of that name. passes/ has its own names."""
    functions = {name for name in fp8pass.__all__ if not inspect.ismodule(getattr(fp8pass, name))}
    modules = [module for module in house.modules() if not module.startswith("fp8pass.passes.")]
    names = {part for module in modules for part in module.split(".")[1:]}
    assert names & functions == set()


def test_files_that_the_code_names_exist() -> None:
    """Their paths tell frames of fp8pass from the user's; frames of a moved file would be taken for the user's code."""
    assert [path for path in (*RUNS_GRAPHS, _CALLS) if PACKAGE in path and not Path(path).exists()] == []


def test_no_class_name_and_no_file_name_is_there_twice() -> None:
    """Except the callbacks of the two frameworks that have callbacks."""
    trees = [ast.parse(file.read_text()) for file in house.modules().values()]
    classes = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, times in classes.items() if times > 1} == {"Fp8Callback"}
    files = Counter(file.name for file in house.modules().values())
    assert {name for name, times in files.items() if times > 1} == {"__init__.py"}
