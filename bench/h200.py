"""Measure speed, memory and correctness on one GPU, in one command that ends within 8 minutes.

    python bench/h200.py                              prints a line for each run, and writes all to h200.jsonl
    python bench/h200.py 'llama_*' gemm linear--rowwise     runs what these patterns name; --list prints all names
    python bench/h200.py --device cpu --quick linear--delayed      is a dry run, which says nothing about speed

It needs torch, and fp8pass installed (`pip install -e .`; offline with --no-build-isolation --no-deps). Each run is a
process, h200_run.py, that compiles one contender for one workload. All compile side by side, with one thread each, and
then wait. One after the other is timed, so that nothing else runs on the GPU. What has not compiled in its time, for
what no time is left and what is not installed says so. The exit status is 1 if a result is wrong or fp8pass failed, 3
if the time was up.

The first line of the file has the versions and the hardware, and each other one is a result: `work`, `who`, `status`
and what h200_run.py measured, as bench/results/h200.jsonl has them, from which measured.py makes tables. It is written
after each run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blocks import GPT2MLP, LlamaBlock, LlamaMLP, SquaredMLP
from torch import nn

Row = dict[str, Any]
OURS: dict[str, dict[str, Any]] = {
    **{recipe: {"recipe": recipe} for recipe in ("delayed", "dynamic", "rowwise", "blockwise", "mxfp8")},
    "fused": {"epilogues": "always"},  # matmuls that quantize their result, wherever it is possible
    "save": {"save_fp8": True},
    "fusedsave": {"epilogues": "always", "save_fp8": True},
    "graphs": {"mode": "reduce-overhead"},
}
"""The options of fp8pass by contender. `t_` before a name: the whole step in `fp8pass.train_step`, with its options."""
TORCHAO = ("ao_tensorwise", "ao_rowwise")
LAYER = ("bf16", *OURS, *TORCHAO)
STEP = ("bf16", *OURS, *(f"t_{name}" for name in OURS if name != "graphs"), *TORCHAO)
MODELS = ("hf_8b_4l", "hf_1b_8l", "hf_160m", "gpt2", "gpt2_50257")
"""Whole models of transformers, which h200_run.py trains."""
RUNS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("llama_block", "llama_mlp", "gpt2_mlp", "relu2_mlp", "linear"), LAYER),
    **dict.fromkeys(MODELS, STEP),
    "gemm": ("tensorwise", "rowwise"),
    "xla": ("jax",),
}
"""All contenders of each workload."""
USUAL = [
    f"{work}--{who}"
    for work, *names in (
        ("llama_block", "delayed", "ao_tensorwise", "fused", "save", "dynamic"),
        ("hf_8b_4l", "bf16", "delayed", "t_delayed", "ao_tensorwise"),
        ("llama_block", "rowwise", "blockwise", "fusedsave", "bf16"),
        ("llama_mlp", "delayed", "fused", "ao_tensorwise", "graphs"),
        ("gpt2_mlp", "delayed", "fused", "ao_tensorwise"),
        ("relu2_mlp", "delayed", "fused", "ao_tensorwise"),
        ("gemm", "tensorwise", "rowwise"),
        ("linear", "delayed", "ao_tensorwise"),
        ("hf_1b_8l", "bf16", "delayed", "ao_tensorwise"),
    )
    for who in names
]
"""The runs without any patterns, in the order in which they are timed."""

# The shapes of Llama 2 70B that torchao benchmarks (M = 4 x 4096), and the two of torchao's README.
SHAPES = (
    *((16384, 8192, 7168), (16384, 3584, 8192), (16384, 1024, 8192), (16384, 8192, 1280)),
    *((4096, 8192, 16384), (1024, 2048, 1024)),
)
QUICK_SHAPES = (128, 64, 96), (64, 96, 64)

COMPILES = 0.6
"""The share of the time in which the runs compile; the rest is for measuring."""
TURN = 60
"""The most seconds of one run's turn."""


# ---------------------------------------------------------------------------------------------------------- models


def llama_mlp(tokens: int = 8192, width: int = 4096, hidden: int = 14336) -> tuple[Any, ...]:
    """Return the MLP of Llama 3 8B, with its residual, and its input."""
    return LlamaMLP(width, hidden), torch.randn(tokens, width, requires_grad=True)


def gpt2_mlp(tokens: int = 8192, width: int = 4096, hidden: int = 16384) -> tuple[Any, ...]:
    """Return the MLP of a layer like GPT-2's, with GELU, biases and its residual, and its input."""
    return GPT2MLP(width, hidden), torch.randn(tokens, width, requires_grad=True)


def relu2_mlp(tokens: int = 32768, width: int = 768, hidden: int = 3072) -> tuple[Any, ...]:
    """Return an MLP of the size of modded-nanogpt's, and its input."""
    return SquaredMLP(width, hidden), torch.randn(tokens, width, requires_grad=True)


def llama_block(
    batch: int = 4, length: int = 2048, width: int = 4096, hidden: int = 14336, heads: int = 32, groups: int = 8
) -> tuple[Any, ...]:
    """Return one layer of Llama 3 8B, and its input."""
    model = LlamaBlock(width, hidden, heads, groups, length)
    return model, torch.randn(batch, length, width, requires_grad=True)


