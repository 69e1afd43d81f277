"""The check of `quantize_collectives`: scales must be the same on all ranks of a collective that is to send FP8.

the same         numbers, `ops.shared`, the result of an all-reduce, and elementwise functions of these
made the same    functions of these and of the amax of the collective's output: that amax is reduced over the group
NaN if infinite  where(amax < inf, scale_inv, nan): NaN for a tensor that is not finite, only on the rank that has it.
                 FP8 has a NaN, so each rank marks its non-finite elements instead, and the scale is the same again

Numbers in the graph are assumed to be the same on all ranks: ranks run one program. Code that computes a scale from the
rank, or picks an entry of a shared tensor by rank, is compiled with other numbers on each rank, and the graph does not
show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from fp8pass.base._torch import ranks_of
from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.refusal import Reject
from fp8pass.passes.common.patterns import (
    CASTS,
    DIVIDING,
    JOINS,
    MOVEMENT,
    MULTIPLYING,
    RESHAPES,
    as_node,
    at,
    aten,
    constant,
    first,
    has_one_element,
    reach,
)
from fp8pass.passes.joint.collective_chains import (
    WAIT,
    Dequantized,
    Gathered,
    amax_from,
    c10d,
    data_of,
    is_computed,
    moves_all,
    quantized_by,
    scales_of,
    unmarked,
    widens,
)
from fp8pass.quant.ops import RECORD, SHARED

LIMITS = {
    "collectives": {
        "scale": (
            "the scale may differ between ranks, is computed from something else, or is not one for all",
            "delayed scaling with `reduce_amax=True` over a group that contains the collective's ranks",
        ),
        "amax": ("something else reads the amax of the gathered tensor", "compute it before the collective"),
        "padding": ("the tensor is padded before it is gathered, with a value other than 0", "pad with 0"),
        "not finite": ("the tensor was quantized where an infinity can't be marked", "quantize it in the same graph"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


class Use(NamedTuple):
    """A node `user` that reads an amax, or its cast to f32.

    how: "part" if it records the amax for a scale that all ranks share: this rank's amax is enough. "nan" if it makes a
    dequantized tensor NaN. "whole" for any other reader, which needs the amax of the whole tensor.
    """

    amax: fx.Node
    user: fx.Node
    how: str


def group_of(collective: fx.Node) -> str:
    """Return the name of a collective's group."""
    return str(collective.args[-1])


def is_shared(x: Any, group: str) -> bool:
    """Return whether `x` is known to be the same on all ranks of a group."""
    return _is_of(x, set(), group)


def _is_of(x: Any, amaxes: set[fx.Node], group: str) -> bool:
    """Return whether `x` is computed from these amaxes and from values that are the same on all ranks alone."""
    if not isinstance(x, fx.Node) or x in amaxes or constant(x) is not None:
        return True
    if x.target is SHARED:
        return _is_within(group, str(x.args[1]))
    if x.target is WAIT:
        return first(x).target is c10d.all_reduce.default and _is_within(group, group_of(first(x)))
    return is_computed(x) and all(_is_of(n, amaxes, group) for n in x.all_input_nodes)


def _is_within(group: str, other: str) -> bool:
    return set(ranks_of(group)) <= set(ranks_of(other))


def without_nan(scale_inv: Any, group: str) -> Any:
    """Strip `where(amax < inf, ..., nan)` from `scale_inv`; None if the result may differ between ranks.

    before   where(amax < inf, reciprocal(scale), nan)
    """
    if is_shared(scale_inv, group):
        return scale_inv
    if scale_inv.target in RESHAPES and has_one_element(scale_inv):
        return without_nan(first(scale_inv), group)
    if scale_inv.target is not aten.where.self:
        return None
    condition, finite, nan = scale_inv.args
    is_nan_if_infinite = constant(nan) != constant(nan) and _is_below_infinity(
        as_node(condition)
    )  # NaN differs from itself
    return finite if is_nan_if_infinite and is_shared(finite, group) else None


def _is_below_infinity(condition: fx.Node) -> bool:
    return condition.target is aten.lt.Scalar and condition.args[1:] == (float("inf"),)


# ---------------------------------------------------------------------------------------------------------------------
# Quantize after a collective


def check_gathered(gathered: Gathered) -> None:
    """Raise Reject if the scale may differ between ranks or is not one number.

    Also if the scale depends on the collective's output other than by its amax, or if the amax of an all-to-all's
    output is read other than for a record.
    """
    collective, group = gathered.collective, group_of(gathered.collective)
    scales = scales_of(gathered.quantizes[0].ops)
    _check_one_number(scales, f"after {at(collective)}", [first(collective), *(q.source for q in gathered.quantizes)])
    amaxes = set(gathered.amaxes) if follows_from_amax(gathered) else set()
    for scale in scales:
        if not _is_of(scale, amaxes, group):
            raise Reject("scale", f"the scale {scale.name} after {at(collective)} may differ between ranks")
        if _depends_on(scale, collective, amaxes):
            raise Reject(
                "scale", f"the scale {scale.name} follows from the result of {at(collective)}, not by its amax"
            )
    if collective.target is c10d.all_to_all_single.default:
        for use in uses_of_amaxes(gathered):
            if use.how == "whole":
                raise Reject(
                    "amax", f"{at(use.user)} reads the amax of the result of {at(collective)} to this rank alone"
                )


