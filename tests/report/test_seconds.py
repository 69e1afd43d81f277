"""The seconds of each function in a report."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8pass.report.report import Report, collect
from tests.helpers.harness import compiled
from tests.helpers.models import Block


@pytest.mark.compiled
def test_seconds_of_each_function() -> None:
    """Equal layers have one row; the last row is the sum; a table is empty if nothing was compiled."""
    assert Report().seconds() == ""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(3)))
    with collect() as report:
        compiled(model)(torch.randn(16, 32)).sum().backward()
    heads, _, *rows = report.seconds().splitlines()
    assert heads.split() == ["compiled", "AOTAutograd", "s", "passes", "s", "Inductor", "s", "all", "s"]
    assert "3 equal layers, 1 to 3" in "\n".join(rows) and rows[-1].startswith(f"{len(rows) - 1} functions")
    assert not any(timing.inductor for timing in report.timings)  # run op by op
    assert all(timing.total > timing.passes >= 0 for timing in report.timings)
    *numbers, total = ([float(cell) for cell in row.split()[-4:]] for row in rows)
    for column, whole in zip(zip(*numbers, strict=True), total, strict=True):
        assert sum(column) == pytest.approx(whole, abs=0.16)  # each is rounded to a tenth
