"""Measure the Python time of a training step around the generated code, beside plain Inductor and torchao.

    python bench/host_overhead.py [--layers 4 12 32] [--ways inductor:blocks inductor delayed ...] [--steps 200]

Prints a table of microseconds per step. The model has `--layers` equal blocks of attention and MLP. After some steps,
the functions that Inductor generated are replaced by functions that return their last results again, so that no kernel
runs: kernels that take longer would make everything else slower, by what they leave in the caches of the CPU. "Python"
is what is left of the step, without the replaced functions: Dynamo's guards, AOTAutograd's wrappers, autograd, and
fp8pass. Ratios are to Inductor compiled layer by layer, and to Inductor compiled as a whole, with the same optimizer.
"in fp8pass" is the part within `CompiledGraph`, without AOTAutograd's wrappers: it rolls and collects the state.

Ways are "inductor", "torchao" (its tensorwise recipe; left out if torchao is not installed) and recipes of fp8pass.
With ":blocks" each block is compiled by itself, with ":whole" the graph is compiled in one piece
(`compile_once=False`), and with ":monitor" the numerics monitor counts. With ":adamw", ":compiled_adamw", ":train_step"
and ":train_step_fused" the step has an optimizer, as in compile_time.py. With ":graphs", each forward, backward and
update of fp8pass is replaced as a whole, as a CUDA graph is replayed: what is left is around these. What torch does to
replay one needs a GPU, and is in no number. Each number is the least of `--repeat` repetitions in a process of each
way; ways take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from compile_time import TOKENS, WIDTH, Block
from compile_time import step_of as with_optimizer
from torch import nn
from torch._inductor.output_code import CompiledFxGraph

from fp8pass.compiler import cuda_graphs, lower
from fp8pass.compiler.compiled_graph import Compilation, CompiledGraph

WAYS = (
    *("inductor:blocks", "inductor", "torchao", "delayed", "delayed:blocks", "delayed:monitor"),
    *("inductor:adamw", "inductor:compiled_adamw", "delayed:adamw", "delayed:train_step", "delayed:train_step_fused"),
    *("inductor:graphs", "inductor:compiled_adamw:graphs", "delayed:graphs", "delayed:train_step:graphs"),
)
BASE = "inductor:blocks"
OPTIMIZED = {
    "adamw": "inductor:adamw",
    "compiled_adamw": "inductor:compiled_adamw",
    "train_step": "inductor:compiled_adamw",
    "train_step_fused": "inductor:adamw",
}
"""{mark of a way with an optimizer: the way to compare it with}."""
TRAIN_STEPS = ("train_step", "train_step_fused")


@dataclass
class Clock:
    """Seconds spent in functions that are wrapped by `timed`, without the functions timed by other clocks within."""

    seconds: float = 0.0
    inner: list[Clock] = field(default_factory=list)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which adds its time to the clock."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._within
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began - (self._within - before)

        return call

    @property
    def _within(self) -> float:
        return sum([clock.seconds for clock in self.inner]) if self.inner else 0.0


replays = False


def replayed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a function that, while `replays` is set, returns aliases of its last results."""
    last = list[Any]()

    def call(inputs: list[Any]) -> Any:
        if not replays:
            return function(inputs)
        if not last:
            last.append(function(inputs))
        inputs.clear()
        return [x.detach() if isinstance(x, torch.Tensor) else x for x in last[0]]

    return call


