"""Targets, and the key of what the CPU's kernels depend on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest
import torch

from fp8pass import hardware
from fp8pass.hardware import TARGETS, cpu_key, target_of, why_no_fp8

pytestmark = pytest.mark.passes

CPU = torch.device("cpu")


def test_targets() -> None:
    assert target_of(CPU) is None
    assert target_of(CPU, "sm_90") is TARGETS["h100"]
    assert why_no_fp8(CPU, None) == ""
    assert why_no_fp8(torch.device("cuda"), TARGETS["h200"]) == ""
    assert "a100 is sm_80; FP8 matmuls need sm_89" in why_no_fp8(torch.device("cuda"), TARGETS["a100"])
    assert "no FP8 matmul on mps devices" in why_no_fp8(torch.device("mps"), None)


LIMITED = """
import json
from fp8pass import hardware
print(json.dumps([hardware.cpu_key(), [str(d) for d in hardware.reference_dtypes()]]))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="limits of x86")
def test_limits_in_the_environment_are_seen() -> None:
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    environment = {**os.environ, **limits}
    done = subprocess.run([sys.executable, "-c", LIMITED], env=environment, capture_output=True, text=True, check=True)
    key, slow = json.loads(done.stdout)
    assert slow == ["torch.bfloat16", "torch.float16"]
    assert (key == cpu_key()) == (limits.items() <= os.environ.items())


def test_the_key_changes_with_what_kernels_depend_on_and_with_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    can = {"avx2": True, "avx512_f": True, "avx512_bf16": False, "num_logical_cores": 2, "cpu_name": "one"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    key = cpu_key()
    can |= {"num_logical_cores": 64, "cpu_name": "another"}
    assert cpu_key() == key
    can["avx512_bf16"] = True
    assert cpu_key() != key
    can["avx512_bf16"] = False
    monkeypatch.setattr(hardware, "onednn_multiplies", lambda dtype: None)
    assert cpu_key() != key
    monkeypatch.undo()
    key = cpu_key()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert cpu_key() != key
