"""`fp8pass.enabled` and `fp8pass.autocast`: run calls of compiled code in high precision, or with another recipe."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate

from fp8pass.base.errors import Fp8Error
from fp8pass.base.node_meta import ENABLED, RECIPE
from fp8pass.options.config import Config
from fp8pass.recipes import Disabled, Plan, Schedule, resolve


@dataclass(frozen=True)
class Setting:
    """The setting of an `autocast` context. recipe: None for that of the compiled code."""

    enabled: bool
    recipe: Plan | Schedule

    def applied(self, config: Config) -> Config:
        """Return the options of code that is called with this setting, made from those it was compiled with."""
        return _applied(config, self.enabled, self.recipe)


class _Thread(threading.local):
    setting: Setting | None = None


_thread = _Thread()
_entered = False
"""True if any thread has entered a context: until then, calls need not look for theirs."""


@contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    """Run the calls within this context in FP8 or not, and with another recipe if one is given.

    Around calls of compiled code, it chooses among compilations of one graph: the code is compiled once for each
    setting, at its first call, and Dynamo traces it once. Within compiled code, it applies to the matmuls in it. The
    backward runs as its forward ran, wherever it is called. Contexts nest, the innermost counts, and they hold for the
    calling thread. The state of delayed scaling stays as it is in calls that do not use it. Quantize-dequantize that
    the user wrote is not affected. Ranks that share amaxes must enter the same contexts.

    Args:
        enabled: False for high precision.
        recipe: As the option `recipe`; None for the recipe of the surrounding context, or of the compiled code. Within
            compiled code, a recipe's name.

    Raises:
        ValueError: If the recipe is unknown.
    """
    if torch.compiler.is_compiling():
        # Dynamo traces this context; `annotate` notes the setting in the `meta["custom"]` of the nodes within it
        with annotate({ENABLED: enabled} if recipe is None else {ENABLED: enabled, RECIPE: recipe}):
            yield
        return
    global _entered
    outer = _thread.setting
    inherited = None if outer is None else outer.recipe
    _entered = True
    _thread.setting = Setting(bool(enabled), inherited if recipe is None else resolve(recipe))
    try:
        yield
    finally:
        _thread.setting = outer


def enabled(flag: bool = True) -> Any:
    """Return a context in which calls run in FP8, or in high precision if `flag` is False: see `autocast`."""
    return autocast(enabled=flag)


def any_entered() -> bool:
    """Return whether any thread has ever entered an `autocast` context."""
    return _entered


def current_setting() -> Setting | None:
    """Return the setting of the calling thread; None if it changes nothing."""
    setting = _thread.setting
    return None if setting == Setting(True, None) else setting


def within(node: fx.Node, config: Config) -> Config:
    """Return the options for a node of Dynamo's graph, which may be within contexts of the compiled code.

    Raises Fp8Error for a recipe that is unknown, or that is not given by its name.
    """
    notes = node.meta.get("custom") or {}
    if ENABLED not in notes:
        return config
    recipe = notes.get(RECIPE)
    try:
        inside = _applied(config, notes[ENABLED], resolve(recipe))
    except ValueError as error:
        raise Fp8Error(f"fp8pass.autocast({recipe=!r}) in compiled code: {error}") from error
    # the code is called within `enabled(False)`, where a schedule counts no steps, so that it has no recipe to enable
    return config if isinstance(inside.recipe, Schedule) else inside


def _applied(config: Config, enabled: bool, recipe: Plan | Schedule) -> Config:
    configured = config.recipe.plan if isinstance(config.recipe, Disabled) else config.recipe
    recipe = configured if recipe is None else recipe  # type: ignore[assignment]
    if enabled:
        return replace(config, recipe=recipe)
    return config.disabled(recipe)
