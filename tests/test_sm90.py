"""The code that Inductor generates for sm_90, without a GPU: see pretend_gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.xla_rules import CASES

ROOT = Path(__file__).parent.parent


def pretend(what: str) -> Any:
    command = [sys.executable, "-m", "tests.pretend_gpu", what]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


# Strides of the scales of both operands, of the two GEMMs of the forward and the four of the backward. None: a buffer.
SCALES: dict[str, list[list[Any]]] = {
    "delayed": [[None] * 4, [None] * 8],
    "dynamic": [[None] * 4, [None] * 8],
    "rowwise": [  # [M, 1] and [1, N]; a width of 1000 needs padding, where it is N
        [[1, 1], [1008, 1], [1, 1], [512, 1]],
        [[1, 1], [1008, 1], [1, 1], [1008, 1], [1, 1], [512, 1], [1, 1], [512, 1]],
    ],
    "blockwise": [  # [M, K/128] by columns; 128x128 by columns, 1x128 of the second operand by rows
        [[1, 256], [1, 4], [1, 256], [1, 8]],
        [[1, 256], [1, 4], [1, 512], None, [1, 256], [1, 8], [1, 1024], None],
    ],
    "mxfp8": [[None] * 4, [None] * 8],
}


def _views(strides: list[Any]) -> Counter[str]:
    return Counter(str(s) for s in strides if s is not None)


@pytest.mark.parametrize("recipe", SCALES)
def test_every_triton_kernel_compiles_and_operands_and_scales_are_laid_out_as_kernels_read_them(recipe: str) -> None:
    found = pretend(recipe)
    assert found["scaled_mm"] == found["column_major"] == [2, 4]
    for actual, expected in zip(found["scales"], SCALES[recipe], strict=True):
        assert len(actual) == len(expected)
        # versions differ in which scales are a buffer of their own, of which the call does not show the strides
        assert not _views(actual) - _views(expected)
        assert _views(expected).total() - _views(actual).total() <= 1
    assert all(n > 5 for n in found["kernels"])
    assert found["record_ops"] == 0


def test_movement_and_epilogues_compile() -> None:
    found = pretend("rules")
    calls = sum(c.calls for c in CASES.values() if c.target is None and not c.dynamic)
    assert found["scaled_mm"] == [calls]
    assert found["column_major"] == [calls - 1]  # one program is called with a second operand that is that already


READS = 2 if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12) else 1
"""Kernels that read a large product to quantize it and for its amax: 2.11 splits the reduction by itself."""
LARGE = {
    "E7 amax and quantize, large": READS + 1,  # the tail of the amax
    "E8 amax of the scaled, large": READS + 1,
    "E9 own amax, large": 3,  # what it scales has to wait for it
    "E9 amax of rows, large": 1,
}


def test_what_stays_outside_the_matmul_is_one_kernel() -> None:
    """XLA's rules about epilogues: nothing runs behind what was folded, and one kernel does all of the rest."""
    launches = pretend("behind")
    small = {name: case for name, case in CASES.items() if name[0] == "E"}
    assert set(launches) == {*small, *LARGE}
    for name, n in launches.items():
        folded = name in small and (small[name].behind in ((), ("view",)) or name == "E5 on CPU")
        assert n == LARGE.get(name, 0 if folded else 1), (name, n)
