"""Quantizers of recipes and their oracles, for the files test_quantizers.py of several tiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8pass.passes.annotate.quantizers import quantizers
from fp8pass.passes.common.matmul_calls import Dims
from fp8pass.recipes import Recipe
from tests.helpers import oracle

LINEAR = Dims(("b", "s", "k"), ("n", "k"), ("b", "s", "n"))


ALL = ("output", "grad_input", "grad_weight")


def found(recipe: Recipe, dims: Dims = LINEAR, **shapes: tuple[int, ...]) -> dict[Any, Any]:
    sizes = {"input": (4, 32, 256), "weight": (128, 256), "grad_output": (4, 32, 128), **shapes}
    tensors: Any = {role: torch.empty(shape) for role, shape in sizes.items()}
    return {kind: quantizers(recipe, kind, dims, tensors, record=True) for kind in ALL}


def rows(x: Tensor, dim: int) -> Tensor:
    return oracle.qdq_rows(x, dim)


def blocks(x: Tensor, dim: int) -> Tensor:
    return oracle.qdq_blocks(x, *((1, 128) if dim else (128, 1)))


def mx(x: Tensor, dim: int) -> Tensor:
    return oracle.qdq_mx(x) if dim else oracle.qdq_mx(x.t()).t()
