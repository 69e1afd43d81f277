"""Adds to `mkdocs build` the pages that are not files of docs/, and mends links that lead out of docs/.

passes/INVARIANTS.md, CHANGELOG.md and CONTRIBUTING.md become pages, and the API reference is made of
`fp8pass.__all__`. The site begins with docs/index.md; README.md, which a code host shows, is not in it. Links in the
repository are those of a code host. Here, each page is where the site has it, and a source file that a page links to is
a part of the site, as it is.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"passes/INVARIANTS.md": "INVARIANTS.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files outside of docs/ that are pages, with their names in the site."""
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")


def rewritten(text: str, folder: str, linked: set[str]) -> str:
    """Markdown of a file in `folder`, with links as the site has them; `linked` gets the sources among them."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if target in PAGES:
            target = PAGES[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        elif (ROOT / target).is_file():
            linked.add(target)
        else:
            return match[0]  # mkdocs will warn of it
        return f"{match[1]}{target}{match[3] or ''}{match[4]}"

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)  # code is left as it is
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def api() -> str:
    """Return the page with all public names, in the order in which `fp8pass.__all__` has them."""
    tree = ast.parse((ROOT / "fp8pass" / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    )
    return "\n".join(
        ["# API reference", "", "All public names of `fp8pass`.", "", *map("::: fp8pass.{}\n".format, names)]
    )


def named(nav: Any) -> set[str]:
    """Return the pages that a nav has."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav
    return {page for part in parts for page in named(part)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, the sources that are linked to, and to the nav what it lacks."""
    linked: set[str] = set()
    for source, page in PAGES.items():
        text = rewritten((ROOT / source).read_text(), posixpath.dirname(source), linked)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "api.md", content=api()))
    for page in files.documentation_pages():
        if page.generated_by is None:
            rewritten(page.content_string, "docs", linked)
    for source in sorted(linked):
        files.append(File.generated(config, source, abs_src_path=str(ROOT / source)))
    lacking = sorted({page.src_uri for page in files.documentation_pages()} - named(config.nav))
    config.nav = [*(config.nav or []), *([{"More": lacking}] if lacking else [])]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the pages in docs/."""
    return markdown if page.file.generated_by is not None else rewritten(markdown, "docs", set())
