"""Predict when a training step with FP8 copies of weights pays, beside the backend with torch's fused AdamW.

    python bench/when_it_pays.py [--target h100] [--tokens 1024 4096 16384 65536] [--forwards 1 8]
    python bench/when_it_pays.py --updates [--target h100] [--ranks 8]

Prints a table for one layer of Llama-3-8B with AdamW, parameters and moments in bfloat16; a model has these figures
once for each layer. `backend` quantizes weights in each forward, and updates them by a fused AdamW. `train_step`
compiles the update, which writes the FP8 copies too; with `fused=True` one call of compiled code writes them after a
fused AdamW. Bytes and launches are those around the matmuls, counted as by bench/traffic.py; what a fused AdamW moves,
14 bytes for each parameter, and its launches follow from torch's source. The time is that of the whole step on the
GPU, predicted. A step of several forwards, for microbatches, has as many forwards and backwards, and one update.

With `--updates` the table has the update alone, for optimizers and options, and what is left of it on one of `--ranks`
ranks of FSDP, each of which updates its shards.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]  # `inspect` imports this file as bench.when_it_pays

import torch  # noqa: E402
from blocks import DTYPE, WIDTH, LlamaBlock  # noqa: E402
from traffic import around_matmuls  # noqa: E402

from fp8pass.gpu.target import TARGETS  # noqa: E402
from fp8pass.inspect.inspector import InspectedRun, inspect  # noqa: E402
from fp8pass.roofline import memory_seconds  # noqa: E402

CHUNK, BLOCKS = 65536, 320
"""Elements for each block, and blocks for each launch, of torch's fused optimizers (MultiTensorApply.cuh)."""
FUSED_BYTES, COPIES_BYTES = 14, 4
"""For each parameter: a fused AdamW reads the parameter, its gradient and two moments, and writes all but the gradient;
both FP8 copies are written from the parameter."""


def layer(tokens: int) -> tuple[Any, ...]:
    """Return a layer of Llama-3-8B, and an input bf16[1, tokens, 4096]."""
    torch.set_default_dtype(DTYPE)
    try:
        return LlamaBlock(length=tokens), torch.randn(1, tokens, WIDTH, requires_grad=True)
    finally:
        torch.set_default_dtype(torch.float32)


layer_1024, layer_4096, layer_16384, layer_65536 = (partial(layer, n) for n in (1024, 4096, 16384, 65536))


class Cost(NamedTuple):
    """Hold the cost of a part of a step. moved: bytes around matmuls. seconds: of all kernels."""

    moved: float
    launches: float
    seconds: float

    def __add__(self, other: Any) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, n: int) -> Cost:
        """Return the cost of n such parts."""
        return Cost(*(n * a for a in self))


def cost_of(run: InspectedRun, is_update: bool) -> Cost:
    """Return the cost of the update, or of forward and backward."""
    kernels = tuple(k for k in run.kernels if (k.graph == "update") == is_update)
    moved, triton, others = around_matmuls(InspectedRun(run.name, kernels, 0))
    return Cost(moved, triton + others, sum(k.seconds for k in kernels))


def costs(tokens: int, forwards: int, target: str) -> dict[str, Cost]:
    """Return the cost of a step for each way."""
    backend = inspect(f"bench.when_it_pays:layer_{tokens}", target, "delayed").run("fp8pass delayed")
    step = step_of(tokens, target)
    fused, copies = fused_costs(target)
    reads = cost_of(step, False).times(forwards)
    return {
        "backend": cost_of(backend, False).times(forwards) + fused,
        "train_step": reads + cost_of(step, True),
        "train_step, fused=True": reads + fused + copies,
    }


def step_of(tokens: int, target: str, optimizer: str = "AdamW", **options: str | bool) -> InspectedRun:
    """Return the kernels of a forward and a backward that read kept copies, and of the update that writes these."""
    cached = {"weight_cache": "fp8+transpose", **options}
    spec = f"bench.when_it_pays:layer_{tokens}"
    return inspect(spec, target, "delayed", optimizer=optimizer, options=cached).run("fp8pass delayed")


def fused_costs(target: str) -> tuple[Cost, Cost]:
    """Return the costs of a fused AdamW, and of writing all FP8 copies after it."""
    with torch.device("meta"):
        parameters = [p.numel() for p in LlamaBlock().parameters()]
    gpu, moved = TARGETS[target], FUSED_BYTES * sum(parameters)
    fused = Cost(moved, math.ceil(sum(parameters) / CHUNK / BLOCKS), memory_seconds(gpu, moved))
    weights = [n for n in parameters if n > WIDTH]
    written = COPIES_BYTES * sum(weights)
    # a kernel that writes FP8 in both orientations, as those of the compiled update
    return fused, Cost(written, len(weights), memory_seconds(gpu, written, "transposed_share"))


UPDATES: dict[str, tuple[str, dict[str, str | bool]]] = {
    "AdamW": ("AdamW", {}),
    'AdamW, optimizer_state="fp8"': ("AdamW", {"optimizer_state": "fp8"}),
    'AdamW, update_rounding="stochastic"': ("AdamW", {"update_rounding": "stochastic"}),
    "AdamW, skip_nonfinite=True": ("AdamW", {"skip_nonfinite": True}),
    "SGD without momentum": ("SGD", {}),
}
"""{what the table calls a compiled update: its optimizer and the options of the step}."""


def print_updates(target: str, ranks: int) -> None:
    """Print the table of updates."""
    fused, copies = fused_costs(target)
    found = {"fused AdamW, no copies": fused, "fused AdamW, then copies": fused + copies}
    for name, (optimizer, options) in UPDATES.items():
        found[name] = cost_of(step_of(4096, target, optimizer, **options), is_update=True)
    print(f"| update | MB | launches | ms | ms on one of {ranks} ranks |\n|---|---:|---:|---:|---:|")
    for name, (moved, launches, seconds) in found.items():
        print(f"| {name} | {moved / 1e6:.0f} | {launches:.0f} | {seconds * 1e3:.2f} | {seconds * 1e3 / ranks:.2f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="h100", help="the GPU (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536], help="of each forward")
    parser.add_argument("--forwards", type=int, nargs="+", default=[1, 8], help="of each step")
    parser.add_argument("--updates", action="store_true", help="print the table of updates instead")
    parser.add_argument("--ranks", type=int, default=8, help="of FSDP, in that table (default: %(default)s)")
    args = parser.parse_args()
    if args.updates:
        print_updates(args.target, args.ranks)
        return
    print("| tokens | forwards | way | MB | launches | ms | time saved |\n|---:|---:|---|---:|---:|---:|---:|")
    for tokens in args.tokens:
        for forwards in args.forwards:
            found = costs(tokens, forwards, args.target)
            base = found["backend"].seconds
            for way, (moved, launches, seconds) in found.items():
                saved = "" if way == "backend" else f"{1 - seconds / base:.1%}"
                cells = tokens, forwards, way, f"{moved / 1e6:.0f}", f"{launches:.0f}", f"{seconds * 1e3:.2f}", saved
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
