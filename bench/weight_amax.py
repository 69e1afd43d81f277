"""Compare scales of weights from predicted amaxes with those from measured ones: losses, and how much range they use.

    python bench/weight_amax.py [--steps 200]

Trains a smaller model than the demo's with AdamW, twice from the same weights with the same batches. After each step it
reads of each FP8 copy what its scale makes of the weight's amax: more than `fp8_max` saturates, less leaves the upper
part of the format's range unused.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.base.scaling import E4M3, fp8_max
from fp8pass.inspect import demo
from fp8pass.weights.weight_cache import weights_of
from fp8pass.weights.weight_copy import DelayedWeight

SMALL = {"WIDTH": 128, "LAYERS": 2, "CONTEXT": 64, "HEADS": 4}


def trained(amax: str, steps: int) -> tuple[float, Tensor]:
    """Train; return the validation loss, and the largest value of each copy after each step, as a part of `fp8_max`."""
    torch._dynamo.reset()
    text = demo.load_text()
    run = demo.new_run(amax, "cpu", dtype=torch.float32)
    step = fp8pass.train_step(weight_amax=amax, min_speedup=0)(demo.train_step)
    generator, used = torch.Generator().manual_seed(0), []
    for i in range(steps):
        for group in run.optimizer.param_groups:
            group["lr"].fill_(demo.rate_at(i, steps))
        step(run.model, run.optimizer, *text.batch(generator, "cpu"), run.dtype)
        if i:  # the first update writes no copy of a slot without history
            used.append(_used(run.model))
    run.validate(text, "cpu")
    return run.validation, torch.stack(used)


def _used(model: nn.Module) -> Tensor:
    parts = []
    for w in weights_of(list(model.parameters())):
        assert isinstance(w, DelayedWeight)
        scale_inv, amax = w.state.tensors.weight_copy_scales[:, w.index]
        parts.append(amax / scale_inv / fp8_max(E4M3))
    return torch.stack(parts)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    steps = parser.parse_args().steps
    for name, value in SMALL.items():
        setattr(demo, name, value)
    print(f"AdamW on the demo's GPT in float32, {SMALL['LAYERS']} layers of width {SMALL['WIDTH']}, {steps} steps\n")
    print("| weight_amax | validation loss | copies that saturate | by at most | unused range, mean and most |")
    print("|---|---|---|---|---|")
    for amax in ("measured", "predicted"):
        validation, used = trained(amax, steps)
        over, unused = used > 1, -used.clamp(max=1).log2()
        saturated = f"{over.double().mean():.1%} | {max(used.max().item() - 1, 0):.2%}"
        bits = f"{unused.mean():.2f} and {unused.max():.2f} bits"
        print(f"| {amax} | {validation:.4f} | {saturated} | {bits} |", flush=True)


if __name__ == "__main__":
    main()
