"""Train a SwiGLU layer in which two weights of a channel are aligned, with and without `smooth_swiglu`.

    python bench/smooth_swiglu.py [--seeds 3] [--steps 180]

The layer, a teacher's with noise, learns what the teacher computes. In channel 0, gate and up are aligned, as Fishman
et al. (arXiv 2409.12517) observe after long training, so that the channel is quadratic in the input. From step 20 on,
in each fourth batch, a quarter of the tokens lies along these weights. None of their elements is larger than the
largest of usual tokens. Delayed scaling, with a history of two steps, knows the amaxes of usual batches only when such
a batch comes: the channel saturates each time, the gradient asks for larger weights, and the loss of usual batches
rises as well.
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

import fp8pass  # noqa: F401  registers the backend
from fp8pass.recipes import DelayedScaling

WIDTH, CHANNELS, TOKENS, RATE, NOISE = 64, 128, 256, 3e-3, 0.1
FIRST, EVERY, SIZE = 20, 4, 3.0
"""The first step with tokens along the aligned weights, the steps from one to the next, and the size of elements."""
WINDOW = 40
"""Steps over which losses are averaged."""
RECIPE = DelayedScaling(amax_history_len=2)
RUNS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "delayed": {"recipe": RECIPE},
    "delayed, smooth_swiglu": {"recipe": RECIPE, "smooth_swiglu": True},
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
    """Yield inputs; some have tokens along the aligned weights."""
    made = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(TOKENS, WIDTH, generator=made)
        if has_outliers(step):
            x[: TOKENS // 4] = along.sign() * SIZE
        yield x


def has_outliers(step: int) -> bool:
    """Return whether the batch of a step has tokens along the aligned weights."""
    return step >= FIRST and step % EVERY == 0


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
        for own, weight in zip(student.parameters(), teacher.parameters(), strict=True):
            own.copy_(weight + NOISE * weight.std() * torch.randn(weight.shape))
    run: Callable[[Tensor], Tensor] = student
    if options is not None:
        run = torch.compile(student, backend="fp8pass", options={"lowering": "eager", **options})
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


def row(of: list[list[float]]) -> list[str]:
    """Return the cells of a run: means and deviations over seeds, given the losses of each."""
    steps = range(len(of[0]))
    usual = [[i for i in steps if begin <= i < begin + WINDOW and not has_outliers(i)] for begin in begins(len(steps))]
    outliers = [i for i in steps[-WINDOW:] if has_outliers(i)]
    cells = []
    for chosen in ([i for i in steps if FIRST - 5 <= i < FIRST], *usual, outliers):
        means = [statistics.mean(losses[i] for i in chosen) for losses in of]
        cells.append(f"{statistics.mean(means):.4f} ± {statistics.pstdev(means):.4f}")
    return cells


def begins(steps: int) -> range:
    """Return the first steps of the windows."""
    return range(FIRST, steps - WINDOW + 1, WINDOW)


def main() -> None:
    """Print the losses of usual batches before the first outliers and after them, and of the last batches with some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=180)
    args = parser.parse_args()
    windows = [f"steps {begin} to {begin + WINDOW - 1}" for begin in begins(args.steps)]
    print("| loss of usual batches | before | " + " | ".join(windows) + " | batches with outliers, at the end |")
    print("|---|---:|" + "---:|" * (len(windows) + 1))
    for name, options in RUNS.items():
        cells = row([losses(seed, args.steps, options) for seed in range(args.seeds)])
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
