"""Count what FP8 copies of weights save: the bytes of a step with one forward, and with four.

    python bench/weight_copies.py [--block llama_mlp] [--target h100]

Prints a table in gigabytes around the matmuls, counted as by bench/traffic.py, with the update of AdamW. A step of four
forwards is four times the forward and backward, and one update.
"""

from __future__ import annotations

import argparse

from traffic import around_matmuls

from fp8pass.inspect.inspector import InspectedRun, inspect

RECIPES, CACHES, FORWARDS = ("delayed", "dynamic", "rowwise"), ("off", "fp8+transpose"), {1: "one", 4: "four"}


def step(block: str, target: str, recipe: str, cache: str) -> tuple[int, int]:
    """Return the bytes of forward and backward, and those of the update."""
    spec = f"bench.blocks:{block}"
    found = inspect(spec, target, recipe, optimizer="AdamW", options={"weight_cache": cache})
    run = next(run for run in found.runs if run.name == f"fp8pass {recipe}")
    update = _part(run, True)
    return around_matmuls(_part(run, False))[0], around_matmuls(update)[0]


def _part(run: InspectedRun, is_update: bool) -> InspectedRun:
    kernels = tuple(k for k in run.kernels if (k.graph == "update") == is_update)
    return InspectedRun(run.name, kernels, run.bytes_saved, run.notes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--block", default="llama_mlp", help="a factory in bench/blocks.py (default: %(default)s)")
    parser.add_argument("--target", default="h100", help="the GPU (default: %(default)s)")
    args = parser.parse_args()
    print("| GB | forwards | " + " | ".join(f'`"{cache}"`' for cache in CACHES) + " |\n|---|---|---:|---:|")
    for recipe in RECIPES:
        steps = [step(args.block, args.target, recipe, cache) for cache in CACHES]
        for count, word in FORWARDS.items():
            cells = (f"{(count * around + update) / 1e9:.2f}" for around, update in steps)
            print(f"| `{recipe}` | {word} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
