"""Test that each field of the three objects of an instance's state is written in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import house
import pytest

pytestmark = pytest.mark.tools

STATES = house.ROOT / "fp8pass" / "states"
CLASSES = {"InstanceState": "slots.py", "StepTracker": "step_tracker.py", "ReductionState": "reduction_state.py"}
FILLED_ELSEWHERE = {
    "derived": {"slots.py", "prequantized.py", "weight_cache.py"},
    "counted": {"monitor_inputs.py", "snapshot.py"},
}
"""Fields of `InstanceState` that inputs of graphs fill: the class only makes them, and empties them."""


def fields(name: str) -> set[str]:
    tree = ast.parse((STATES / CLASSES[name]).read_text())
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def written(node: ast.AST, of_class: str = "") -> Iterator[tuple[str, str]]:
    """Yield attributes that are assigned to, with the class whose `self` they are of, "" for any other object."""
    if isinstance(node, ast.ClassDef):
        of_class = node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else ():
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            while isinstance(part, ast.Subscript):
                part = part.value
            if isinstance(part, ast.Attribute):
                is_own = isinstance(part.value, ast.Name) and part.value.id == "self"
                yield part.attr, of_class if is_own else ""
    for child in ast.iter_child_nodes(node):
        yield from written(child, of_class)


def writers(name: str) -> dict[str, set[str]]:
    """Return the files that write each field, whatever they call the object."""
    found: dict[str, set[str]] = {field: set() for field in fields(name)}
    for file in (f for f in house.modules().values() if f.parts[len(house.ROOT.parts)] == "fp8pass"):
        for attribute, of_class in written(ast.parse(file.read_text())):
            if attribute in found and of_class in ("", name):
                found[attribute].add(file.name)
    return found


def test_each_field_is_written_in_one_file() -> None:
    for name, file in CLASSES.items():
        for field, by in writers(name).items():
            assert by <= FILLED_ELSEWHERE.get(field, {file}), f"{name}.{field} is written in {sorted(by)}"


def test_what_counts_as_writing() -> None:
    code = "class A:\n    def f(self):\n        self.a += 1\n        x.b, y.c[0] = 1, 2\n"
    assert list(written(ast.parse(code))) == [("a", "A"), ("b", ""), ("c", "")]


def test_fields_are_few() -> None:
    assert max(len(fields(name)) for name in CLASSES) <= 20
