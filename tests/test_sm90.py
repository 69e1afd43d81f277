"""The code that Inductor generates for sm_90, without a GPU: see pretend_gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("recipe", ["delayed", "dynamic"])
def test_every_triton_kernel_compiles_and_every_second_operand_is_column_major(recipe: str) -> None:
    """A width of 1000 needs padding; forward has two GEMMs, backward four."""
    command = [sys.executable, "-m", "tests.pretend_gpu", recipe]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["scaled_mm"] == found["column_major"] == [2, 4]
    assert all(n > 5 for n in found["kernels"])
    assert found["record_ops"] == 0
