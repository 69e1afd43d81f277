"""What lowering op by op costs beside "aot_eager": CPU seconds of the first training step, and of a later one.

    python bench/op_by_op.py [--models linear swin ...] [--ways aot_eager delayed ...] [--repeat 1] [--steps 5]

Prints a table of ratios, each to aot_eager's row of the same model, which has to come first, and the number of ops that
a later step calls: quantizing and scaling are ops of their own there, that "aot_eager" has not. Nor does it decompose
ops; "aot_eager_decomp_partition" does, as fp8pass and Inductor do. The first step is the first two, for a backward may
be compiled in the second. Ways are backends of torch's, and recipes of fp8pass. The models are transformers' of their
usual depths, but narrow, so that what is timed is Python; "linear" is one layer. All runs in this process: each way
first compiles one line, for what is imported only then.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

WAYS = ("aot_eager", "aot_eager_decomp_partition", "delayed", "dynamic")
BACKENDS = ("aot_eager", "aot_eager_decomp_partition", "inductor")


class Logits(nn.Module):
    """An image classifier of transformers, of which only the logits are wanted."""

    def __init__(self, kind: str, **fields: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{kind}Config")(**fields)
        self.model = getattr(transformers, f"{kind}ForImageClassification")(config)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 3, height, width]."""
        logits: Tensor = self.model(x).logits
        return logits


def linear() -> tuple[nn.Module, Tensor]:
    """One layer: what a compilation costs at least."""
    return nn.Linear(32, 32), torch.randn(16, 32)


def swin() -> tuple[nn.Module, Tensor]:
    """Swin-T's 76 linear layers."""
    sizes = {"image_size": 32, "patch_size": 1, "embed_dim": 16, "num_heads": [1, 2, 4, 8], "window_size": 4}
    return Logits("Swin", **sizes, drop_path_rate=0.0), torch.randn(1, 3, 32, 32)


def levit() -> tuple[nn.Module, Tensor]:
    """LeViT-128S's depth, and twice: it has batch norms behind its linear layers."""
    return Logits("Levit", image_size=64, hidden_sizes=[32, 48, 64], drop_path_rate=0), torch.randn(2, 3, 64, 64)


def cvt() -> tuple[nn.Module, Tensor]:
    """CvT-13: convolutions make the inputs of its linear layers."""
    sizes = {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4]}
    return Logits("Cvt", **sizes, drop_path_rate=[0.0, 0.0, 0.0]), torch.randn(1, 3, 64, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": linear,
    "swin": swin,
    "levit": levit,
    "cvt": cvt,
}


@dataclass
class Row:
    """CPU seconds of the first step and of a later one, and the ops that this calls."""

    first: float
    later: float
    ops: int


def compiled(model: nn.Module, way: str) -> Callable[[Tensor], Tensor]:
    """Return what is called in the model's place."""
    if way in BACKENDS:
        return torch.compile(model, backend=way)  # type: ignore[return-value]
    return torch.compile(model, backend="fp8pass", options={"recipe": way, "lowering": "eager"})  # type: ignore[return-value]


def row(make: Callable[[], tuple[nn.Module, Tensor]], way: str, steps: int) -> Row:
    """Compile anew, and train."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = make()
    run = compiled(model, way)

    def seconds() -> float:
        began = time.process_time()
        run(x).square().mean().backward()
        return time.process_time() - began

    first = seconds() + seconds()  # a backward may be compiled in the second step
    later = min(seconds() for _ in range(steps))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        seconds()
    return Row(first, later, calls(profiled))


def calls(profiled: profile) -> int:
    """Count the ops that no other op has called."""
    events = (e for e in profiled.events() or () if e.name.startswith("aten::"))
    return sum(e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::") for e in events)


def least(rows: list[Row]) -> Row:
    """Of all repetitions the smallest times: what else a machine does only ever adds to them."""
    return Row(min(r.first for r in rows), min(r.later for r in rows), rows[-1].ops)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=WAYS, help="aot_eager, inductor, or recipes")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for way in args.ways:
        row(linear, way, 1)
    print("| model | way | first step, CPU s | ratio | later step, CPU ms | ratio | ops |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in args.models:
        found = {way: least([row(MODELS[name], way, args.steps) for _ in range(args.repeat)]) for way in args.ways}
        base = found[args.ways[0]]
        for way, r in found.items():
            ratios = f"{r.first:.2f} | {r.first / base.first:.2f} | {r.later * 1e3:.1f} | {r.later / base.later:.2f}"
            print(f"| {name} | {way} | {ratios} | {r.ops} |", flush=True)


if __name__ == "__main__":
    main()
