"""Time matmuls on this CPU, and on this CPU limited to AVX2, and print what fp8pass decides about them.

    python bench/cpu_matmuls.py

Prints CPU times of one thread as multiples of the same matmul in float32: for bfloat16 and float16, and whether fp8pass
warns about the dtype; and for FP8, and what the `emulate_matmuls` pass chooses. fp8pass decides neither by timing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from fp8pass.hardware import reference_dtypes, why_emulated
from fp8pass.passes.common.patterns import dtype_name
from fp8pass.passes.kernels.emulate_matmuls import in_float32

M, K, N = 1024, 256, 1024
SETTINGS = {"this CPU": {}, "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYOUTS: dict[str, tuple[bool, bool]] = {
    "output": (False, True),
    "grad_input": (False, False),
    "grad_weight": (True, False),
}
"""For each matmul of a linear layer: (first operand is transposed, second operand is transposed)."""
PRODUCTS = (
    (E4M3, E4M3, F32, "tensor"),
    (E4M3, E4M3, BF16, "tensor"),
    (E4M3, E4M3, F16, "tensor"),
    (E4M3, E4M3, BF16, "row"),
    (E5M2, E4M3, BF16, "tensor"),
    (E4M3, E5M2, BF16, "tensor"),
)
"""Dtypes of the operands and of the result; and "tensor" for one scale per tensor, "row" for one per row."""

Found = dict[str, list[Any]]
"""The values of one setting for each row of a table."""


def seconds(run: Callable[[], object]) -> float:
    """Return the shortest CPU time of 2 to 20 calls, after one call that does not count."""
    run()
    times: list[float] = []
    while len(times) < 2 or (len(times) < 20 and sum(times) < 0.2):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def operand(rows: int, columns: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Return normal data [rows, columns]; if transposed, columns are contiguous in memory."""
    x = torch.randn(columns, rows).t() if transposed else torch.randn(rows, columns)
    return x.to(dtype)


def high_precision(dtype: torch.dtype, transposed: tuple[bool, bool]) -> list[Any]:
    """Return the time in a dtype, relative to float32, and whether fp8pass warns about the dtype."""
    a, b = operand(M, K, transposed[0], F32), operand(K, N, transposed[1], F32)
    exact = seconds(lambda: a @ b)
    a, b = a.to(dtype), b.to(dtype)
    return [seconds(lambda: a @ b) / exact, "yes" if dtype in reference_dtypes() else "no"]


def fp8(of_a: torch.dtype, of_b: torch.dtype, result: torch.dtype, scaled: str) -> list[Any]:
    """Return the times of `_scaled_mm` and of the pass's compiled float32, and which of them the pass chooses."""
    a, b = operand(M, K, False, of_a), operand(K, N, True, of_b)
    exact_a, exact_b = a.float(), b.float()
    scales = (torch.ones(M, 1), torch.ones(1, N)) if scaled == "row" else (torch.ones(()), torch.ones(()))
    emulate = torch.compile(lambda *tensors: in_float32(*tensors).to(result), dynamic=False)
    exact = seconds(lambda: exact_a @ exact_b)
    return [
        seconds(lambda: torch._scaled_mm(a, b, *scales, out_dtype=result)) / exact,
        seconds(lambda: emulate(a, b, *scales)) / exact,
        "float32" if why_emulated(a.device, of_a, of_b) else "`_scaled_mm`",
    ]


def measure() -> dict[str, Found]:
    """Return the values of both tables in the setting of this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = {f"{dtype_name(d)} | {kind}": high_precision(d, how) for d in (BF16, F16) for kind, how in LAYOUTS.items()}
    with inductor_config.patch(fx_graph_cache=False):  # the cache's keys lack the instruction set
        products = {f"{dtype_name(p[0])} @ {dtype_name(p[1])} | {dtype_name(p[2])} | {p[3]}": fp8(*p) for p in PRODUCTS}
    return {"high_precision": plain, "fp8": products}


def measured_with(environment: dict[str, str]) -> dict[str, Found]:
    """Return the values of both tables, measured in a process with these environment variables."""
    command = [sys.executable, __file__, "--measure"]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    tables: dict[str, Found] = json.loads(done.stdout.splitlines()[-1])
    return tables


def table(name: str, keys: str, columns: tuple[str, ...], found: dict[str, dict[str, Found]]) -> str:
    """Return a table in Markdown: the keys of the rows, then these columns for each setting."""
    titles = [keys, *(f"{setting}: {columns[0]} | {' | '.join(columns[1:])}" for setting in found)]
    lines = [f"| {' | '.join(titles)} |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for row in found["this CPU"][name]:
        values = [value for tables in found.values() for value in tables[name][row]]
        cells = [value if isinstance(value, str) else f"{value:.2g}" for value in values]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    if "--measure" in sys.argv:
        print(json.dumps(measure()))
        return
    found = {setting: measured_with(environment) for setting, environment in SETTINGS.items()}
    print(f"[{M}, {K}] by [{K}, {N}], torch {torch.__version__}, one thread; float32 is 1\n")
    print(table("high_precision", "multiplied in | matmul", ("time", "warning"), found))
    print()
    print(table("fp8", "operands | result | a scale for each", ("`_scaled_mm`", "in float32", "the pass takes"), found))


if __name__ == "__main__":
    main()
