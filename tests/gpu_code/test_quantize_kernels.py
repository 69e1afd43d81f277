"""Kernels that quantize tile by tile: in Triton's interpreter, and compiled for several GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_code.test_triton_numerics import interpreted
from tests.helpers.quantize_kernels import CASES, compared, compiled

SIZES = {
    "tiles divide": (128, 128, ""),
    "tiles do not divide": (144, 80, ""),
    "NaN and infinities": (144, 80, "nan"),
    "zero scales": (64, 80, "nan zero"),
}
IN_BLOCKS = {
    "tiles divide": (256, 128, ""),
    "NaN and infinities": (128, 256, "nan"),
    "tiles do not divide": (256, 80, ""),
}
"""Sizes for cases with a scale for each block: only `in_columns` takes those that no row of blocks divides."""
CHOICES = "64 64 4", "64 64 8", "128 64 8"
BLOCKS = "128 64 8", "128 128 8", "128 128 32"
EVERYDAY = {
    ("weight", "tiles do not divide", "128 64 8"),
    ("siblings", "tiles do not divide", "128 64 8"),
    ("gelu", "NaN and infinities", "64 64 4"),
    ("exact_gelu", "tiles do not divide", "64 64 8"),
    ("tanh", "tiles do not divide", "64 64 4"),
    ("gradient", "NaN and infinities", "128 64 8"),
    ("gradient", "tiles do not divide", "64 64 8"),
    ("heads", "tiles do not divide", "64 64 4"),
    ("rotated", "NaN and infinities", "64 64 8"),
    ("rotated_by_rows", "tiles do not divide", "128 64 8"),
    ("padded", "tiles do not divide", "128 64 8"),
    ("gated", "zero scales", "64 64 8"),
    ("gated_gradient", "tiles do not divide", "64 64 8"),
    ("by_rows", "NaN and infinities", "64 64 4"),
    ("gated_by_rows", "tiles do not divide", "64 64 8"),
    ("in_blocks", "tiles divide", "128 128 8"),
    ("in_columns", "tiles do not divide", "128 64 8"),
    ("in_rows_and_columns", "NaN and infinities", "128 128 32"),
}
WORK = {
    "weight": (0, 2),
    "siblings": (0, 2),
    "gelu": (1, 2),
    "exact_gelu": (1, 2),
    "tanh": (1, 2),
    "gradient": (1, 3),
    "heads": (0, 2),
    "rotated": (0, 4),
    "rotated_by_rows": (0, 4),
    "padded": (0, 4),
    "gated": (1, 1),
    "gated_gradient": (1, 5),
    "by_rows": (0, 2),
    "gated_by_rows": (1, 5),
    "in_blocks": (0, 2),
    "in_columns": (0, 1),
    "in_rows_and_columns": (1, 5),
}
"""Exponentials, and casts to FP8 of each element: one for each FP8 tensor that is written."""
SPILLS = {("rotated_by_rows", 120): 8}
"""Bytes of local memory: ptxas decides for 80 registers, to run three programs at once, and one value is too many."""
WRITES = {
    "weight": ["amax", "columns", "rows"],
    "siblings": ["amax", "columns", "rows"],
    "gradient": ["amax", "columns", "columns", "rows", "sums"],
    "gated": ["amax", "rows"],
    "gated_gradient": ["amax", "columns", "columns", "rows"],
    "padded": ["amax", "columns", "rows", "sums"],
    "by_rows": ["columns", "rows"],
    "rotated_by_rows": ["amaxes of columns", "amaxes of rows", "columns", "rows"],
    "gated_by_rows": [
        *["amaxes of columns"] * 2,
        *["amaxes of rows"] * 2,
        *["columns"] * 3,
        *["rows"] * 2,
    ],
    "in_blocks": ["columns", "numbers", "rows"],
    "in_columns": ["columns", "numbers"],
    "in_rows_and_columns": [*["columns"] * 3, *["numbers"] * 5, *["rows"] * 2],
}
"""The kinds of a kernel's outputs: amaxes, FP8 in rows and in columns, and sums."""


def _cases() -> list[Any]:
    blocks = {"in_blocks": BLOCKS[1:], "in_columns": BLOCKS[:1], "in_rows_and_columns": BLOCKS[1:]}
    cases = [(name, size, choice) for name in CASES if name not in blocks for size in SIZES for choice in CHOICES]
    cases += [(name, size, choice) for name in blocks for size in IN_BLOCKS for choice in blocks[name]]
    cases = [c for c in cases if c[0] == "in_columns" or c[0] not in blocks or c[1] != "tiles do not divide"]
    return [pytest.param(*c, marks=[] if c in EVERYDAY else pytest.mark.variant) for c in cases]


@interpreted
@pytest.mark.parametrize(("name", "size", "choice"), _cases())
def test_it_writes_what_the_graph_computes(name: str, size: str, choice: str) -> None:
    m, n, how = (IN_BLOCKS if name.startswith("in_") else SIZES)[size]
    found = compared(name, m, n, choice, how)
    assert sorted(f["kind"] for f in found) == WRITES.get(name, ["amax", "columns", "rows"])
    for f in found:
        assert f["special"], f
        # what is not computed by the CPU's exponential rounds to another FP8 number here and there
        assert f["steps"] <= 1, f
        assert f["differing"] < 0.01 or f["kind"] == "sums", f
        assert f["sqnr"] > 40, f


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(
            n,
            c,
            marks=[] if (n, c) in {("gradient", 90), ("gated_by_rows", 89), ("siblings", 120)} else pytest.mark.variant,
        )
        for n in CASES
        for c in (89, 90, 100, 120)
    ],
)
def test_each_choice_compiles_without_spills(name: str, capability: int) -> None:
    for found in compiled(name, capability):
        assert found["spilled"] <= SPILLS.get((name, capability), 0), found
        assert found["saturates"], found  # `quantize` does not clamp on GPUs
        exponentials, casts = WORK[name]  # whatever the layout of the stores
        assert found["exponentials"] <= exponentials, found
        writes = {"rows", "columns"} & set(found["kinds"])
        assert 0 < found["casts"] <= casts if writes else not found["casts"], found
        assert max(found["stores"]) >= 64 or not writes, found
