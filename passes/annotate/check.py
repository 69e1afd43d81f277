"""Check whether a matmul of Dynamo's graph can run in FP8, and whether the user wants it to. Rewrites nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass.frozen.weight import FrozenWeight
from fp8pass.fsdp import GatheredWeight
from fp8pass.graph.refusal import MAX_BATCHES, LeftOut, Reject
from fp8pass.graph.wanted import HIGH_PRECISION, check_sizes, hint, recipe_of
from fp8pass.options.config import Config
from fp8pass.passes.common.grouped_kernels import MAX_GROUPS, why_no_kernel
from fp8pass.passes.common.matmul_calls import Dims, MatmulSignature, argument, dims_of, result_type
from fp8pass.passes.common.patterns import dtype_name
from fp8pass.passes.common.transforms import Transform, held_by
from fp8pass.quant import sharded
from fp8pass.recipes import (
    BlockwiseScaling,
    Calibration,
    DelayedScaling,
    DynamicScaling,
    MXFP8Scaling,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)
from fp8pass.roofline import predicted_speedup

ONE_SCALE = (DelayedScaling, DynamicScaling)
"""Recipes that quantize a merged tensor with one scale. Compared by exact type: the subclasses calibrate."""

IN_FP8 = (GatheredWeight, FrozenWeight)
"""Types of weights that are quantized before the graph runs: by FSDP before its all-gather, or once and for all."""


@dataclass(frozen=True)
class Call:
    """A matmul call of Dynamo's graph that passed all checks, and its recipe.

    speedup: predicted by the roofline model; None without a target. sizes: example values of M, K, N.
    """

    node: fx.Node
    signature: MatmulSignature
    dims: Dims
    recipe: Recipe
    speedup: float | None
    sizes: tuple[int, int, int]


def check(
    node: fx.Node,
    signature: MatmulSignature,
    name: str,
    config: Config,
    training: bool,
    merged: Recipe | None = None,
    experts: bool = False,
    inside: Sequence[Transform] = (),
) -> Call:
    """Raise LeftOut if the recipe or the filter excludes this matmul, Reject if it cannot run in FP8; return the call.

    merged: the recipe of a call that stands for several calls, which were checked one by one. experts: True if the
    second operand is a parameter that holds a batch of matrices. inside: the function transforms around the call.
    """
    operands = argument(node, signature.a), argument(node, signature.b)
    if not all(isinstance(o, fx.Node) and isinstance(o.meta.get("example_value"), Tensor) for o in operands):
        raise Reject("form", f"{signature.name} is called in a form that is not understood: {node.format_node()}")
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
    sizes = dims.sizes(sharded.part_of(a), sharded.part_of(b))  # of a DTensor, what this rank's kernel multiplies
    target = hardware.target_of(a.device, config.target)
    may_be_grouped = signature.offs is not None or experts
    no_kernel = why_no_kernel(b, result_type(signature, node), target) if may_be_grouped else None
    is_grouped = signature.offs is not None or (experts and no_kernel is None)
    check_sizes(sizes, MAX_GROUPS if is_grouped else MAX_BATCHES, f"; {no_kernel}" if no_kernel else "")
    m, k, n = (hint(s) for s in (sizes.m, sizes.k, sizes.n))
    recipe = merged or recipe_of(name, config, m, k, n)
    if is_grouped:
        recipe = _by_rows(recipe)
        if no_kernel is not None:
            raise no_kernel
    if isinstance(b, FrozenWeight):
        recipe = _for_frozen(recipe, b)
    if isinstance(weight := sharded.part_of(b), GatheredWeight):
        _check_gathered(recipe, weight)
    if reason := hardware.why_no_fp8(a.device, target):
        raise Reject("device", reason)
    size = node.meta["example_value"].element_size()
    gain = None if target is None else predicted_speedup(target, m, k, n, recipe, size, training)
    return Call(node, signature, dims, recipe, gain, (m, k, n))


def _by_rows(recipe: Recipe) -> Recipe:
    """Return the recipe of a grouped matmul, whose kernels take one scale per row. Raises Reject if there is none.

    Rowwise scaling keeps no state, so an expert that gets no token in a step has no amax history to lose.
    """
    if isinstance(recipe, RowwiseScaling):
        return recipe
    if isinstance(recipe, (DelayedScaling, DynamicScaling)) and not isinstance(recipe, Calibration):
        return RowwiseScaling(high_precision=recipe.high_precision, fast_accum=recipe.fast_accum)
    raise Reject("grouped scale", f"{recipe.name} scales; grouped FP8 matmuls take one for each row: recipe 'rowwise'")


def _check_gathered(recipe: Recipe, weight: GatheredWeight) -> None:
    """Raise Reject if the recipe has other scales than those with which FSDP gathered a weight."""
    if weight.scales == "tensor" and type(recipe) in ONE_SCALE:
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


def _for_frozen(recipe: Recipe, weight: FrozenWeight) -> Recipe:
    """Return the recipe of a matmul whose weight is kept in FP8: one that has the weight's scales."""
    kept = _kept(recipe)
    if weight.scales == "block":
        return recipe if isinstance(recipe, BlockwiseScaling) else BlockwiseScaling(**kept)
    if weight.scales == "row":
        return recipe if isinstance(recipe, RowwiseScaling) else RowwiseScaling(**kept)
    return recipe if type(recipe) in ONE_SCALE else DynamicScaling(**kept)


def check_speedup(call: Call, device: torch.device, config: Config) -> None:
    """Raise LeftOut if the predicted speed-up of the call is below `config.min_speedup`."""
    if call.speedup is not None and call.speedup < config.min_speedup:
        target = hardware.target_of(device, config.target)
        assert target is not None
        m, k, n = call.sizes
        raise LeftOut(
            "min_speedup",
            f"predicted speed-up on {target.name} is {call.speedup:.2f}, below min_speedup={config.min_speedup:g}: "
            f"[{m}, {k}] by [{k}, {n}] is too small to pay for its quantization",
        )


def check_not_left_out(name: str, config: Config, a: Tensor, b: Tensor) -> None:
    """Raise LeftOut if the recipe or the filter excludes a matmul that can't run in FP8, whatever its sizes are.

    Only the filter looks at the sizes. Under vmap the operands show those of one example, which may be a vector
    although the matmul of all examples has matrices.
    """
    *rows, k = (hint(size) for size in (a.shape or (1,)))
    recipe_of(name, config, math.prod(rows), k, hint(b.numel()) // max(k, 1))


def _check_dtypes(a: Tensor, b: Tensor) -> None:
    if a.dtype not in HIGH_PRECISION or b.dtype not in HIGH_PRECISION:
        types = f"{dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
        raise LeftOut("dtype", f"operands are {types}; FP8 replaces float32, bfloat16 and float16")


def _check_operands(a: Tensor, b: Tensor) -> None:
    for operand in (a, b):
        if over := sharded.partial_over(operand):
            raise Reject(
                "partial sum",
                f"an operand is still to be summed up over {' and '.join(over)} of the device mesh, and parts of a sum "
                "have no scale in common with it; redistribute it first",
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
        if absent or not has_owner:
            raise LeftOut("not calibrated", f"no scale for {' and '.join(absent)} was calibrated")
    if has_owner or not isinstance(recipe, DelayedScaling):
        return recipe
    if isinstance(recipe, Calibration):
        raise LeftOut("no parameters", "the graph has no parameters by which its scales could be named")
    return DynamicScaling(
        fp8_format=recipe.fp8_format, high_precision=recipe.high_precision, fast_accum=recipe.fast_accum
    )
