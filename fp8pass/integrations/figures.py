"""Collect what the logs of a training loop show of FP8: the share of FLOPs, saturation and underflow."""

from __future__ import annotations

import math
from contextlib import ExitStack

from torch import nn

from fp8pass.base.errors import warn_once
from fp8pass.inspect.statistics import is_watched, stats
from fp8pass.report.report import Report, collect


class Figures:
    """The figures of one model, from `begin` to `end`."""

    def __init__(self) -> None:
        self.report = Report()
        self._model: nn.Module | None = None
        self._collecting = ExitStack()

    def begin(self, model: nn.Module) -> None:
        """Begin to collect the verdicts of what is compiled from now on."""
        self.end()  # an error may have ended the training before
        self._model = model
        self.report = self._collecting.enter_context(collect())

    def end(self) -> None:
        """Stop collecting verdicts."""
        self._collecting.close()

    def read(self) -> dict[str, float]:
        """Return the figures by name.

        fp8_share: FLOPs of matmuls in FP8 as a share of those of all matmuls. fp8_saturation and fp8_underflow, where
        the monitor is on: the largest shares of a tensor's elements in the latest step watched. fp8_kurtosis: the
        largest kurtosis of an activation there.
        """
        share = self._share()
        if is_watched(self._model) and (watched := stats(self._model).latest):
            share["fp8_saturation"] = max(row.saturation for row in watched)
            share["fp8_underflow"] = max(row.underflow for row in watched)
            of_activations = [row.kurtosis for row in watched if row.role == "input" and not math.isnan(row.kurtosis)]
            if of_activations:
                share["fp8_kurtosis"] = max(of_activations)
        return share

    def _share(self) -> dict[str, float]:
        timings = self.report.timings
        cached = sum(not timing.passes for timing in timings)  # the passes run only where a graph is compiled again
        if cached:
            warn_once(
                f"fp8pass: logs have no fp8_share, as torch's caches had {cached} of {len(timings)} graphs, without "
                "their verdicts: TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles them anew"
            )
        share = self.report.fp8_share
        return {} if share is None or cached else {"fp8_share": share}