def _check_one_number(scales: list[fx.Node], where: str, scaled: list[fx.Node]) -> None:
    rank = min(val(x).dim() for x in scaled)
    for scale in scales:
        if not is_tensor(scale) or not has_one_element(scale):
            raise Reject("scale", f"{scale.name} {where} is not one scale for all of it")
        if val(scale).dim() > rank:
            raise Reject("scale", f"{scale.name} {where} has {val(scale).dim()} dimensions, more than what it scales")
    if not rank:
        raise Reject("scale", f"a tensor {where} is a single number")


def follows_from_amax(gathered: Gathered) -> bool:
    """Return whether the scale is computed from the gathered tensor's amax, which must then be reduced over ranks."""
    group = group_of(gathered.collective)
    return bool(gathered.amaxes) and not all(is_shared(s, group) for s in scales_of(gathered.quantizes[0].ops))


def _depends_on(x: fx.Node, collective: fx.Node, but_by: set[fx.Node]) -> bool:
    """Return whether `x` depends on a collective's output by a path that avoids the nodes `but_by`."""
    if x in but_by:
        return x is collective
    # nodes before the collective in the graph cannot depend on it
    not_earlier = reach(
        [x], lambda node: (n for n in node.all_input_nodes if n >= collective), lambda n: n not in but_by
    )
    return collective in not_earlier


def uses_of_amaxes(gathered: Gathered) -> list[Use]:
    """Return all uses of the amaxes, including uses of their casts to f32."""
    group, uses = group_of(gathered.collective), []
    to_all = gathered.collective.target is c10d.broadcast.default  # only the source rank has the tensor
    quantized = {q.ops[-1] for q in gathered.quantizes}
    for_whole = follows_from_amax(gathered)
    # for_whole: the amax is reduced over ranks anyway, so that the scale_inv is NaN on all of them or on none
    may_mark = not for_whole and _may_mark(gathered)
    records_parts = not for_whole and not to_all and any(map(_is_from_slots, scales_of(gathered.quantizes[0].ops)))
    for amax in gathered.amaxes:
        casts = [u for u in amax.users if widens(u) and val(u).dtype == torch.float32]
        for node in (amax, *casts):
            for user in node.users:
                if user in casts:
                    continue  # its readers are listed in its own turn
                if records_parts and user.target is RECORD and user.args[0] is not node:
                    how = "part"
                else:
                    how = "nan" if may_mark and _only_sets_nan(user, group, quantized) else "whole"
                uses.append(Use(node, user, how))
    return uses


def _is_from_slots(x: fx.Node) -> bool:
    """Return whether a scale is computed from a result of `ops.shared`."""
    return x.target is SHARED or (is_computed(x) and any(_is_from_slots(n) for n in x.all_input_nodes))


def _only_sets_nan(is_finite: fx.Node, group: str, quantized: set[fx.Node]) -> bool:
    """Return whether `is_finite` only decides if the scale_inv that dequantizes the tensors `quantized` is NaN."""
    return _is_below_infinity(is_finite) and all(
        user.target is aten.where.self
        and user.args[0] is is_finite
        and without_nan(user, group) is user.args[1]
        and _dequantizes(user, quantized)
        for user in is_finite.users
    )


def _may_mark(gathered: Gathered) -> bool:
    """Return whether quantizing inf as NaN changes no result, for each reader's scale_inv is NaN if there is an inf."""
    group = group_of(gathered.collective)
    of_all = {*gathered.amaxes, *(u for amax in gathered.amaxes for u in amax.users if widens(u))}

    def is_nan_if_infinite(scale_inv: fx.Node) -> bool:
        return without_nan(scale_inv, group) not in (None, scale_inv) and _deciding_amax(scale_inv) in of_all

    return all(_keeps_nan(q.ops) and _is_always(q.ops[-1], is_nan_if_infinite) for q in gathered.quantizes)


def _keeps_nan(ops: Iterable[fx.Node]) -> bool:
    clamps = {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default}
    return {op.target for op in ops} <= {*CASTS, *MULTIPLYING, *DIVIDING, *clamps}  # torch's clamp propagates NaN


