"""Store an optimizer's moments in 8 bits, or 16: `optimizer_state="fp8"`.

A first moment, which is a running mean of gradients, is stored in e4m3; a second moment, a running mean of their
squares, as its square root in e5m2, e4m3 or float16. The scales are powers of two, one for a tensor or for a block of
its elements. The compiled update reads and writes the stored tensors (`read_moments.py`, `write_moments.py`). In
`optimizer.state` an `Fp8Moment` replaces the plain tensor; ops that read it get the dequantized moment. If a moment is
sharded, each rank stores its shard with its own scales: a DTensor whose local tensor is an `Fp8Moment`.

A tensor's scale in a step is computed from its largest value of the step before, with room to grow, so that an update
takes one pass. A block is small enough for a kernel to hold it, so its scale comes from its own largest value, and
nothing saturates. State dicts hold plain tensors with exactly the stored values, which load into any optimizer.

An update changes a second moment by a thousandth. Rounded to nearest, 8 bits would never change. So they are rounded
stochastically, such that the mean of the moment (not of its root) is the exact one: means of moments then follow the
moments that float32 would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fp8pass.base import scaling
from fp8pass.base._torch import FakeTensor, make_wrapper_subclass, pytree
from fp8pass.base.errors import Fp8Error
from fp8pass.base.fields import FLAG, Checked, names, whole
from fp8pass.quant.random_bits import Key, bits_like, uniform
from fp8pass.quant.sharded import part_of, sizes_of_parts, with_part

MomentKind = Literal["first", "second"]
MIN_ELEMENTS = 4096  # as in bitsandbytes (`min_8bit_size`) and torchao
"""Moments with fewer elements, on all ranks together, stay in high precision."""
POWERS = (1, 2, 4, 8)
"""The powers of range expansion. Products and square roots compute them, which are exact to the last bit everywhere."""
_DTYPES = {"e4m3": scaling.E4M3, "e5m2": scaling.E5M2, "float16": torch.float16}
_MANTISSA_BITS = {scaling.E4M3: 3, scaling.E5M2: 2}


@dataclass(frozen=True)
class Moments(Checked):
    """How `train_step(optimizer_state=...)` stores an optimizer's moments: `"fp8"` is `Moments()`.

    Raises:
        ValueError: If a field or a value is unknown, or `expand` or float16 is incompatible with `block`.
    """

    second: str = field(default="e5m2", metadata=names(*_DTYPES).field)
    """Format of the square roots of second moments: "e5m2", "e4m3" or "float16". With "float16", moments are rounded to
    nearest; with 8 bits, both moments are rounded stochastically."""
    block: int | None = field(
        default=None, metadata=(whole(16, "a number of elements, 16 or more, or None") | None).field
    )
    """The number of consecutive elements that share a scale. None: a tensor has one scale."""
    expand: bool = field(default=False, metadata=FLAG.field)
    """Store powers 1, 2, 4 or 8 of a block's values: the largest for which FP8 has room. Only with `block`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expand and self.block is None:
            raise ValueError("Moments: expand=True chooses a power for each block: set block=256, too")
        if self.block is not None and self.second == "float16":
            raise ValueError("Moments: block is for moments in FP8: leave it out, or set second='e5m2' or 'e4m3'")

    def format(self, kind: MomentKind, x: Tensor) -> Format:
        """Return the format of a moment like `x`: without blocks if they do not divide it, or `x` has gaps.

        If a tensor is sharded, blocks must divide each shard, so that all ranks choose the same format.
        """
        dtype = scaling.E4M3 if kind == "first" else _DTYPES[self.second]
        divides = self.block and not any(n % self.block for n in sizes_of_parts(x)) and part_of(x).is_contiguous()
        block = self.block if divides else None
        expands = self.expand and block is not None and x.dtype == torch.float32
        return Format(kind, dtype, block, expands, stochastic=self.second != "float16")


