"""Write tensors to files by size, in a folder that appears complete or not at all."""

from __future__ import annotations

import importlib.util
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8pass.base.errors import Fp8Error

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_of(size: Any) -> int:
    """Return a number of bytes: 5_000_000_000 for "5GB". Raises ValueError for other texts, and sizes below 1."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)?", str(size))
    number = int(float(match[1]) * UNITS[match[2] or ""]) if match else 0
    if number < 1:
        raise ValueError(f"max_shard_size is {size!r}: pass a number of bytes, or a text such as '5GB' or '500MB'")
    return number


def check_free(directory: Path, overwrite: bool) -> None:
    """Raise FileExistsError if there is something at the path of the directory that may not be replaced.

    Raises Fp8Error if safetensors is not installed.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise Fp8Error("export_fp8 writes files of safetensors, which is not installed: pip install fp8pass[export]")
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file: pass a directory that does not exist yet")
    if directory.exists() and not overwrite:
        raise FileExistsError(f"{directory} exists: pass another directory, or overwrite=True, which replaces it whole")


@contextmanager
def complete_or_absent(directory: Path) -> Iterator[Path]:
    """Yield an empty folder beside `directory`; at the end, put it there, instead of what is there already.

    If an error ends the context, the folder is removed, and `directory` stays as it was. Raises Fp8Error if files can't
    be written.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(directory)
    try:
        new.mkdir()
        yield new
        _put(new, directory)
    except OSError as error:
        raise Fp8Error(
            f"{directory} could not be written: {error}. Nothing of it is left; make room, or pass another directory"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _beside(directory: Path) -> Path:
    """Return a path that does not exist, on the same file system."""
    return directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")


def _put(new: Path, directory: Path) -> None:
    """Rename `new` to `directory`, and remove what was there."""
    if not directory.exists():
        new.rename(directory)
        return
    # a folder can't be renamed to the path of one that has files
    old = _beside(directory)
    directory.rename(old)
    try:
        new.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, limit: int) -> None:
    """Write model.safetensors, or several files of at most `limit` bytes with model.safetensors.index.json.

    A tensor that is larger has a file alone. Raises OSError if a file can't be written.
    """
    shards = _shards(tensors, limit)
    if len(shards) == 1:
        _write(shards[0], folder / "model.safetensors")
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write(shard, folder / name)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": weight_map}
    write_json(index, folder / "model.safetensors.index.json")


def write_json(content: Any, file: Path) -> None:
    """Write a file of JSON."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, x in tensors.items():
        if shards[-1] and size + x.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = x
        size += x.nbytes
    return shards


def _write(tensors: Mapping[str, Tensor], file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
