"""Measure the time to compile a training step, beside plain Inductor: with empty caches and with warm caches.

    python bench/compile_time.py [--layers 1 2 4 8 16] [--backends inductor delayed ...] [--repeat 2] [--json FILE]
    python bench/compile_time.py --layers 8 32 --backends inductor:compiled_adamw delayed:adamw delayed:train_step

Prints a table. The model has `--layers` identical blocks of attention and MLP, and is so narrow that its arithmetic
takes no time. Backends are "inductor"; recipes of fp8pass; "torchao", which is torchao's tensorwise recipe and is left
out if torchao is not installed; and "casts": plain Inductor, with linear layers that cast to FP8 without scales, the
least that any way of multiplying in FP8 gives Inductor to compile. The model is compiled as a whole or, with ":blocks"
after a backend, block by block; "explain" calls `fp8pass.explain` instead of training. With ":adamw" torch's fused
AdamW updates the parameters, with ":compiled_adamw" an AdamW whose step is compiled too, with ":train_step" the same
AdamW in a `fp8pass.train_step`, and with ":train_step_fused" the fused one in it. Every number is the least of
`--repeat` repetitions. Each repetition runs two processes: the first starts with an empty cache directory, the second
with the cache that the first wrote. A process first compiles one line without fp8pass, whatever the backend, so that
imports, the pool of compile workers and compiled C++ headers are ready; then it times two training steps. The CPU
seconds of the process itself measure Dynamo, AOTAutograd, passes and Inductor, and do not depend on what else the
machine runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8pass
from fp8pass.base._torch import counters

WIDTH, TOKENS, STEPS = 64, 64, 2
BACKENDS = ("inductor", "torchao", "delayed", "inductor:blocks", "delayed:blocks")
COUNTERS = (
    ("aot_autograd", "autograd_cache_hit"),
    ("aot_autograd", "autograd_cache_miss"),
    ("aot_autograd", "autograd_cache_bypass"),
    ("inductor", "fxgraph_cache_hit"),
    ("inductor", "fxgraph_cache_miss"),
    ("inductor", "fxgraph_cache_bypass"),
)


class Block(nn.Module):
    """Attention and a gated MLP, with norms and residuals: f32[1, TOKENS, WIDTH] -> f32[1, TOKENS, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x f32[1, TOKENS, WIDTH] to the same shape."""
        y = self.attention_norm(x)
        q, k, v = (linear(y).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        hidden: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + hidden


class CastLinear(torch.autograd.Function):
    """A linear layer whose three matmuls multiply in FP8 without scales. Its numbers are of no use."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        """Map weight f32[N, K] and x f32[1, M, K] to f32[1, M, N]."""
        x_q, w_q = x[0].to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        ctx.save_for_backward(x_q, w_q)
        return multiplied(x_q, w_q.t())[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of weight and x, for `grad` f32[1, M, N]."""
        (x_q, w_q), g_q = ctx.saved_tensors, grad[0].to(torch.float8_e5m2)
        of_weight = multiplied(g_q.t().contiguous(), x_q.t().contiguous().t())
        return of_weight, multiplied(g_q, w_q.t().contiguous().t())[None]


def multiplied(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a f8[M, K] by b f8[K, N], as if their scales were 1; f32[M, N]."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16).float()


@dataclass
class Start:
    """The measurements of one process.

    seconds: wall time of two steps. cpu: CPU seconds of the process itself, without the compilers that it started.
    peak: the most memory that it held, in bytes. counts: torch's counters of cache hits, misses and bypasses that are
    not 0.
    """

    seconds: float
    cpu: float
    peak: int
    counts: dict[str, int]


@dataclass
class Row:
    """The least seconds and bytes over all repetitions of one model with one backend.

    cold and peak are the first process's. counts: those of the last second process.
    """

    layers: int
    backend: str
    cold: float
    cold_cpu: float
    peak: int
    warm: float
    counts: dict[str, int]


def start(backend: str, layers: int, device: str) -> Start:
    """Compile the model and run two steps in this process; return the measurements."""
    torch.manual_seed(0)
    line = torch.compile(lambda x: (x.sin() + 1).sum())
    line(torch.ones(9, device=device, requires_grad=True)).backward()
    counters.clear()
    model = nn.Sequential(*(Block() for _ in range(layers))).to(device)
    x = torch.randn(1, TOKENS, WIDTH, device=device, requires_grad=True)
    recipe, _, how = backend.partition(":")
    fp8: dict[str, Any] = {"backend": "fp8pass", "options": {"recipe": recipe, "min_speedup": 0}}
    if recipe == "torchao":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model)
    if recipe == "casts":
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.forward = partial(CastLinear.apply, linear.weight)  # type: ignore[method-assign]
    options = {} if recipe in ("inductor", "torchao", "casts", "explain") else fp8
    for block in model if how == "blocks" else ():
        block.compile(**options)
    # model.compile() would not compile Sequential.forward
    run = model if how == "blocks" or how.startswith("train_step") else torch.compile(model, **options)
    step = step_of(run, x, how, recipe)
    began, began_cpu = time.perf_counter(), time.process_time()
    if recipe == "explain":
        fp8pass.explain(model, x, config=fp8pass.Config(min_speedup=0))
    else:
        for _ in range(STEPS):
            step()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB
    return Start(seconds, cpu, peak, {name: n for group, name in COUNTERS if (n := counters[group][name])})


def step_of(run: Any, x: Tensor, how: str, recipe: str, **options: Any) -> Callable[[], None]:
    """Return a function that runs one training step; without an optimizer, unless `how` names one. options: for FP8."""
    if how in ("", "blocks"):
        return lambda: run(x).sum().backward()
    fused = how in ("adamw", "train_step_fused")
    optimizer = torch.optim.AdamW(run.parameters(), fused=fused, foreach=not fused)
    update = torch.compile(optimizer.step) if how == "compiled_adamw" else optimizer.step

    def step() -> None:
        run(x).sum().backward()
        update()
        optimizer.zero_grad()

    if not how.startswith("train_step"):
        return step
    compiled: Callable[[], None] = fp8pass.train_step(recipe=recipe, min_speedup=0, **options)(step)
    return compiled


def measure(backend: str, layers: int, device: str) -> tuple[Start, Start]:
    """Run a process with empty caches, and then one with the caches that the first wrote."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--start", backend, "--layers", str(layers), "--device", device]
        starts = []
        for _ in range(2):
            done = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True)
            starts.append(Start(**json.loads(done.stdout.splitlines()[-1])))
    return starts[0], starts[1]


def least(found: Iterable[tuple[Start, Start]], layers: int, backend: str) -> Row:
    """Return the least times of all repetitions: other work of the machine can only add to them."""
    cold, warm = zip(*found, strict=True)
    seconds, cpu, peak = min(s.seconds for s in cold), min(s.cpu for s in cold), min(s.peak for s in cold)
    return Row(layers, backend, seconds, cpu, peak, min(s.seconds for s in warm), warm[-1].counts)


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    titles = "first process s", "of it Python, CPU s", "its peak GB", "second process s"
    lines = ["| layers | backend | " + " | ".join(f"{title} | times Inductor's" for title in titles) + " |"]
    lines.append("|---:|---" + "|---:" * 2 * len(titles) + "|")
    bases = "inductor", "inductor:compiled_adamw"
    inductor = {row.layers: numbers(row) for base in bases for row in rows if row.backend == base}
    for row in rows:
        cells = [str(row.layers), row.backend]
        for i, number in enumerate(numbers(row)):
            base = inductor.get(row.layers)
            cells += [f"{number:.1f}", f"{number / base[i]:.2f}" if base else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def numbers(row: Row) -> tuple[float, ...]:
    """Return what the table shows of a row, in seconds and gigabytes."""
    return row.cold, row.cold_cpu, row.peak / 1e9, row.warm


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--backends", nargs="+", default=BACKENDS, help="recipes and other backends, with :blocks or an optimizer"
    )
    parser.add_argument("--repeat", type=int, default=2, help="number of repetitions (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="a file to write the rows to, with counts")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(asdict(start(args.start, args.layers[0], args.device))))
        return
    there = importlib.util.find_spec("torchao") is not None
    backends = [b for b in args.backends if there or not b.startswith("torchao")]
    rows = []
    for layers in args.layers:  # backends take turns, so that a slow minute of the machine affects all of them
        found: dict[str, list[tuple[Start, Start]]] = {backend: [] for backend in backends}
        for _ in range(args.repeat):
            for backend in backends:
                found[backend].append(measure(backend, layers, args.device))
        rows += [least(found[backend], layers, backend) for backend in backends]
        print(f"{layers} layers done", file=sys.stderr)
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
