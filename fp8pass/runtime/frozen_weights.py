"""FP8 weights of static recipes: quantized once, and again when a parameter changes. Graphs take them as inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass import scaling
from fp8pass.graph.annotation import Frozen
from fp8pass.states.slots import SlotGroup


def frozen_weights(frozen: Sequence[Frozen], args: Sequence[Any], groups: Sequence[SlotGroup]) -> list[Tensor]:
    """The FP8 weights that a graph takes: made once, and again where a parameter has changed since."""
    return [_frozen(f, args[f.position], groups[f.table]) for f in frozen]


def _frozen(f: Frozen, weight: Tensor, group: SlotGroup) -> Tensor:
    made_of = None if weight.is_inference() else weight._version, weight.data_ptr()
    if f not in group.frozen or group.frozen[f][0] != made_of or weight.is_inference():  # that has no version
        with torch.inference_mode(False), torch.no_grad():
            x_q = scaling.quantize(weight.clone(), group.tensors.scale[f.slot], scaling.E4M3)
            group.frozen[f] = made_of, x_q.t().contiguous().t() if f.by_columns else x_q
    weight_q: Tensor = group.frozen[f][1]
    return weight_q


def frozen_example(f: Frozen, weight: Tensor) -> Tensor:
    """What a graph is compiled for: an FP8 tensor as `frozen_weights` makes it, of a parameter like `weight`."""
    strides = (1, weight.shape[0]) if f.by_columns else torch.empty(weight.shape, device="meta").stride()
    return torch.empty_strided(weight.shape, strides, dtype=scaling.E4M3, device=weight.device)
