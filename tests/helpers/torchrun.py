"""Runs functions of tests on several ranks: processes that communicate over gloo.

Starting ranks takes long. So one launch for each number of ranks runs all such functions of the files that pytest has
collected, file by file, in the order of their definition. One process imports all that they need, and forks into new
ranks for each file, which find each other as torchrun's ranks do: models that one file leaves have no slots in the next
file, and a file that fails does not affect the others. `run` starts torchrun itself, for tests that need it.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.helpers import ROOT
from tests.helpers.harness import without_caches

COMPILES_FSDP_IN_A_STEP = not torch.__version__.startswith("2.11.")
"""False for torch 2.11, which fails on FSDP2 in a compiled step, with any backend: see docs/versions.md."""

Function = TypeVar("Function", bound=Callable[[], Any])
TIMEOUT = 60
"""Seconds after which gloo gives up, which ends a test that hangs."""

SHARING = (
    "tests.distributed.test_ddp",
    "tests.distributed.test_fsdp",
    "tests.distributed.test_pipelining",
    "tests.distributed.test_sharded_updates",
    "tests.distributed.test_tensor_parallel",
)
"""Modules whose functions share compiled code."""


VARIANTS = "FP8PASS_TEST_VARIANTS"
"""A variable that is set where variants run, so that ranks, which import the functions too, know it."""


class OnRanks:
    """A function that runs on all ranks; a call returns the list of the ranks' results."""

    def __init__(self, function: Callable[[], Any], ranks: int, variant: bool) -> None:
        self.function, self.ranks, self.module = function, ranks, function.__module__
        self.name = f"{self.module}.{function.__name__}"
        if not variant or VARIANTS in os.environ:
            _functions.setdefault(ranks, []).append(self)

    def __call__(self) -> list[Any]:
        folder, output = _launch(self.ranks)
        files = [folder / f"{self.name}.{rank}" for rank in range(self.ranks)]
        assert all(f.exists() for f in files), f"{self.name} has not ended on all ranks:\n{_failure(output)}"
        return [torch.load(f, weights_only=False) for f in files]


def _failure(output: str) -> str:
    """Return the last lines that ranks printed when they failed, or else the end of the output."""
    lines = [line for line in output.splitlines() if line.startswith("[rank") and "]:W" not in line]
    return "\n".join(lines[-40:]) or output[-4000:]


_functions: dict[int, list[OnRanks]] = {}
"""The functions of all modules that have been imported, by number of ranks."""


def on_ranks(ranks: int, variant: bool = False) -> Callable[[Callable[[], Any]], OnRanks]:
    """Decorate a function without arguments to run on that many ranks.

    variant: only variants call it, so that it runs only where variants do.
    """
    return functools.partial(OnRanks, ranks=ranks, variant=variant)


_before: dict[int, list[Callable[[], Any]]] = {}


def before_launch(ranks: int) -> Callable[[Function], Function]:
    """Decorate a function that runs in the process of the tests, before that many ranks are started."""

    def register(function: Function) -> Function:
        _before.setdefault(ranks, []).append(function)
        return function

    return register


@functools.cache
def _launch(ranks: int) -> tuple[Path, str]:
    """Run all functions for that many ranks. Return the folder with their results, and what they printed."""
    for prepare in _before.get(ranks, ()):
        prepare()
    folder = Path(tempfile.mkdtemp())
    modules = dict.fromkeys(function.module for function in _functions[ranks])
    result = _python("-m", "tests.helpers.torchrun", str(ranks), str(folder), *modules)
    return folder, result.stdout + result.stderr


def run(ranks: int, *args: str, timeout: float = 1200, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start torchrun with arguments, and wait until it ends."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return _python(*launcher, *args, timeout=timeout, **environment)


def _python(*args: str, timeout: float = 1200, **environment: str) -> subprocess.CompletedProcess[str]:
    # a script must not see the variables of pytest and of another torchrun
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TORCHELASTIC_"))}
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def collectives() -> int:
    """Return how many collectives this rank has called in the default group."""
    return dist.group.WORLD._get_sequence_number_for_group()


def main(ranks: int, folder: str, *modules: str) -> int:
    """Import modules, and run the functions of each on so many ranks. Return 1 if any of them failed."""
    for module in ("torch._inductor.compile_fx", *modules):  # all modules need the first, whose import takes long
        importlib.import_module(module)
    failed = [_run_module(ranks, folder, module) for module in modules]
    return int(any(failed))


def _run_module(ranks: int, folder: str, module: str) -> bool:
    """Fork into so many ranks, and wait for their ends. Return whether a rank has failed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks))
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")  # the store is in this process, as torchrun's is
        running = {_forked(rank, folder, module) for rank in range(ranks)}
        # the store has a thread, which may hold a lock that a process forked now would wait for; ranks only connect
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    failed = _wait(running)
    del store  # which ends its thread before the next module's ranks are forked
    return failed


def _wait(running: set[int]) -> bool:
    """Wait until these processes have ended. Return whether one has failed; then kill the others."""
    failed = False
    while running:
        ended, status = os.wait()
        running.discard(ended)
        if status and not failed:
            failed = True
            for process in running:
                os.kill(process, signal.SIGKILL)
    return failed


def _forked(rank: int, folder: str, module: str) -> int:
    """Fork into a rank. Return its process id; the rank itself does not return."""
    if process := os.fork():
        return process
    status = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        _run_functions(folder, module)
        status = 0
    except BaseException:  # noqa: BLE001  # nothing else in a rank would print it
        lines = traceback.format_exc().splitlines()
        sys.stderr.write("".join(f"[rank{rank}]: {line}\n" for line in lines))  # at once: other ranks write, too
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skips the exit handlers of the process that it was forked from


def _run_functions(folder: str, module: str) -> None:
    """Run all functions of a module for as many ranks as there are, as each rank does."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    for function in (f for f in _functions[dist.get_world_size()] if f.module == module):
        begin = time.monotonic()
        with without_caches(share=function.module in SHARING):
            result = function.function()
        print(f"{function.name}: {time.monotonic() - begin:.1f} s\n", end="", flush=True)
        torch.save(result, Path(folder) / f"{function.name}.{dist.get_rank()}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # so that the modules, which import tests.helpers.torchrun, register their functions in this module
    sys.modules["tests.helpers.torchrun"] = sys.modules["__main__"]
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
