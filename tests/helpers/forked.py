"""Runs programs one after the other, each in a fork of a process that has imported torch.

Importing torch takes longer than most of these programs. fp8pass is not imported before the fork.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Program(NamedTuple):
    """A file, its arguments, the working directory, and the first entry of sys.path (by default the file's folder)."""

    file: Path
    arguments: Sequence[str] = ()
    folder: Path = Path()
    root: Path | None = None


class Ended(NamedTuple):
    """The exit status of a program, and what it has printed."""

    returncode: int
    stdout: str
    stderr: str


def run(programs: Sequence[Program], environment: Mapping[str, str]) -> list[Ended]:
    """Run programs with an environment; torch is imported with the same one."""
    with tempfile.TemporaryDirectory() as outputs:
        request = [
            [str(p.file), list(p.arguments), str(p.folder.resolve()), str(p.root or p.file.parent)] for p in programs
        ]
        command = [sys.executable, __file__, json.dumps(request), outputs]
        done = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, text=True, check=True)
        texts = [(Path(outputs) / f"{i}.{name}").read_text() for i in range(len(programs)) for name in ("out", "err")]
    codes: list[int] = json.loads(done.stdout)
    return [Ended(*each) for each in zip(codes, texts[::2], texts[1::2], strict=True)]


def _run(program: tuple[str, list[str], str, str], output: Path) -> int:
    """Run a program in a fork, and return its exit status."""
    file, arguments, folder, root = program
    if process := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    status = 1
    try:
        for descriptor, name in (1, "out"), (2, "err"):
            os.dup2(os.open(output.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT), descriptor)
        os.chdir(folder)
        sys.argv, sys.path[0] = [file, *arguments], root  # instead of this file's folder
        runpy.run_path(file, run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  # printed, as Python itself does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    import torch._inductor.compile_fx  # noqa: F401  # takes longest, and is the same for all

    outputs = Path(sys.argv[2])
    print(json.dumps([_run(each, outputs / str(i)) for i, each in enumerate(json.loads(sys.argv[1]))]))
