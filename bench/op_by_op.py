"""Measure the cost of lowering op by op, relative to "aot_eager": CPU seconds of a first and of a later training step.

    python bench/op_by_op.py [--models linear swin ...] [--ways aot_eager delayed ...] [--repeat 1] [--steps 5]
    python bench/op_by_op.py --zoo [--models Switch T5 ...] [--ways aot_eager delayed ...] [--repeat 1]

Prints a table with ratios to the first way of the same model, "aot_eager" by default, and with the number of ops that
a later step calls. fp8pass calls ops for quantizing and scaling, which "aot_eager" does not have. "aot_eager" does not
decompose ops either; "aot_eager_decomp_partition" does, as fp8pass and Inductor do. "First step" is the sum of the
first two steps, because a backward may be compiled in the second. Ways are backends of torch and recipes of fp8pass.
The models are models of transformers with their usual depths, but narrow, so that most of the time is Python's;
"linear" is one layer. Everything runs in this process. Each way first compiles one layer, so that imports are not
timed.

With `--zoo` the models are those of tests/zoo, at toy size. Each trains for three steps of SGD in a process for itself,
which has compiled nothing before, and the table has the CPU seconds until the third step ends: what is compiled, also
what the second step compiles again, such as an expert for another number of tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

WAYS = ("aot_eager", "aot_eager_decomp_partition", "delayed", "dynamic")
ROOT = Path(__file__).parent.parent
ZOO = {
    "Switch": "SwitchTransformersForConditionalGeneration",
    "T5": "T5ForConditionalGeneration",
    "Swin": "SwinForImageClassification",
    "Jamba": "JambaForCausalLM",
}
"""{name in the table: the class in transformers}."""
BACKENDS = ("aot_eager", "aot_eager_decomp_partition", "inductor")


class Logits(nn.Module):
    """An image classifier of transformers that returns only its logits."""

    def __init__(self, kind: str, **fields: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{kind}Config")(**fields)
        self.model = getattr(transformers, f"{kind}ForImageClassification")(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, classes] of x [batch, 3, height, width]."""
        logits: Tensor = self.model(x).logits
        return logits


def linear() -> tuple[nn.Module, Tensor]:
    """Return one linear layer, which shows the least that a compilation costs, and its input."""
    return nn.Linear(32, 32), torch.randn(16, 32)


def swin() -> tuple[nn.Module, Tensor]:
    """Return a narrow Swin-T, which has 76 linear layers, and its input."""
    sizes = {"image_size": 32, "patch_size": 1, "embed_dim": 16, "num_heads": [1, 2, 4, 8], "window_size": 4}
    return Logits("Swin", **sizes, drop_path_rate=0.0), torch.randn(1, 3, 32, 32)


def levit() -> tuple[nn.Module, Tensor]:
    """Return a narrow LeViT-128S, and a batch of two images, since it has batch norms after its linear layers."""
    return Logits("Levit", image_size=64, hidden_sizes=[32, 48, 64], drop_path_rate=0), torch.randn(2, 3, 64, 64)


def cvt() -> tuple[nn.Module, Tensor]:
    """Return a narrow CvT-13, in which convolutions compute the inputs of linear layers, and its input."""
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
    """CPU seconds of the first step and of a later step, and the number of ops that a later step calls."""

    first: float
    later: float
    ops: int


def compiled(model: nn.Module, way: str, **options: Any) -> Callable[..., Any]:
    """Return the compiled model. options: of fp8pass, in addition to the recipe."""
    if way in BACKENDS:
        return torch.compile(model, backend=way)
    return torch.compile(model, backend="fp8pass", options={"recipe": way, "lowering": "eager", **options})


def row(make: Callable[[], tuple[nn.Module, Tensor]], way: str, steps: int) -> Row:
    """Compile a new model, train it, and return the measurements."""
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
    """Count the ops that were not called by another op."""
    events = (e for e in profiled.events() or () if e.name.startswith("aten::"))
    return sum(e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::") for e in events)


def least(rows: list[Row]) -> Row:
    """Return the least times of all repetitions: other work of the machine can only add to them."""
    return Row(min(r.first for r in rows), min(r.later for r in rows), rows[-1].ops)


def of_zoo(name: str, way: str) -> float:
    """Train a model of the zoo for three steps in this process; return the CPU seconds that it took."""
    sys.path.insert(0, str(ROOT))
    from tests.zoo import catalogue
    from tests.zoo import row as zoo

    zoo.seeded(0)
    sample = catalogue.transformer(ZOO[name], next(k for k in catalogue.TRANSFORMERS if ZOO[name] in k.models.split()))
    optimizer = torch.optim.SGD(sample.model.parameters(), lr=0.01)
    began = time.process_time()
    run = compiled(sample.model, way, **sample.options)
    for _ in range(3):
        zoo.loss_of(run(**sample.inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - began


def in_a_process(name: str, way: str) -> float:
    """Return what `of_zoo` does in a process for itself."""
    command = [sys.executable, __file__, "--zoo", "--start", "--models", name, "--ways", way]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def zoo_table(names: list[str], ways: list[str], repeat: int) -> None:
    """Print the CPU seconds of each model of the zoo in each way, and their ratio to those of the first way."""
    print("| model | " + " | ".join([f"{ways[0]}, CPU s", *(f"{way} | ratio" for way in ways[1:])]) + " |")
    print("|---" + "|---:" * (2 * len(ways) - 1) + "|")
    for name in names:
        # ways take turns, so that a slow minute of the machine affects all of them
        turns = [[in_a_process(name, way) for way in ways] for _ in range(repeat)]
        base, *others = map(min, zip(*turns, strict=True))
        print(f"| {name} | " + " | ".join([f"{base:.2f}", *(f"{x:.2f} | {x / base:.2f}" for x in others)]) + " |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--zoo", action="store_true", help="train models of the zoo, each in a process for itself")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *ZOO], help="models (default: all)")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], help=f"recipes of fp8pass, or {', '.join(BACKENDS)}")
    parser.add_argument("--repeat", type=int, default=1, help="number of repetitions (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="later steps, of which the fastest counts (default: 5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.models or list(ZOO if args.zoo else MODELS)
    if args.start:
        print(of_zoo(names[0], args.ways[0]))
        return
    if args.zoo:
        zoo_table(names, args.ways, args.repeat)
        return
    for way in args.ways:
        row(linear, way, 1)
    print("| model | way | first step, CPU s | ratio | later step, CPU ms | ratio | ops |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name in names:
        found = {way: least([row(MODELS[name], way, args.steps) for _ in range(args.repeat)]) for way in args.ways}
        base = found[args.ways[0]]
        for way, r in found.items():
            ratios = f"{r.first:.2f} | {r.first / base.first:.2f} | {r.later * 1e3:.1f} | {r.later / base.later:.2f}"
            print(f"| {name} | {way} | {ratios} | {r.ops} |", flush=True)


if __name__ == "__main__":
    main()
