"""Kernels of matmuls with generated epilogues: in Triton's interpreter, and compiled for several GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compiler.test_triton_numerics import interpreted
from tests.helpers.asked import ask
from tests.helpers.fused_matmuls import CASES, STEPS, compared

pytestmark = pytest.mark.gpu_code

SMALL, IN_HALVES = "64 64 32 4 2", "64 32 32 4 2 2"
SIZES = {
    "three tiles down, two across": (192, 128, 64, SMALL, "exact"),
    "sizes that tiles do not divide, K of 16": (80, 48, 16, IN_HALVES, "exact"),
    "NaN and infinities": (80, 48, 48, IN_HALVES, "exact nan"),
    "zero scales": (80, 48, 48, IN_HALVES, "exact nan zero"),
    "symbolic M": (80, 48, 48, IN_HALVES, "exact nan symbolic"),
    "symbolic M, no TMA": (176, 48, 48, "", "exact pointers symbolic"),
    "no TMA": (80, 48, 48, "", "exact pointers"),
    "one tile, as chosen, sums that round": (96, 112, 64, "", ""),
}
EVERYDAY = {
    ("gelu", "sizes that tiles do not divide, K of 16"),
    ("relu_squared", "NaN and infinities"),
    ("gated", "no TMA"),
    ("by_rows", "zero scales"),
    ("gated", "symbolic M"),
    ("several_dims", "symbolic M, no TMA"),
    ("gated_backward", "sizes that tiles do not divide, K of 16"),
    ("gated_backward", "NaN and infinities"),
    ("residual", "three tiles down, two across"),
    ("several_dims", "one tile, as chosen, sums that round"),
    ("strided", "NaN and infinities"),
    ("by_rows", "sizes that tiles do not divide, K of 16"),
    ("in_float32", "three tiles down, two across"),
    ("summed", "NaN and infinities"),
}
WRITES = {
    "gelu": ["amax", "columns", "rows", "rows"],
    "gated": ["amax", "columns", "rows", "rows"],
    "gated_backward": ["amax", "columns", "columns", "rows", "sums"],
    "residual": ["rows"],
    "summed": ["amax", "columns", "rows", "rows", "sums"],
}
"""The kinds of a kernel's outputs: amaxes, FP8 in rows and in columns, sums, and high precision in rows."""


def _variants(cases: list[tuple[str, str]], everyday: Any) -> list[Any]:
    return [pytest.param(*case, marks=[] if case in everyday else pytest.mark.variant) for case in cases]


@interpreted
@pytest.mark.parametrize(
    ("name", "size"),
    _variants([(n, s) for n in CASES for s in SIZES], EVERYDAY),
)
def test_a_kernel_writes_what_the_graph_computes_to_the_bit(name: str, size: str) -> None:
    m, n, k, tile, how = SIZES[size]
    found = compared(name, m, n, k, tile, how)
    assert found["products"] == (2 if name == "gated" else 1)
    writes = WRITES.get(name, ["amax", "columns", "rows"])
    if "symbolic" in how:
        writes = [kind for kind in writes if kind in ("amax", "rows")]
    assert sorted(of["kind"] for of in found["outputs"]) == writes
    for of in found["outputs"]:
        assert of["special"], of  # NaN and infinities are where the graph has them
        assert of["differing"] == 0, of
        assert of.get("oracle", True) or how != "exact", of


@interpreted
@pytest.mark.variant
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6),
    st.sampled_from([(80, 48, 32), (64, 64, 16), (136, 144, 48)]),
    st.sampled_from([SMALL, IN_HALVES]),
)
def test_random_epilogues(steps: list[str], size: tuple[int, int, int], tile: str) -> None:
    for of in compared(f"chain:{','.join(steps)}", *size, tile, "exact")["outputs"]:
        assert of["special"], of
        assert of["differing"] == 0, of


TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
CAPABILITIES = "90", "89", "100"


@pytest.mark.parametrize(
    ("name", "capability"),
    _variants(
        [(n, c) for n in (*CASES, *(f"{n} symbolic" for n in CASES)) for c in CAPABILITIES],
        {
            ("gated symbolic", "90"),
            ("gelu", "90"),
            ("gated_backward", "90"),
            ("gated", "90"),
            ("gelu", "89"),
            ("gated_backward", "100"),
        },
    ),
)
def test_a_kernel_compiles_without_spills_and_stores_whole_blocks(name: str, capability: str) -> None:
    found = ask("tests.helpers.fused_matmuls", "compiled", name, capability)
    assert found["tensor_cores"]
    if TRITON >= (3, 7):  # 3.6, which comes with torch 2.11, spills up to 856 bytes per thread of some, most on sm_89
        # the masks of a symbolic M take two registers that sm_100 does not have left in some
        assert found["spilled"] <= (8 if "symbolic" in name and capability == "100" else 0)
    assert 0 < found["shared"] <= (232448 if capability != "89" else 101376)
    if capability == "89":  # 16 bytes at once, in either orientation
        assert found["tma_stores"] == 0 and max(found["widths"]) == 128
    else:
        assert found["tma_stores"] >= found["blocks"]  # only amaxes and sums are stored in another way
        assert max([0, *found["widths"]]) <= 32
