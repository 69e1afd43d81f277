"""`FrozenWeight`: a parameter that is kept in FP8 alone, and that every op reads as its dequantized value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.base import scaling
from fp8pass.base._torch import pytree
from fp8pass.base.errors import Fp8Error, warn_once
from fp8pass.quant import ops
from fp8pass.quant.wrapper_tensor import Fp8Weight, Scales
from fp8pass.recipes import BLOCK, BlockwiseScaling

aten = torch.ops.aten


class FrozenWeight(Fp8Weight):
    """A weight f[N, K] in FP8, which every op reads as `dequantize(x_q, scale_inv)` and which takes no gradient.

    x_q: e4m3[N, K], contiguous; scale_inv: f32[], f32[N, 1] or f32[N / 128, K / 128]. Ops that write into it, as
    `merge` of an adapter does, quantize the result again, and warn once.
    """

    is_frozen = True

    @staticmethod
    @torch.no_grad()
    def of(weight: Tensor, scales: Scales) -> FrozenWeight:
        """Quantize `weight` f[N, K] by its own amaxes. Scales of blocks are powers of 2, as in recipe `blockwise`.

        Raises Fp8Error if blocks of 128 do not divide N and K.
        """
        return FrozenWeight(*_quantized(weight.detach(), scales), weight.dtype)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """The weight e4m3[N, K], and scale_inv."""
        return self._x_q, self._scale_inv

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Do nothing. Raises Fp8Error if `requires_grad` is True: an update would be lost in 8 bits."""
        if requires_grad:
            raise Fp8Error("a frozen weight in FP8 takes no gradient: call fp8pass.unfreeze(model) before you train it")
        return self

    @staticmethod
    def _run(func: Any, args: Any, kwargs: Any) -> Any:
        if func in _KEEPING and kwargs.get("dtype") in (None, args[0].dtype):
            x, kwargs = args[0], {k: v for k, v in kwargs.items() if k != "dtype"}
            x_q, scale_inv = (func(part, *args[1:], **kwargs) for part in (x._x_q, x._scale_inv))
            return FrozenWeight(x_q, scale_inv, x.dtype)
        plain = pytree.tree_map_only(FrozenWeight, FrozenWeight.dequantized, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if not (func._schema.is_mutable and args and isinstance(args[0], FrozenWeight)):
            return result
        args[0]._write(plain[0][0])  # the dequantized copy, into which the op has written
        return args[0]

    def _write(self, value: Tensor) -> None:
        warn_once(
            "fp8pass: a frozen weight in FP8 is written to, and is quantized again: small changes may be lost. Call "
            "fp8pass.unfreeze(model) before you merge adapters"
        )
        for part, new in zip((self._x_q, self._scale_inv), _quantized(value, self.scales), strict=True):
            part.copy_(new)


_KEEPING = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
"""Ops that change no value: their results stay in FP8."""


def _quantized(weight: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """Return (e4m3[N, K], scale_inv)."""
    if scales == "block":
        if weight.shape[0] % BLOCK or weight.shape[1] % BLOCK:
            raise Fp8Error(f"scales='block': a weight {list(weight.shape)} has no whole blocks of {BLOCK}")
        x_q, scale_inv = ops.Blockwise(BlockwiseScaling(), scaling.E4M3, BLOCK, square=True).parts(weight)
        return x_q, scale_inv
    amax = scaling.amax(weight) if scales == "tensor" else scaling.amax_along(weight, (1,))
    scale = scaling.scale_from_amax(amax, scaling.fp8_max(scaling.E4M3), 1.0)
    return scaling.quantize(weight, scale, scaling.E4M3).contiguous(), scaling.inverse_unless_nonfinite(scale, amax)


def parameter(weight: FrozenWeight) -> nn.Parameter:
    """Return the parameter that a module holds instead of the weight in high precision."""
    return nn.Parameter(weight, requires_grad=False)


torch.serialization.add_safe_globals([FrozenWeight])  # for torch.load of a saved state_dict, with weights_only=True
