"""Test for plain words: a docstring begins with what a function does, and pages and code do without our idioms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import house
import pytest

pytestmark = pytest.mark.tools

OPENINGS = ("What", "Of", "Whether", "And", "Not", "But", "See the function")
"""Openings that the first line of a function's docstring, or of a pass's, may not have, for a verb is missing."""
IDIOMS = (r"behind", r"in front of", r"in the place of", r"is none of", r"(?<!there )(is|are) no\b(?! longer)")
"""Idioms that no docstring, comment or message may use: say after, before, instead of, is not one of, is not."""
DIALECT = (
    r"say(?=[,;:)])",  # for example, such as
    r"(?<=, )say(?=\.)",
    r"(?<=[,;] )else(?! (if|\d)\b)",  # otherwise
    r"Of (a|an|all|each|every|its)",  # at the beginning of a sentence
    r"kin",  # similar, related
    r"twins?",  # copy, the same of
    r"sisters?",
    r"judg(e[sd]?|ing)",  # decide
    r"poison\w*",
    r"in vain",  # needlessly
)
"""Idioms of this project that neither code nor pages may use, each with what to say instead."""
FIRST_LINES = ("of its own",)
"""Idioms that a first line may not use: say "its own"."""


OTHERS = ("bench/*.py", "tests/guides.py", "tests/planted_faults/*.py", "tests/zoo/*.py")
"""Files whose texts are checked too, beside those of the package."""
FILES = house.modules() | {
    f"{file.parent.name}.{file.stem}": file for pattern in OTHERS for file in sorted(house.ROOT.glob(pattern))
}


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield place, kind and first line of every docstring. kind: "function", "pass", "class", "module"."""
    for module, file in FILES.items():
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


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string, a docstring too, and of every comment, each in one line."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, " ".join(node.value.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


DOCSTRINGS = list(docstrings())
TEXTS = [(f"{module}:{line}", text) for module, file in FILES.items() for line, text in texts(file)]


@pytest.mark.parametrize("opening", OPENINGS)
def test_functions_and_passes_do_not_begin_with(opening: str) -> None:
    lines = [f"{at}: {line}" for at, kind, line in DOCSTRINGS if kind in ("function", "pass")]
    found = [line for line in lines if re.match(rf"\S+: {opening}\b", line)]
    assert not found


@pytest.mark.parametrize("idiom", FIRST_LINES)
def test_first_lines_do_not_say(idiom: str) -> None:
    found = [f"{at}: {line}" for at, _, line in DOCSTRINGS if re.search(rf"\b{idiom}\b", line)]
    assert not found


@pytest.mark.parametrize("idiom", IDIOMS)
def test_no_text_says(idiom: str) -> None:
    found = [f"{at}: {text}" for at, text in TEXTS if re.search(rf"\b{idiom}\b", text, re.IGNORECASE)]
    assert not found


@pytest.mark.parametrize("idiom", DIALECT)
def test_no_text_has_dialect(idiom: str) -> None:
    found = [f"{at}: {text}" for at, text in TEXTS if re.search(rf"\b{idiom}\b", text)]
    assert not found


PAGES = [*house.ROOT.glob("*.md"), *house.ROOT.glob("docs/*.md"), *house.ROOT.glob("passes/*.md")]


def prose(page: str) -> str:
    """Return the text of a page without code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("idiom", DIALECT)
def test_no_page_says(idiom: str) -> None:
    texts = {file.name: " ".join(prose(file.read_text()).split()) for file in PAGES}
    found = [
        (name, text[m.start() - 40 : m.end() + 20])
        for name, text in texts.items()
        for m in re.finditer(rf"\b{idiom}\b", text)
    ]
    assert len(texts) > 40 and not found


def test_idioms_of_pages_are_found() -> None:
    page = "A size, M say, varies. Of a matrix, it is\nthe kin; else not. `or else, say, kin`\n```\nin vain\n```\n"
    hits = [idiom for idiom in DIALECT if re.search(rf"\b{idiom}\b", " ".join(prose(page).split()))]
    assert hits == [DIALECT[0], DIALECT[2], DIALECT[3], DIALECT[4]]


def test_passes_are_found() -> None:
    """This holds, or else nothing would check their first lines, which the table of passes shows."""
    assert sum(kind == "pass" for _, kind, _ in DOCSTRINGS) >= 25


def test_texts_are_found(tmp_path: Path) -> None:
    """Texts are docstrings, messages and comments, and not names."""
    file = tmp_path / "a.py"
    file.write_text('"""One\n  two."""\nbehind = 1  # three\nraise ValueError(f"four {behind}")\n')
    assert sorted(texts(file)) == [(1, "One two."), (3, "# three"), (4, "four")]
