"""Collect the rules by which passes decline, with what they mean, for docs/limits.md.

A file of the product that raises a `Reject` or `LeftOut` has them in a literal, LIMITS: {table: {rules: (what holds,
what a user can do)}}, with links as in docs/. Nothing is imported to read them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLES = ("declined", "saved", "outside", "detected", "collectives")
Lines = dict[str, tuple[str, str]]


def table(name: str) -> str:
    """Return the rows of a table, in the order of files."""
    rows = ["| rule | reason | what to do |", "|---|---|---|"]
    for limits in declared():
        for rules, cells in limits.get(name, {}).items():
            shown = ", ".join(f"`{rule}`" for rule in rules.split(", "))
            rows.append(f"| {' | '.join((shown, *cells))} |".replace("|  |", "| |"))
    return "\n".join(rows)


def declared() -> Iterator[dict[str, Lines]]:
    """Yield the LIMITS of each file that has them."""
    for tree in sources():
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LIMITS":
                yield ast.literal_eval(node.value)


def raised() -> set[str]:
    """Return the rules with which a `Reject` or `LeftOut` is made anywhere."""
    calls = [node for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("Reject", "LeftOut")]
    return {str(c.args[0].value) for c in made if isinstance(c.args[0], ast.Constant)}


def sources() -> Iterator[ast.Module]:
    """Yield the parsed files of the product, by path."""
    for top in ("fp8pass", "passes"):
        yield from (ast.parse(file.read_text()) for file in sorted((ROOT / top).rglob("*.py")))
