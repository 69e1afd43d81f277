"""A process that answers one question after the other: importing torch and pretending a GPU takes longer than most."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests.helpers import ROOT


@functools.cache
def _process(module: str, environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """The one of this worker. Its errors are told as answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, **dict(environment)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate()  # with the end of what it reads, it ends


def ask(module: str, *question: str, **environment: str) -> Any:
    """What `module`, run as a script with `environment`, answers.

    Each question is answered as in a process of its own: torch forgets before it what it has compiled.
    """
    process = _process(module, tuple(environment.items()))
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"{module} ended with {process.wait()}"
    answer = json.loads(line)
    assert "error" not in answer, answer["error"]
    return answer["found"]


def answer_all(answer: Callable[..., Any]) -> None:
    """Of a process that is asked: answers until there are no more questions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    for line in sys.stdin:
        torch.compiler.reset()
        torch.manual_seed(0)
        try:
            said = {"found": answer(*json.loads(line))}
        except Exception:  # noqa: BLE001  # the next question may still have an answer
            said = {"error": traceback.format_exc()}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
