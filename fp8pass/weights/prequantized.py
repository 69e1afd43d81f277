"""FP8 weights of static recipes: quantized once, and again after a parameter changes. Graphs take them as inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.graph.inputs import Call


@dataclass(frozen=True)
class PrequantizedInput:
    """An input of the graph that is a parameter in FP8, quantized in advance.

    position: of the parameter among Dynamo's inputs. table, slot: of its scale. by_columns: True if it is laid out so
    that its first dimension, which the matmul sums over, is contiguous.
    """

    name: str
    position: int
    table: int
    slot: int
    by_columns: bool

    def example(self, call: Call) -> Tensor:
        """Return an empty FP8 tensor of the shape and strides that the quantized parameter has."""
        weight = call.args[self.position]
        strides = (1, weight.shape[0]) if self.by_columns else torch.empty(weight.shape, device="meta").stride()
        return torch.empty_strided(weight.shape, strides, dtype=scaling.E4M3, device=weight.device)

    def value(self, call: Call) -> Tensor:
        """Return the FP8 parameter; quantize it if it is new or has changed."""
        weight, state = call.args[self.position], call.states[self.table]
        # the address, too: `p.data = x` does not count up the version. Inference tensors have no version counter, so
        # their changes go unseen: they are quantized at each call
        made_of = None if weight.is_inference() else weight._version, weight.data_ptr()
        kept = state.derived.get(self)
        if kept is None or kept[0] != made_of or weight.is_inference():
            with torch.inference_mode(False), torch.no_grad():
                x_q = scaling.quantize(weight.clone(), state.tensors.scale[self.slot], scaling.E4M3)
                # on Hopper and Ada, cuBLASLt takes FP8 operands only with the summed dimension contiguous (TN)
                kept = state.derived[self] = made_of, x_q.t().contiguous().t() if self.by_columns else x_q
        weight_q: Tensor = kept[1]
        return weight_q
