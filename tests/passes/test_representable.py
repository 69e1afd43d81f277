"""`cast_to_representable` rounds to values that FP8 represents."""

from __future__ import annotations

import pytest
import torch

from fp8pass import cast_to_representable
from tests.helpers.harness import E4M3, E5M2, F32


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_cast(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """The cast gives the nearest representable values, and a second cast does not change them."""
    x = torch.randn(64, 64).to(x_dtype)
    y = cast_to_representable(x, 16.0, dtype)
    assert y.dtype == x_dtype and not torch.equal(x, y)
    assert torch.equal(y, (x.double() * 16).to(F32).to(dtype).double().div(16).to(x_dtype))
    assert torch.equal(cast_to_representable(y, 16.0, dtype), y)
    assert torch.equal(cast_to_representable(x, torch.tensor(16.0), dtype), y)


def test_edges() -> None:
    x = torch.tensor([1000.0, -1e9, float("inf"), float("nan"), 0.0, -0.0])
    assert cast_to_representable(x)[:3].tolist() == [448.0, -448.0, 448.0]
    assert cast_to_representable(x, 0.25)[:2].tolist() == [1024.0, -1792.0]
    assert cast_to_representable(x)[3].isnan() and cast_to_representable(x)[4:].tolist() == [0.0, 0.0]
    with pytest.raises(
        ValueError, match=r"dtype is torch.bfloat16: choose one of torch.float8_e4m3fn, torch.float8_e5m2"
    ):
        cast_to_representable(x, 1.0, torch.bfloat16)
