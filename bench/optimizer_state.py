"""Compare losses and bytes of moments in FP8 with those of moments in float32, on a smaller model than the demo's.

    python bench/optimizer_state.py [--steps 200]

Both runs start with the same weights, use the same batches, and run their matmuls in FP8. Prints a table, each row when
its run is done.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import fp8pass
from fp8pass.demo import demo
from fp8pass.quant.moments import Fp8Moment

SMALL = {"WIDTH": 128, "LAYERS": 2, "CONTEXT": 64, "HEADS": 4}


def trained(state: str, steps: int) -> tuple[float, float, int]:
    """Train, and return the mean training loss of the last 20 steps, the validation loss, and the bytes of moments."""
    torch._dynamo.reset()
    text = demo.load_text()
    run = demo.new_run(state, "cpu")
    optimizer = run.optimizer
    step = fp8pass.train_step(optimizer_state=state, min_speedup=0)(demo.train_step)
    generator, losses = torch.Generator().manual_seed(0), []
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"].fill_(demo.rate_at(i, steps))
        losses.append(step(run.model, optimizer, *text.batch(generator, "cpu")).item())
    run.validate(text, "cpu")
    return sum(losses[-20:]) / len(losses[-20:]), run.validation, nbytes(optimizer)


def nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's moments."""
    states: list[Any] = [x for of in optimizer.state.values() for x in of.values()]
    stored = [s for x in states for s in (x.stored if isinstance(x, Fp8Moment) else [x])]
    return sum(x.nbytes for x in stored if x.dim())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    steps = parser.parse_args().steps
    for name, value in SMALL.items():
        setattr(demo, name, value)
    print(f"AdamW on the demo's GPT, {SMALL['LAYERS']} layers of width {SMALL['WIDTH']}, {steps} steps\n")
    print("| optimizer_state | training loss | validation loss | against off | moments |\n|---|---|---|---|---|")
    baseline = 0.0
    for state in ("off", "fp8+float16", "fp8"):
        loss, validation, size = trained(state, steps)
        baseline = baseline or validation
        gap = f"{validation / baseline - 1:+.2%}" if state != "off" else ""
        print(f"| {state} | {loss:.4f} | {validation:.4f} | {gap} | {size / 1e6:.2f} MB |", flush=True)


if __name__ == "__main__":
    main()
