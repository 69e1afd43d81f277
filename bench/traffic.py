"""Count the bytes that a training step reads and writes around its matmuls, and the kernels that it launches for this.

    python bench/traffic.py [--target h100] [--blocks llama_mlp ...] [--optimizer AdamW] [--requantize] [--json FILE]

Prints a table. With an optimizer, the step includes its compiled update, which rows of fp8pass compile with
`fp8pass.train_step`. Nothing is measured: Inductor generates the code for the GPU, on any machine, and its scheduler
counts the bytes. `fp8pass inspect bench.blocks:llama_mlp` lists the kernels. Rows of torchao are missing if it is not
installed. Launches are written as Triton kernels + ATen kernels, which finish sums. Matmuls and attention are not
counted, but for what a fused matmul moves more than the matmul alone would; FlashAttention-2 reads and writes the same
bytes in all rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # to import bench.blocks from any working directory

from fp8pass.inspect.inspector import InspectedRun, Inspection, inspect  # noqa: E402

BLOCKS = ("llama_mlp", "llama_block", "gpt2_mlp")
FUSED = "fp8pass delayed, fused"
"""The row with `epilogues="always"`."""
AGAIN = "fp8pass requantize"
"""The row with `on_saturation="requantize"`, in steps that saturate nothing."""
ROWS = ("bf16", "torchao tensorwise", "torchao rowwise", "fp8pass delayed", AGAIN, FUSED, "fp8pass rowwise")


def around_matmuls(run: InspectedRun) -> tuple[int, int, int]:
    """Return (bytes, launches of Triton kernels, launches of ATen kernels) without matmuls and attention.

    A fused matmul counts with the bytes that it moves more than the matmul alone would.
    """
    triton, others = run.of("triton"), [k for k in run.of("extern") if "attention" not in k.name]
    moved = sum(k.bytes_moved for k in (*triton, *others)) + sum(k.epilogue for k in run.of("gemm"))
    return moved, len(triton), len(others)


def inspected(block: str, target: str, optimizer: str | None = None, again: bool = False) -> list[Inspection]:
    """Inspect a block with two recipes, each beside torchao's of the same granularity, and with fused matmuls.

    again: also with saturation answered in the step.
    """
    pairs = (("delayed", "torchao:tensorwise"), ("rowwise", "torchao:rowwise"))
    spec = f"bench.blocks:{block}"
    fused = inspect(spec, target, "delayed", optimizer=optimizer, options={"epilogues": "always"})
    fused = replace(fused, runs=(replace(fused.runs[0], name=FUSED),))
    importlib.import_module("bench.blocks")  # registers the recipe
    more = [inspect(spec, target, "requantize", optimizer=optimizer)] if again else []
    return [*(inspect(spec, target, recipe, peer=peer, optimizer=optimizer) for recipe, peer in pairs), fused, *more]


def table(found: dict[str, list[Inspection]]) -> str:
    """Return a table in Markdown with megabytes and launches for each block."""
    runs = {block: {run.name: run for i in of for run in i.runs} for block, of in found.items()}
    lines = [
        "| | " + " | ".join(f"{block} MB | launches" for block in runs) + " |",
        "|---" + "|---:|---:" * len(runs) + "|",
    ]
    for row in ROWS:
        if all(row in of for of in runs.values()):
            counts = (around_matmuls(of[row]) for of in runs.values())
            cells = (f"{moved / 1e6:.0f} | {triton} + {others}" for moved, triton, others in counts)
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100", help="the GPU (default: %(default)s)")
    parser.add_argument("--blocks", nargs="+", default=BLOCKS, help="factories in bench/blocks.py (default: all)")
    parser.add_argument("--optimizer", help="a class of torch.optim, whose update counts too (default: no update)")
    parser.add_argument("--requantize", action="store_true", help='also with on_saturation="requantize"')
    parser.add_argument("--json", type=Path, help="a file to write all kernels to")
    args = parser.parse_args()
    found = {block: inspected(block, args.target, args.optimizer, args.requantize) for block in args.blocks}
    print(table(found))
    if args.json is not None:
        everything = {block: [asdict(i) for i in of] for block, of in found.items()}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
