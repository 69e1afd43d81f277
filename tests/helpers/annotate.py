"""Annotates functions, for tests of the passes over Dynamo's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fp8pass.compiler.dynamo_passes import annotated as annotate
from fp8pass.graph.annotation import Annotation
from fp8pass.options.config import Config


def annotation(function: Callable[..., Any], *inputs: Any, training: bool = True, **config: Any) -> Annotation:
    """Return the annotation of the only graph that Dynamo captures of `function`."""
    made: list[Annotation] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        made.append(annotate(module, Config(**config)))
        return module.forward

    with torch.set_grad_enabled(training):
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (only,) = made
    return only
