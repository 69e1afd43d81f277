"""The insert_monitors pass: Inductor's code counts what the graph, run op by op, counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from tests.helpers.insert_monitors import RECIPES, linear, trained
from tests.helpers.models import Parts, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:fp8pass. (blockwise|mxfp8) kernels exist"),
    pytest.mark.shares_code,
]


@pytest.mark.parametrize(
    ("model", "layers"), [(linear, 1), pytest.param(lambda: make(Parts), 2, marks=pytest.mark.variant)]
)
def test_inductor_counts_as_the_graph_does(model: Callable[[], nn.Module], layers: int) -> None:
    options = {"recipe": RECIPES["delayed"], "min_speedup": 0}
    (_, eager), (_, fused) = (trained(True, model(), lowering=low, **options) for low in ("eager", "inductor"))
    assert len(eager.rows) == len(fused.rows) == 3 * layers * 4
    for a, b in zip(eager.rows, fused.rows, strict=True):
        assert (a.slot, a.step, a.elements, a.nonfinite) == (b.slot, b.step, b.elements, b.nonfinite)
        assert b.amax == pytest.approx(a.amax, rel=1e-4) and b.scale == pytest.approx(a.scale, rel=1e-4)
        assert b.sqnr == pytest.approx(a.sqnr, abs=0.5)
        assert abs(a.saturation - b.saturation) * a.elements <= 2 and abs(a.underflow - b.underflow) * a.elements <= 2
