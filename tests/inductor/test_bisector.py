"""`fp8pass.bisect`: faults that were planted are found, where they were planted."""

from __future__ import annotations

import pytest

from tests.helpers.bisector import Once, faulty


@pytest.mark.parametrize("max_runs", [3, pytest.param(100, marks=pytest.mark.variant)])
def test_compiled_by_inductor(max_runs: int) -> None:
    """The first run is. With more runs the culprit alone, too, in the last one."""
    found = faulty(Once, lowering="inductor", max_runs=max_runs)
    assert (found.verdict, found.repeated) == ("numbers", None if max_runs == 3 else True)
    assert [run.outcome for run in found.runs[:3]] == ["fails", "passes", "fails"]