def linear(m: int, k: int, n: int) -> tuple[Any, ...]:
    """Return one linear layer, and its input."""
    return nn.Linear(k, n, bias=False), torch.randn(m, k, requires_grad=True)


QUICK = {
    llama_mlp: {"tokens": 64, "width": 64, "hidden": 96},
    gpt2_mlp: {"tokens": 64, "width": 64, "hidden": 96},
    relu2_mlp: {"tokens": 64, "width": 64, "hidden": 96},
    llama_block: {"batch": 2, "length": 16, "width": 64, "hidden": 96, "heads": 4, "groups": 2},
}
LAYERS = {make.__name__: make for make in QUICK}


def with_unit_products(model: nn.Module) -> nn.Module:
    """Initialize weights so that products are as large as inputs: else a residual would hide wrong products."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model


# ------------------------------------------------------------------------------------------------------------ times


class HostEvent:
    """An event like CUDA's, for machines without a GPU: the host itself computes, and does not run ahead."""

    def record(self) -> None:
        """Note the time."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds until another event."""
        return 1e3 * (end.time - self.time)


def seconds(device: torch.device, calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Return the seconds of each call in each round; the calls take turns.

    Before each call the GPU overwrites a buffer larger than any L2 cache; meanwhile the host runs ahead.
    """
    cuda = device.type == "cuda"
    flush = torch.empty(256 << 20 if cuda else 1, dtype=torch.uint8, device=device)
    marks: list[list[tuple[Any, Any]]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, marks, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) if cuda else HostEvent() for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            found.append((start, end))
    if cuda:
        torch.cuda.synchronize()
    return [[start.elapsed_time(end) / 1e3 for start, end in found] for found in marks]


# -------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """A process that measures one contender on one workload. Its files are `folder`/`name`.ready, .jsonl and .log."""

    name: str
    folder: Path
    options: Sequence[str]

    def __post_init__(self) -> None:
        """Start the process. It reads a line from its stdin before it measures, and ends if there is none."""
        worker = str(Path(__file__).with_name("h200_run.py"))
        # a cache of its own, for the kernels that another run has chosen are not this one's
        own = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"cache-{self.name}")}
        one = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.file("log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, worker, self.name, str(self.folder), *self.options],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **own, **one, "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
                start_new_session=True,
            )

    def file(self, suffix: str) -> Path:
        """Return the path of one of the run's files."""
        return self.folder / f"{self.name}.{suffix}"

    def runs(self) -> bool:
        """Return whether the process has not ended."""
        return self.process.poll() is None

    def compiles(self) -> bool:
        """Return whether the process is not ready yet."""
        return self.runs() and not self.file("ready").exists()

    def take_turn(self, until: float) -> None:
        """Let the process measure, and end it if it takes too long."""
        if self.runs() and time.monotonic() < until:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has just failed
                self.process.stdin.write(b"go\n")
                self.process.stdin.flush()
            wait(lambda: not self.runs(), until)
        self.kill()

    def kill(self) -> None:
        """End the process and all that it has started."""
        if self.runs():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()  # closes its stdin

    def results(self, late: str) -> list[Row]:
        """Return what the process has measured, and a result with the reason if it failed. late: why it was killed."""
        work, who = self.name.split("--")
        file, code = self.file("jsonl"), self.process.returncode
        rows: list[Row] = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
        if code == -signal.SIGKILL:
            rows.append({"status": f"out of time: {late or 'not measured to the end'}"})
        elif code:
            log = self.file("log").read_text(errors="replace")
            rows.append({"status": f"failed: {' '.join(log.split())[-500:]}"})
        return [{"work": work, "who": who, **row} for row in rows]


def wait(condition: Callable[[], bool], until: float) -> None:
    """Wait until a condition holds, or the time is reached."""
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)


