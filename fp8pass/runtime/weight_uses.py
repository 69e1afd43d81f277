"""How the latest graphs have quantized each weight, which `fp8pass.export_fp8` asks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8pass.graph.annotation import WeightUse
from fp8pass.recipes import Recipe, StaticScaling


@dataclass(frozen=True)
class NotedUse:
    """How graphs quantize a weight. graph: tells graphs apart. recipe, reason: see `WeightUse`.

    parts: the parameters that are quantized together with one scale, the weight among them, in order.
    """

    graph: object
    recipe: Recipe | None
    reason: str
    parts: tuple[weakref.ref[Tensor], ...]


_in_training: Any = WeakTensorKeyDictionary()
_in_evaluation: Any = WeakTensorKeyDictionary()


def noting(weights: Sequence[WeightUse], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, a graph with these weights, which also notes how it quantizes the weights that it is called with.

    Instances share graphs, so that only calls tell whose weights a graph has quantized.
    """
    if not weights:
        return run
    noted = _in_training if torch.is_grad_enabled() else _in_evaluation
    graph, first = object(), weights[0].positions[0]

    def called(*args: Any) -> Any:
        known = noted.get(args[first])
        if known is None or known.graph is not graph:
            for use in weights:
                parts = [args[i] for i in use.positions]
                note = NotedUse(graph, use.recipe, use.reason, tuple(map(weakref.ref, parts)))
                noted.update((part, note) for part in parts)
        return run(*args)

    return called


def use_of(weight: Tensor) -> NotedUse | None:
    """Return how training has quantized a weight, or evaluation, if only that ran or its scales are static; or None."""
    trained, evaluated = _in_training.get(weight), _in_evaluation.get(weight)
    is_static = evaluated is not None and isinstance(evaluated.recipe, StaticScaling)
    use: NotedUse | None = evaluated if trained is None or is_static else trained
    return use
