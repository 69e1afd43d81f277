"""Check whether a matmul of Dynamo's graph can run in FP8, and whether the user wants it to. Rewrites nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass import hardware
from fp8pass.graph.prediction import Prediction, in_words, needed, predict
from fp8pass.graph.refusal import MAX_BATCHES, LeftOut, Reject
from fp8pass.graph.sizes import expression, is_at_least
from fp8pass.graph.wanted import HIGH_PRECISION, MatmulSizes, check_sizes, recipe_of
from fp8pass.options.config import Config
from fp8pass.passes.common.grouped_kernels import MAX_GROUPS, why_no_kernel, why_none_of
from fp8pass.passes.common.matmul_calls import BLOCK_ROWS, Dims, MatmulSignature, argument, dims_of, result_type
from fp8pass.passes.common.patterns import dtype_name
from fp8pass.passes.common.transforms import Transform, held_by
from fp8pass.quant import sharded
from fp8pass.quant.wrapper_tensor import Fp8Weight
from fp8pass.recipes import (
    KINDS,
    BlockwiseScaling,
    Calibration,
    DelayedScaling,
    DynamicScaling,
    Kind,
    MXFP8Scaling,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)

LIMITS = {
    "declined": {
        "dtype": ("its operands are not float32, bfloat16 or float16", "cast them"),
        "grouped scale": (
            "grouped matmuls only have kernels with rowwise scales: none for blocks, static scales, or one scale for "
            "a tensor",
            '`"rowwise"`, `"delayed"` or `"dynamic"` for these modules',
        ),
        "not calibrated": (
            "the static scales lack one for this tensor",
            'calibrate with batches that reach it, and with `loss=` for gradients; or a pattern, `{"*.grad_output": '
            "1.0}`",
        ),
        "no parameters": (
            "the graph has no parameters by which scales could be named",
            '`"dynamic"`, or compile a module that has parameters',
        ),
        "device": (
            "the GPU has no FP8 kernels, or the tensors are on another device than the graph's state",
            "`target` only predicts: use sm_89 or newer; compile each device's part separately",
        ),
        "partial sum": ("an operand is a DTensor whose sum over ranks is still pending", "`redistribute` it first"),
        "gathered in FP8": (
            "its weight is gathered in FP8 with other scales than the recipe's; [why not `rowwise` and "
            "`mxfp8`](distributed.md#fsdp2)",
            '`enable_fp8_all_gather(scales="block")` for `blockwise`, `"tensor"` for `delayed` and `dynamic`; or '
            "`filter=`",
        ),
        "form": (
            "a number is added instead of a tensor; operands are not tensors; groups have another shape than experts",
            "write it as one of torch's matmuls",
        ),
        "out=": ("it writes into `out=`", "assign the result"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


def has_one_scale(recipe: Recipe) -> bool:
    """Return whether the recipe quantizes a merged tensor with one scale."""
    return isinstance(recipe, (DelayedScaling, DynamicScaling)) and not isinstance(recipe, Calibration)


@dataclass(frozen=True)
class CheckedCall:
    """A matmul call of Dynamo's graph that passed all checks, and its recipe.

    prediction: of the roofline model; None without a target. sizes: M, K, N, ints or SymInts. kinds: the matmuls that
    it computes in this graph.
    """

    node: fx.Node
    signature: MatmulSignature
    dims: Dims
    recipe: Recipe
    prediction: Prediction | None
    sizes: tuple[Any, Any, Any]
    kinds: tuple[Kind, ...]


def check(
    node: fx.Node,
    signature: MatmulSignature,
    name: str,
    config: Config,
    training: bool,
    merged: Recipe | None = None,
    experts: bool = False,
    inside: Sequence[Transform] = (),
) -> CheckedCall:
    """Raise LeftOut if the recipe or the filter excludes this matmul, Reject if it cannot run in FP8; return the call.

    merged: the recipe, if the call replaces several calls that were checked one by one. experts: True if the second
    operand is a parameter that holds a batch of matrices. inside: the function transforms around the call.
    """
    operands = argument(node, signature.a), argument(node, signature.b)
    if not all(isinstance(o, fx.Node) and isinstance(o.meta.get("example_value"), Tensor) for o in operands):
        raise Reject("form", f"{signature.name} has arguments that fp8pass does not understand: {node.format_node()}")
    a, b = (o.meta["example_value"] for o in operands)
    _check_dtypes(a, b)
    if inside:
        check_not_left_out(name, config, a, b)  # first: strict raises an error for a Reject, not for LeftOut
        raise held_by(inside)
    _check_operands(a, b)
    if node.kwargs.get("out") is not None:
        raise Reject("out=", f"{signature.name} writes into out=; assign its result instead")
    if not isinstance(argument(node, signature.bias), fx.Node | None):
        raise Reject("form", f"{signature.name} adds a number, not a tensor: {node.format_node()}")
    dims = dims_of(signature, node, a, b)
    sizes = dims.sizes(sharded.part_of(a), sharded.part_of(b))  # of this rank's parts of DTensors
    target = hardware.target_of(a.device, config.target)
    may_be_grouped = signature.offs is not None or experts
    no_kernel = why_no_kernel(b, result_type(signature, node), target) if may_be_grouped else None
    is_grouped = signature.offs is not None or (experts and no_kernel is None)
    if not may_be_grouped and _are_many(sizes):
        no_kernel = _why_not_one_launch(
            sizes, a.device, result_type(signature, node), target, config.recipe_of(name)[0]
        )
        is_grouped = no_kernel is None
    check_sizes(sizes, MAX_GROUPS if is_grouped else MAX_BATCHES, f"; {no_kernel}" if no_kernel else "")
    m, k, n = sizes.m, sizes.k, sizes.n
    recipe = merged or recipe_of(name, config, m, k, n)
    if is_grouped:
        recipe = _by_rows(recipe)
        if no_kernel is not None:
            raise no_kernel
    if isinstance(b, Fp8Weight) and b.is_frozen:
        recipe = _for_frozen(recipe, b)
    if isinstance(weight := sharded.part_of(b), Fp8Weight) and not weight.is_frozen:
        _check_gathered(recipe, weight)
    if reason := hardware.why_no_fp8(a.device, target):
        raise Reject("device", reason)
    size = node.meta["example_value"].element_size()
    by_blocks = isinstance(recipe, (BlockwiseScaling, MXFP8Scaling)) and isinstance(m, int)
    padded = -(-m // BLOCK_ROWS) * BLOCK_ROWS if by_blocks else m
    kinds = needed(a.requires_grad, b.requires_grad) if training else KINDS[:1]
    ready = isinstance(sharded.part_of(b), Fp8Weight)
    prediction = predict(target, (padded, k, n), recipe, size, kinds, config.min_speedup, ready)
    return CheckedCall(node, signature, dims, recipe, prediction, (m, k, n), kinds)


def _are_many(sizes: MatmulSizes) -> bool:
    return isinstance(sizes.batches, int) and sizes.batches > MAX_BATCHES


def _why_not_one_launch(
    sizes: MatmulSizes, device: torch.device, dtype: torch.dtype, target: hardware.Target | None, recipe: Recipe | None
) -> Reject | None:
    """Return why a batch of many products can't be one grouped matmul with a group per product; None if it can.

    The sum of the second operand's gradient is over M, which must fit the kernel too.
    """
    if recipe is not None:
        try:
            _by_rows(recipe)
        except Reject as reject:
            return reject
    shapes = (sizes.batches, sizes.k, sizes.n), (sizes.batches, sizes.m, sizes.n)
    return next(filter(None, (why_none_of(shape, device, dtype, target) for shape in shapes)), None)


def _by_rows(recipe: Recipe) -> Recipe:
    """Return the recipe of a grouped matmul, whose kernels take one scale per row. Raises Reject if there is none.

    Rowwise scaling keeps no state, so an expert that gets no token in a step has no amax history to lose.
    """
    if isinstance(recipe, RowwiseScaling):
        return recipe
    if has_one_scale(recipe):
        return RowwiseScaling(high_precision=recipe.high_precision, fast_accum=recipe.fast_accum)
    raise Reject("grouped scale", f"{recipe.name} scales; grouped FP8 matmuls take one for each row: recipe 'rowwise'")


def _check_gathered(recipe: Recipe, weight: Fp8Weight) -> None:
    """Raise Reject if FSDP gathered a weight with other scales than the recipe's."""
    if weight.scales == "tensor" and has_one_scale(recipe):
        return
    if weight.scales == "block" and isinstance(recipe, BlockwiseScaling) and recipe.power_of_2:
        return
    if isinstance(recipe, (RowwiseScaling, MXFP8Scaling)):
        why = (
            f"the recipe {recipe.name!r} scales it along each of its dimensions. Gathered in FP8 for both, it would "
            "take more than 2 bytes per element, and it takes 2 in bfloat16: leave it out with "
            "enable_fp8_all_gather(filter=)"
        )
    else:
        why = (
            f"{recipe!r} has others: gather it with scales='tensor' for 'delayed' and 'dynamic', with scales='block' "
            "for 'blockwise', or leave it out with enable_fp8_all_gather(filter=)"
        )
    raise Reject("gathered in FP8", f"its weight travels in FP8 with scales={weight.scales!r}, and {why}")


