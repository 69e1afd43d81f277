"""Measure the error of gradients that ranks exchange in FP8, for each format and choice of scales.

    python bench/gradient_error.py [--steps 20] [--ranks 4]

Trains the demo's language model in float32 for some steps, and then takes the gradients of as many batches as there
are ranks. Their mean through FP8 is compared with their mean in float64, by DDP's buckets of 25 MB, one of which holds
the whole model: the relative error of all gradients, and of the parameter with the largest one; and how many gradients
that are not 0 become 0. One process stands for all ranks: it runs the same functions on what they would exchange.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))  # to import fp8pass from any working directory

from fp8pass.inspect.demo import GPT, LEARNING_RATE, load_text, loss_of
from fp8pass.quant.wire import GradientExchange, GradientFormat

CHOICES = (("common", 1024), ("own", 1024), ("own", 128))
"""Choices of scales: which gradients share one, and the size of blocks."""


def gradients_of_ranks(steps: int, ranks: int) -> tuple[nn.Module, Tensor]:
    """Train in float32; return the model and the gradients f32[ranks, n] of one batch for each rank."""
    torch.manual_seed(0)
    model, text, generator = GPT(), load_text(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    found = []
    for step in range(steps + ranks):
        optimizer.zero_grad()
        loss_of(model, *text.batch(generator, "cpu"), torch.float32).backward()  # type: ignore[no-untyped-call]
        if step < steps:
            optimizer.step()
        else:
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return model, torch.stack(found)


@torch.no_grad()
def mean_through_fp8(gradients: Tensor, how: GradientFormat) -> Tensor:
    """Return what all ranks get: f32[n], the mean of gradients f32[ranks, n]."""
    ranks, n = gradients.shape
    exchange, (size, blocks) = GradientExchange(how), how.part(-(-n // ranks))
    parts = torch.nn.functional.pad(gradients, (0, ranks * size - n)).view(ranks, ranks, blocks, -1)
    if how.scale == "own":
        scales = [exchange.own_scale(of_rank) for of_rank in parts]
    else:
        amax = parts.abs().amax()
        scales = [(exchange.scale_of(amax), amax)] * ranks
    arrived = [exchange.unpacked(exchange.packed(x, *s), blocks) for x, s in zip(parts, scales, strict=True)]
    mean = sum(arrived, torch.zeros(ranks, size)).div(ranks).view(ranks, blocks, -1)
    return exchange.unpacked(exchange.packed(mean, *exchange.own_scale(mean)), blocks).flatten()[:n]


def row(model: nn.Module, gradients: Tensor, how: GradientFormat) -> str:
    """Return a line of the table, in Markdown."""
    exact, found = gradients.double().mean(0), mean_through_fp8(gradients, how).double()
    sizes = [p.numel() for p in model.parameters()]
    errors = [
        ((a - b).norm() / a.norm()).item()
        for a, b in zip(torch.split(exact, sizes), torch.split(found, sizes), strict=True)
    ]
    lost = ((found == 0) & (exact != 0)).float().mean().item()
    total = ((exact - found).norm() / exact.norm()).item()
    scales = f"{how.scale}, blocks of {how.block}" if how.scale == "own" else how.scale
    sent = how.message(gradients.shape[1]) / gradients.shape[1]
    return f"| {how.dtype} | {scales} | {sent:.3f} | {total:.2%} | {max(errors):.2%} | {lost:.2%} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps before (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks (default: %(default)s)")
    args = parser.parse_args()
    model, gradients = gradients_of_ranks(args.steps, args.ranks)
    print("| format | scale | bytes per gradient | error | of the worst parameter | gradients that become 0 |")
    print("|---|---|---:|---:|---:|---:|")
    for dtype in ("e4m3", "e5m2"):
        for scale, block in CHOICES:
            print(row(model, gradients, GradientFormat(dtype, scale, block)))


if __name__ == "__main__":
    main()
