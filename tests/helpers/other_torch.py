"""Imports fp8pass under a torch that pretends to be another version: a process to `ask`, which forks for each question."""

from __future__ import annotations

import importlib
import multiprocessing
import warnings
from typing import Any

import torch
import torch._inductor.compile_fx  # takes longest, and is the same for all questions
from torch.torch_version import TorchVersion

from tests.helpers.asked import answer_all


def imported(statements: str, version: str, gone: str) -> dict[str, Any]:
    """Run statements while torch claims to have that version and lacks the attribute `gone`, if any.

    Return "warnings", a [file, text] for each of fp8pass, and "error", "" or the ImportError's text.
    """
    torch.__version__ = TorchVersion(version)
    if gone:
        owner, _, name = gone.rpartition(".")
        delattr(importlib.import_module(owner), name)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(compile(statements, "user.py", "exec"), {})
        except ImportError as raised:
            error = str(raised)
    return {"error": error, "warnings": [(w.filename, str(w.message)) for w in caught if "fp8pass" in str(w.message)]}


def in_a_fork(*question: str) -> dict[str, Any]:
    """Return the answer of `imported` from a fork, which is not affected by other questions."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(imported, question)


if __name__ == "__main__":
    answer_all(in_a_fork)