FP8 = Moments()
NAMED: dict[str, Moments] = {"fp8": FP8, "fp8+float16": Moments(second="float16")}
"""Values of `Config.optimizer_state` by name. The second one has the formats of MS-AMP."""


@dataclass(frozen=True)
class Format:
    """How one moment is stored.

    dtype: of the stored values. block: the number of elements that share a scale; None for one scale. expands: True if
    blocks are stored as powers. stochastic: True if values are rounded stochastically, otherwise to nearest.
    """

    kind: MomentKind
    dtype: torch.dtype
    block: int | None = None
    expands: bool = False
    stochastic: bool = False

    @property
    def limit(self) -> float:
        """The largest stored value."""
        return torch.finfo(self.dtype).max

    @property
    def target(self) -> float:
        """The most that a tensor's scale makes of the largest value of the step before.

        In e4m3 the next value may be twice as large if it is a first moment, and four times if it is a second one;
        e5m2 and float16 have room for a factor of 255.
        """
        if self.dtype == scaling.E4M3:
            return self.limit / (2 if self.kind == "first" else 4)
        return 256.0 if self.dtype == torch.float16 else self.limit / 256


def scale_towards(target: Tensor | float, amax: Tensor, keep: Tensor | float) -> Tensor:
    """Return the power of two that takes amax f32[...] to at most `target`; `keep` where amax is 0 or not finite.

    The result, f32[...], is at most 2**126: the reciprocal of a larger one is subnormal, and GPUs flush that to 0.
    """
    return scaling.floor_to_power_of_2(scaling.scale_from_amax(amax, target, keep)).clamp(max=2.0**126)


def _raised(x: Tensor, power: Tensor | None) -> Tensor:
    """Return `x ** power`, by products. power: 1, 2, 4 or 8, f32; None for 1."""
    if power is not None:
        for k in POWERS[1:]:
            x = torch.where(power >= k, x * x, x)
    return x


def _rooted(x: Tensor, power: Tensor | None) -> Tensor:
    """Return `x ** (1 / power)`, by square roots."""
    if power is not None:
        for k in POWERS[1:]:
            x = torch.where(power >= k, x.sqrt(), x)
    return x


def encode(stored_as: Format, x: Tensor, scale: Tensor, power: Tensor | None = None, key: Key | None = None) -> Tensor:
    """Convert a moment to be stored: `(x * scale) ** power`, for a second moment `(sqrt(x) * scale) ** power`.

    x: floating; scale, power: f32, which broadcast. key: for stochastic rounding; without it, to nearest.
    Saturates; NaN stays NaN. With stochastic rounding a second moment above 0 is never stored as 0, which it is
    divided by.
    """
    if not stored_as.stochastic:
        if stored_as.kind == "first":
            return scaling.quantize(x, scale, stored_as.dtype)
        # the cast alone would make infinity of values above the limit
        return (x.float().sqrt() * scale).clamp(max=stored_as.limit).to(stored_as.dtype)
    return encode_exactly(stored_as, x, scale, power, key).to(stored_as.dtype)


def encode_exactly(stored_as: Format, x: Tensor, scale: Tensor, power: Tensor | None, key: Key | None) -> Tensor:
    """Return the values that `encode` stores, as f32: the cast to the format's dtype changes none of them."""
    x = x.float()
    scaled = (x.abs() if stored_as.kind == "first" else x.sqrt()) * scale
    code = _raised(scaled, power).clamp(max=stored_as.limit)
    low, step = _grid(code, stored_as.dtype)

    def value(stored: Tensor) -> Tensor:
        root = _rooted(stored, power)
        return root if stored_as.kind == "first" else root * root

    down, up = value(low), value(low + step)
    chance = 0.5 if key is None else uniform(bits_like(x, key))
    wanted = scaled if stored_as.kind == "first" else scaled * scaled
    # rounds up with the probability by which the mean of what is decoded is exact; of a second moment that is the
    # square of what is stored, not what is stored
    stored = torch.where(chance * (up - down) < wanted - down, low + step, low).clamp(max=stored_as.limit)
    if stored_as.kind == "first":
        return torch.where(x < 0, -stored, stored)
    return torch.where(
        x > 0,
        stored.clamp(min=torch.finfo(stored_as.dtype).smallest_normal * 2.0 ** -_MANTISSA_BITS[stored_as.dtype]),
        stored,
    )


