"""Compare formats of parameters: train a small MLP whose parameters are rounded after each step, with several seeds.

    python bench/rounded_parameters.py [--steps 1000] [--seeds 5]

A student learns a teacher of the same shape, by AdamW with a learning rate that falls to 0, as late training has it.
All computation is in float32. Runs of one seed have the same weights at the beginning, and the same batches.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from seeds import ROUNDINGS
from torch import nn

from fp8pass.quant.random_bits import keys_of

NAMES = {
    "": "float32",
    "nearest": "bfloat16, to nearest",
    "stochastic": "bfloat16, stochastically",
    "float16": "float16 with a scale, to nearest",
}


def mlp() -> nn.Sequential:
    """Return a new MLP."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def trained(rounds: str, seed: int, steps: int) -> float:
    """Train, and return the mean squared error on other data, in millionths."""
    torch.manual_seed(seed)
    teacher, student = mlp().requires_grad_(False), mlp()
    parameters = list(student.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, foreach=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for i in range(steps):
        x = torch.randn(128, 32)
        (student(x) - teacher(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rounds:
            keys = keys_of(torch.tensor([i], dtype=torch.int32), torch.arange(len(parameters), dtype=torch.int32))
            with torch.no_grad():
                for p, key in zip(parameters, keys, strict=True):
                    p.copy_(ROUNDINGS[rounds](p, key))
    x = torch.randn(4096, 32)
    return 1e6 * float((student(x) - teacher(x)).square().mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each format (default: %(default)s)")
    args = parser.parse_args()
    print(f"An MLP, {args.steps} steps, {args.seeds} seeds; mean squared errors in millionths\n")
    print("| parameters | bytes | error | its deviation | against float32 |\n|---|---:|---:|---:|---:|")
    reference: list[float] = []
    for rounds, name in NAMES.items():
        errors = [trained(rounds, seed, args.steps) for seed in range(args.seeds)]
        reference = reference or errors
        ratios = [a / b for a, b in zip(errors, reference, strict=True)]
        cells = [f"{statistics.mean(errors):.1f}", f"{statistics.stdev(errors):.1f}", f"{statistics.mean(ratios):.2f}x"]
        print(f"| {name} | {2 if rounds else 4} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
