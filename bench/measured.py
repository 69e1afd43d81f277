"""Print the table of what bench/h200.py has measured on a GPU.

python bench/measured.py [results.json]        bench/results/h100.json by default
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "h100.json"
HEAD = (
    "| model | recipe | BF16 ms | FP8 ms | speed-up | matmuls ms | other kernels ms | launches | peak GB "
    "| dB of output, worst gradient |"
)


def row(point: dict[str, Any]) -> str:
    """Return a point as a row: the median and the 20th and 80th percentile of its speed-up, kernels if profiled."""
    kernels = point.get("kernels")
    of_kernels = [f"{kernels[name] * 1e3:.2f}" if kernels else "" for name in ("gemm_seconds", "other_seconds")] + [
        f"{kernels['launches']:.0f}" if kernels else ""
    ]
    noise = point["sqnr_db"]
    cells = [
        point["op"],
        point["recipe"],
        f"{point['seconds_bf16'] * 1e3:.2f}",
        f"{point['seconds_fp8'] * 1e3:.2f}",
        f"**{point['speedup']:.2f}** ({point['speedup_p20']:.2f} to {point['speedup_p80']:.2f})",
        *of_kernels,
        f"{point['peak_bytes'] / 1e9:.2f}",
        f"{noise['output']:.1f}, {noise['worst']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(found: dict[str, Any]) -> str:
    """Return where and when the results were measured, and a row for each point that is right."""
    of = found["environment"]
    points = [p for section in found["sections"].values() for p in section["points"] if p["status"] == "ok"]
    where = f"{of['gpu']}, {of['date'][:10]}, torch {of['torch']}, Triton {of['triton']}, torchao {of['torchao']}."
    ruler = "|" + "---|" * (HEAD.count("|") - 1)
    return "\n".join([where, "", HEAD, ruler, *map(row, points)])


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else RESULTS).read_text())))
