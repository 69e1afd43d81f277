"""Train the demo's GPT with several seeds and each of the settings that save memory, and compare validation losses.

    python bench/seeds.py [--steps 150] [--seeds 5] [--width 64] [--layers 2] [--only NAME ...]

The reference is ordinary eager PyTorch in float32. Rows of fp8pass run all matmuls in FP8 too, op by op, whose numbers
are those of compiled code up to the last bits of float32. Rows "rounded" are the reference, with all parameters rounded
to another format after each step: they compare formats of parameters, without FP8. For each setting, runs start with
the same weights and see the same batches as the reference's run of that seed.

A setting is within the noise if its mean and the reference's differ by at most twice the standard deviation among the
reference's seeds. The table also has the mean and the deviation of the differences to the reference's runs, seed by
seed, which are finer. Each row is printed when its runs are done.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.inspect import demo
from fp8pass.quant.moments import scale_towards
from fp8pass.quant.random_bits import keys_of, round_to_bfloat16

VALIDATION_BATCHES = 32


@dataclass(frozen=True)
class Setting:
    """A way to train. config: of `fp8pass.train_step`; None for eager PyTorch. rounds: see `ROUNDINGS`."""

    config: dict[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    rounds: str = ""


BF16 = torch.bfloat16
SETTINGS = {
    "float32, the reference": Setting(),
    "fp8pass": Setting({}),
    "optimizer_state='fp8+float16'": Setting({"optimizer_state": "fp8+float16"}),
    "optimizer_state='fp8'": Setting({"optimizer_state": "fp8"}),
    "Moments(second='e4m3')": Setting({"optimizer_state": fp8pass.Moments(second="e4m3")}),
    "Moments(second='e4m3', block=256)": Setting({"optimizer_state": fp8pass.Moments(second="e4m3", block=256)}),
    "Moments(second='e4m3', block=256, expand=True)": Setting(
        {"optimizer_state": fp8pass.Moments(second="e4m3", block=256, expand=True)}
    ),
    "bfloat16, to nearest": Setting({}, BF16),
    "bfloat16, update_rounding='stochastic'": Setting({"update_rounding": "stochastic"}, BF16),
    "bfloat16, all: stochastic, optimizer_state='fp8', weight_cache='fp8'": Setting(
        {"update_rounding": "stochastic", "optimizer_state": "fp8", "weight_cache": "fp8"}, BF16
    ),
    "rounded to bfloat16, to nearest": Setting(rounds="nearest"),
    "rounded to bfloat16, stochastically": Setting(rounds="stochastic"),
    "rounded to float16 with a scale": Setting(rounds="float16"),
}


def _to_float16(x: Tensor, _: Tensor) -> Tensor:
    """Round as MS-AMP's master weights: float16 with a scale for each tensor, here a power of two."""
    scale = scale_towards(32768.0, x.abs().amax(), 1.0)
    return (x * scale).half().float() / scale


ROUNDINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nearest": lambda x, _: x.bfloat16().float(),
    "stochastic": lambda x, key: round_to_bfloat16(x, key).float(),
    "float16": _to_float16,
}
"""Functions of a parameter and a key of random bits."""


def step_of(setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """Return the training step, with clipping."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if setting.config is None:
        return step
    run: Callable[..., Tensor] = fp8pass.train_step(step, min_speedup=0, lowering="eager", **setting.config)
    return run


@torch.no_grad()
def round_all(rounds: str, model: nn.Module, step: int) -> None:
    """Round each parameter in place."""
    for i, p in enumerate(model.parameters()):
        key = keys_of(*(torch.tensor([n], dtype=torch.int32) for n in (step, i)))[0]
        p.copy_(ROUNDINGS[rounds](p, key))


def trained(setting: Setting, seed: int, steps: int, text: Any) -> float:
    """Train from a seed, and return the validation loss, which the trained weights have in float32."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = demo.GPT().to(setting.dtype)
    rate = torch.tensor(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.1)
    run, generator = step_of(setting, model, optimizer), torch.Generator().manual_seed(1000 + seed)
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"].fill_(demo.rate_at(i, steps))
        run(*text.batch(generator, "cpu"))
        if setting.rounds:
            round_all(setting.rounds, model, i)
    validates = demo.GPT()
    validates.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        losses = [
            F.cross_entropy(validates(tokens).flatten(0, 1), targets.flatten()).item()
            for tokens, targets in (text.batch(generator, "cpu", validation=True) for _ in range(VALIDATION_BATCHES))
        ]
    return statistics.mean(losses)


def line(name: str, losses: list[float], reference: list[float]) -> str:
    """Return a row of the table."""
    mean, apart = statistics.mean(losses), [a - b for a, b in zip(losses, reference, strict=True)]
    band = 2 * statistics.stdev(reference) if len(reference) > 1 else math.inf
    inside = abs(mean - statistics.mean(reference)) <= band
    cells = [name, f"{mean:.4f}", f"{statistics.stdev(losses) if len(losses) > 1 else 0:.4f}"]
    if losses is not reference:
        deviation = statistics.stdev(apart) if len(apart) > 1 else 0.0
        cells += [f"{statistics.mean(apart):+.4f}", f"{deviation:.4f}", "yes" if inside else "**no**"]
    return "| " + " | ".join([*cells, *[""] * (6 - len(cells))]) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each setting (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of settings (default: all)")
    args = parser.parse_args()
    demo.WIDTH, demo.LAYERS, demo.CONTEXT, demo.BATCH, demo.HEADS = args.width, args.layers, 64, 16, 4
    warnings.simplefilter("ignore")  # of bfloat16 on this CPU
    text = demo.load_text()
    print(
        f"AdamW on the demo's GPT, {args.layers} layers of width {args.width}, {args.steps} steps, {args.seeds} seeds\n"
    )
    heads = ("", "validation loss", "deviation", "difference", "its deviation", "within the noise")
    print(f"| {' | '.join(heads)} |\n|---{'|---:' * 4}|---|")
    reference: list[float] = []
    for name, setting in SETTINGS.items():
        if not reference or not args.only or any(part in name for part in args.only):
            losses = [trained(setting, seed, args.steps, text) for seed in range(args.seeds)]
            reference = reference or losses
            print(line(name, losses, reference), flush=True)


if __name__ == "__main__":
    main()
