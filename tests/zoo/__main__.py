"""Train models of other projects in FP8, and write a row of results for each.

python -m tests.zoo [name ...]      make the rows that do not exist yet, or those named, as files in build/zoo
    --keep                          write all rows into tests/zoo/rows.jsonl, which git tracks
    --lowering inductor             train with Inductor; the default is eager
    --lowering h100 | sm_120        generate code for an H100, or for an RTX 5090
    --lowering explain              only explain the models, without training
    --third                         only a third of each kind: the models that took the least time in eager
    --failed                        also repeat rows that failed
    --list                          print the names
    --page                          print the tables for docs/zoo.md
    --problems                      print the results that are not as they should be
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each row is made in a process that is forked from this one
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["FP8PASS_ON_FAULT"] = "raise"

import torch._dynamo.backends.inductor
import torch._inductor.compile_fx
from torch._dynamo import config as dynamo_config

from tests.zoo import row as zoo_row
from tests.zoo.catalogue import Entry, catalogue
from tests.zoo.lowerings import Explained, ForGpu, ThroughInductor
from tests.zoo.page import page, problems
from tests.zoo.rows import TRAINED, Rows, third

ROOT = Path(__file__).parents[2]
ROWS = Rows(ROOT / "build" / "zoo", ROOT / "tests" / "zoo" / "rows.jsonl")
SECONDS = 300
"""CPU seconds that a row may take; they do not depend on what else the machine runs."""


IMPORTS = {
    "transformers": "transformers.modeling_utils",
    "torch": "torch.testing._internal.common_modules",
    "diffusers": "diffusers.models",
    "megatron-core": "megatron.core.tensor_parallel.layers",
    "peft": "peft",
    "timm": "timm",
}
"""{package: a slow import of its rows}. These modules are imported once, before the rows' processes are forked."""


LOWERINGS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "eager": lambda make: make(),
    "explain": lambda make: Explained(make()),
    "inductor": lambda make: ThroughInductor(make()),
    "h100": functools.partial(ForGpu, "h100"),
    "sm_120": functools.partial(ForGpu, "sm_120"),
}


def run(entry: Entry, lowering: str) -> dict[str, Any]:
    """Make the row of one model in another process, and return it."""
    file = ROWS.file(entry.name, lowering)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(entry, file, LOWERINGS[lowering]))
    file.unlink(missing_ok=True)
    process.start()
    process.join()
    if not file.exists():
        known = {-signal.SIGXCPU: f"not done in {SECONDS} s", -signal.SIGKILL: f"not done in {SECONDS} s"}
        error = known.get(process.exitcode or 0, f"ended with {process.exitcode}")
        _write(file, entry, zoo_row.Row(entry.name, error=error))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _child(entry: Entry, file: Path, lower: Callable[[Callable[[], Any]], Any]) -> None:
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, spent + SECONDS + 5))
    gc.freeze()  # the garbage collector need not scan imported objects again
    gc.set_threshold(50_000, 20, 50)
    # else Dynamo replaces numpy's random numbers by torch's, which eager does not do
    settings = dynamo_config.patch(run_gc_after_compile=False, use_numpy_random_stream=True)
    with file.with_suffix(".log").open("w") as log, settings:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        row = zoo_row.Row(entry.name)
        zoo_row.fill(row, lambda: lower(entry.make))
        _write(file, entry, row)


def _write(file: Path, entry: Entry, row: zoo_row.Row) -> None:
    about = {
        "package": entry.package,
        "kind": entry.kind,
        "date": time.strftime("%FT%TZ", time.gmtime()),
        "commit": _commit(),
        "versions": _versions(entry),
    }
    file.write_text(json.dumps({**about, **asdict(row)}, indent=1))


def _versions(entry: Entry) -> dict[str, str]:
    """Return the versions of the packages that a row depends on."""
    found = {}
    for package in dict.fromkeys(("torch", entry.package)):
        with contextlib.suppress(metadata.PackageNotFoundError):  # the row's error says that it is missing
            found[package] = metadata.version(package)
    return found


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def prepare(entries: Iterable[Entry]) -> None:
    """Import the packages that rows need, and compile a layer, which imports more, so that rows need not do it again.

    It runs no backward, for which autograd starts threads, which a forked process does not have. A torch that is built
    for GPUs starts them as soon as a backward is traced, so that there the layer is compiled without gradients.
    """
    for package in {entry.package for entry in entries}:
        with contextlib.suppress(ImportError, RuntimeError):  # rows of a missing or unfit package have the error
            importlib.import_module(IMPORTS.get(package, package))
    model = torch.compile(torch.nn.Linear(32, 32), backend="fp8pass", options=zoo_row.OPTIONS)
    with torch.set_grad_enabled(not torch.backends.cuda.is_built()):
        model(torch.randn(32, 32))
    torch._dynamo.reset()


def told(row: dict[str, Any]) -> str:
    """Return a row as one line of text."""
    share = f"{row['fp8_flops'] / row['flops']:4.0%}" if row["flops"] else "   -"
    owned = f"{row['owned_fp8_flops'] / row['owned_flops']:4.0%}" if row["owned_flops"] else "   -"
    rest = f"{row['stage']}: {row['error']} [{row['frame']}] torch: {row['trains_elsewhere']}" if row["error"] else ""
    ran = f"{row['rewritten']}/{row['matmuls']}"
    seconds = sum(row["seconds"].values())
    return (
        f"{row['name']:42} {row['status']:13} {ran:>9} {share} {owned} {row['flops'] / max(1, row['eager_flops']):.2f} "
        f"cos {row['cosine']:.3f} excused {len(row['excused'])} cancel {len(row['cancelled'])} {seconds:4.0f}s "
        f"{row['rules'] or ''} {len(row['breaks'])} breaks {rest}"
    )


def rows() -> list[dict[str, Any]]:
    """Return the rows of eager, each with the names of the lowerings that train its model."""
    by_lowering = {name: ROWS.all(name) for name in TRAINED}
    found = list(by_lowering["eager"].values())
    for row in found:
        others = [name for name, made in by_lowering.items() if made.get(row["name"], {}).get("status") == "trains"]
        row["lowerings"] = others
    return found


def main() -> None:
    """Make rows, one after the other, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--lowering", choices=LOWERINGS, default="eager")
    for flag in ("--failed", "--keep", "--list", "--third", "--page", "--problems"):
        parser.add_argument(flag, action="store_true")
    asked = parser.parse_args()
    entries = catalogue()
    if asked.list:
        sys.exit(print("\n".join(entries)))
    if asked.keep:
        sys.exit(print(f"{ROWS.keep()} rows are in {ROWS.kept}"))
    if asked.page:
        sys.exit(print(page(rows(), entries)))
    if asked.problems:
        sys.exit(print("\n".join(f"{by}: {p}" for by in TRAINED for p in problems(ROWS.all(by).values()))))
    known = {} if asked.names else ROWS.all(asked.lowering)
    again = {name for name, row in known.items() if asked.failed and row["status"] == "fails"}
    names = third(entries.values(), ROWS.all("eager")) if asked.third else list(entries)
    wanted = asked.names or [name for name in names if name not in known or name in again]
    prepare(entries[name] for name in wanted)
    ROWS.file("", asked.lowering).parent.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        print(told(run(entries[name], asked.lowering)), flush=True)


if __name__ == "__main__":
    main()
