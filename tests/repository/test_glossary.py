"""Test docs/glossary.md: the code uses every term, and has one name for each thing in what it calls and prints."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.tools

PAGE = ROOT / "docs" / "glossary.md"
MAX_ROWS = 40


def rows() -> list[list[str]]:
    """Return the cells of each row: terms, meaning, banned words."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["term", "what it means", "also called"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


TERMS = [term for cells in rows() for term in cells[0].split(", ")]
OTHERS = [word for cells in rows() for word in cells[2].split(", ") if word]
"""Other names of the terms: prose may use them, names and messages may not."""


@functools.cache
def code() -> dict[str, str]:
    """Return the text of each source file, by path."""
    return {str(p.relative_to(ROOT)): p.read_text() for room in ("fp8pass", "passes") for p in _texts(ROOT / room)}


@functools.cache
def names_and_messages() -> dict[str, str]:
    """Return the text of each source file without docstrings and comments, and of the report's page."""
    return {path: without_prose(text) if path.endswith(".py") else text for path, text in code().items()}


def without_prose(source: str) -> str:
    """Return a source with empty lines for docstrings, of attributes too, and without comments."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)


def _texts(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".html"))


def pattern(phrase: str) -> re.Pattern[str]:
    """Return a pattern for a phrase in whole words, in the singular or plural, in any case, also across lines."""
    words = r"[\s#]+".join(map(re.escape, phrase.split()))
    return re.compile(rf"(?<![\w-]){words}s?(?![\w-])", re.IGNORECASE)


def uses(phrase: str, texts: dict[str, str]) -> list[str]:
    """Return the places of a phrase, as "path:line"."""
    found = [(path, text, match) for path, text in texts.items() for match in pattern(phrase).finditer(text)]
    return [f"{path}:{text.count(chr(10), 0, match.start()) + 1}" for path, text, match in found]


def test_phrases_are_found_in_whole_words() -> None:
    text = {"a.py": "one row-wise scale,\n# Scaling\n# factors; rowwise, arrow-wise, row-wisely"}
    assert uses("row-wise", text) == ["a.py:1"]
    assert uses("scaling factor", text) == ["a.py:2"]


def test_the_table_is_short_and_names_each_term_once() -> None:
    assert 0 < len(rows()) <= MAX_ROWS
    assert [cells for cells in rows() if len(cells) != 3 or not cells[0] or not cells[1]] == []
    words = [word.lower() for word in (*TERMS, *OTHERS)]
    assert sorted(word for word in set(words) if words.count(word) > 1) == []


@pytest.mark.parametrize("term", TERMS)
def test_the_code_uses_each_term(term: str) -> None:
    assert uses(term, code()) != []


@pytest.mark.parametrize("word", OTHERS)
def test_no_name_and_no_message_uses_another_word(word: str) -> None:
    assert uses(word, names_and_messages()) == []


def test_prose_is_told_from_names_and_messages() -> None:
    source = '"""Of dgrad.\n\nAnd wgrad."""\nlhs = 1  # rhs\n"""Of fprop."""\nprint(f"{lhs} absmax")\n'
    assert without_prose(source) == '\n\n\nlhs = 1  \n\nprint(f"{lhs} absmax")'
