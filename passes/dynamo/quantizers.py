"""Choose the quantizers of a matmul call by its recipe: one for each operand of each of its three matmuls.

    output         input       @ weight            contracts K
    grad_input     grad_output @ weight            contracts N
    grad_weight    input       @ grad_output       contracts M

Tensorwise recipes quantize a tensor once for both matmuls that read it; other recipes quantize it for each matmul,
along the dimensions that the matmul contracts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fp8pass.graph.annotation import SingleProduct
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.passes.common.matmul_calls import Dims
from fp8pass.quant import ops
from fp8pass.quant.wrapper_tensor import Fp8Weight
from fp8pass.recipes import (
    BLOCK,
    FACTORS,
    MX_BLOCK,
    BlockwiseScaling,
    Calibration,
    DelayedScaling,
    DynamicScaling,
    Kind,
    MXFP8Scaling,
    Recipe,
    Role,
    RowwiseScaling,
    StaticScaling,
)

LIMITS = {
    "declined": {
        "frozen rows": (
            "grad_input sums over the rows of a [frozen weight](lora.md), which have a scale each",
            '`fp8pass.freeze(model, scales="tensor")`',
        ),
        "block size": (
            "the summed size is not a multiple of 128 (or 32), N is not a multiple of 16, or a weight can't be cut "
            "into 128x128; a last batch with an odd M is padded, but its weight's gradient sums over M",
            'pad the layer, or use `"rowwise"` for it',
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

Pair = tuple[ops.Quantizer | None, ops.Quantizer | None]
"""The quantizers of the two operands; None for one that is not quantized: only in trials of `fp8pass.bisect`."""


def quantizers(
    recipe: Recipe, kind: Kind, dims: Dims, tensors: dict[Role, Tensor], record: bool, name: str = ""
) -> Pair | Reject:
    """Return the quantizers of the two operands of one matmul, or the reason why it stays in high precision.

    tensors: example tensors by role. record: True if amaxes are recorded. name: of the matmul, for static scales.
    """
    if left_out := _left_out(recipe, kind, name):
        return left_out
    if kind == "grad_input" and isinstance(weight := tensors["weight"], Fp8Weight) and weight.scales == "row":
        return LeftOut("frozen rows", "its frozen weight has a scale for each row, and grad_input sums over the rows")
    if dims.has_groups and kind == "grad_weight":
        assert isinstance(recipe, RowwiseScaling), recipe
        return tuple(ops.Groupwise(recipe, recipe.dtype(role)) for role in FACTORS[kind])  # type: ignore[return-value]
    return _pair(recipe, FACTORS[kind], [tensors[role] for role in FACTORS[kind]], dims.contracted(kind), record)


def quantizers_of_product(
    product: SingleProduct, recipe: Recipe, dims: Dims, operands: Sequence[Tensor], name: str
) -> Pair | Reject:
    """Return the quantizers of the operands of a matmul in a Function, as `quantizers` does."""
    if left_out := _left_out(recipe, product.kind, name):
        return left_out
    return _pair(recipe, product.roles, operands, dims.contracted("output"), record=True)


def _left_out(recipe: Recipe, kind: Kind, name: str) -> LeftOut | None:
    """Return why the recipe leaves a matmul in high precision; None if it does not."""
    if kind in recipe.high_precision:
        return LeftOut("high precision", f"{recipe!r} keeps {kind} in high precision")
    if kind != "output" and not _may_quantize_gradients(recipe, name):
        return LeftOut("not calibrated", f"there is no static scale for {name}.grad_output")
    return None


def _pair(
    recipe: Recipe, roles: Sequence[Role], operands: Sequence[Tensor], summed: Sequence[tuple[int, ...]], record: bool
) -> Pair | Reject:
    """Return the quantizers of two operands. summed: the dimensions that the matmul sums over, in each."""
    try:
        each = zip(roles, operands, summed, strict=True)
        first, second = (quantizer_of(recipe, role, x, along, record) for role, x, along in each)
    except Reject as reject:
        return reject
    return first, second


def _may_quantize_gradients(recipe: Recipe, name: str) -> bool:
    if isinstance(recipe, Calibration):
        return recipe.gradients
    return not isinstance(recipe, StaticScaling) or recipe.has(f"{name}.grad_output")


def with_weight_of_now(kind: Kind, pair: Pair) -> Pair:
    """Return the quantizers with the weight's scale from its current amax instead of its history."""
    tried = zip(FACTORS[kind], pair, strict=True)
    first, second = (_of_now(q) if role == "weight" and isinstance(q, ops.Delayed) else q for role, q in tried)
    return first, second


