"""The version of fp8pass, the versions of torch that it is tested with, and the checks of the installed torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from fp8pass.base.errors import warn_once

__version__ = "0.1.0"

TESTED = ("2.11.0", "2.13.0", "2.15.0")
"""The versions of torch that the tests run on, oldest first. pyproject.toml refuses older ones."""


def minor(version: str) -> tuple[int, int]:
    """Return (2, 13) for "2.13.0+cpu"."""
    first, second = version.split(".")[:2]
    return int(first), int(second)


OLDEST, NEWEST = (".".join(map(str, minor(version))) for version in (TESTED[0], TESTED[-1]))
_INSTALL = f"pip install 'torch=={NEWEST}.*'"


def check_version() -> None:
    """Raise ImportError if torch is too old; warn if it is newer than the tested versions."""
    version = torch.__version__
    if minor(version) < minor(OLDEST):
        raise ImportError(f"fp8pass needs torch {OLDEST} or newer; this is {version}. Install one: {_INSTALL}")
    if minor(version) > minor(NEWEST):
        warn_once(
            f"fp8pass is tested with torch {OLDEST} to {NEWEST}; this is {version}. "
            f"If something fails, install a tested one: {_INSTALL}"
        )


@contextlib.contextmanager
def required_names() -> Iterator[None]:
    """Turn errors about names that torch lacks into an ImportError that names them and the versions that have them.

    Other errors pass unchanged, such as a missing package that torch imports.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        name = _missing(error)
        if not name.startswith("torch."):
            raise
        raise ImportError(
            f"fp8pass needs {name}, which torch {torch.__version__} does not have. "
            f"It is tested with torch {OLDEST} to {NEWEST}: {_INSTALL}",
            name=name,
        ) from error


def _missing(error: ImportError | AttributeError) -> str:
    """Return the dotted name that was not found; "" if the error does not contain it."""
    if isinstance(error, AttributeError):
        return f"{getattr(error.obj, '__name__', '')}.{error.name}"
    member = re.match(r"cannot import name '(\w+)'", error.msg)
    return f"{error.name}.{member[1]}" if member else error.name or ""
