"""The base of tensor subclasses that stand for a tensor in another form, such as a weight in FP8."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base._torch import make_wrapper_subclass
from fp8pass.quant import ops

Scales = Literal["tensor", "row", "block"]
"""The part with one scale: a weight f[N, K], each of its rows, or each block of 128 rows and 128 columns."""


class WrapperTensor(Tensor):
    """Base of tensor subclasses that run ops on the tensors they hold; subclasses implement `_run`."""

    _run: Any

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one op by `_run`."""
        return cls._dispatched(func, args, kwargs or {})

    # in a compiled train step, Dynamo would trace it as the user's code
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _dispatched(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return cls._run(func, args, kwargs)


class Fp8Weight(WrapperTensor):
    """Base of weights f[N, K] that ops read as their dequantized values, from FP8 and a scale_inv.

    is_frozen: True if the weight is kept in FP8 permanently; False if FSDP has gathered it in FP8.
    """

    is_frozen: ClassVar[bool]
    _x_q: Tensor
    _scale_inv: Tensor

    @staticmethod
    def __new__(cls, x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Any:
        """Make the wrapper, without memory for its values. x_q: f8[N, K]; scale_inv: f32; dtype: what ops read."""
        return make_wrapper_subclass(
            cls,
            x_q.size(),
            strides=x_q.stride(),
            storage_offset=x_q.storage_offset(),
            dtype=dtype,
            device=x_q.device,
            requires_grad=False,  # where a weight takes a gradient, the parameter that is made of it does
        )

    def __init__(self, x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> None:
        self._x_q, self._scale_inv = x_q, scale_inv

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._x_q!r}, {self._scale_inv!r}, {self.dtype})"

    @property
    def scales(self) -> Scales:
        """The part that has one scale: "tensor", "row" or "block"."""
        if self._scale_inv.dim() == 0:
            return "tensor"
        return "row" if self._scale_inv.shape[0] == self.shape[0] else "block"

    def dequantized(self) -> Tensor:
        """Return the weight f[N, K] in high precision."""
        if self.scales == "block":
            result: Tensor = ops.dequantize_blocks(self._x_q, self._scale_inv, self.dtype)
            return result
        return scaling.dequantize(self._x_q, self._scale_inv, self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors' attributes, and the metadata: torch.compile's subclass protocol."""
        return ["_x_q", "_scale_inv"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Any:
        """Rebuild the tensor from the parts that `__tensor_flatten__` named."""
        return cls(inner["_x_q"], inner["_scale_inv"], dtype)
