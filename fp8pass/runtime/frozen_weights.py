"""FP8 weights of static recipes: quantized once, and again after a parameter changes. Graphs take them as inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass import scaling
from fp8pass.graph.annotation import FrozenWeightInput
from fp8pass.states.slots import InstanceState


def frozen_weights(
    frozen: Sequence[FrozenWeightInput], args: Sequence[Any], states: Sequence[InstanceState]
) -> list[Tensor]:
    """Return the FP8 weights that a graph takes; quantize those that are new or whose parameter has changed."""
    return [_frozen(f, args[f.position], states[f.table]) for f in frozen]


def _frozen(f: FrozenWeightInput, weight: Tensor, state: InstanceState) -> Tensor:
    # the address, too: `p.data = x` does not count up the version. Inference tensors have no version counter, so their
    # changes go unseen: they are quantized at each call
    made_of = None if weight.is_inference() else weight._version, weight.data_ptr()
    if f not in state.frozen or state.frozen[f][0] != made_of or weight.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            x_q = scaling.quantize(weight.clone(), state.tensors.scale[f.slot], scaling.E4M3)
            # on Hopper and Ada, cuBLASLt takes FP8 operands only with the summed dimension contiguous (TN)
            state.frozen[f] = made_of, x_q.t().contiguous().t() if f.by_columns else x_q
    weight_q: Tensor = state.frozen[f][1]
    return weight_q


def frozen_example(f: FrozenWeightInput, weight: Tensor) -> Tensor:
    """Return an example input to compile with: an empty FP8 tensor of the shape and strides of the frozen `weight`."""
    strides = (1, weight.shape[0]) if f.by_columns else torch.empty(weight.shape, device="meta").stride()
    return torch.empty_strided(weight.shape, strides, dtype=scaling.E4M3, device=weight.device)
