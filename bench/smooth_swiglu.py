"""Train a SwiGLU layer in which two weights of a channel are aligned, with and without `smooth_swiglu`.

    python bench/smooth_swiglu.py [--seeds 3] [--steps 65]

The layer, a teacher's with noise, learns what the teacher computes. In channel 0, gate and up are aligned, as Fishman
et al. (arXiv 2409.12517) observe after long training, so that the channel is quadratic in the input. In three batches,
a quarter of the tokens lies along these weights; they double from one such batch to the next, and none of their
elements is larger than those of usual tokens. Delayed scaling knows the amaxes of earlier batches only: the channel
saturates.
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

WIDTH, CHANNELS, TOKENS, RATE, NOISE = 64, 128, 256, 3e-3, 0.1
ALONG = {30: 0.75, 40: 1.5, 50: 3.0}
"""{step: size of the elements of the tokens along the aligned weights}."""
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
    """Yield inputs; those of the steps in ALONG have tokens along the aligned weights."""
    made = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(TOKENS, WIDTH, generator=made)
        if step in ALONG:
            x[: TOKENS // 4] = along.sign() * ALONG[step]
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


def main() -> None:
    """Print the losses before the first such batch, and at the end, as means and deviations over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=65)
    args = parser.parse_args()
    print("| loss | before | " + " | ".join(f"step {step}" for step in ALONG) + " | the step after | last 10 |")
    print("|---|---:|" + "---:|" * (len(ALONG) + 2))
    for name, options in RUNS.items():
        rows = []
        for seed in range(args.seeds):
            of = losses(seed, args.steps, options)
            first, last = min(ALONG), max(ALONG)
            rows.append([of[first - 1], *(of[step] for step in ALONG), of[last + 1], statistics.mean(of[-10:])])
        cells = [f"{statistics.mean(c):.4f} ± {statistics.pstdev(c):.4f}" for c in zip(*rows, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
