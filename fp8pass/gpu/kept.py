"""Keep what was found out about a GPU in Inductor's cache folder: by GPU, driver, and versions of torch and CUDA."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fp8pass.base._torch import cache_dir, cuda_driver_version, get_hash_for_files
from fp8pass.gpu import speeds, trial


def file_of(properties: Any) -> Path:
    """Return the file for a GPU with these `torch.cuda.get_device_properties`, and for how we measure and try."""
    parts = properties.multi_processor_count, properties.total_memory
    how = get_hash_for_files((speeds.__file__, trial.__file__))
    versions = cuda_driver_version(), torch.__version__, torch.version.cuda, how
    key = repr((properties.name, properties.major, properties.minor, parts, versions))
    return Path(cache_dir()) / f"fp8pass-gpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read(file: Path) -> dict[str, Any]:
    """Return what a file keeps; {} if there is none, or none that can be read."""
    try:
        answers = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return answers if isinstance(answers, dict) else {}


def write(file: Path, answers: dict[str, Any]) -> None:
    """Write a file at once: another process reads it whole, or not at all. Without a folder to write, does nothing."""
    temporary = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(answers, indent=1))
        temporary.replace(file)


@contextlib.contextmanager
def alone(file: Path, seconds: float) -> Iterator[bool]:
    """Be the one process that finds out what the file will keep; others wait. Yields False after so many seconds.

    Yields True, too, where the folder can't be written: each process then finds out for itself.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file.with_suffix(".lock"), timeout=seconds)
        lock.acquire()
    except Timeout:
        yield False
        return
    # OSError: the folder is read-only, or its disk full. NotImplementedError: filelock 3, where flock does not exist.
    except (OSError, NotImplementedError):
        yield True
        return
    try:
        yield True
    finally:
        lock.release()
