"""How the latest graphs have quantized each weight, which `fp8pass.export_fp8` asks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8pass.graph.annotation import WeightUse
from fp8pass.recipes import Recipe, StaticScaling


@dataclass(frozen=True)
class NotedUse:
    """How graphs quantize a weight. graph: identifies the graph. recipe, reason: see `WeightUse`.

    parts: the parameters that are quantized together with one scale, the weight among them, in order.
    """

    graph: object
    recipe: Recipe | None
    reason: str
    parts: tuple[weakref.ref[Tensor], ...]


_in_training: Any = WeakTensorKeyDictionary()
_in_evaluation: Any = WeakTensorKeyDictionary()


class Notes:
    """Notes how a graph quantizes the weights that it is called with: instances share graphs, only calls tell whose.

    weights: those of the graph, which trains if gradients are enabled now.
    """

    def __init__(self, weights: Sequence[WeightUse] = ()) -> None:
        self._weights = weights
        self._noted = _in_training if torch.is_grad_enabled() else _in_evaluation

    def note(self, args: Sequence[Any]) -> None:
        """Note the weights among the arguments of a call, unless the latest note of them is this graph's."""
        if not self._weights:
            return
        # the first weight stands for all: each call of a graph notes all of its weights
        latest = self._noted.get(args[self._weights[0].positions[0]])
        if latest is not None and latest.graph is self:
            return
        for use in self._weights:
            parts = [args[i] for i in use.positions]
            note = NotedUse(self, use.recipe, use.reason, tuple(map(weakref.ref, parts)))
            self._noted.update((part, note) for part in parts)


def use_of(weight: Tensor) -> NotedUse | None:
    """Return how training has quantized a weight, or evaluation, if only that ran or its scales are static; or None."""
    trained, evaluated = _in_training.get(weight), _in_evaluation.get(weight)
    is_static = evaluated is not None and isinstance(evaluated.recipe, StaticScaling)
    use: NotedUse | None = evaluated if trained is None or is_static else trained
    return use
