"""The callable that chooses among compilations of one graph by the `fp8pass.autocast` in which it is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from fp8pass.errors import warn_once
from fp8pass.options.config import Config
from fp8pass.options.setting import Setting, any_entered, current_setting
from fp8pass.states.steps import Pass, checkpointed_region, repeats_forward

Run = Callable[..., Any]

_newest: dict[Hashable, Setting | None] = {}
"""The setting of the newest forward of each function in a checkpointed region, whose backward runs another graph."""


class SettingGraph:
    """A graph that Dynamo calls, which is compiled once for each setting, when it is first called with it.

    config: the options of the compiled code. code: the same for all graphs of a function, with gradients and without.
    compile_with: compiles the graph with other options.
    """

    def __init__(self, config: Config, code: str, compile_with: Callable[[Config], Run]) -> None:
        self._config = config
        self._key = type(self), code
        self._compile_with = compile_with
        self._by_setting: dict[Setting | None, Run] = {}
        self._lock = threading.Lock()

    def has(self, setting: Setting | None, run: Run) -> None:
        """Add code that has been compiled for a setting."""
        self._by_setting[setting] = run

    def __call__(self, *args: Any) -> Any:
        """Call the graph as compiled for the setting of this thread; in a repeated forward, for that of the first."""
        setting = self._setting() if any_entered() else None
        run = self._by_setting.get(setting)
        return (run or self._compiled(setting))(*args)

    def _setting(self) -> Setting | None:
        found = checkpointed_region()
        if found is None and not repeats_forward():
            return current_setting()
        if found is not None:
            region, how = found
            if how is not Pass.REPEATED:
                setting = _newest[self._key] = current_setting()
                region.remember(self._key, (setting,))
                return setting
            if (forward := region.next_forward(self._key)) is not None:
                return forward[0]  # type: ignore[no-any-return]
        # a region within a region with use_reentrant=True: the backward repeats both, and torch does not tell which
        # forward it repeats
        if len(self._by_setting) > 1:
            warn_once(
                "fp8pass: a forward in nested activation checkpoints with use_reentrant=True is repeated with the "
                "fp8pass.autocast of the newest forward there. Run the backward of each forward before the next one, "
                "or pass use_reentrant=False"
            )
        return _newest.get(self._key)

    def _compiled(self, setting: Setting | None) -> Run:
        with self._lock:
            config = self._config_of(setting)
            alike = (run for other, run in self._by_setting.items() if self._config_of(other) == config)
            run = self._by_setting[setting] = next(alike, None) or self._compile_with(config)
        return run

    def _config_of(self, setting: Setting | None) -> Config:
        return self._config if setting is None else setting.applied(self._config)
