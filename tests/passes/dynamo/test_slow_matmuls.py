"""Test the one warning of models in bfloat16 and float16 on CPUs without instructions for them."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fp8pass import hardware
from fp8pass.base.errors import warn_once
from tests.helpers.harness import BF16, F16, F32, compiled

pytestmark = pytest.mark.compiled

AVX2, AVX512_BF16, AVX512_FP16 = (), (BF16,), (BF16, F16)
"""The dtypes that oneDNN multiplies on such processors."""


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that sets which dtypes oneDNN multiplies, in a process that has warned of nothing yet."""
    warn_once.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    yield lambda dtypes: monkeypatch.setattr(hardware, "onednn_multiplies", lambda dtype: dtype in dtypes)
    warn_once.cache_clear()


def said(model: nn.Module, dtype: torch.dtype, **options: Any) -> list[str]:
    """Compile a model of 64 features; return the warnings of slow matmuls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(model.to(dtype), recipe="dynamic", **options)(torch.randn(16, 64, dtype=dtype))
    return [str(w.message) for w in caught if "reference routine" in str(w.message)]


def test_one_warning_with_the_figure_and_what_to_do(processor: Any) -> None:
    processor(AVX2)
    assert said(nn.Linear(64, 32), BF16) == [
        "fp8pass: on this CPU torch multiplies bfloat16 and float16 by a reference routine, up to 100 times slower than "
        "float32. Matmuls in FP8 are not affected. For the others, use float32 to develop here, or a CPU that has "
        "AVX-512 BF16 or AMX for bfloat16, AVX-512 FP16 for float16"
    ]
    assert said(nn.Linear(64, 48), BF16) == []
    assert said(nn.Linear(64, 48), F16) == []


@pytest.mark.parametrize(("can", "dtype"), [(AVX2, F32), (AVX512_BF16, BF16), (AVX512_FP16, F16)])
def test_what_the_processor_multiplies_itself_is_not_warned_of(processor: Any, can: Any, dtype: torch.dtype) -> None:
    processor(can)
    assert said(nn.Linear(64, 32), dtype) == []


def test_a_processor_may_have_one_of_the_types(processor: Any) -> None:
    processor(AVX512_BF16)
    (warning,) = said(nn.Linear(64, 32), F16)
    assert "multiplies float16 by a reference" in warning and warning.endswith("has AVX-512 FP16 for float16")


def test_a_model_without_matmuls_and_other_architectures_are_not_warned_of(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(AVX2)
    assert said(nn.RMSNorm(64), BF16) == []
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert said(nn.Linear(64, 32), BF16) == []


def test_it_goes_by_the_type_under_autocast_and_by_what_will_run_elsewhere(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(AVX2)
    with torch.autocast("cpu", dtype=BF16):
        assert len(said(nn.Linear(64, 32), F32)) == 1
    warn_once.cache_clear()
    monkeypatch.setattr(hardware, "pretended_device", torch.device("cuda"))
    assert said(nn.Linear(64, 32), BF16) == []
