"""Test that the examples run, and print what their pages say."""

from __future__ import annotations

import os
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path

import generate
import pytest

from tests.helpers import ROOT, forked

pytestmark = pytest.mark.tools

WITHOUT = () if find_spec("torchtitan") else ("torchtitan_train",)
"""Examples of packages that tests do not install, and that are not there."""
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem not in WITHOUT)
MARKERS = {"train": "example"}
"""The names of sections in pages, if they differ from the example's."""
NOISY = ("divergence", "monitor")
"""Examples that print measurements of few digits, in lines sorted by these. They are variants, for test_bisector.py
and test_stats.py test what they find, too."""

UNCACHED = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}
"""Graphs are compiled anew, for cached ones come without verdicts. The C++ of their kernels may be cached, by its
text; and the processor's vectors are not tried, which would take seconds."""


def printed_in_page(name: str) -> str:
    marker = MARKERS.get(name, name)
    page = ROOT / generate.PARTS[marker].page
    section = re.search(f"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", page.read_text(), re.DOTALL)
    assert section is not None, f"{page} has no output of {name}"
    return re.findall(r"(?:^|\n\n)```\n(.*?)```", section[1], re.DOTALL)[-1]


def without_numbers(text: str, name: str) -> list[str]:
    """Return lines with masked numbers: losses, and, if NOISY, all measurements, for they differ between machines."""
    number = r"-?\d[\d.]*(e[-+]?\d+)?%?" if name in NOISY else r"\d+\.\d+"
    lines = [" ".join(re.sub(number, "#", line).split()) for line in text.strip().splitlines()]
    return sorted(lines) if name in NOISY else lines


_ALL = ("accelerate_loop", "export_fp8", "lightning_module", "lora", "torchtitan_train")
WITH_FRAMEWORKS = [name for name in _ALL if name in EXAMPLES]
"""Examples that take 10 to 30 seconds each, most of which it takes to import a framework; transformers_trainer, which
is one too, runs every day."""
EVERY_DAY = [name for name in EXAMPLES if name not in (*NOISY, *WITH_FRAMEWORKS)]


def ended(*names: str) -> dict[str, forked.Ended]:
    """Run examples op by op after the passes, which needs no compiler and prints the same. The gate compiles one."""
    environment = {**os.environ, "COLUMNS": "120", "FP8PASS_LOWERING": "eager", **UNCACHED}
    with tempfile.TemporaryDirectory() as folder:
        files = [ROOT / "examples" / f"{name}.py" for name in names]
        done = forked.run([forked.Program(file, folder=Path(folder)) for file in files], environment)
    return dict(zip(names, done, strict=True))


@pytest.mark.gate
@pytest.mark.parametrize(
    "names",
    [EVERY_DAY, *(pytest.param(list(names), marks=pytest.mark.variant) for names in (NOISY, WITH_FRAMEWORKS))],
    ids=["all", "noisy", "frameworks"],
)
def test_each_prints_what_its_page_says(names: list[str]) -> None:
    for name, done in ended(*names).items():
        assert done.returncode == 0, (name, done.stderr)
        assert without_numbers(done.stdout, name) == without_numbers(printed_in_page(name), name), name
