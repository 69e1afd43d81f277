"""Compare the gradients of the first steps with dynamic first scales and with a first scale of 1.

    python bench/first_step.py

Prints, for the demo's language model, the signal-to-noise ratio of the weight gradients relative to the same model in
high precision, and the share of gradients that are exactly zero. e5m2 has no positive value below 2**-16, so that with
a scale of 1 the small gradients of a normal model underflow. The graph is compiled once in either case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8pass.inspect.demo import GPT, load_text
from fp8pass.report.report import collect

STEPS = 3


def gradients(compiled: bool) -> tuple[list[list[Tensor]], int]:
    """Return the gradients of all 2-dimensional parameters at each step, and the number of graphs compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT()
    run: Callable[[Tensor], Tensor] = model
    if compiled:
        run = torch.compile(model, backend="fp8pass", options={"lowering": "eager", "min_speedup": 0})
    text, generator, found = load_text(), torch.Generator().manual_seed(0), []
    with collect() as report:
        for _ in range(STEPS):
            model.zero_grad()
            tokens, targets = text.batch(generator, "cpu")
            F.cross_entropy(run(tokens).flatten(0, 1), targets.flatten()).backward()
            found.append([p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.dim() == 2])
    return found, report.graphs


def main() -> None:
    """Print the table."""
    exact, _ = gradients(compiled=False)
    dynamic, graphs = gradients(compiled=True)
    with mock.patch("fp8pass.states.slots.InstanceState.cold", return_value=[]):
        one, _ = gradients(compiled=True)
    print("weight gradients of a 3.3M GPT against high precision (SQNR over all layers, share of exact zeros)\n")
    print("| step | first scale dynamic | zeros | first scale 1 | zeros |\n|---|---|---|---|---|")
    for step in range(STEPS):
        cells = [f"{sqnr(exact[step], g[step]):.1f} dB | {zeros(g[step]):.1%}" for g in (dynamic, one)]
        print(f"| {step} | {' | '.join(cells)} |")
    print(f"\ngraphs compiled: {graphs}")


def sqnr(wanted: list[Tensor], got: list[Tensor]) -> float:
    """Return the signal-to-noise ratio over all tensors, in dB."""
    signal = sum(float(w.square().sum()) for w in wanted)
    noise = sum(float((w - g).square().sum()) for w, g in zip(wanted, got, strict=True))
    return 10 * math.log10(signal / noise)


def zeros(tensors: list[Tensor]) -> float:
    """Return the share of elements that are exactly zero."""
    return sum(int((t == 0).sum()) for t in tensors) / sum(t.numel() for t in tensors)


if __name__ == "__main__":
    main()