def measure(
    names: Sequence[str],
    options: Sequence[str],
    seconds: float,
    record: Callable[[Row], None],
    compiling: float | None = None,
) -> None:
    """Compile all these runs side by side, let one after the other measure, and record their results.

    compiling: the most seconds in which they compile; the share `COMPILES` of all seconds by default.
    """
    begun = time.monotonic()
    compiling = seconds * COMPILES if compiling is None else compiling
    end, compiled_by = begun + seconds, begun + compiling
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = [Run(name, Path(folder), options) for name in names]
        try:
            wait(lambda: not any(run.compiles() for run in runs), compiled_by)
            late = [run for run in runs if run.compiles()]
            for run in late:
                run.kill()
            print(f"compiled for {time.monotonic() - begun:.0f} s", flush=True)
            for run in runs:
                run.take_turn(min(end, time.monotonic() + TURN))
                for row in run.results(f"not compiled after {compiling:.0f} s" if run in late else ""):
                    record(row)
        finally:
            for run in runs:
                run.kill()


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the names of the runs that patterns select, in the order of the patterns: of `work--who`, or of `work`."""
    every = [f"{work}--{who}" for work, names in RUNS.items() for who in names]
    found: dict[str, None] = {}
    for pattern in patterns:
        names = [n for n in every if fnmatch.fnmatch(n, pattern) or fnmatch.fnmatch(n.partition("--")[0], pattern)]
        if not names:
            raise ValueError(f"no run is named {pattern!r}; --list prints all names")
        found |= dict.fromkeys(names)
    return list(found)


def line(row: Row) -> str:
    """Return a result as one line: milliseconds, speed-up with its 20th and 80th percentile, memory, dB."""
    shape = "x".join(str(row[x]) for x in "mkn") if "m" in row else ""
    text = f"{row['work']}--{row['who']} {shape}{' fast' if row.get('fast_accum') else ''}".ljust(32)
    if "tokens_s" in row:
        text += (
            f"{row['ms']:9.3f} ms {row['tokens_s']:8,} tokens/s {row['peak_GB'] or 0:6.2f} GB  loss {row['loss'][1]}"
        )
    elif "ms" in row:
        text += f"{row['ms'][0]:9.3f} {row['ms'][1]:9.3f} ms {row['speedup']:6.2f}x"
        text += " ({:.2f} to {:.2f})".format(*row["p20_80"])
        text += f" {(row.get('peak') or 0) / 1e9:6.2f} GB  dB {row['dB'][0]}, worst {min(row['dB'])}"
    ms = row.get("ms", 0)
    if row.get("host_ms", 0) > (ms[1] if isinstance(ms, list) else ms):
        text += "  host-bound"
    return text + ("" if row["status"] == "ok" else f"  {row['status']}")


def exit_status(rows: Sequence[Row]) -> int:
    """Return 1 if a result is wrong or fp8pass or BF16 failed, 3 if the time was up, else 0."""
    kinds = {(row["status"].partition(":")[0], row["who"] in (*TORCHAO, *RUNS["xla"])) for row in rows}
    if kinds & {("wrong", False), ("wrong", True), ("failed", False)}:
        return 1
    return 3 if any(kind == "out of time" for kind, _ in kinds) else 0


# ------------------------------------------------------------------------------------------------------- environment


def environment_of(device: torch.device) -> dict[str, Any]:
    """Return the versions, hardware and state of the GPU that the figures depend on."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "torch": str(torch.__version__),
        **{name: version(name) for name in ("triton", "torchao", "transformers", "jax", "flax", "fp8pass")},
        "commit": output("git", "describe", "--always", "--dirty"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"capability": [properties.major, properties.minor], "sms": properties.multi_processor_count}
        found |= {"memory_bytes": properties.total_memory, "l2_bytes": properties.L2_cache_size}
        found |= {"before": state_of_gpu(), "copy_bytes_per_second": copy_rate(device)}
    return found


def version(package: str) -> str | None:
    """Return the version of a package; None, or a text for fp8pass, if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed, run from its sources" if package == "fp8pass" else None


def output(*command: str) -> str:
    """Return what a command prints, or why it did not run."""
    try:
        where = Path(__file__).parent
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=where).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {str(error)[:200]}"


def state_of_gpu() -> dict[str, str]:
    """Return driver, clocks, power and temperature as nvidia-smi reports them, or why it does not."""
    names = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")
    text = output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0")
    return dict(zip(names, (part.strip() for part in text.split(",")), strict=False))


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes, which other memory-bound kernels could reach."""
    source = torch.randint(256, (4 << 30,), dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    (times,) = seconds(device, [partial(into.copy_, source)], 10)
    return 2 * source.numel() / statistics.median(times[2:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments ask for; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure speed, memory and correctness on one GPU.")
    parser.add_argument("runs", nargs="*", default=USUAL, help="names or patterns (default: those of most interest)")
    parser.add_argument("--list", action="store_true", help="print the names of all runs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="use tiny sizes: tests the script, measures nothing")
    parser.add_argument("--minutes", type=float, default=7.5, help="end after this time at the latest (default: 7.5)")
    parser.add_argument("--out", type=Path, default=Path("h200.jsonl"), help="file of results (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.list:
        print(*chosen(["*"]), sep="\n")
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --device cpu --quick tests everything else")
    if given.device == "cpu" and not given.quick:
        parser.error("on a CPU there is nothing to measure: add --quick for a dry run")
    begun, names = time.monotonic(), chosen(given.runs)
    device, rows = torch.device(given.device), list[Row]()
    environment = environment_of(device) | {"dry_run": given.quick}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the runs need the memory
    print(json.dumps(environment))
    with given.out.open("w") as file:

        def write(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        def record(row: Row) -> None:
            rows.append(row if device.type == "cpu" else row | {"gpu_after": state_of_gpu()})
            write(rows[-1])
            print(line(row), flush=True)

        write({"environment": environment})
        options = [f"--device={device.type}", *(["--quick"] if given.quick else [])]
        measure(names, options, 60 * given.minutes - (time.monotonic() - begun), record)
    status = exit_status(rows)
    wrong = "; SOMETHING IS WRONG: see above" if status == 1 else ""
    print(f"\n{time.monotonic() - begun:.0f} s; {given.out}{wrong}")
    return status


if __name__ == "__main__":
    sys.exit(main())
