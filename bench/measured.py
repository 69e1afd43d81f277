"""Print tables of what was measured on a GPU, for docs/measured.md and README.md.

    python bench/measured.py h100                               the table of bench/results/h100.json, a list of points
    python bench/measured.py layers|options|kinds|kernels|steps|short [h200.jsonl]

The other tables are of bench/results/h200.jsonl, or of another file that bench/h200.py has written: `layers` and
matmuls against BF16; what `options` cost; milliseconds of a layer by `kinds` of kernels; the longest `kernels` that
store FP8; whole `steps`; and a `short` one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
WORKS = {
    "llama_block": "a layer of Llama-3-8B",
    "llama_mlp": "MLP of Llama-3-8B",
    "gpt2_mlp": "MLP like GPT-2's, 4096 to 16384",
    "relu2_mlp": "MLP with ReLU squared, 768 to 3072, 32768 tokens",
    "hf_8b_4l": "Llama, 4 layers of 8B's shapes",
    "hf_1b_8l": "Llama, 8 layers of 1B's shapes",
    "hf_160m": "Llama, 160M",
    "gpt2": "GPT-2, 124M",
    "gpt2_50257": "GPT-2, 124M, 50257 words",
}
WHO = {
    "bf16": "BF16",
    "t_delayed": "delayed, `train_step`",
    **{recipe: recipe for recipe in ("delayed", "dynamic", "rowwise", "blockwise", "mxfp8")},
    "fused": '`epilogues="always"`',
    "save": "`save_fp8`",
    "fusedsave": '`save_fp8`, `epilogues="always"`',
    "graphs": "delayed, CUDA graphs",
    "ao_tensorwise": "torchao tensorwise",
    "ao_rowwise": "torchao rowwise",
    **{name: name for name in ("tensorwise", "xla dynamic", "flax delayed")},
}


def load(path: Path) -> tuple[Row, list[Row]]:
    """Return the environment, and the results that have figures, in the order of WORKS and WHO."""
    first, *rows = [json.loads(text) for text in path.read_text().splitlines()]
    works, names = list(WORKS), list(WHO)

    def place(row: Row) -> tuple[int, int]:
        return works.index(row["work"]) if row["work"] in works else len(works), names.index(row["who"]) if row[
            "who"
        ] in names else len(names)

    return first["environment"], sorted((row for row in rows if "ms" in row), key=place)


def table(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(
        [head, "|" + "---|" * (head.count("|") - 1), *(f"| {' | '.join(map(str, row))} |" for row in rows)]
    )


def where(environment: Row) -> str:
    """Return where and when the results were measured."""
    parts = [f"{name} {environment[key]}" for name, key in NAMES.items() if environment.get(key)]
    return f"{environment['gpu']}, {environment['date'][:10]}, {', '.join(parts)}."


NAMES = {
    "torch": "torch", "Triton": "triton", "torchao": "torchao", "transformers": "transformers", "fp8pass at": "commit",
}  # fmt: skip


def named(row: Row) -> tuple[str, str]:
    """Return the words for workload and contender."""
    shape = f" {row['m']} x {row['k']} x {row['n']}" if "m" in row else ""
    fast = ", fast" if row.get("fast_accum") else ""
    return WORKS.get(row["work"], row["work"]) + shape, WHO.get(row["who"], row["who"]) + fast


def giga(count: int | None) -> str:
    """Return a count of bytes in GB."""
    return "" if count is None else f"{count / 1e9:.2f}"


def layers(environment: Row, rows: list[Row]) -> str:
    """Return a row for each contender on a layer or matmul, with speed, accuracy and memory."""
    found = [
        (
            *named(row),
            *(f"{ms:.2f}" for ms in row["ms"]),
            "**{:.2f}** ({:.2f} to {:.2f})".format(row["speedup"], *row["p20_80"]),
            f"{row['dB'][0]}, {min(row['dB'])}",
            giga(row.get("peak")),
            giga(row.get("peak_bf16")),
            f"{row['host_ms']:.1f}" if "host_ms" in row else "",
            f"{row['compile_s']:.0f}" if "compile_s" in row else "",
        )
        for row in rows
        if "speedup" in row
    ]
    head = (
        "| forward and backward of | contender | BF16 ms | FP8 ms | speed-up | dB of output, worst gradient | peak GB "
        "| BF16's | host ms | compiles in s |"
    )
    return f"{where(environment)}\n\n{table(head, found)}"


def options(_: Row, rows: list[Row]) -> str:
    """Return what options cost and save, relative to delayed scaling without them."""
    delayed = {row["work"]: row for row in rows if row["who"] == "delayed" and "m" not in row}
    found = [
        (
            *named(row),
            f"{100 * (delayed[row['work']]['speedup'] / row['speedup'] - 1):+.1f}%",
            f"{(row['peak'] - delayed[row['work']]['peak']) / 1e9:+.2f} GB",
        )
        for row in rows
        if row["who"] in ("fused", "save", "fusedsave") and row["work"] in delayed
    ]
    return table("| forward and backward of | option | time | peak memory |", found)


_ATTENTION = ("sdpa", "flash", "fmha", "cudnn::fusion")
_MATMULS = ("gemm", "nvjet", "cutlass", "wgmma", "xmma", "cublas", "_mm", "::mm", "addmm", "bmm", "matmul")
_FUSED = ("triton_poi", "triton_red", "triton_per", "triton_unk")


def kind(kernel: str) -> str:
    """Return "matmul", "attention" or "other" for the name of a kernel on a GPU, or of an operator on a CPU.

    Inductor names its kernels by the ops around them, too; they are not matmuls, except for templates.
    """
    name = kernel.lower()
    if any(part in name for part in _ATTENTION) and not name.startswith("triton"):
        return "attention"
    return "matmul" if any(part in name for part in _MATMULS) and not name.startswith(_FUSED) else "other"


def kinds(_: Row, rows: list[Row]) -> str:
    """Return the milliseconds of a Llama layer by kind of kernel; without flushed caches, unlike `layers`."""
    of_layer = [row for row in rows if row["work"] == "llama_block"]
    profiles = {named(row | {"who": "bf16"})[1]: row["kernels_bf16"] for row in of_layer if "kernels_bf16" in row}
    profiles |= {named(row)[1]: row["kernels"] for row in of_layer if row["who"] != "bf16"}
    found = []
    for name, kernels in profiles.items():
        ms = [sum(took for kernel, took, _ in kernels if kind(kernel) == k) for k in ("matmul", "attention", "other")]
        found.append((name, *(f"{each:.2f}" for each in (*ms, sum(ms)))))
    return table("| a layer of Llama-3-8B | matmuls ms | attention ms | other ms | sum |", found)


def kernels(_: Row, rows: list[Row], most: int = 14) -> str:
    """Return the longest kernels of delayed scaling that store FP8, with all configurations where they were timed."""
    found: list[tuple[float, tuple[str, ...]]] = []
    delayed = [
        row for row in rows if row["who"] == "delayed" and "m" not in row and row["work"].endswith(("block", "mlp"))
    ]
    for row in delayed:
        for one in row.get("table") or [
            {"kernel": name, "us": 1e3 * ms} for name, ms, _ in row["kernels"] if _stores(name)
        ]:
            chosen = next((c for c in one.get("configurations", ()) if c["chosen"]), one)
            cells: tuple[str, ...] = (named(row)[0], f"`{_shortened(one['kernel'])}`", f"{chosen['us']:.0f}")
            if "configurations" in one:
                others = ", ".join(f"{_tile(c)} {c['us']:.0f}" for c in one["configurations"] if not c["chosen"])
                moved = f"{one['bytes'] / 1e6:.0f}", f"{chosen['GB_s']:.0f}", f"{chosen['share_of_copy']:.0%}"
                cells = (*cells, *moved, _tile(chosen), others)
            found.append((chosen["us"], cells))
    width = max(len(cells) for _, cells in found)
    head = "| in | kernel | us | MB | GB/s | share of a copy's | configuration | others, us |"
    shown = [cells for _, cells in sorted(found, key=lambda pair: -pair[0])[:most]]
    return table("|".join(head.split("|")[: width + 1]) + "|", shown)


def _stores(kernel: str) -> bool:
    """Return whether a kernel of delayed scaling stores FP8, by its name."""
    return kernel.startswith("triton_unk") or (kernel.startswith("triton_red_fused__to_copy") and "amax" in kernel)


def _shortened(kernel: str) -> str:
    return kernel if len(kernel) < 60 else f"{kernel[:45]}...{kernel[-12:]}"


def _tile(of: Row) -> str:
    blocks = " x ".join(str(value) for name, value in of.items() if name.endswith(("BLOCK", "_BLOCK")))
    return f"{blocks}, {of['num_warps']} warps, {of['num_stages']} stages"


def steps(_: Row, rows: list[Row]) -> str:
    """Return a row for each contender on a whole step with its optimizer."""
    of_steps = [row for row in rows if "tokens_s" in row]
    bf16 = {row["work"]: row["tokens_s"] for row in of_steps if row["who"] == "bf16"}
    compared = {row["work"] for row in of_steps if row["who"] != "bf16"}
    found = [
        (
            *named(row),
            f"{row['ms']:.1f}",
            f"{row['tokens_s']:,}",
            f"**{row['tokens_s'] / bf16[row['work']]:.2f}**",
            f"{row['host_ms']:.1f}",
            row["peak_GB"],
            f"{row['compile_s']:.0f}",
        )
        for row in of_steps
        if row["work"] in bf16.keys() & compared
    ]
    head = "| step with AdamW | contender | ms | tokens/s | speed-up | host ms | peak GB | compiles in s |"
    return table(head, found)


def short(environment: Row, rows: list[Row]) -> str:
    """Return the figures of BF16, fp8pass and torchao where all of them were measured."""
    by = {(row["work"], row["who"]): row for row in rows if "m" not in row}
    found = []
    for work in WORKS:
        both = [by.get((work, "t_delayed"), by.get((work, "delayed"))), by.get((work, "ao_tensorwise"))]
        if all(row and "speedup" in row for row in both):
            cells = [f"{row['ms'][1]:.2f} ms, {row['speedup']:.2f}x" for row in both if row]
            found.append((WORKS[work], f"{by[work, 'delayed']['ms'][0]:.2f} ms", *cells))
        elif all(both):
            base = by[work, "bf16"]["tokens_s"]
            cells = [f"{row['tokens_s']:,}, {row['tokens_s'] / base:.2f}x" for row in both if row]
            found.append((f"{WORKS[work]}, whole step", f"{base:,} tokens/s", *cells))
    return table(f"| {environment['gpu']} | BF16, compiled | fp8pass, delayed | torchao, tensorwise |", found)


def h100(found: Row) -> str:
    """Return a row for each point of the older form that is right: kernels only if they were profiled."""
    points = [p for section in found["sections"].values() for p in section["points"] if p["status"] == "ok"]
    rows = []
    for point in points:
        profiled = point.get("kernels")
        ms = [f"{profiled[name] * 1e3:.2f}" if profiled else "" for name in ("gemm_seconds", "other_seconds")]
        rows.append(
            (
                point["op"],
                point["recipe"],
                f"{point['seconds_bf16'] * 1e3:.2f}",
                f"{point['seconds_fp8'] * 1e3:.2f}",
                f"**{point['speedup']:.2f}** ({point['speedup_p20']:.2f} to {point['speedup_p80']:.2f})",
                *ms,
                f"{profiled['launches']:.0f}" if profiled else "",
                giga(point["peak_bytes"]),
                f"{point['sqnr_db']['output']:.1f}, {point['sqnr_db']['worst']:.1f}",
            )
        )
    head = (
        "| model | recipe | BF16 ms | FP8 ms | speed-up | matmuls ms | other kernels ms | launches | peak GB "
        "| dB of output, worst gradient |"
    )
    return f"{where(found['environment'])}\n\n{table(head, rows)}"


TABLES: dict[str, Callable[[Row, list[Row]], str]] = {
    "layers": layers, "options": options, "kinds": kinds, "kernels": kernels, "steps": steps, "short": short,
}  # fmt: skip


def printed(name: str, path: Path = RESULTS / "h200.jsonl") -> str:
    """Return a table by its name."""
    if name == "h100":
        return h100(json.loads((RESULTS / "h100.json").read_text()))
    return TABLES[name](*load(path))


if __name__ == "__main__":
    print(printed(sys.argv[1], *map(Path, sys.argv[2:])))