def _grid(code: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest FP8 number that is at most `code`, f32 >= 0, and its distance to the next one."""
    kept = _MANTISSA_BITS[dtype]
    normal = torch.finfo(dtype).smallest_normal
    least = normal * 2.0**-kept
    bits = code.view(torch.int32)
    exponent = (bits & 0x7F800000).view(torch.float32)
    low = (bits & -(1 << (23 - kept))).view(torch.float32)  # without the bits that the format lacks
    is_normal = code >= normal
    # NaN is not normal, and stays NaN
    low = torch.where(is_normal, low, (code * (1 / least)).floor() * least)
    return low, torch.where(is_normal, exponent * 2.0**-kept, least)


def decode(
    stored_as: Format, x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype, power: Tensor | None = None
) -> Tensor:
    """Return the moment that was stored, rounded once to `dtype`. scale_inv, power: f32, which broadcast."""
    x = x_q.float()
    if power is not None:
        root = _rooted(x.abs(), power)
        x = torch.where(x < 0, -root, root)
    x = x * scale_inv
    x = x if stored_as.kind == "first" else x.square()
    return x if x.dtype == dtype else x.to(dtype)


def amax_of(x_q: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the largest stored value, f32[]; for a second moment it is a square root."""
    return scaling.amax(x_q.float()) * scale_inv


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def decode_blocks(stored_as: Format, x_q: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the moment that was stored in blocks. blocks: see `Fp8Moment`."""
    assert stored_as.block is not None
    scale_inv, power = blocks[0].unsqueeze(1), blocks[1].unsqueeze(1) if stored_as.expands else None
    return decode(stored_as, x_q.view(-1, stored_as.block), scale_inv, dtype, power).view(x_q.shape)


def encode_blocks(stored_as: Format, x: Tensor, key: Key | None) -> tuple[Tensor, Tensor]:
    """Return the stored values of `x`, as f32 in its shape, and its `blocks` (see `Fp8Moment`)."""
    assert stored_as.block is not None
    rows = x.float().view(-1, stored_as.block)
    root = rows.abs() if stored_as.kind == "first" else rows.sqrt()
    amax = root.amax(1, keepdim=True)
    power = _power_for(stored_as, root, amax) if stored_as.expands else None
    return _encoded_blocks(stored_as, rows, amax, power, key, x.shape)


def _encoded_blocks(
    stored_as: Format, rows: Tensor, amax: Tensor, power: Tensor | None, key: Key | None, shape: torch.Size
) -> tuple[Tensor, Tensor]:
    scale = scale_towards(_limit_before(stored_as, power), amax, 1.0)
    stored = encode_exactly(stored_as, rows, scale, power, key)
    numbers = [scale.reciprocal()] if power is None else [scale.reciprocal(), power]
    return stored.view(shape), torch.cat(numbers, 1).t()


def _limit_before(stored_as: Format, power: Tensor | None) -> Tensor | float:
    """Return the value whose power is the largest stored one, and a little more, for roots that are rounded up."""
    if power is None:
        return stored_as.limit
    return _rooted(torch.full_like(power, stored_as.limit), power) * (1 + 2.0**-20)


def _power_for(stored_as: Format, root: Tensor, amax: Tensor) -> Tensor:
    """Return for each block the largest power with which its smallest value above 0 is at least FP8's."""
    least = torch.where(root > 0, root, torch.inf).amin(1, keepdim=True)
    smallest = torch.finfo(stored_as.dtype).smallest_normal * 2.0 ** -_MANTISSA_BITS[stored_as.dtype]
    chosen = torch.ones_like(amax)
    for k in POWERS[1:]:
        power = torch.full_like(amax, k)
        scale = scale_towards(_limit_before(stored_as, power), amax, 1.0)
        chosen = torch.where(least * scale >= smallest ** (1 / k), power, chosen)
    return chosen


def _blocks_of(stored_as: Format, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `encode_blocks` does, to nearest, but exactly for values that were stored with some powers before."""
    stored, blocks = encode_blocks(stored_as, x, None)
    if not stored_as.expands:
        return stored, blocks
    rows, is_exact = x.float().view(-1, stored_as.block or 0), None
    amax = (rows.abs() if stored_as.kind == "first" else rows.sqrt()).amax(1, keepdim=True)
    for k in POWERS:
        tried, of_tried = _encoded_blocks(stored_as, rows, amax, torch.full_like(amax, k), None, x.shape)
        hits = (decode_blocks(stored_as, tried, of_tried, torch.float32).view_as(rows) == rows).all(1)
        # the smallest power that is exact; blocks for which none is keep what `encode_blocks` has chosen
        new = hits if is_exact is None else hits & ~is_exact
        stored = torch.where(new.unsqueeze(1), tried.view_as(rows), stored.view_as(rows)).view(x.shape)
        blocks = torch.where(new, of_tried, blocks)
        is_exact = hits if is_exact is None else hits | is_exact
    return stored, blocks


# ---------------------------------------------------------------------------------------------------------------------
# The tensor


class Fp8Moment(torch.Tensor):
    """A moment [...] of dtype float32 or bfloat16, stored as `x_q` of the same shape. Ops read the dequantized moment.

    moment_scales: f32[2, n], for n moments the scale_inv and the amax of the stored values. column: of this moment.
    blocks: f32[1, b] with the scale_inv of each block, f32[2, b] with its power too; None if the tensor has one scale.
    seed: the number of this tensor, from which the random bits of its rounding are computed.
    Raises Fp8Error if an op other than `copy_` and `zero_` writes into it: only the compiled update can do that.
    """

    x_q: Tensor
    moment_scales: Tensor
    column: int
    stored_as: Format
    blocks: Tensor | None
    seed: int

    @staticmethod
    def __new__(
        cls,
        x_q: Tensor,
        moment_scales: Tensor,
        column: int,
        stored_as: Format,
        dtype: torch.dtype,
        blocks: Tensor | None = None,
        seed: int = 0,
    ) -> Fp8Moment:
        """Make a wrapper without storage, with the shape and strides of `x_q`."""
        made: Fp8Moment = make_wrapper_subclass(cls, x_q.shape, strides=x_q.stride(), dtype=dtype, device=x_q.device)
        made.x_q, made.moment_scales, made.column, made.stored_as = x_q, moment_scales, column, stored_as
        made.blocks, made.seed = blocks, seed
        return made

    @classmethod
    def of(cls, stored_as: Format, x: Tensor, seed: int = 0) -> Fp8Moment:
        """Store `x` with scales from its own amaxes. Values that were stored before get no further error."""
        with torch.no_grad():
            if stored_as.block is not None:
                stored, blocks = _blocks_of(stored_as, x)
                unused = torch.tensor([[1.0], [0.0]], device=x.device)  # `pack` takes a column of every moment
                return cls(stored.to(stored_as.dtype), unused, 0, stored_as, x.dtype, blocks.contiguous(), seed)
            root = x if stored_as.kind == "first" else x.float().sqrt()
            scale = scale_towards(stored_as.limit, scaling.amax(root.reshape(1, -1)), 1.0)
            x_q = encode(stored_as, x, scale)
            scale_inv = scale.reciprocal()
            numbers = torch.stack([scale_inv, amax_of(x_q.reshape(1, -1), scale_inv)]).unsqueeze(1)
            return cls(x_q, numbers, 0, stored_as, x.dtype, None, seed)

    @property
    def kind(self) -> MomentKind:
        """ "first" or "second"."""
        return self.stored_as.kind

    @property
    def stored(self) -> list[Tensor]:
        """The tensors that hold the moment, except `moment_scales`: `x_q`, and `blocks` if there are any."""
        return [self.x_q] if self.blocks is None else [self.x_q, self.blocks]

    def value(self) -> Tensor:
        """Return the moment as a plain tensor."""
        if self.blocks is not None:
            return decode_blocks(self.stored_as, self.x_q, self.blocks, self.dtype)
        return decode(self.stored_as, self.x_q, self.moment_scales[0, self.column], self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the kind, the shape and the stored dtype."""
        return f"Fp8Moment({self.kind}, {list(self.shape)}, {self.x_q.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Moment:
        """Copy the stored tensors, for a copy of an optimizer."""
        moment_scales = self.moment_scales[:, self.column : self.column + 1].clone()
        blocks = None if self.blocks is None else self.blocks.clone()
        made = Fp8Moment(self.x_q.clone(), moment_scales, 0, self.stored_as, self.dtype, blocks, self.seed)
        memo[id(self)] = made
        return made

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Return the names of the inner tensors, and the other fields. Dynamo makes fake moments of them."""
        inner = ["x_q", "moment_scales"] if self.blocks is None else ["x_q", "moment_scales", "blocks"]
        return inner, (self.column, self.stored_as, self.dtype, self.seed)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: tuple[Any, ...], *_: Any) -> Fp8Moment:
        """Return the moment of these inner tensors and fields."""
        column, stored_as, dtype, seed = context
        return Fp8Moment(inner["x_q"], inner["moment_scales"], column, stored_as, dtype, inner.get("blocks"), seed)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an op on the dequantized moments. The result of `copy_` or `zero_` is stored."""
        kwargs = kwargs or {}
        # aliases share the stored tensors, so they see what the compiled update writes; `DTensor` makes views
        x: Any = args[0] if args else None
        as_it_is = func is torch.ops.aten.view.default and x.shape == torch.Size(args[1])
        if as_it_is or func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(x.x_q, x.moment_scales, x.column, x.stored_as, x.dtype, x.blocks, x.seed)
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
            new = cls.of(into[0].stored_as, func(*plain[0], **plain[1]))
            for old, now in zip(into[0].stored, new.stored, strict=True):
                old.copy_(now)
            into[0].moment_scales[:, into[0].column] = new.moment_scales[:, 0]
            return into[0]
        result = func(*plain[0], **plain[1])  # on fake tensors Dynamo only needs shapes
        return args[0] if isinstance(result, Tensor) else result  # an in-place op returns its first argument


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an op writes into."""
    written: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += pytree.tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return written


def moment_of(x: Any) -> Fp8Moment | None:
    """Return the moment in FP8 that `x` is, or that is this rank's part of a DTensor `x`; None if neither is."""
    part = part_of(x)
    return part if isinstance(part, Fp8Moment) else None


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
    """Make the optimizer's state dicts hold plain tensors instead of FP8 moments, from now on: DTensors of such."""
    if not hasattr(optimizer, "_fp8pass_saves_plainly"):
        optimizer._fp8pass_saves_plainly = optimizer.register_state_dict_post_hook(_plain)  # type: ignore[attr-defined]


def _plain(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def value(x: Any) -> Any:
        return x if (moment := moment_of(x)) is None else with_part(x, moment.value())

    states = {
        key: {n: value(x) for n, x in entries.items()} if isinstance(entries, dict) else entries
        for key, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def nbytes_saved(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, int]:
    """Return (number of moments in FP8, bytes of memory that this saves on this rank)."""
    states = (x for o in optimizers for state in o.state.values() for x in state.values())
    moments = [m for m in map(moment_of, states) if m is not None]
    return len(moments), sum(m.numel() * m.dtype.itemsize - sum(x.nbytes for x in m.stored) for m in moments)
