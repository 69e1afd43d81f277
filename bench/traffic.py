"""What is read and written around the matmuls in one training step, and how many kernels that takes.

    python bench/traffic.py [--target h100] [--blocks llama_mlp ...] [--optimizer AdamW] [--json FILE]

Prints a table. With an optimizer its update counts too: compiled, as the rest, and in rows of fp8pass with what
`fp8pass.train_step` makes of it. Nothing is measured: Inductor generates the code for the GPU, on any machine, and its
scheduler counts the bytes; `fp8pass inspect bench.blocks:llama_mlp` shows kernel by kernel. Rows of torchao are missing
where it is not installed. Launches are those of Triton kernels + those of ATen's that finish a sum. Matmuls are not
counted, nor is attention: FlashAttention-2 reads and writes the same in all rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for bench.blocks, from wherever this is run

from fp8pass.inspect.inspector import Inspection, Run, inspect  # noqa: E402

BLOCKS = ("llama_mlp", "llama_block", "gpt2_mlp")
ROWS = ("bf16", "torchao tensorwise", "torchao rowwise", "fp8pass delayed", "fp8pass rowwise")


def around_matmuls(run: Run) -> tuple[int, int, int]:
    """(bytes, launches of Triton kernels, of ATen's) of everything but matmuls and attention."""
    triton, others = run.of("triton"), [k for k in run.of("extern") if "attention" not in k.name]
    return sum(k.bytes_moved for k in (*triton, *others)), len(triton), len(others)


def inspected(block: str, target: str, optimizer: str | None = None) -> list[Inspection]:
    """The block with either recipe, each beside torchao's of the same name."""
    pairs = (("delayed", "torchao:tensorwise"), ("rowwise", "torchao:rowwise"))
    spec = f"bench.blocks:{block}"
    return [inspect(spec, target, recipe, peer=peer, optimizer=optimizer) for recipe, peer in pairs]


def table(found: dict[str, list[Inspection]]) -> str:
    """As Markdown: for each block megabytes and launches."""
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
    parser.add_argument("--optimizer", help="a class of torch.optim: the whole step (default: forward and backward)")
    parser.add_argument("--json", type=Path, help="file to write everything to")
    args = parser.parse_args()
    found = {block: inspected(block, args.target, args.optimizer) for block in args.blocks}
    print(table(found))
    if args.json is not None:
        everything = {block: [asdict(i) for i in of] for block, of in found.items()}
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
