"""The pages: what is made of the sources is up to date, and the site builds."""

from __future__ import annotations

import ast
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
import readme
from diagram import stages, svg

import fp8pass

ROOT = readme.ROOT
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_the_drawing_has_every_pass() -> None:
    drawing = page("images/pipeline.svg")
    assert drawing == svg(), "python bench/readme.py pipeline"
    drawn = {name for stage in stages() for name in (*stage.passes, *stage.updates)}
    rows = re.findall(r"^\| \[`(\w+)`\]", readme.table_of_passes(), re.MULTILINE)
    assert drawn == set(rows)
    assert all(f">{html.escape(name)}</text>" in drawing for name in drawn)


def test_the_table_of_passes() -> None:
    assert readme.table_of_passes() in (ROOT / "README.md").read_text(), "python bench/readme.py passes"


def test_the_pass_of_the_page_is_the_one_that_runs() -> None:
    assert (ROOT / "examples" / "add_a_pass.py").read_text().strip() in page("add-a-pass.md")


def rules() -> set[str]:
    """The first argument of every `Reject` and `LeftOut`."""
    files = [*ROOT.glob("fp8pass/*.py"), *ROOT.glob("passes/*.py")]
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    made = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("Reject", "LeftOut")]
    return {str(c.args[0].value) for c in made if isinstance(c.args[0], ast.Constant)}


def test_every_rule_that_declines_is_a_limit() -> None:
    named = set(re.findall(r"`([^`]+)`", page("limits.md")))
    assert rules() - named == set()


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs_autorefs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "api.html").read_text()
    assert [name for name in fp8pass.__all__ if f'id="fp8pass.{name}"' not in reference] == []
    assert {path.with_suffix(".html").name for path in DOCS.glob("*.md")} <= {
        path.name for path in tmp_path.glob("*.html")
    }
    loaded = {url for file in tmp_path.glob("*.html") for url in re.findall(r'src="(https?:[^"]*)', file.read_text())}
    assert loaded == set(), "the pages need no network"
    start = (tmp_path / "index.html").read_text()
    assert 'href="train-step.html"' in start and 'href="passes/scaled_mm.py"' in start
    assert (tmp_path / "passes" / "scaled_mm.py").read_text() == (ROOT / "passes" / "scaled_mm.py").read_text()