def replayed_by_self(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of generated functions, each of which is `replayed`."""
    functions: dict[int, Callable[[list[Any]], Any]] = {}

    def call(self: Any, inputs: list[Any]) -> Any:
        if id(self) not in functions:
            functions[id(self)] = replayed(partial(method, self))
        return functions[id(self)](inputs)

    return call


GENERATED = Clock()
WRAPPERS = Clock(inner=[GENERATED])
OURS = Clock(inner=[GENERATED, WRAPPERS])


def watch() -> None:
    """Time the generated code, AOTAutograd's wrappers around it, and what fp8pass does around those."""
    CompiledFxGraph.__call__ = GENERATED.timed(replayed_by_self(CompiledFxGraph.__call__))  # type: ignore[method-assign]
    CompiledGraph.__call__ = OURS.timed(CompiledGraph.__call__)  # type: ignore[method-assign]
    init: Any = Compilation.__init__

    def timed_init(self: Compilation, config: Any, annotation: Any, run: Callable[..., Any], *args: Any) -> None:
        init(self, config, annotation, WRAPPERS.timed(run), *args)

    Compilation.__init__ = timed_init  # type: ignore[method-assign, assignment]


def record_on_cpu() -> None:
    """Let fp8pass record CUDA graphs on a CPU, of what returns its last results again, as generated functions do."""
    files: tuple[Any, ...] = cuda_graphs, lower
    for file in files:
        file.DEVICE_TYPE = "cpu"
    files[0].cudagraphify = lambda function, *_, **__: GENERATED.timed(replayed(function))


def step_of(way: str, layers: int) -> Callable[[], None]:
    """Return a function that runs one training step of a new model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    kind, *marks = way.split(":")
    mode = {"mode": "reduce-overhead"} if "graphs" in marks else {}
    if mode:
        record_on_cpu()
    options: dict[str, Any] = mode
    if kind == "torchao":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model)
    elif kind != "inductor":
        fp8 = {"recipe": kind, "min_speedup": 0, "monitor": "monitor" in marks, **mode}
        options = {"backend": "fp8pass", "options": {**fp8, **({"compile_once": False} if "whole" in marks else {})}}
    for block in model if "blocks" in marks else ():
        block.compile(**options)
    how = next((mark for mark in marks if mark in OPTIMIZED), "")
    run = model if "blocks" in marks or how in TRAIN_STEPS else torch.compile(model, **options)
    if how:
        return with_optimizer(run, x, how, kind, **mode)

    def train() -> None:
        run(x).sum().backward()
        for p in model.parameters():
            p.grad = None

    return train


@dataclass
class Row:
    """Microseconds per step. python: outside of generated code; ours: of that, within fp8pass."""

    python: float
    ours: float


def measure(step: Callable[[], None], steps: int) -> Row:
    """Return the mean over some steps."""
    clocks = (GENERATED, WRAPPERS, OURS)
    for clock in clocks:
        clock.seconds = 0.0
    began = time.perf_counter()
    for _ in range(steps):
        step()
    total = time.perf_counter() - began
    each = 1e6 / steps
    return Row((total - GENERATED.seconds) * each, OURS.seconds * each)


def work(way: str, layers: int, steps: int) -> None:
    """Compile a way; then measure it once for each line of standard input, and print the row."""
    global replays
    watch()
    step = step_of(way, layers)
    for _ in range(6):  # compiles, and passes the first steps, in which slots have no scale
        step()
    replays = True
    print("compiled", flush=True)
    for _ in sys.stdin:
        print(json.dumps(asdict(measure(step, steps))), flush=True)


def whole_of(way: str) -> str:
    """Return the way to compare with: Inductor's, as a whole, with the same optimizer, with or without CUDA graphs."""
    marks = way.split(":")[1:]
    base = next((OPTIMIZED[mark] for mark in marks if mark in OPTIMIZED), "inductor")
    return f"{base}:graphs" if "graphs" in marks else base


class Worker:
    """A process for one way: what one way leaves in torch, such as hooks of optimizers, changes no other."""

    def __init__(self, way: str, layers: int, steps: int) -> None:
        command = [sys.executable, __file__, "--work", way, "--layers", str(layers), "--steps", str(steps)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "compiled"

    def row(self) -> Row:
        """Return what the process measures next."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return Row(**json.loads(self._line()))

    def close(self) -> None:
        """End the process."""
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 32], help="numbers of blocks")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="what to measure (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="steps per repetition (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions (default: %(default)s)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.layers[0], args.steps)
        return
    there = importlib.util.find_spec("torchao") is not None
    ways = [way for way in args.ways if there or not way.startswith("torchao")]
    print("| layers | way | Python us | against Inductor by layer | as a whole | per layer us | in fp8pass us |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for layers in args.layers:
        workers = {way: Worker(way, layers, args.steps) for way in ways}
        rows: dict[str, list[Row]] = {way: [] for way in ways}
        for _ in range(args.repeat):
            for way, worker in workers.items():
                rows[way].append(worker.row())
        for worker in workers.values():
            worker.close()
        least = {way: min(of, key=lambda row: row.python) for way, of in rows.items()}
        base = least.get(BASE)
        for way, row in least.items():
            whole = least.get(whole_of(way))
            ratios = (f"{row.python / other.python:.2f}" if other else "" for other in (base, whole))
            cells = f"{row.python:.0f}", *ratios, f"{row.python / layers:.0f}", f"{row.ours:.0f}"
            print(f"| {layers} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
