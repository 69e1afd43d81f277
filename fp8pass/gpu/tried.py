"""Try which matmul kernels a GPU has, in child processes that run `trial.py`: an error there ends no other process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fp8pass.gpu import trial

SECONDS = 15.0
"""The most that the cases of all children take together."""
STARTS = 30.0
"""The most that a child takes until it begins: it imports torch, and makes a context."""


@dataclass(frozen=True)
class Tried:
    """One case of a trial. result: "" if it is right, otherwise what is wrong. needed: fp8pass emits such matmuls."""

    kind: str
    case: str
    needed: bool
    result: str


def try_kinds(kinds: Sequence[str], device: str, seconds: float = SECONDS, script: str | None = None) -> list[Tried]:
    """Try all cases of these kinds of scales. Raises OSError or RuntimeError where no child can start.

    The last line of a child that dies, or hangs, says what it tried; another one tries the kinds after that.
    """
    end, results, left = time.monotonic() + seconds, list[Tried](), list(kinds)
    while left and time.monotonic() < end:
        answers, began = _child(left, device, end - time.monotonic(), script or trial.__file__)
        if not began:
            raise RuntimeError(answers[0].result if answers else "the child process ended before it began")
        results += answers
        left = left[left.index(answers[-1].kind) + 1 :] if answers else []
    return results + [Tried(kind, "all", True, f"{trial.NOT_TRIED}: no time was left") for kind in left]


def _child(kinds: Sequence[str], device: str, seconds: float, script: str) -> tuple[list[Tried], bool]:
    """Run one child; return its answers, and whether it began; if not, the only answer is why."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.jsonl"
        command = [sys.executable or "python", script, device, str(file), *kinds]
        with open(Path(folder) / "errors", "w+") as errors:
            ended = _run(command, file, seconds, errors)
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not lines:
        return [Tried(kinds[0], "all", True, ended)] if ended else [], False
    return _answers(lines[1:], ended), True


def _run(command: Sequence[str], answers: Path, seconds: float, errors: IO[str]) -> str:
    """Run a child, for so many seconds after it has begun to write answers; return how it ended, "" if well."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, text=True)
    end = time.monotonic() + STARTS
    # `trial.py` creates the file when it begins: the import of torch before that has a separate limit
    while child.poll() is None and time.monotonic() < end and not answers.exists():
        time.sleep(0.05)
    try:
        child.wait(seconds if answers.exists() else 0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"it took more than {seconds if answers.exists() else STARTS:.0f} s"
    if not child.returncode:
        return ""
    errors.seek(0)
    said = errors.read().strip().splitlines()
    return f"the process died with status {child.returncode}{': ' + said[-1] if said else ''}"


def _answers(lines: Sequence[Sequence[Any]], ended: str) -> list[Tried]:
    """Return the answers of a child's lines: one with a result for each case, but for the case in which it ended."""
    results = [Tried(*line) for line in lines if len(line) == 4]
    if ended and lines and len(lines[-1]) == 3:
        kind, case, needed = lines[-1]
        results.append(Tried(kind, case, needed, ended))
    return results


def works(kind: str, results: Sequence[Tried]) -> bool | None:
    """Return whether all cases of a kind are right that fp8pass emits; None if not all were tried."""
    needed = [t for t in results if t.kind == kind and t.needed]
    if not needed or any(t.result.startswith(trial.NOT_TRIED) for t in needed):
        return None
    return all(not t.result for t in needed)
