"""Test the pages: sections that are made from the sources are up to date, and the site builds."""

from __future__ import annotations

import html
import inspect
import re
import subprocess
import sys
import types
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import generate
import limits
import pytest
import sections
from diagram import stages, svg

import fp8pass
from fp8pass.compiler import order
from tests import guides
from tests.helpers import ROOT

pytestmark = pytest.mark.tools

DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_the_drawing_has_every_pass() -> None:
    drawing = svg()
    drawn = {name for stage in stages() for name in (*stage.passes, *stage.updates)}
    rows = re.findall(r"^\| \[`(\w+)`\]", sections.table_of_passes(), re.MULTILINE)
    assert drawn == set(rows)
    assert all(f">{html.escape(name)}</text>" in drawing for name in drawn)


@pytest.mark.parametrize("name", generate.PARTS)
def test_every_part_has_its_markers(name: str) -> None:
    text = (ROOT / generate.PARTS[name].page).read_text()
    assert len(generate.FROM_SOURCES) + len(generate.RUN) == len(generate.PARTS)
    assert "\na new text\n" in generate.replaced(text, name, "a new text")
    with pytest.raises(ValueError, match=f"no markers <!-- {name} -->"):
        generate.replaced(text.replace(f"<!-- {name} -->", ""), name, "a new text")


def test_parts_that_are_out_of_date_fail_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check names them with the command that updates them, and writes nothing."""
    (tmp_path / "a.md").write_text("before\n<!-- old -->\n1\n<!-- /old -->\n<!-- right -->\n2\n<!-- /right -->\n")
    (tmp_path / "a.svg").write_text("<svg/>")
    parts = {name: generate.Part("a.md", partial(str, text)) for name, text in (("old", "3"), ("right", "2"))}
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "PARTS", parts)
    monkeypatch.setattr(generate, "FROM_SOURCES", parts)
    monkeypatch.setattr(generate, "PICTURES", {"a.svg": lambda: "<svg></svg>"})
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(
        SystemExit, match=r"^out of date: old \(a\.md\), a\.svg\. To update: .*python docs/generate\.py$"
    ):
        generate.main()
    assert (tmp_path / "a.svg").read_text() == "<svg/>"
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    generate.main()
    assert (tmp_path / "a.md").read_text().startswith("before\n<!-- old -->\n3\n<!-- /old -->\n<!-- right -->\n2\n")
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    generate.main()


def test_the_pass_of_the_page_passes_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's test imports the page's pass from where the pass would be."""
    code, tests = re.findall(r"```python\n(.*?)```", page("add-a-pass.md"), re.DOTALL)
    module = types.ModuleType("fp8pass.passes.joint.requantize")
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = {}
    exec(tests, names)
    functions = [function for name, function in names.items() if name.startswith("test_")]
    assert len(functions) == 2
    for function in functions:
        function()


def test_the_page_of_passes_has_every_list() -> None:
    """The page has their folders, contexts and example passes, too."""
    tuples = {name: value for name, value in vars(order).items() if isinstance(value, tuple)}
    lists = {name: passes for name, passes in tuples.items() if all(hasattr(p, "run") for p in passes)}
    lists |= {"UPDATE": order.UPDATE, "TRACED": order.TRACED}  # loaded where they run
    text = page("add-a-pass.md")
    rows = [re.findall(r"`([^`]+)`|\[(\w+)\]", row) for row in text.splitlines() if "| `passes/" in row]
    assert len(rows) == len(lists) == 5
    for row in rows:
        *folders, listed, context = (code for code, _ in row if code)
        passes = lists.pop(listed)
        assert {f.removeprefix("passes/") for f in folders} == {type(p).__module__.split(".")[2] for p in passes}
        assert {inspect.signature(p.run).parameters["context"].annotation for p in passes} == {context}
        assert {example for _, example in row if example} <= {p.name for p in passes}
        assert f"`{listed}`" in text.partition("harness.py")[2], "the page does not say how its passes are tested"