def _of_now(quantizer: ops.Delayed) -> ops.Dynamic:
    return ops.Dynamic(DynamicScaling(fp8_format=quantizer.recipe.fp8_format), quantizer.dtype)


def is_uniform(pairs: dict[Kind, Pair], trains: bool) -> bool:
    """Return whether all matmuls are quantized, and each tensor has one quantizer for all matmuls that read it."""
    if len(pairs) < (len(FACTORS) if trains else 1):
        return False
    by_role: dict[Role, set[ops.Quantizer | None]] = {}
    for kind, pair in pairs.items():
        for role, quantizer in zip(FACTORS[kind], pair, strict=True):
            by_role.setdefault(role, set()).add(quantizer)
    return all(len(matching) == 1 and None not in matching for matching in by_role.values())


def quantizer_of(recipe: Recipe, role: Role, x: Tensor, contracted: tuple[int, ...], record: bool) -> ops.Quantizer:
    """Return the quantizer of `x`, a tensor with this role. contracted: the dimensions that its matmul sums over.

    Raises Reject if blocks do not divide a size.
    """
    dtype = recipe.dtype(role)
    if isinstance(recipe, Calibration):
        return ops.Observe(recipe, dtype)
    if isinstance(recipe, DelayedScaling):
        return ops.Delayed(recipe, dtype, slot=-1, index=-1, bootstrap=not record, record=record)
    if isinstance(recipe, StaticScaling):
        return ops.Static(recipe, dtype, slot=-1)
    if isinstance(recipe, DynamicScaling):
        return ops.Dynamic(recipe, dtype)
    if isinstance(recipe, RowwiseScaling):
        return ops.Rowwise(recipe, dtype, contracted)
    if isinstance(recipe, MXFP8Scaling):
        _check_blocks(recipe, role, x, contracted, MX_BLOCK)
        return ops.Blockwise(recipe, dtype, MX_BLOCK, dims=contracted)
    assert isinstance(recipe, BlockwiseScaling), recipe
    if role == "weight" and x.dim() == 2:  # square blocks serve both matmuls that read the weight
        for dim in (0, 1):
            _check_blocks(recipe, role, x, (dim,), BLOCK, f"{x.shape[dim]} rows or columns to cut into squares")
        return ops.Blockwise(recipe, dtype, BLOCK, square=True)
    _check_blocks(recipe, role, x, contracted, BLOCK)
    return ops.Blockwise(recipe, dtype, BLOCK, dims=contracted)


def _check_blocks(recipe: Recipe, role: Role, x: Tensor, along: tuple[int, ...], block: int, cut: str = "") -> None:
    """Raise Reject if the size along `along` is not a known multiple of `block`. cut: the message's words for it."""
    size: Any = math.prod(x.shape[d] for d in along)
    # a symbolic expression may stand for one number; asking for it in this way adds no guard
    number = size if isinstance(size, int) else size.node.maybe_as_int()
    what = cut or f"{size} elements along the sum"
    shape = f"{recipe.name} scales blocks of {block}, and {role} {list(x.shape)}"
    if number is None:
        raise Reject("block size", f"{shape} has {what}, which is not known when the graph is compiled")
    if number % block:
        advice = "choose such a size, or another recipe for this module"
        raise Reject("block size", f"{shape} has {what}, not a multiple of {block}; {advice}")
