"""Sibling layers and their annotation, for the files test_merge_siblings.py of several tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8pass.compiler.dynamo_passes import annotated as annotate
from fp8pass.graph.annotation import Annotation
from fp8pass.options.config import Config


class Siblings(nn.Module):
    """Linear layers that read the same input; `read` is called with their results."""

    def __init__(self, read: Callable[..., Any], widths: tuple[int, ...] = (48, 48), bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, n, bias=bias) for n in widths)
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return self.read(*(layer(x) for layer in self.layers))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def annotation(model: nn.Module, *inputs: Tensor, **options: Any) -> Annotation:
    """Return the annotation of the only graph of a model, with `merge_siblings` on unless options say otherwise."""
    made: list[Annotation] = []

    def backend(module: Any, _: Any) -> Any:
        made.append(annotate(module, Config(**{"merge_siblings": True, **options})))
        return module.forward

    torch.compile(model, backend=backend, fullgraph=True)(*(inputs or (torch.randn(4, 8, 32),)))
    (only,) = made
    return only


def called(a: Annotation) -> list[str]:
    """Return the names of all matmul calls."""
    return [choice.name for choice in a.choices]
