"""Test that kernels which quantize are as fast as docs/kernels.md says, by the committed facts."""

from __future__ import annotations

import kernel_times
import pytest

pytestmark = pytest.mark.tools


@pytest.mark.parametrize("model", kernel_times.MODELS)
def test_kernels_that_only_quantize_reach_most_of_a_copy(model: str) -> None:
    """The memory limits kernels of the template that compute no activation."""
    found = [k for k in kernel_times.predicted_now() if k.model == model and k.what.startswith("amax, quantize")]
    large = [k for k in found if k.bytes >= kernel_times.SMALLEST and k.code and "ROWS" in k.code.config]
    assert large
    for k in large:
        assert k.bytes / k.seconds > 0.7 * kernel_times.COPY, k
