"""The table of kernels that quantize: it is that of the page, and what it says holds by the committed facts."""

from __future__ import annotations

import kernel_times
import pytest

from tests.helpers import ROOT


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert kernel_times.now_table() in page, "python bench/readme.py kernels_now"
    assert kernel_times.now_totals() in page, "python bench/readme.py speedups_now"


@pytest.mark.parametrize("model", kernel_times.MODELS)
def test_kernels_that_only_quantize_reach_most_of_a_copy(model: str) -> None:
    """The memory limits kernels of the template that compute no activation."""
    found = [k for k in kernel_times.predicted_now() if k.model == model and k.what.startswith("amax, quantize")]
    large = [k for k in found if k.bytes >= kernel_times.SMALLEST and k.code and "ROWS" in k.code.config]
    assert large
    for k in large:
        assert k.bytes / k.seconds > 0.7 * kernel_times.COPY, k
