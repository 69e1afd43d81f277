"""Test the rooms of the code: imports between them, few files at the top, and no names that shadow public ones."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import rooms

import fp8pass
from fp8pass.base.names import PACKAGE
from fp8pass.compiler.not_compiled import RUNS_GRAPHS

FLOORS = (
    ("errors", "fields", "node_meta"),
    ("scaling", "versions"),
    ("_torch", "recipes"),
    ("gpu", "inductor", "module_tensors", "names", "quant"),
    ("ddp", "hardware", "options"),
    ("fsdp", "roofline", "states"),
    ("frozen", "fused", "graph"),
    ("report",),
    ("dump", "dynamo"),
    ("faults", "runtime"),
    ("export", "passes.common"),
    ("passes.annotate", "passes.collectives", "passes.kernels", "passes.layers", "passes.rewrite"),
    ("passes.share", "passes.traced"),
    ("passes", "passes.update"),
    ("lowering",),
    ("backend", "calibration", "rewriting"),
    ("inspect", "training_step"),
    ("debug",),
    ("fp8pass",),
    ("demo", "integrations"),
    ("cli",),
)
"""Rooms by floor, from the ground. A room imports only from floors below its own."""
LAZY = {
    ("fp8pass.report.report", "fp8pass.report.html"): "`Report.to_html` is public, and the page is made of reports",
    ("fp8pass.report.report", "fp8pass.report.report_table"): "so is `Report.show`",
    ("fp8pass.report.drawing", "fp8pass.report.graph_view"): "for type checkers: what is drawn is set there",
}
"""Imports within functions, or for type checkers, that close a circle, each with its reason. Any others count like imports at the top."""


def test_a_room_imports_from_floors_below_it() -> None:
    floor = {room: number for number, level in enumerate(FLOORS) for room in level}
    arrows = rooms.between_rooms()
    assert set(arrows) == set(floor)
    assert [f"{a} imports {b}" for a, others in arrows.items() for b in sorted(others) if floor[b] >= floor[a]] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = rooms.imports()
    assert set(LAZY) <= {(i.importer, i.imported) for i in found}
    arrows: dict[str, list[str]] = {}
    for importer, imported, _ in found:
        if (importer, imported) not in LAZY:
            arrows.setdefault(importer, []).append(imported)
    assert rooms.circles(arrows) == []


def test_a_circle_is_found() -> None:
    arrows = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": []}
    assert rooms.circles(arrows) == [["a", "b", "c"]]
    assert rooms.floors({"a": ["b"], "b": ["d"], "c": ["d"], "d": []}) == [["d"], ["b", "c"], ["a"]]


def test_few_files_lie_outside_of_rooms() -> None:
    assert len(list((rooms.ROOT / "fp8pass").glob("*.py"))) <= 21
    assert len(list((rooms.ROOT / "passes").glob("*.py"))) <= 2


FOLDERS = sorted(r for r in {*rooms.between_rooms()} - {"fp8pass", "passes"} if (rooms.ROOT / rooms.folder(r)).is_dir())


@pytest.mark.parametrize("room", FOLDERS)
def test_a_room_says_what_lives_in_it(room: str) -> None:
    """Its `__init__` says so, and holds nothing else."""
    tree = ast.parse((rooms.ROOT / rooms.folder(room) / "__init__.py").read_text())
    said = ast.get_docstring(tree) or ""
    assert len(tree.body) == 1
    assert re.fullmatch(r"[^\n]+\n\nMay import: [^\n]+\nDoes not live here: [^\n]+", said), said


def test_each_room_is_in_the_wheel() -> None:
    """`pyproject.toml` lists packages by hand, as two folders at the top are one package."""
    listed = re.search(r"^packages = \[(.*?)\]", (rooms.ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed
    assert set(re.findall(r'"fp8pass\.(.+)"', listed[1])) == {"passes", *FOLDERS}


def test_no_file_is_named_like_a_public_function() -> None:
    """`fp8pass.state` is a function: nothing could be imported from a folder of that name. passes/ has its own names."""
    functions = {name for name in fp8pass.__all__ if not inspect.ismodule(getattr(fp8pass, name))}
    modules = [module for module in rooms.modules() if not module.startswith("fp8pass.passes.")]
    names = {part for module in modules for part in module.split(".")[1:]}
    assert names & functions == set()


def test_files_that_the_code_names_exist() -> None:
    """Their paths tell frames of fp8pass from the user's; frames of a moved file would be taken for the user's code."""
    assert [path for path in RUNS_GRAPHS if PACKAGE in path and not Path(path).exists()] == []
