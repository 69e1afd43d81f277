"""Functions of tests that run on several ranks: processes that torchrun starts, and that talk over gloo.

All such functions of one file run in one launch, in the order in which they stand there, for starting one takes long.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
TIMEOUT = 60
"""Seconds after which gloo gives up, and with it a test that hangs."""


class OnRanks:
    """A function that runs on all ranks. Called, it returns what it returned, of each rank."""

    def __init__(self, function: Callable[[], Any], ranks: int) -> None:
        self.function, self.ranks, self.name = function, ranks, function.__name__
        _of_file.setdefault((function.__module__, ranks), []).append(self)

    def __call__(self) -> list[Any]:
        folder, output = _launch(self.function.__module__, self.ranks)
        files = [folder / f"{self.name}.{rank}" for rank in range(self.ranks)]
        assert all(f.exists() for f in files), f"{self.name} has not come to its end on all ranks:\n{_failure(output)}"
        return [torch.load(f, weights_only=False) for f in files]


def _failure(output: str) -> str:
    """What the first rank that failed had to say."""
    lines = [line for line in output.splitlines() if line.startswith("[rank")]
    return "\n".join(lines[-40:]) or output[-4000:]


_of_file: dict[tuple[str, int], list[OnRanks]] = {}


def on_ranks(ranks: int) -> Callable[[Callable[[], Any]], OnRanks]:
    """What decorates such functions."""
    return functools.partial(OnRanks, ranks=ranks)


@functools.cache
def _launch(module: str, ranks: int) -> tuple[Path, str]:
    folder = Path(tempfile.mkdtemp())
    result = run(ranks, "-m", "tests.torchrun", module, str(ranks), str(folder))
    return folder, result.stdout + result.stderr


def run(ranks: int, *args: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start torchrun with arguments, and wait until it ends."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # what pytest has loaded is not what a script sees
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TORCHELASTIC_"))}
    return subprocess.run(
        [*launcher, *args],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def collectives() -> int:
    """How many this rank has called in the default group."""
    return dist.group.WORLD._get_sequence_number_for_group()


def main(module: str, ranks: str, folder: str) -> None:
    """What each rank does."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    importlib.import_module(module)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    for function in sys.modules["tests.torchrun"]._of_file[module, int(ranks)]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(inductor_config.patch(fx_graph_cache=False))
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
            result = function.function()
        print(f"{function.name}: {time.monotonic() - begin:.1f} s", flush=True)
        torch.save(result, Path(folder) / f"{function.name}.{dist.get_rank()}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["tests.torchrun"] = sys.modules["__main__"]  # what the module imports registers its functions here
    main(*sys.argv[1:])