def _kept(recipe: Recipe) -> dict[str, Any]:
    return {"high_precision": recipe.high_precision, "fast_accum": recipe.fast_accum}


def _for_frozen(recipe: Recipe, weight: Fp8Weight) -> Recipe:
    """Return a recipe with the scales of a weight that is kept in FP8."""
    kept = _kept(recipe)
    if weight.scales == "block":
        return recipe if isinstance(recipe, BlockwiseScaling) else BlockwiseScaling(**kept)
    if weight.scales == "row":
        return recipe if isinstance(recipe, RowwiseScaling) else RowwiseScaling(**kept)
    return recipe if has_one_scale(recipe) else DynamicScaling(**kept)


Splits = Mapping[sympy.Expr, Mapping[int, bool | None]]
"""For each dynamic size: {value at which FP8 becomes faster or slower: True if this compilation serves the sizes
from there on}, as `split_sizes` has decided; None if it could not decide.
"""


def check_speedup(call: CheckedCall, device: torch.device, config: Config, splits: Splits | None = None) -> None:
    """Raise LeftOut if the predicted speed-up of the call is below `config.min_speedup`.

    With a dynamic size, `split_sizes` has limited this compilation to sizes for which FP8 is faster throughout, or
    slower throughout. If it could not, the largest sizes decide.
    """
    prediction = call.prediction
    if prediction is None or config.min_speedup == 0:
        return
    target = hardware.target_of(device, config.target)
    assert target is not None
    m, k, n = call.sizes
    product = f"[{m}, {k}] by [{k}, {n}]"
    if prediction.ends is None:
        if prediction.speedup < config.min_speedup:
            raise LeftOut(
                "min_speedup",
                f"predicted speed-up on {target.name} is {prediction.speedup:.2f}, below min_speedup="
                f"{config.min_speedup:g}: {product} is too small to pay for its quantization",
            )
    elif not _pays(prediction, config.min_speedup, splits or {}):
        where = in_words(prediction.pays, prediction.of)
        start = f"from {prediction.of}={where} on" if prediction.pays else "for no size"
        raise LeftOut(
            "min_speedup",
            f"predicted speed-up on {target.name} reaches min_speedup={config.min_speedup:g} {start}: the sizes of "
            f"{product} that this graph is compiled for are too small to pay for its quantization",
        )