def _is_always(x_q: fx.Node, is_nan_if_infinite: Callable[[fx.Node], bool]) -> bool:
    """Return whether all readers of an FP8 tensor, after casts and movement, scale it by a NaN if it was infinite."""
    for user in x_q.users:
        if user.target in (MOVEMENT - JOINS) | CASTS:
            is_always = _is_always(user, is_nan_if_infinite)
        else:
            scales = user.target in {aten.mul.Tensor, aten.div.Tensor} and data_of(user) is x_q
            is_always = scales and any(is_nan_if_infinite(n) for n in user.all_input_nodes if n is not x_q)
        if not is_always:
            return False
    return True


def _deciding_amax(scale_inv: fx.Node) -> fx.Node:
    """Return the amax that decides whether `scale_inv`, which is NaN for an infinite amax, is NaN."""
    while scale_inv.target in RESHAPES:
        scale_inv = first(scale_inv)
    return first(first(scale_inv))


def _dequantizes(scale_inv: fx.Node, quantized: set[fx.Node]) -> bool:
    """Return whether `scale_inv` scales only tensors made of the FP8 tensors `quantized` by casts and movement."""
    for user in scale_inv.users:
        if user.target in RESHAPES | CASTS:
            if not _dequantizes(user, quantized):
                return False
            continue
        if user.target not in {aten.mul.Tensor, aten.div.Tensor}:
            return False
        data = data_of(user)
        while data is not None and data not in quantized and data.target in (MOVEMENT - JOINS) | CASTS:
            data = first(data)
        if data not in quantized:
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Dequantize before a collective


def check_dequantized(dequantized: Dequantized) -> None:
    """Raise Reject if the scale may differ between ranks or is not one number, or if results could change.

    Results could change where NaN or inf is not marked in the FP8 tensor, or where padding is not 0 in FP8.
    """
    group, where = group_of(dequantized.collective), f"before {at(dequantized.collective)}"
    scaled = [first(op) for op in dequantized.ops if scales_of([op]) and is_tensor(op.args[0])]
    scales = scales_of(dequantized.ops)
    _check_one_number(scales, where, [dequantized.x_q, first(dequantized.collective), *scaled])
    for scale_inv in scales:
        finite = without_nan(scale_inv, group)
        if finite is None:
            raise Reject("scale", f"{scale_inv.name} {where} may differ between ranks")
        if finite is not scale_inv and not _is_nan_by_amax_of(scale_inv, dequantized.x_q):
            raise Reject(
                "not finite", f"{dequantized.x_q.name} was quantized elsewhere, and would hide what is not finite"
            )
        if finite is not scale_inv and not _is_marked(dequantized.x_q) and not _may_mark_here(dequantized.x_q, group):
            raise Reject(
                "not finite", f"what reads {dequantized.x_q.name} elsewhere would see what is not finite as NaN"
            )
    pads = [op for op in dequantized.ops if op.target is aten.constant_pad_nd.default]
    keeps_zeros = {op.target for op in dequantized.ops} <= {*CASTS, *MOVEMENT, *MULTIPLYING, *DIVIDING}
    if pads and not (keeps_zeros and all(constant(p.args[2]) == 0 for p in pads if len(p.args) > 2)):
        raise Reject("padding", f"{at(pads[0])} {where} adds what is not 0 in FP8")


def _is_nan_by_amax_of(scale_inv: fx.Node, x_q: fx.Node) -> bool:
    """Return whether the amax of the tensor that was quantized into `x_q` decides if `scale_inv` is NaN."""
    ops = quantized_by(x_q)
    if ops is None:
        return False
    amax = _deciding_amax(scale_inv)
    # `amax_from` returns the amax before its cast to float32
    same = {amax, first(amax)} if widens(amax) else {amax}
    return any(amax_from(n) in same for n in _readers(_unmoved(unmarked(as_node(data_of(ops[0]))))))


def _is_marked(x_q: fx.Node) -> bool:
    """Return whether `x_q` was quantized from a `marked` tensor: by the rewrite of another collective."""
    ops = quantized_by(x_q)
    assert ops is not None
    return unmarked(data := as_node(data_of(ops[0]))) is not data


def _may_mark_here(x_q: fx.Node, group: str) -> bool:
    """Return what `_may_mark` does, for a tensor that is dequantized before a collective."""

    def is_nan_if_infinite(scale_inv: fx.Node) -> bool:
        return without_nan(scale_inv, group) not in (None, scale_inv) and _is_nan_by_amax_of(scale_inv, x_q)

    return _keeps_nan(quantized_by(x_q) or ()) and _is_always(x_q, is_nan_if_infinite)


def _unmoved(node: fx.Node) -> fx.Node:
    """Return the tensor from which `node` is made by widening casts and movement of all elements."""
    while moves_all(node) or widens(node):
        node = first(node)
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the readers of a tensor, and of what widening casts and movement of all its elements make of it."""
    met = reach([node], lambda n: n.users, lambda n: moves_all(n) or widens(n))
    return [n for n in met if n is not node]
