"""Store an optimizer's moments in FP8 and float16: `optimizer_state="fp8"`.

A first moment, which is a running mean of gradients, is stored in e4m3; a second moment, a running mean of their
squares, as its square root in float16. MS-AMP uses the same formats. Each tensor has one scale, a power of two. The
compiled update reads and writes the stored tensors (`read_moments.py`, `write_moments.py`). In `optimizer.state` an
`Fp8Moment` replaces the plain tensor; ops that read it get the dequantized moment.

A step's scale is computed from the largest value of the step before, with room to grow, so that an update takes one
pass. State dicts hold plain tensors with exactly the stored values, which load into any optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fp8pass import scaling
from fp8pass._torch import FakeTensor, make_wrapper_subclass, pytree
from fp8pass.errors import Fp8Error

MomentKind = Literal["first", "second"]
DTYPES: dict[MomentKind, torch.dtype] = {"first": scaling.E4M3, "second": torch.float16}
TARGETS: dict[MomentKind, float] = {"first": scaling.fp8_max(scaling.E4M3) / 2, "second": 256.0}
"""The most that a scale makes of the largest value of the step before: the next may be 2, or 255, times as large."""
MIN_ELEMENTS = 4096  # as in bitsandbytes (`min_8bit_size`) and torchao
"""Moments with fewer elements stay in high precision."""


def scale_towards(target: Tensor | float, amax: Tensor, keep: Tensor | float) -> Tensor:
    """Return the power of two that takes amax f32[...] to at most `target`; `keep` where amax is 0 or not finite.

    The result, f32[...], is at most 2**126: the reciprocal of a larger one is subnormal, and GPUs flush that to 0.
    """
    return scaling.floor_to_power_of_2(scaling.scale_from_amax(amax, target, keep)).clamp(max=2.0**126)


def encode(kind: MomentKind, x: Tensor, scale: Tensor) -> Tensor:
    """Convert a moment to be stored: to e4m3 of `x * scale`, or float16 of `sqrt(x) * scale`.

    Saturates; NaN stays NaN.
    """
    if kind == "first":
        return scaling.quantize(x, scale, DTYPES[kind])
    limit = torch.finfo(torch.float16).max
    # the cast alone would make infinity of values above the limit
    return (x.float().sqrt() * scale).clamp(max=limit).to(torch.float16)


def decode(kind: MomentKind, x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the moment that was stored, rounded once to `dtype`."""
    x = x_q.float() * scale_inv
    x = x if kind == "first" else x.square()
    return x if x.dtype == dtype else x.to(dtype)


