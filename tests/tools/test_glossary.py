"""Test docs/glossary.md: the code uses every term, and neither the code nor the pages use a word that it bans."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

PAGE = ROOT / "docs" / "glossary.md"
MAX_ROWS = 40
QUOTED: dict[str, tuple[str, ...]] = {}
"""Files, by path, with the banned words that they quote as another system's own terms."""


def rows() -> list[list[str]]:
    """Return the cells of each row: terms, meaning, banned words."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["term", "what it means", "do not say"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


TERMS = [term for cells in rows() for term in cells[0].split(", ")]
BANNED = [word for cells in rows() for word in cells[2].split(", ") if word]


@functools.cache
def code() -> dict[str, str]:
    """Return the text of each source file, by path."""
    return {str(p.relative_to(ROOT)): p.read_text() for room in ("fp8pass", "passes") for p in _texts(ROOT / room)}


@functools.cache
def pages() -> dict[str, str]:
    """Return the text of each page and example, by path. peers.md describes other systems in their own terms."""
    files = [ROOT / "README.md", *_texts(ROOT / "docs"), *_texts(ROOT / "examples")]
    return {str(p.relative_to(ROOT)): p.read_text() for p in files if p not in (PAGE, PAGE.with_name("peers.md"))}


def _texts(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".md", ".html", ".sh"))


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
    words = [word.lower() for word in (*TERMS, *BANNED)]
    assert sorted(word for word in set(words) if words.count(word) > 1) == []


@pytest.mark.parametrize("term", TERMS)
def test_the_code_uses_each_term(term: str) -> None:
    assert uses(term, code()) != []


@pytest.mark.parametrize("word", BANNED)
def test_nothing_uses_a_banned_word(word: str) -> None:
    quoted = {path for path, words in QUOTED.items() if word in words}
    texts = {path: text for path, text in {**code(), **pages()}.items() if path not in quoted}
    assert uses(word, texts) == []


def test_only_what_is_quoted_is_excused() -> None:
    texts = {**code(), **pages()}
    assert [(p, w) for p, words in QUOTED.items() for w in words if not uses(w, {p: texts[p]})] == []
