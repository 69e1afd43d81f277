"""Quantize the weights of layers as training did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base.errors import Fp8Error
from fp8pass.base.names import parts_of
from fp8pass.frozen.weight import FrozenWeight
from fp8pass.quant import ops
from fp8pass.recipes import (
    BLOCK,
    BlockwiseScaling,
    DelayedScaling,
    DynamicScaling,
    Recipe,
    RowwiseScaling,
    StaticScaling,
    next_scale_of,
)


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight in FP8. x_q: e4m3 [N, K]. scale_inv: f32[], [N, 1], or [N / 128, K / 128]. input_scale_inv: f32[]."""

    x_q: Tensor
    scale_inv: Tensor
    input_scale_inv: Tensor | None = None


class Scales:
    """The scales of delayed scaling with which the next training forward begins, by slot.

    saved: what `fp8pass.state(model).state_dict()` returned. A forward in training begins with rolling the amaxes that
    the step before has recorded, and quantizes by the scales that result.
    """

    def __init__(self, saved: Mapping[str, Tensor]) -> None:
        self._saved = saved
        slots = (name.removesuffix(".scale") for name in saved if name.endswith(".weight.scale"))
        self._slot_of = {part: slot for slot in slots for part in (*parts_of(slot), slot)}

    def of(self, paths: Sequence[str], recipe: DelayedScaling) -> Tensor:
        """Return the scale f32[] of the weight of the layers with these paths; 0 if it has none yet.

        Raises:
            Fp8Error: If the state has no slot for it.
        """
        slot = next((s for path in paths if (s := self._slot_of.get(f"{path}.weight"))), None)
        if slot is None:
            raise Fp8Error(
                f"the FP8 state has no slot {paths[0]}.weight: delayed scales come from training. Load the state that "
                "was saved with the weights, fp8pass.state(model).load_state_dict(...), or pass recipe='dynamic'"
            )
        scale, history, amax = (self._saved[f"{slot}.{part}"].cpu() for part in ("scale", "amax_history", "amax"))
        limit = _f32(scaling.fp8_max(scaling.E4M3))[None]
        rolled, _ = scaling.roll_history(
            scale[None],
            history[:, None],
            amax[None],
            limit,
            next_scale=next_scale_of(recipe),
        )
        return rolled[0]


@torch.no_grad()
def quantized(paths: Sequence[str], weights: Sequence[Tensor], which: int, recipe: Recipe, scales: Scales) -> Fp8Matrix:
    """Return the weight at `which` in FP8. paths: of the layers that have it. weights: [N, K] each; they share a scale.

    Raises:
        Fp8Error: If a weight is not finite, or delayed scaling has no slot for the layer.
    """
    frozen = weights[which]
    if isinstance(frozen, FrozenWeight):
        return Fp8Matrix(*frozen.parts)
    x = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    x_q, scale_inv = _parts(paths, x, recipe, scales)
    if not scale_inv.isfinite().all() or not x.isfinite().all():
        raise Fp8Error(f"the weight of {paths[0]} holds NaN or inf: export a checkpoint from before the run diverged")
    rows = [len(w) for w in weights]
    own_rows = x_q.narrow(0, sum(rows[:which]), rows[which]).contiguous()
    input_scale = None
    if isinstance(recipe, StaticScaling):
        input_scale = _static(recipe, f"{paths[0]}.input").reciprocal()
    return Fp8Matrix(own_rows, scale_inv, input_scale)


def _parts(paths: Sequence[str], x: Tensor, recipe: Recipe, scales: Scales) -> tuple[Tensor, Tensor]:
    """Return x_q and scale_inv: see `Fp8Matrix`."""
    if isinstance(recipe, DelayedScaling):
        delayed = ops.Delayed(recipe, scaling.E4M3, slot=0, index=0, bootstrap=True, record=False)
        return delayed.parts(x, scales.of(paths, recipe)[None], torch.empty(0))
    if isinstance(recipe, DynamicScaling):
        return ops.Dynamic(recipe, scaling.E4M3).parts(x)
    if isinstance(recipe, RowwiseScaling):
        return ops.Rowwise(recipe, scaling.E4M3, dims=(1,)).parts(x)
    if isinstance(recipe, BlockwiseScaling):
        return ops.Blockwise(recipe, scaling.E4M3, BLOCK, square=True).parts(x)
    assert isinstance(recipe, StaticScaling), recipe
    scale = _static(recipe, f"{paths[0]}.weight")
    return scaling.quantize(x, scale, scaling.E4M3), scale.reciprocal()


def _static(recipe: StaticScaling, slot: str) -> Tensor:
    scale = recipe.scale_of(slot)
    assert scale is not None, slot
    return _f32(scale)


def _f32(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)
