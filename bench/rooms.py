"""Reads which file of fp8pass imports which: for the drawing of the rooms in docs/architecture.md, and for the tests.

A room is a folder of `fp8pass/` or `passes/`, or a file at their top. Imports within functions and those for type
checkers alone count like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
Arrows = Mapping[str, Iterable[str]]


class Import(NamedTuple):
    """One module imports another. lazy: within a function."""

    importer: str
    imported: str
    lazy: bool


def modules() -> dict[str, Path]:
    """Return the file of each module by its name, as "fp8pass.graph.builder"."""
    found = {}
    for top, package in (("fp8pass", "fp8pass"), ("passes", "fp8pass.passes")):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT / top).with_suffix("").parts
            if top == "passes" or parts[0] != "passes":  # which some checkouts link to from within fp8pass/
                found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def imports() -> list[Import]:
    """Return the imports of all modules, each once."""
    files = modules()
    found = [i for name, file in files.items() for i in _of_file(name, ast.parse(file.read_text()), files)]
    return sorted(set(found))


def _of_file(name: str, node: ast.AST, files: Mapping[str, Path], lazy: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inner = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(child, ast.ImportFrom):
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                imported = whole if whole in files else str(child.module)
                if imported in files:
                    yield Import(name, imported, lazy)
        elif isinstance(child, ast.Import):
            yield from (Import(name, alias.name, lazy) for alias in child.names if alias.name in files)
        else:
            yield from _of_file(name, child, files, inner)


def room_of(module: str) -> str:
    """Return the room of a module: "graph" for "fp8pass.graph.builder", "passes.share", "fp8pass" for the package."""
    parts = module.split(".")[1:]
    depth = 2 if parts[:1] == ["passes"] else 1
    return ".".join(parts[:depth]) or "fp8pass"


def folder(room: str) -> str:
    """Return where a room is, relative to the repository: a folder, or where there is no such folder, a file's stem."""
    return room.replace(".", "/") if room.startswith(("fp8pass", "passes")) else f"fp8pass/{room}"


def between_rooms() -> dict[str, set[str]]:
    """Return which rooms each room imports."""
    found: dict[str, set[str]] = {room_of(name): set() for name in modules()}
    for importer, imported, _ in imports():
        if room_of(importer) != room_of(imported):
            found[room_of(importer)].add(room_of(imported))
    return found


def circles(arrows: Arrows) -> list[list[str]]:
    """Return the sets of more than one node that all reach one another, by Tarjan's algorithm (1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in arrows.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == index[node]:
            circle = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in arrows:
        if node not in index:
            visit(node)
    return found


def floors(arrows: Arrows) -> list[list[str]]:
    """Return the rooms by floor, from the ground: each stands above all that it imports. There must be no circle."""
    level: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in level:
            level[room] = max((of(other) + 1 for other in arrows.get(room, ())), default=0)
        return level[room]

    for room in arrows:
        of(room)
    return [sorted(r for r in level if level[r] == floor) for floor in range(max(level.values()) + 1)]


def main() -> None:
    """Print the rooms by floor, each with what it imports."""
    arrows = between_rooms()
    for number, rooms in reversed(list(enumerate(floors(arrows)))):
        print(number, *(f"{room} <- {', '.join(sorted(arrows[room])) or 'nothing'}" for room in rooms), sep="\n    ")


if __name__ == "__main__":
    main()
