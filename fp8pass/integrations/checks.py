"""Check that a framework's version and flags are compatible with fp8pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from fp8pass.base.errors import Fp8Error

HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@contextmanager
def importing(package: str, tested: str) -> Iterator[None]:
    """Say which version of a framework was tested, where it lacks what is imported in this context.

    Args:
        package: Name of the framework.
        tested: The version that was tested, such as "5.24".

    Raises:
        ImportError: If an import in this context fails.
    """
    try:
        yield
    except ImportError as error:
        try:
            installed = f"{version(package)} is installed"
        except PackageNotFoundError:
            installed = "none is installed"
        raise ImportError(
            f"fp8pass.integrations.{package} can't be imported: {error}. It was tested with {package} {tested}, and "
            f'{installed}: pip install "{package}=={tested}.*"'
        ) from error


def check_autocast(model: nn.Module, dtype: torch.dtype | None, flag: str) -> None:
    """Check that autocast and parameters do not have different types of 16 bits.

    Args:
        model: Its parameters.
        dtype: Type that autocast computes in; None without autocast.
        flag: The flag of the framework that turns autocast on, for the message.

    Raises:
        Fp8Error: If parameters are bfloat16 and autocast computes in float16, or the other way round.
    """
    other = next((p for p in HALVES if p is not dtype), None) if dtype in HALVES else None
    names = [name for name, p in model.named_parameters() if p.dtype is other]
    if other is not None and dtype is not None and names:
        raise Fp8Error(
            f"{flag} computes in {HALVES[dtype]}, and {len(names)} parameters are {HALVES[other]}, {names[0]} first: "
            f"values of one dtype do not fit the other. Load the model in float32, or drop {flag} and train in "
            f"{HALVES[other]}"
        )
