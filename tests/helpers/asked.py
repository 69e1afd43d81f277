"""A process that answers many questions, because importing torch and faking a GPU takes longer than most answers."""

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
    """Start this worker's process for `module`, which reads questions from stdin and writes answers to stdout."""
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
    process.communicate()  # closes its stdin, on which it exits


def ask(module: str, *question: str, **environment: str) -> Any:
    """Return the answer of `module`, run as a script with `environment`, to a question.

    Each question is answered as in a new process: torch discards what it has compiled before. Fails on the answer's error.
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
    """Answer the questions on stdin, in the process that `ask` started, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints go to stderr, so that stdout has only answers
    for line in sys.stdin:
        torch.compiler.reset()
        torch.manual_seed(0)
        try:
            said = {"found": answer(*json.loads(line))}
        except Exception:  # noqa: BLE001  # the next question may still have an answer
            said = {"error": traceback.format_exc()}
        answers.write(json.dumps(said) + "\n")
        answers.flush()
