"""Capture one operand of a matmul: an FP8 tensor times a scale, through any ops that commute with the scale.

Walks from the matmul towards the FP8 tensor instead of matching fixed chains of ops: users, decompositions and other
passes insert casts, scales and movement in any number and order. Chains of one-number scales fold into one scale. Casts
between high-precision types and negation are looked through.

The folding is exact except for rounding: the scale is one product, rounded to float32, and dequantized values are not
rounded to the types in between (Inductor would not round them either). Values that would have overflowed such a type
do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fp8pass.base.scaling import FNUZ_DTYPES, FP8_DTYPES
from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.refusal import Reject
from fp8pass.passes.common import view_ops
from fp8pass.passes.common.patterns import (
    ADDING,
    CASTS,
    COPIES,
    DIVIDING,
    JOINS,
    MAX_OPS_BETWEEN,
    MULTIPLYING,
    VIEWS,
    WIDE,
    at,
    aten,
    changes_places,
    constant,
    dtype_name,
    dtype_of,
    first,
    fp8_source,
    is_wide_cast,
    one_number,
    prims,
    same_value,
)
from fp8pass.passes.common.view_ops import Emit
from fp8pass.passes.joint.row_scales import RowScale, scaled_rows
from fp8pass.quant.ops import DEQUANTIZE_BLOCKS

LIMITS = {
    "detected": {
        "not float8": (
            "an operand is not an FP8 tensor times a scale",
            "quantize both; no kernel takes only one FP8 operand",
        ),
        "op between": ("an op between dequantize and matmul does not commute with a scale", "quantize after it"),
        "scale": (
            "it is not a normal float32, is a number divided by a tensor, is complex, or is on another device",
            "a float32 scale, on the tensor's device",
        ),
        "zero point": ("the quantization is shifted", "symmetric quantization"),
        "cast": ("there is a cast to less than 16 bits between", "leave it out"),
        "fnuz, float8 kind": ("no NVIDIA GPU multiplies the format", "`float8_e4m3fn` and `float8_e5m2`"),
        "fill value": (
            "the tensor is padded or filled with a value other than 0",
            "0, or fill before the quantization",
        ),
        "join": ("tensors of several scales or dtypes are joined", "one scale for all parts"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

MAX_DEPTH = 50
"""How deep joins (cat, where) may be nested; deeper ones are declined."""
_F32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Scale:
    """number * product of `multiplied` / product of `divided`: nodes of one-element tensors of any shape and dtype."""

    number: float = 1.0
    multiplied: tuple[fx.Node, ...] = ()
    divided: tuple[fx.Node, ...] = ()

    def times(self, factor: Any, divide: bool = False) -> Scale:
        """Return this scale multiplied with, or divided by, a number or a node."""
        # not of an integer: the negative of an unsigned one wraps around
        if isinstance(factor, fx.Node) and factor.target is aten.neg.default and val(factor).dtype.is_floating_point:
            return replace(self, number=-self.number).times(first(factor), divide)
        if not isinstance(factor, fx.Node):
            return replace(self, number=self.number / factor if divide else self.number * factor)
        if divide:
            return replace(self, divided=(*self.divided, factor))
        return replace(self, multiplied=(*self.multiplied, factor))

    def __mul__(self, other: Scale) -> Scale:
        return Scale(self.number * other.number, self.multiplied + other.multiplied, self.divided + other.divided)

    def fits_float32(self) -> bool:
        """Return whether the number is a normal float32, as kernels need: not 0, infinite or subnormal."""
        return _F32.tiny <= abs(self.number) <= _F32.max

    def key(self) -> Hashable:
        """Return a key that is equal only for scales that are certainly equal, up to their sign."""
        factors = (Counter(map(same_value, nodes)) for nodes in (self.multiplied, self.divided))
        return abs(self.number), *(frozenset(f.items()) for f in factors)


UNSCALED = Scale()


@dataclass(frozen=True)
class Joined:
    """FP8 tensors that a cat or where joins. parts: each input with its capture, None for zeros."""

    node: fx.Node
    parts: tuple[tuple[fx.Node, Dequantize | None], ...]


@dataclass(frozen=True)
class Dequantize:
    """An operand that is FP8 times a scale.

    x_q: the FP8 tensor. movement: the ops between it and the matmul that move elements, innermost first. scale: the
    product of all one-number scales. dtype: the FP8 type. rows: a factor that differs between rows. blocks: the
    `dequantize_blocks` node that reads x_q, if x_q has a scale for each block.
    """

    x_q: fx.Node | Joined
    movement: tuple[fx.Node, ...]
    scale: Scale
    dtype: torch.dtype
    rows: RowScale | None = None
    blocks: fx.Node | None = None

    def apply_views(self, emit: Emit, emitted: dict[fx.Node, Any]) -> Any:
        """Return the FP8 operand, with all movement done by `emit`.

        emitted: results by op; those made before are reused, and new ones are added.
        """
        x = (
            self._joined(self.x_q, emit, emitted)
            if isinstance(self.x_q, Joined)
            else self._leaf(self.x_q, emit, emitted)
        )
        for node in self.movement:
            if node not in emitted:
                emitted[node] = view_ops.move(node, x, self.dtype, emit)
            x = emitted[node]
        return x

    def _leaf(self, x_q: fx.Node, emit: Emit, shared: dict[fx.Node, Any]) -> Any:
        if x_q not in shared:
            shared[x_q] = view_ops.pinned(x_q, emit)
        return shared[x_q]

    def _joined(self, source: Joined, emit: Emit, emitted: dict[fx.Node, Any]) -> Any:
        if source.node not in emitted:
            parts = {node: self._part(node, dq, emit, emitted) for node, dq in source.parts}
            emitted[source.node] = view_ops.join(source.node, parts, self.dtype, emit)
        return emitted[source.node]

    def _part(self, node: fx.Node, dq: Dequantize | None, emit: Emit, shared: dict[fx.Node, Any]) -> Any:
        if dq is None:  # zeros, which are 0 in FP8 under any scale
            return emit(prims.convert_element_type.default, node, self.dtype)
        x = dq.apply_views(emit, shared)
        return x if dq.scale.number > 0 else view_ops.negate(x, self.dtype, emit)


def dequantize(operand: fx.Node) -> Dequantize:
    """Capture `operand`. Raises Reject with the condition that failed if it is not a dequantized FP8 tensor."""
    if fp8_source(operand, MAX_OPS_BETWEEN) is None:
        raise _not_float8(operand)
    captured = _walk(operand, {}, 0)
    if not captured.scale.fits_float32():
        raise Reject("scale", f"{at(operand)} is scaled by {captured.scale.number:g}, which is not a normal float32")
    return captured


def _walk(operand: fx.Node, captured: dict[fx.Node, Dequantize], depth: int) -> Dequantize:
    """Capture `operand`, or return its capture from `captured`.

    captured: captures by node. Nested joins may contain one part very many times.
    """
    if operand not in captured:
        captured[operand] = _walk_on(operand, captured, depth)
    return captured[operand]


def _walk_on(operand: fx.Node, captured: dict[fx.Node, Dequantize], depth: int) -> Dequantize:
    node, scale = operand, UNSCALED
    moves: list[fx.Node] = []
    rows: RowScale | None = None
    while True:
        if dtype_of(node) in FP8_DTYPES and not _rearranges_fp8(node):
            return Dequantize(node, tuple(reversed(moves)), scale, val(node).dtype, rows)
        if node.target is DEQUANTIZE_BLOCKS:
            x_q = first(node)
            return Dequantize(x_q, tuple(reversed(moves)), scale, val(x_q).dtype, rows, blocks=node)
        if node.target in JOINS:
            join = _join(node, captured, depth)
            return replace(join, movement=tuple(reversed(moves)), scale=scale * join.scale, rows=rows)
        # the first factor that differs between rows; `scaled_input` refuses a second one
        if node.target in MULTIPLYING | DIVIDING and rows is None and (by_row := scaled_rows(node)) is not None:
            node, factor, scaled = *by_row, node
            rows = RowScale(scaled, factor, tuple(reversed(moves)))
        elif node.target in MULTIPLYING | DIVIDING:
            x, factor = scaled_input(node)
            scale = scale.times(factor, divide=node.target in DIVIDING)
            if val(x).shape != val(node).shape:
                moves.append(_broadcasting(node))
            node = x
        elif (source := view_ops.moved_input(node)) is not None:
            moves.append(node)
            node = source
        elif is_wide_cast(node) or is_dequantizing(node) or _adds_zero(node):
            node = first(node)
        elif node.target is aten.neg.default:
            scale = scale.times(-1.0)
            node = first(node)
        else:
            raise _why_not(operand, node)


def _broadcasting(node: fx.Node) -> fx.Node:
    """Return `node`, a multiplication or division that broadcasts the tensor to the shape of its scale.

    It then counts as movement. Raises Reject if the shape is symbolic.
    """
    if not all(isinstance(size, int) for size in val(node).shape):
        raise Reject("scale shape", f"{at(node)} broadcasts to the symbolic shape {list(val(node).shape)}")
    return node


def is_dequantizing(node: fx.Node) -> bool:
    """Return whether `node` casts an FP8 tensor to a high-precision type."""
    if node.target not in CASTS or dtype_of(first(node)) not in FP8_DTYPES:
        return False
    return dtype_of(node) in WIDE and val(node).device == val(first(node)).device


def _rearranges_fp8(node: fx.Node) -> bool:
    """Return whether `node` is a view or copy of an FP8 tensor.

    The walk looks through it, because a copy may turn out to be unnecessary in the layout that the kernel needs.
    """
    return node.target in VIEWS | COPIES and dtype_of(first(node)) == dtype_of(node)


def _adds_zero(node: fx.Node) -> bool:
    """Return whether `node` adds or subtracts 0, such as the zero point of an affine dequantize."""
    if node.target not in ADDING or not is_tensor(node.args[0]):
        return False
    return constant(node.args[1]) == 0 and val(node).shape == val(first(node)).shape


def scaled_input(node: fx.Node) -> tuple[fx.Node, Any]:
    """Return the tensor and the one-number factor of a multiplication or division. Raises Reject if it has none."""
    x, y = node.args
    if node.target in MULTIPLYING and _is_the_factor(x, y):
        x, y = y, x
    if not is_tensor(x) or (node.target in DIVIDING and one_number(x) is not None and one_number(y) is None):
        raise Reject("scale", f"{at(node)} divides a number by a tensor")
    return x, _checked_factor(node, x, y)


def _is_the_factor(x: Any, y: Any) -> bool:
    """Return whether `x`, and not `y`, is the scale in `x * y`.

    If both are one number, the one that comes from FP8 is not the scale.
    """
    if not is_tensor(x) or not is_tensor(y):
        return not is_tensor(x)
    if one_number(x) is None or one_number(y) is None:
        return one_number(x) is not None
    return fp8_source(x) is None


def _checked_factor(node: fx.Node, x: fx.Node, y: Any) -> Any:
    """Return the number or one-element tensor that `node` scales `x` by. Raises Reject if `y` cannot be a scale."""
    factor = one_number(y)
    if factor is None and is_tensor(y) and fp8_source(y) is not None:
        raise Reject("scale shape", f"{at(node)} scales by {y.name}, which comes from float8 itself")
    if factor is None and is_tensor(y):
        raise Reject(
            "scale shape",
            f"{at(node)} scales by a tensor of shape {list(val(y).shape)}, not by one number, or once by one per row",
        )
    if factor is None:
        what = "a complex number" if isinstance(y, complex) else "a symbolic size"
        raise Reject("scale", f"{at(node)} scales by {what}")
    if not isinstance(factor, fx.Node) and not Scale(factor).fits_float32():
        raise Reject("scale", f"{at(node)} scales by {factor:g}, which is not a normal float32")
    if isinstance(factor, fx.Node) and val(factor).device != val(x).device:
        devices = f"a tensor on {val(x).device} by one on {val(factor).device}"
        raise Reject("scale", f"{at(node)} scales {devices}; move the scale there")
    if isinstance(factor, fx.Node) and val(factor).dtype.is_complex:
        raise Reject("scale", f"{at(node)} scales by a complex number")
    return factor


def _join(node: fx.Node, captured: dict[fx.Node, Dequantize], depth: int) -> Dequantize:
    """Capture a cat or where of tensors that share one scale, or are 0. Raises Reject for any other."""
    if depth == MAX_DEPTH:
        raise Reject("join", f"{at(node)} is one of more than {MAX_DEPTH} nested joins")
    tensors = view_ops.joined(node)
    for n in filter(constant, tensors):  # not those for which `constant` is None, or 0
        raise Reject("fill value", f"{at(node)} fills in {constant(n):g}; only 0 is the same under every finite scale")
    parts = [(n, None if constant(n) == 0 else _walk(n, captured, depth + 1)) for n in tensors]
    scaled = [dq for _, dq in parts if dq is not None]
    if not scaled:
        raise Reject("not float8", f"{at(node)} holds nothing but zeros")
    if any(dq.rows or dq.blocks for dq in scaled):
        raise Reject("join", f"{at(node)} joins tensors that have more than one scale each")
    if len(dtypes := {dtype_name(dq.dtype) for dq in scaled}) > 1:
        raise Reject("join", f"{at(node)} joins {' and '.join(sorted(dtypes))}")
    if len(scales := {dq.scale.key() for dq in scaled}) > 1:
        raise Reject("join", f"{at(node)} joins tensors with {len(scales)} different scales")
    # keys ignore signs: a part with a negative scale is negated itself, see `Dequantize._part`
    scale = replace(scaled[0].scale, number=abs(scaled[0].scale.number))
    return Dequantize(Joined(node, tuple(parts)), (), scale, scaled[0].dtype)


def _why_not(operand: fx.Node, node: fx.Node) -> Reject:
    """Return why the walk from `operand` ends at `node`."""
    source = dtype_of(first(node)) if node.target in CASTS else dtype_of(node)
    if source in FNUZ_DTYPES:
        return Reject("fnuz", f"operand {at(node)} comes from {dtype_name(source)}, which no NVIDIA GPU multiplies")
    if source is not None and source.itemsize == 1 and source.is_floating_point and source not in FP8_DTYPES:
        return Reject(
            "float8 kind", f"operand {at(node)} comes from {dtype_name(source)}, which no matmul kernel takes"
        )
    if node.target in CASTS and dtype_of(node) not in WIDE:
        return Reject(
            "cast", f"{at(node)} casts to {dtype_name(dtype_of(node))} between the float8 tensor and the matmul"
        )
    x_q = fp8_source(node, MAX_OPS_BETWEEN)
    if x_q is None:
        return _not_float8(operand)
    if node.target in ADDING and one_number(node.args[1]) is not None:
        zero_point = "a zero point that is not the constant 0; float8 needs none, so pass the number 0"
        return Reject("zero point", f"{at(node)} shifts by {zero_point}")
    op = str(node.target).removesuffix(".default")
    return Reject(
        "op between",
        f"{at(node)} = {op} is between {x_q.name} and the matmul; only movement of elements, negation and scaling by "
        "one number, or one per row, commute with the matmul",
    )


def _not_float8(operand: fx.Node) -> Reject:
    node = operand
    while node.op == "call_function" and changes_places(node) and isinstance(node.args[0], fx.Node):
        node = first(node)
    through = "" if node is operand else f" (reached through {operand.name})"
    return Reject(
        "not float8", f"operand {at(node)}: {dtype_name(dtype_of(node))} is not a float8 tensor times a scale{through}"
    )
