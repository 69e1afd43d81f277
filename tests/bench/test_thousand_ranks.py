"""Test bench/thousand_ranks.py: formulas against what a rank of a tiny stage runs, and what grows with ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import thousand_ranks
from thousand_ranks import NARROW, in_process, requests

from tests.helpers import ROOT

pytestmark = pytest.mark.tools

TINY = replace(NARROW, layers=1)


@pytest.mark.parametrize(
    "ways", [["fp8pass, gradients too"], pytest.param(list(thousand_ranks.WAYS), marks=pytest.mark.variant)]
)
def test_formulas_have_what_runs(ways: list[str]) -> None:
    for name in ways:
        found = in_process(name, 64, TINY)
        assert found.slots == 9 * name.startswith("fp8pass")


def test_a_rank_asks_the_store_equally_often_among_few_and_many() -> None:
    assert requests(4) == requests(100)


def test_the_table_of_the_page() -> None:
    table = thousand_ranks.of_collectives(1024)
    if "torchao" in table:  # else the page has a column more
        assert table in (ROOT / "docs" / "thousand-ranks.md").read_text(), "python docs/generate.py thousand_ranks"
