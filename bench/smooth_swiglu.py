"""Train a SwiGLU layer in which two weights of a channel are aligned, with and without `smooth_swiglu`.

    python bench/smooth_swiglu.py [--seeds 5] [--steps 300]

The layer learns what a teacher computes. In channel 0 of both, gate and up are aligned, as Fishman et al.
(arXiv 2409.12517) observe after long training, so that the channel's product is quadratic in the input. A few tokens of
one batch in five are along these weights, and grow from one such batch to the next; no element of theirs is larger than
those of usual tokens. Delayed scaling knows the amaxes of earlier batches only: each time, the channel saturates.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass

WIDTH, CHANNELS, TOKENS, RATE = 64, 128, 256, 3e-3
QUIET, EVERY, GROWTH = 30, 5, 1.2
"""Steps before the first such batch, steps from one to the next, and the factor by which these tokens grow."""
SPIKES, SMALLEST = 16, 0.2
"""How many tokens of such a batch are along the weights, and the size of their elements in the first batch."""
RUNS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "delayed": {"recipe": "delayed"},
    "delayed, smooth_swiglu": {"recipe": "delayed", "smooth_swiglu": True},
}


def in_bf16(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as BF16 does, with operands and result rounded; CPUs without BF16 are slow at it."""
    x, weight = (t.bfloat16().float() for t in (x, weight))
    return F.linear(x, weight).bfloat16().float()


class Layer(nn.Module):
    """A SwiGLU layer. along: the weights of channel 0, in gate and up. product: multiplies by a weight."""

    def __init__(self, along: Tensor, product: Callable[[Tensor, Tensor], Tensor] = F.linear) -> None:
        super().__init__()
        self.product = product
        self.gate = nn.Linear(WIDTH, CHANNELS, bias=False)
        self.up = nn.Linear(WIDTH, CHANNELS, bias=False)
        self.down = nn.Linear(CHANNELS, WIDTH, bias=False)
        with torch.no_grad():
            self.gate.weight[0] = self.up.weight[0] = along

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, WIDTH]."""
        h = F.silu(self.product(x, self.gate.weight)) * self.product(x, self.up.weight)
        return self.product(h, self.down.weight)


def batches(seed: int, steps: int, along: Tensor) -> Iterator[Tensor]:
    """Yield inputs; from step QUIET on, one in EVERY has tokens with a growing component along the aligned weights."""
    made = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(TOKENS, WIDTH, generator=made)
        times = (step - QUIET) // EVERY
        if step >= QUIET and (step - QUIET) % EVERY == 0:
            x[:SPIKES] = along.sign() * SMALLEST * GROWTH**times
        yield x


def loss_of(y: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean over tokens of the squared error, relative to what is wanted."""
    error = (y.float() - wanted).square().sum(-1)
    return (error / wanted.square().sum(-1).clamp(min=1e-2)).mean()


def losses(seed: int, steps: int, options: dict[str, Any] | None) -> list[float]:
    """Train; return the loss of each step. options: of fp8pass; None for BF16."""
    torch.manual_seed(seed)
    along = torch.randn(WIDTH).sign() / math.sqrt(WIDTH)
    teacher, student = Layer(along), Layer(along, F.linear if options is not None else in_bf16)
    with torch.no_grad():
        student.down.weight[:, 0] = teacher.down.weight[:, 0]  # the channel is learned; the others are not
    run: Callable[[Tensor], Tensor] = student
    if options is not None:
        run = torch.compile(student, backend="fp8pass", options=options)
    optimizer, found = torch.optim.AdamW(student.parameters(), RATE), []
    for x in batches(seed, steps, along):
        with torch.no_grad():
            wanted = teacher(x)
        loss = loss_of(run(x), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def main() -> None:
    """Print the losses before the first such batch, and at the end, as means and deviations over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=105)
    args = parser.parse_args()
    print("| | before | last step with such tokens | last 5 steps without |\n|---|---:|---:|---:|")
    for name, options in RUNS.items():
        rows = []
        for seed in range(args.seeds):
            of = losses(seed, args.steps, options)
            without = [loss for step, loss in enumerate(of) if step >= QUIET and (step - QUIET) % EVERY]
            rows.append([statistics.mean(of[QUIET - 5 : QUIET]), of[QUIET::EVERY][-1], statistics.mean(without[-5:])])
        cells = [f"{statistics.mean(c):.3f} ± {statistics.pstdev(c):.3f}" for c in zip(*rows, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