def test_the_guide_names_what_exists() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(guide.splitlines()) <= 70
    paths = r"(?<![\w/.])(?:fp8pass|passes|tests|docs|bench|\.ci)/[\w./-]*\w|\b[A-Z]+\.md|\bpyproject\.toml"
    named = set(re.findall(paths, guide))
    assert len(named) > 20 and [path for path in named if not (ROOT / path).exists()] == []
    code = "\n".join(f.read_text() for f in [*ROOT.glob("fp8pass/**/*.py"), *ROOT.glob("passes/**/*.py")])
    names = set(re.findall(r"`([A-Za-z_]\w*)`", guide)) - {"HEAD"}
    assert len(names) > 5 and [name for name in names if not re.search(rf"\b{name}\b", code)] == []


LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the names that a code host and mkdocs give to the headings."""
    headings = re.findall(r"^#+ (.*)", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(file: Path) -> list[str]:
    broken = []
    for target, anchor in LINK.findall(without_code(file.read_text())):
        path = (file.parent / target) if target else file
        if target.startswith("https:"):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            broken.append(f"{file.name}: {target}#{anchor}")
    return broken


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("## One heading, and `code`\n")
    links = "[a](there.md) [b](there.md#one-heading-and-code) [c](gone.md) [d](there.md#gone) [e](#gone)"
    (tmp_path / "page.md").write_text(links)
    assert broken_links(tmp_path / "page.md") == ["page.md: gone.md#", "page.md: there.md#gone", "page.md: #gone"]


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("passes/*.md"), *DOCS.glob("*.md")]
    assert [link for file in pages for link in broken_links(file)] == []


def test_the_front_page_links_to_every_page() -> None:
    linked = {target for target, _ in LINK.findall(page("index.md"))}
    assert {path.name for path in DOCS.glob("*.md")} - linked == {"index.md"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_option_is_on_its_page() -> None:
    assert [field.name for field in fields(fp8pass.Config) if f"`{field.name}" not in page("options.md")] == []


def test_predictions_that_a_page_repeats_are_those_of_the_roofline() -> None:
    rows = re.findall(r"^\| h[12]00 \|.*", page("first-hour-gpu.md"), re.MULTILINE)
    assert rows and [row for row in rows if row not in page("roofline.md")] == []


NOT_RAISED = {"product"}
"""Rules that passes write into a verdict without a `Reject`."""


def test_every_rule_that_declines_is_a_limit() -> None:
    """Each has a line, and no line is of a rule that is gone, or of a table that the page lacks."""
    listed = list(limits.declared())
    rules = {rule for each in listed for lines in each.values() for key in lines for rule in key.split(", ")}
    assert len(limits.raised()) > 50
    assert limits.raised() - rules == set()
    assert rules - limits.raised() == NOT_RAISED
    assert {name for each in listed for name in each} == set(limits.TABLES)


@pytest.mark.parametrize("name", limits.TABLES)
def test_each_rule_has_one_line_in_a_table(name: str) -> None:
    first = re.findall(r"^\| `(.*)` \|", limits.table(name), re.MULTILINE)
    rules = [rule for cell in (line.partition(" | ")[0] for line in first) for rule in cell.split("`, `")]
    assert len(rules) > 3 and len(rules) == len(set(rules))


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
    assert loaded == set(), "a page loads something over the network"
    assert 'href="train-step.html"' in (tmp_path / "index.html").read_text()
    assert 'href="passes/joint/scaled_mm.py"' in (tmp_path / "passes.html").read_text()
    assert (tmp_path / "passes/joint/scaled_mm.py").read_text() == (ROOT / "passes/joint/scaled_mm.py").read_text()


def test_every_statement_of_the_guides_is_shown() -> None:
    """The tests, scripts and sections that the page names exist."""
    assert len(guides.STATEMENTS) == 43
    assert not guides.missing()


def test_a_statement_whose_test_is_gone_is_noticed() -> None:
    for gone in ("tests/repository/test_docs.py::test_gone", "tests/gone.py", "docs/guides.md#gone"):
        assert guides._missing(gone)
    assert not guides._missing("docs/guides.md#what-the-guides-describe")
