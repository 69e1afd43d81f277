"""`fp8pass.bisect` on a model that Inductor compiles."""

from __future__ import annotations

import pytest

from tests.helpers.bisector import Once, faulty


@pytest.mark.parametrize("max_runs", [3, pytest.param(100, marks=pytest.mark.variant)])
def test_compiled_by_inductor(max_runs: int) -> None:
    """Inductor compiles the first run. With more runs allowed, the last one repeats the culprit alone in Inductor."""
    found = faulty(Once, lowering="inductor", max_runs=max_runs)
    assert (found.verdict, found.repeated) == ("numbers", None if max_runs == 3 else True)
    assert [run.outcome for run in found.runs[:3]] == ["fails", "passes", "fails"]
