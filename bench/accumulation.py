"""Compare four microbatches per optimizer step with one batch four times as large, in FP8.

    python bench/accumulation.py [--steps 200]

It trains the demo's language model in both ways, and prints the validation losses and how far the training losses are
apart. Both ways train on the same tokens. With microbatches, gradients add up in another order, and the gradients of
all four are quantized with one scale.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.inspect import demo

MICROBATCHES = 4
TOLERANCE = 0.01
"""The largest relative difference of the validation losses with which `main` returns 0."""


def accumulated_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Take the step of `demo.train_step`, with one microbatch at a time."""
    losses = []
    for part in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        loss = demo.loss_of(model, *part, dtype) / MICROBATCHES
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def trained(step: Any, steps: int, recipe: str) -> demo.DemoRun:
    """Train the demo's model with a step function, and return the run."""
    torch._dynamo.reset()
    run, text = demo.new_run(step.__name__, "cpu", recipe), demo.load_text()
    run.train = fp8pass.train_step(recipe=recipe, min_speedup=0)(step)
    for _ in demo.train([run], text, steps, "cpu"):
        pass
    run.validate(text, "cpu")
    return run


def main() -> int:
    """Print the table; return 1 if the validation losses are further apart than `TOLERANCE`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--recipe", default="delayed", help="FP8 recipe (default: %(default)s)")
    args = parser.parse_args()
    whole, parts = (trained(step, args.steps, args.recipe) for step in (demo.train_step, accumulated_step))
    gap = parts.validation / whole.validation - 1
    apart = max(abs(a - b) / b for a, b in zip(parts.losses, whole.losses, strict=True))
    print(f"{args.steps} steps, {args.recipe}, torch {torch.__version__}\n")
    print("| a step of | validation loss |\n|---|---:|")
    print(f"| one batch of {demo.BATCH} | {whole.validation:.4f} |")
    print(f"| {MICROBATCHES} microbatches of {demo.BATCH // MICROBATCHES} | {parts.validation:.4f} ({gap:+.2%}) |")
    print(f"\nTraining losses are at most {apart:.2%} apart in any step.")
    print(f"Tolerance of the validation loss: {TOLERANCE:.0%}.")
    return int(abs(gap) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
