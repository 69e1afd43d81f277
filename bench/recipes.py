"""Train the demo's language model with every recipe, and compare the final losses with that of BF16.

    python bench/recipes.py [--steps 200] [--recipes delayed rowwise ...]

All runs start with the same weights and use the same batches. Prints a table, each row when its run is done. On a CPU,
blockwise and mxfp8 multiply dequantized FP8 values in high precision: their losses are those of the recipe, and their
kernels are not used.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch

from fp8pass.inspect.demo import load_text, new_run, train
from fp8pass.recipes import DelayedScaling, DynamicScaling, RowwiseScaling, Schedule
from fp8pass.report.report import Report, collect

RECIPES: dict[str, Any] = {
    "delayed": "delayed",
    "delayed, e4m3": DelayedScaling(fp8_format="e4m3"),
    "delayed, history 16, most_recent": DelayedScaling(amax_history_len=16, amax_compute_algo="most_recent"),
    "delayed, grad_weight in BF16": DelayedScaling(high_precision=("grad_weight",)),
    "dynamic": "dynamic",
    "dynamic, power of 2": DynamicScaling(power_of_2=True),
    "rowwise": "rowwise",
    "rowwise, any scale": RowwiseScaling(power_of_2=False),
    "rowwise_gw_hp": "rowwise_gw_hp",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
    "rowwise in attention, delayed elsewhere": {
        "blocks.*.qkv": "rowwise",
        "blocks.*.projection": "rowwise",
        "*": "delayed",
    },
    "BF16 for a quarter, then delayed": "switch",
}


def final_loss(recipe: Any, steps: int) -> tuple[float, str]:
    """Return the validation loss after `steps`, and the share of matmul FLOPs in FP8, as text."""
    torch._dynamo.reset()
    run, text = new_run(str(recipe), "cpu", None if recipe == "BF16" else recipe), load_text()
    with collect() as report:
        for _ in train([run], text, steps, "cpu"):
            pass
    run.validate(text, "cpu")
    total, emulated = (sum(g.flops for g in gemms) for gemms in (report.gemms, _emulated(report)))
    done = sum(g.flops for g in report.rewritten)
    share = f"{(done + emulated) / total:.0%}" + (" (dequantized)" if emulated else "") if total else ""
    return run.validation, share


def _emulated(report: Report) -> list[Any]:
    return [g for g in report.declined if g.rule == "no kernel"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES), help="(default: all)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="fp8pass: (blockwise|mxfp8) kernels exist")
    baseline, _ = final_loss("BF16", arguments.steps)
    print(f"validation loss of the demo's GPT after {arguments.steps} steps, torch {torch.__version__}\n")
    print("| recipe | matmul FLOPs in FP8 | validation loss | against BF16 |\n|---|---|---|---|")
    print(f"| BF16 | | {baseline:.4f} | |", flush=True)
    for name in arguments.recipes:
        switches = RECIPES[name] == "switch"
        recipe = Schedule({0: None, arguments.steps // 4: "delayed"}) if switches else RECIPES[name]
        loss, share = final_loss(recipe, arguments.steps)
        share = "75% of the steps" if switches else share
        print(f"| {name} | {share} | {loss:.4f} | {loss / baseline - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
