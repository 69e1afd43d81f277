"""Cut the graphs of DistributedDataParallel at layers, where that is as good as at DDP's gradient buckets.

A compiled backward returns all its gradients at its end. So that DDP can reduce some while others are computed, torch's
DDPOptimizer cuts Dynamo's graph into one for each bucket, by bytes, even within a layer. Graphs that are cut so have no
equal layers. `lower_bodies` runs one backward for each layer anyway: cuts between layers serve both purposes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

from fp8pass.base._torch import instead_of_ddp_optimizer
from fp8pass.compiler.dynamo_passes import pieces_of
from fp8pass.options.config import Config

_Backend = TypeVar("_Backend", bound=Callable[..., Any])


def configured(make: Callable[..., Config]) -> Callable[[_Backend], _Backend]:
    """Return a decorator of a backend. make: returns its configuration, from the backend's options."""

    def note(backend: _Backend) -> _Backend:
        backend._fp8pass_config = make  # type: ignore[attr-defined]
        return backend

    return note


@functools.cache
def cut_at_layers() -> None:
    """Let `cuts_at_layers` decide, from now on, whether DDPOptimizer cuts a graph."""
    instead_of_ddp_optimizer(cuts_at_layers)


def cuts_at_layers(backend: Callable[..., Any], options: dict[str, Any], module: fx.GraphModule, bucket: int) -> bool:
    """Return whether `backend` is fp8pass's, cuts the graph at layers, and leaves no larger graphs than DDPOptimizer.

    bucket: the bytes of parameters from which DDPOptimizer cuts; a single parameter is not cut, whatever its size.
    """
    make: Callable[..., Config] | None = getattr(backend, "_fp8pass_config", None)
    if make is None or not (config := make(**options)).compiles_once:
        return False
    pieces = pieces_of(module, config)
    # {parameter: the first piece that reads it}: that piece's backward runs last, and so completes the gradient
    completed_by: dict[fx.Node, int] = {}
    for i, piece in enumerate(pieces):
        for node in (n for reader in piece.nodes for n in reader.all_input_nodes if n.op == "placeholder"):
            completed_by.setdefault(node, i)
    sizes: dict[int, list[int]] = {i: [0] for i, piece in enumerate(pieces) if not piece.layer}
    for node, i in completed_by.items():
        if i in sizes:
            sizes[i].append(_bytes(node))
    return bool(pieces) and all(sum(of_piece) - max(of_piece) <= bucket for of_piece in sizes.values())


def _bytes(node: fx.Node) -> int:
    """Return the bytes of a trained parameter; 0 for other inputs of the graph."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.nn.Parameter) or not value.requires_grad:
        return 0
    return value.numel() * value.element_size()