def _pays(prediction: Prediction, min_speedup: float, splits: Splits) -> bool:
    """Return whether a call with a dynamic size is to run in FP8."""
    assert prediction.ends is not None
    if prediction.variable is None or prediction.pays is None:
        return prediction.ends[1] >= min_speedup
    variable = prediction.variable
    decided = splits.get(expression(variable), {})

    def is_beyond(value: int) -> bool | None:
        return decided[value] if value in decided else is_at_least(variable, value)

    for first, last in prediction.pays:
        begins, ended = is_beyond(first), False if last is None else is_beyond(last + 1)
        if begins and ended is False:
            return True
        if begins is None or (begins and ended is None):  # not decided by a guard: the largest sizes decide
            return prediction.ends[1] >= min_speedup
    return False


def check_not_left_out(name: str, config: Config, a: Tensor, b: Tensor) -> None:
    """Raise LeftOut if the recipe or the filter excludes a matmul that can't run in FP8 at any size.

    Only the filter looks at the sizes. Under vmap the operands show those of one example, which may be a vector
    although the matmul of all examples has matrices.
    """
    *rows, k = a.shape or (1,)
    recipe_of(name, config, math.prod(rows), k, 0 if statically_known_true(k == 0) else b.numel() // k)


def _check_dtypes(a: Tensor, b: Tensor) -> None:
    if a.dtype not in HIGH_PRECISION or b.dtype not in HIGH_PRECISION:
        types = f"{dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
        raise LeftOut("dtype", f"operands are {types}; FP8 replaces float32, bfloat16 and float16")


def _check_operands(a: Tensor, b: Tensor) -> None:
    for operand in (a, b):
        if over := sharded.partial_over(operand):
            raise Reject(
                "partial sum",
                f"an operand is a partial sum over {' and '.join(over)} of the device mesh, whose amax is not that of "
                "the sum; redistribute it first",
            )
        if operand.dim() == 0:
            raise LeftOut("vector", "an operand is a scalar")
        if operand.dim() == 1:
            raise LeftOut("vector", f"an operand is a vector of {operand.shape[0]} elements")


def for_instance(recipe: Recipe, name: str, has_owner: bool) -> Recipe:
    """Return the recipe, or dynamic scaling instead of delayed if the graph has no instance to keep state for.

    Raises LeftOut if a static scale is missing, or if calibration has no parameters to name scales by.
    """
    if isinstance(recipe, StaticScaling):
        absent = [f"{name}.{role}" for role in ("input", "weight") if not recipe.has(f"{name}.{role}")]
        if absent:
            raise LeftOut("not calibrated", f"no scale for {' and '.join(absent)} was calibrated")
        if not has_owner:
            raise LeftOut("no parameters", "the graph has no parameters by which its scales could be named")
    if has_owner or not isinstance(recipe, DelayedScaling):
        return recipe
    if isinstance(recipe, Calibration):
        raise LeftOut("no parameters", "the graph has no parameters by which its scales could be named")
    return DynamicScaling(
        fp8_format=recipe.fp8_format, high_precision=recipe.high_precision, fast_accum=recipe.fast_accum
    )
