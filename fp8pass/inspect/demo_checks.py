"""Check that the machine has what `fp8pass demo` needs, before it trains for minutes."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tempfile
from pathlib import Path

import torch

from fp8pass.base._torch import cache_dir, cpp_compiler
from fp8pass.options.config import make_config

PLOT_BYTES, CACHE_BYTES, TEMPORARY_BYTES = 1 << 20, 64 << 20, 256 << 20
"""Upper bounds in bytes for the plot, for what Inductor writes for the demo's two models, and for torch's precompiled
header, which takes 150 MiB and is in the temporary folder wherever the cache is."""


class Unusable(Exception):
    """Something that the demo needs is missing. The message is one line and says what to do."""


def check(recipe: str, device: str, path: Path) -> None:
    """Raise Unusable unless the demo can run. path: the file for the plot; its folder is created."""
    _check_recipe(recipe)
    _check_packages()
    _check_device(device)
    if make_config({"recipe": recipe}).lowering == "inductor":
        _check_compiler()
        _check_cache()
    _check_plot(path)


def _check_recipe(recipe: str) -> None:
    try:
        make_config({"recipe": recipe})
    except ValueError as error:
        raise Unusable(f"--recipe {recipe}: {error}") from error


def _check_packages() -> None:
    missing = [p for p in ("rich", "matplotlib") if importlib.util.find_spec(p) is None]
    if missing:
        raise Unusable(f"{' and '.join(missing)} not installed: pip install 'fp8pass[demo]'")


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise Unusable(f"--device {name}: give cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Unusable(f"--device {name}: torch {torch.__version__} sees no such GPU; leave --device out for the CPU")


def _check_compiler() -> None:
    if not cpp_compiler():
        raise Unusable("no C++ compiler, which torch.compile needs: install g++, or name one in CXX")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise Unusable(f"no Python.h in {headers}, which torch.compile needs: install the package python3-dev")


def _check_cache() -> None:
    try:
        _check_room(cache_dir(), CACHE_BYTES, "TORCHINDUCTOR_CACHE_DIR")
    except OSError as error:
        raise Unusable(f"torch.compile's cache can't be written: {error}; set TORCHINDUCTOR_CACHE_DIR") from error
    _check_room(tempfile.gettempdir(), TEMPORARY_BYTES, "TMPDIR")


def _check_room(folder: str, needed: int, variable: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Unusable(
            f"{free >> 20} MiB are free in {folder}, and compiling needs {needed >> 20}: "
            f"free some, or set {variable} to another folder"
        )


def _check_plot(path: Path) -> None:
    """Write a file as large as the plot can be, and remove it. Raises Unusable if that fails."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(bytes(PLOT_BYTES))
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise Unusable(f"--out {path.parent}: can't be written ({error.strerror}); name a folder that can") from error
