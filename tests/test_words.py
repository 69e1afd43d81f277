"""Plain words: a docstring begins with what a function does, and order and time are not told as space."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import rooms

OPENINGS = {"What": 13, "Of": 6, "Whether": 2, "And": 0, "Not": 0, "But": 0, "See the function": 0}
"""How the first line of a function's docstring, or of a pass's, may not begin, for a verb is missing; and how many still
do. A count only falls: whoever mends one lowers it, until all are 0."""
IDIOMS = {"behind": 7, "in front of": 2, "is none of": 1, "is no": 2, "are no": 1, "of its own": 2}
"""What a first line may not say, but after "there" (after, before; is not one of; is not; its own), and how many still do."""


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield place, kind and first line of every docstring. kind: "function", "pass", "class", "module"."""
    for module, file in rooms.modules().items():
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if text := ast.get_docstring(node):
                yield f"{module}.{getattr(node, 'name', '')}", _kind(module, node), text.splitlines()[0]


def _kind(module: str, node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        of_pass = any(isinstance(n, ast.ClassDef) and _name_of(n) == module.rpartition(".")[2] for n in node.body)
        return "pass" if of_pass else "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    decorators = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
    return "property" if "property" in decorators else "function"


def _name_of(node: ast.ClassDef) -> str:
    """Return what a class says its `name` is: a pass says that of its file."""
    values = [n.value for n in node.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "name"]
    return str(values[0].value) if values and isinstance(values[0], ast.Constant) else ""


ALL = list(docstrings())


@pytest.mark.parametrize("opening", OPENINGS)
def test_functions_and_passes_do_not_begin_with(opening: str) -> None:
    lines = [f"{at}: {line}" for at, kind, line in ALL if kind in ("function", "pass")]
    found = [line for line in lines if re.match(rf"\S+: {opening}\b", line)]
    assert len(found) <= OPENINGS[opening], found


@pytest.mark.parametrize("idiom", IDIOMS)
def test_first_lines_do_not_say(idiom: str) -> None:
    found = [f"{at}: {line}" for at, _, line in ALL if re.search(rf"(?<!there )\b{idiom}\b", line)]
    assert len(found) <= IDIOMS[idiom], found


def test_passes_are_found() -> None:
    """Or nothing would hold their first lines, which the table of passes shows."""
    assert sum(kind == "pass" for _, kind, _ in ALL) >= 25
