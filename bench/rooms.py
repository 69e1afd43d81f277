"""Read which files of fp8pass import each other, for the drawing of the rooms in docs/architecture.md and for tests.

A room is a folder of `fp8pass/` or `passes/`, or a file at their top. Imports within functions and imports for type
checkers count like any others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
Arrows = Mapping[str, Iterable[str]]


class Import(NamedTuple):
    """An import of one module by another. lazy: it is within a function."""

    importer: str
    imported: str
    lazy: bool


def modules() -> dict[str, Path]:
    """Return {name of a module, like "fp8pass.graph.builder": its file}."""
    found = {}
    for top, package in (("fp8pass", "fp8pass"), ("passes", "fp8pass.passes")):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT / top).with_suffix("").parts
            if top == "passes" or parts[0] != "passes":  # some checkouts have a link fp8pass/passes
                found[".".join((package, *parts)).removesuffix(".__init__")] = file
    return found


def imports() -> list[Import]:
    """Return the imports of all modules, without repetitions."""
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
    """Return the path of a room in the repository: a folder, or a file without its suffix."""
    return room.replace(".", "/") if room.startswith(("fp8pass", "passes")) else f"fp8pass/{room}"


def between_rooms() -> dict[str, set[str]]:
    """Return {room: the rooms that it imports}."""
    found: dict[str, set[str]] = {room_of(name): set() for name in modules()}
    for importer, imported, _ in imports():
        if room_of(importer) != room_of(imported):
            found[room_of(importer)].add(room_of(imported))
    return found


def circles(arrows: Arrows) -> list[list[str]]:
    """Return the sets of two or more nodes that all reach each other, by Tarjan's algorithm (1972)."""
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
    """Return the rooms by floor, from the ground: each room is above all rooms that it imports.

    The imports must not form a circle.
    """
    level: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in level:
            level[room] = max((of(other) + 1 for other in arrows.get(room, ())), default=0)
        return level[room]

    for room in arrows:
        of(room)
    return [sorted(r for r in level if level[r] == floor) for floor in range(max(level.values()) + 1)]


def main() -> None:
    """Print the rooms by floor, each with the rooms that it imports."""
    arrows = between_rooms()
    for number, rooms in reversed(list(enumerate(floors(arrows)))):
        print(number, *(f"{room} <- {', '.join(sorted(arrows[room])) or 'nothing'}" for room in rooms), sep="\n    ")


if __name__ == "__main__":
    main()