def amax_of(x_q: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the largest stored value, f32[]; for a second moment it is a square root."""
    return scaling.amax(x_q.float()) * scale_inv


class Fp8Moment(torch.Tensor):
    """A moment [...] of dtype float32 or bfloat16, stored as `x_q` of the same shape. Ops read the dequantized moment.

    moment_scales: f32[2, n], for n moments the scale_inv and the amax of the stored values. column: of this moment.
    Raises Fp8Error if an op other than `copy_` and `zero_` writes into it: only the compiled update can do that.
    """

    x_q: Tensor
    moment_scales: Tensor
    column: int
    kind: MomentKind

    @staticmethod
    def __new__(
        cls, x_q: Tensor, moment_scales: Tensor, column: int, kind: MomentKind, dtype: torch.dtype
    ) -> Fp8Moment:
        """Make a wrapper without storage, with the shape and strides of `x_q`."""
        made: Fp8Moment = make_wrapper_subclass(cls, x_q.shape, strides=x_q.stride(), dtype=dtype, device=x_q.device)
        return made

    def __init__(self, x_q: Tensor, moment_scales: Tensor, column: int, kind: MomentKind, dtype: torch.dtype) -> None:
        self.x_q, self.moment_scales, self.column, self.kind = x_q, moment_scales, column, kind

    @classmethod
    def of(cls, kind: MomentKind, x: Tensor) -> Fp8Moment:
        """Store `x` with the scale from its own amax. Values that were stored before get no further error."""
        with torch.no_grad():
            root = x if kind == "first" else x.float().sqrt()
            limit = scaling.fp8_max(scaling.E4M3) if kind == "first" else 65504.0
            scale = scale_towards(limit, scaling.amax(root.reshape(1, -1)), 1.0)
            x_q = encode(kind, x, scale)
            scale_inv = scale.reciprocal()
            return cls(
                x_q, torch.stack([scale_inv, amax_of(x_q.reshape(1, -1), scale_inv)]).unsqueeze(1), 0, kind, x.dtype
            )

    def value(self) -> Tensor:
        """Return the moment as a plain tensor."""
        return decode(self.kind, self.x_q, self.moment_scales[0, self.column], self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the kind, the shape and the stored dtype."""
        return f"Fp8Moment({self.kind}, {list(self.shape)}, {self.x_q.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Moment:
        """Copy the stored tensors, for a copy of an optimizer."""
        moment_scales = self.moment_scales[:, self.column : self.column + 1].clone()
        memo[id(self)] = made = Fp8Moment(self.x_q.clone(), moment_scales, 0, self.kind, self.dtype)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Return the names of the inner tensors, and the other fields. Dynamo makes fake moments of them."""
        return ["x_q", "moment_scales"], (self.column, self.kind, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], of: tuple[Any, ...], *_: Any) -> Fp8Moment:
        """Return the moment of these inner tensors and fields."""
        return Fp8Moment(inner["x_q"], inner["moment_scales"], *of)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an op on the dequantized moments. The result of `copy_` or `zero_` is stored."""
        kwargs = kwargs or {}
        # aliases share the stored tensors, so they see what the compiled update writes
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            x = args[0]
            return cls(x.x_q, x.moment_scales, x.column, x.kind, x.dtype)
        # the schema says what an op writes, also for foreach ops, whose arguments are lists
        into = [x for x in _written(func, args, kwargs) if isinstance(x, Fp8Moment)]
        plain = pytree.tree_map_only(Fp8Moment, Fp8Moment.value, (args, kwargs))
        if not into:
            return func(*plain[0], **plain[1])
        if not isinstance(into[0].x_q, FakeTensor):
            if func not in (torch.ops.aten.copy_.default, torch.ops.aten.zero_.default):
                raise Fp8Error(
                    f"{func} writes into a moment that is kept in FP8 (optimizer_state='fp8'), and only the compiled "
                    "update can: let train_step compile it (foreach=True, not fused=True), or drop the option"
                )
            new = cls.of(into[0].kind, func(*plain[0], **plain[1]))
            into[0].x_q.copy_(new.x_q)
            into[0].moment_scales[:, into[0].column] = new.moment_scales[:, 0]
            return into[0]
        result = func(*plain[0], **plain[1])  # on fake tensors Dynamo only needs shapes
        return args[0] if isinstance(result, Tensor) else result  # an in-place op returns its first argument


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an op writes into."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += pytree.tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def pack(moments: Sequence[Fp8Moment]) -> Tensor:
    """Return one `moment_scales` f32[2, n] of all moments, which they share from now on."""
    moment_scales = moments[0].moment_scales
    if all(m.moment_scales is moment_scales and m.column == i for i, m in enumerate(moments)) and moment_scales.shape[
        1
    ] == len(moments):
        return moment_scales
    # a tensor made in inference mode can't be written in place outside of it
    with torch.no_grad(), torch.inference_mode(False):
        moment_scales = torch.stack([m.moment_scales[:, m.column] for m in moments], 1).contiguous()
    for i, m in enumerate(moments):
        m.moment_scales, m.column = moment_scales, i
    return moment_scales


def save_plainly(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state dicts hold plain tensors instead of FP8 moments, from now on."""
    if not hasattr(optimizer, "_fp8pass_saves_plainly"):
        optimizer._fp8pass_saves_plainly = optimizer.register_state_dict_post_hook(_plain)  # type: ignore[attr-defined]


def _plain(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def value(x: Any) -> Any:
        return x.value() if isinstance(x, Fp8Moment) else x

    states = {
        key: {n: value(x) for n, x in of.items()} if isinstance(of, dict) else of
        for key, of in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def nbytes_saved(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, int]:
    """Return (number of moments in FP8, bytes of memory that this saves)."""
    states = (x for o in optimizers for state in o.state.values() for x in state.values())
    moments = [x for x in states if isinstance(x, Fp8Moment)]
    return len(moments), sum(m.numel() * (m.dtype.itemsize - m.x_q.element_size()) for m in moments)
