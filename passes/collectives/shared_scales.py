"""Which scales are the same on all ranks of a collective, so that FP8 may travel: the check of `quantize_collectives`.

the same         numbers, `ops.shared`, an all-reduce, and what is computed of these elementwise
made the same    what is computed of these, and of the amax of what a collective brings: that is reduced over its group
poisoned         where(amax < inf, scale_inv, nan): NaN for a tensor that is not finite, on the rank that has it alone.
                 FP8 has a NaN of its own, so each rank marks its elements instead, and the scale is the same again

That a number is the same is taken for granted: ranks run one program. Code that computes a scale of its rank, or has
the rank pick an entry of what is shared, is compiled to other numbers on each rank, and no graph tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from fp8pass._torch import ranks_of
from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.refusal import Reject
from fp8pass.passes.collectives.chains import (
    OF_ALL,
    WAIT,
    Dequantized,
    Gathered,
    amax_from,
    c10d,
    data_of,
    is_computed,
    quantized_by,
    scales_of,
    unmarked,
    widens,
)
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
)
from fp8pass.quant.ops import RECORD, SHARED


class Use(NamedTuple):
    """Who reads an amax, or its cast to f32, and how.

    "part": records it for a scale that all ranks share, where this rank's will do. "poison": makes NaN of what is
    dequantized. "whole": that of the whole tensor, for anything else.
    """

    amax: fx.Node
    user: fx.Node
    how: str


def group_of(collective: fx.Node) -> str:
    """The name of its group."""
    return str(collective.args[-1])


def is_shared(x: Any, group: str) -> bool:
    """Return whether `x` is known to be the same on all ranks of a group."""
    return _is_of(x, set(), group)


def _is_of(x: Any, amaxes: set[fx.Node], group: str) -> bool:
    """Return whether `x` is computed of these amaxes, and of what all ranks share."""
    if not isinstance(x, fx.Node) or x in amaxes or constant(x) is not None:
        return True
    if x.target is SHARED:
        return _is_within(group, str(x.args[1]))
    if x.target is WAIT:
        return first(x).target is c10d.all_reduce.default and _is_within(group, group_of(first(x)))
    return is_computed(x) and all(_is_of(n, amaxes, group) for n in x.all_input_nodes)


def _is_within(group: str, other: str) -> bool:
    return set(ranks_of(group)) <= set(ranks_of(other))


def unpoisoned(scale_inv: Any, group: str) -> Any:
    """`scale_inv` without being NaN for what is not finite on this rank; None if it is not the same on all ranks then.

    before   where(amax < inf, reciprocal(scale), nan)
    """
    if is_shared(scale_inv, group):
        return scale_inv
    if scale_inv.target in RESHAPES and has_one_element(scale_inv):
        return unpoisoned(first(scale_inv), group)
    if scale_inv.target is not aten.where.self:
        return None
    condition, finite, nan = scale_inv.args
    is_poison = constant(nan) != constant(nan) and _is_below_infinity(as_node(condition))
    return finite if is_poison and is_shared(finite, group) else None


def _is_below_infinity(condition: fx.Node) -> bool:
    return condition.target is aten.lt.Scalar and condition.args[1:] == (float("inf"),)


# ---------------------------------------------------------------------------------------------------------------------
# Behind a collective


def check_gathered(found: Gathered) -> None:
    """Raise Reject if the scale may differ between ranks."""
    collective, group = found.collective, group_of(found.collective)
    scales = scales_of(found.quantizes[0].ops)
    _check_one_number(scales, f"behind {at(collective)}", [first(collective), *(q.source for q in found.quantizes)])
    amaxes = set(found.amaxes) if follows_from_amax(found) else set()
    for scale in scales:
        if not _is_of(scale, amaxes, group):
            raise Reject("scale", f"the scale {scale.name} behind {at(collective)} may differ between ranks")
        if _depends_on(scale, collective, amaxes):
            raise Reject("scale", f"the scale {scale.name} follows from what {at(collective)} brings, not by its amax")
    if collective.target is c10d.all_to_all_single.default:
        for use in uses_of_amaxes(found):
            if use.how == "whole":
                raise Reject(
                    "amax", f"{at(use.user)} reads the amax of what {at(collective)} brings to this rank alone"
                )


def _check_one_number(scales: list[fx.Node], where: str, scaled: list[fx.Node]) -> None:
    rank = min(val(x).dim() for x in scaled)
    for scale in scales:
        if not is_tensor(scale) or not has_one_element(scale):
            raise Reject("scale", f"{scale.name} {where} is not one scale for all of it")
        if val(scale).dim() > rank:
            raise Reject("scale", f"{scale.name} {where} has {val(scale).dim()} dimensions, more than what it scales")
    if not rank:
        raise Reject("scale", f"what is {where} is a single number")


def follows_from_amax(found: Gathered) -> bool:
    """Return whether the scale is computed of the amax of what is gathered, which must be that of all ranks then."""
    group = group_of(found.collective)
    return bool(found.amaxes) and not all(is_shared(s, group) for s in scales_of(found.quantizes[0].ops))


def _depends_on(x: fx.Node, collective: fx.Node, but_by: set[fx.Node]) -> bool:
    """Return whether `x` is computed of what a collective brings, other than by way of these nodes."""
    todo, seen = [x], set(but_by)
    while todo:
        node = todo.pop()
        if node is collective:
            return True
        if node not in seen:
            seen.add(node)
            todo += [n for n in node.all_input_nodes if n >= collective]
    return False


def uses_of_amaxes(found: Gathered) -> list[Use]:
    """All, those of casts to f32 among them."""
    group, uses = group_of(found.collective), []
    to_all = found.collective.target is c10d.broadcast.default  # of which only one rank has the tensor
    quantized = {q.ops[-1] for q in found.quantizes}
    for_whole = follows_from_amax(found)
    may_mark = not for_whole and _may_mark(found)
    records_parts = not for_whole and not to_all and any(map(_is_from_slots, scales_of(found.quantizes[0].ops)))
    for amax in found.amaxes:
        casts = [u for u in amax.users if widens(u) and val(u).dtype == torch.float32]
        for node in (amax, *casts):
            for user in node.users:
                if user in casts:
                    continue
                if records_parts and user.target is RECORD and user.args[0] is not node:
                    how = "part"
                else:
                    how = "poison" if may_mark and _is_poison(user, group, quantized) else "whole"
                uses.append(Use(node, user, how))
    return uses


def _is_from_slots(x: fx.Node) -> bool:
    """Return whether `ops.shared` is among what a scale is computed of."""
    return x.target is SHARED or (is_computed(x) and any(_is_from_slots(n) for n in x.all_input_nodes))


def _is_poison(is_finite: fx.Node, group: str, quantized: set[fx.Node]) -> bool:
    """Return whether it only makes NaN of the scale that these FP8 tensors are dequantized with."""
    return _is_below_infinity(is_finite) and all(
        user.target is aten.where.self
        and user.args[0] is is_finite
        and unpoisoned(user, group) is user.args[1]
        and _dequantizes(user, quantized)
        for user in is_finite.users
    )


def _may_mark(found: Gathered) -> bool:
    """Return whether nobody sees it if infinities are quantized as NaN."""
    group = group_of(found.collective)
    of_all = {*found.amaxes, *(u for amax in found.amaxes for u in amax.users if widens(u))}

    def is_poisoned(scale_inv: fx.Node) -> bool:
        return unpoisoned(scale_inv, group) not in (None, scale_inv) and _poison_of(scale_inv) in of_all

    return all(_keeps_nan(q.ops) and _is_always(q.ops[-1], is_poisoned) for q in found.quantizes)


def _keeps_nan(ops: Iterable[fx.Node]) -> bool:
    clamps = {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default}
    return {op.target for op in ops} <= {*CASTS, *MULTIPLYING, *DIVIDING, *clamps}


def _is_always(x_q: fx.Node, is_poisoned: Callable[[fx.Node], bool]) -> bool:
    """Whether all that reads an FP8 tensor, behind casts and movement, scales it by a scale_inv that is poisoned."""
    for user in x_q.users:
        if user.target in (MOVEMENT - JOINS) | CASTS:
            poisoned = _is_always(user, is_poisoned)
        else:
            scales = user.target in {aten.mul.Tensor, aten.div.Tensor} and data_of(user) is x_q
            poisoned = scales and any(is_poisoned(n) for n in user.all_input_nodes if n is not x_q)
        if not poisoned:
            return False
    return True


def _poison_of(scale_inv: fx.Node) -> fx.Node:
    """The amax by which `scale_inv`, which is poisoned, is NaN."""
    while scale_inv.target in RESHAPES:
        scale_inv = first(scale_inv)
    return first(first(scale_inv))


def _dequantizes(scale_inv: fx.Node, quantized: set[fx.Node]) -> bool:
    """Return whether it scales what is made of these FP8 tensors by casts and movement, and nothing else."""
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
# In front of a collective


def check_dequantized(found: Dequantized) -> None:
    """Raise Reject if the scale may differ between ranks."""
    group, where = group_of(found.collective), f"in front of {at(found.collective)}"
    scaled = [first(op) for op in found.ops if scales_of([op]) and is_tensor(op.args[0])]
    scales = scales_of(found.ops)
    _check_one_number(scales, where, [found.x_q, first(found.collective), *scaled])
    for scale_inv in scales:
        finite = unpoisoned(scale_inv, group)
        if finite is None:
            raise Reject("scale", f"{scale_inv.name} {where} may differ between ranks")
        if finite is not scale_inv and not _is_poison_of(scale_inv, found.x_q):
            raise Reject("not finite", f"{found.x_q.name} was quantized elsewhere, and would hide what is not finite")
        if finite is not scale_inv and not _is_marked(found.x_q) and not _may_mark_here(found.x_q, group):
            raise Reject("not finite", f"what reads {found.x_q.name} elsewhere would see what is not finite as NaN")
    pads = [op for op in found.ops if op.target is aten.constant_pad_nd.default]
    keeps_zeros = {op.target for op in found.ops} <= {*CASTS, *MOVEMENT, *MULTIPLYING, *DIVIDING}
    if pads and not (keeps_zeros and all(constant(p.args[2]) == 0 for p in pads if len(p.args) > 2)):
        raise Reject("padding", f"{at(pads[0])} {where} adds what is not 0 in FP8")


def _is_poison_of(scale_inv: fx.Node, x_q: fx.Node) -> bool:
    """Return whether `scale_inv`, which is poisoned, is so by the very tensor that `x_q` was quantized of."""
    ops = quantized_by(x_q)
    if ops is None:
        return False
    amax = _poison_of(scale_inv)
    same = {amax, first(amax)} if widens(amax) else {amax}
    return any(amax_from(n) in same for n in _readers(_unmoved(unmarked(as_node(data_of(ops[0]))))))


def _is_marked(x_q: fx.Node) -> bool:
    """Return whether `x_q` was quantized of what is `marked`: for another collective."""
    ops = quantized_by(x_q)
    assert ops is not None
    return unmarked(data := as_node(data_of(ops[0]))) is not data


def _may_mark_here(x_q: fx.Node, group: str) -> bool:
    """As `_may_mark`, in front of a collective."""

    def is_poisoned(scale_inv: fx.Node) -> bool:
        return unpoisoned(scale_inv, group) not in (None, scale_inv) and _is_poison_of(scale_inv, x_q)

    return _keeps_nan(quantized_by(x_q) or ()) and _is_always(x_q, is_poisoned)


def _unmoved(node: fx.Node) -> fx.Node:
    """The tensor that it was before it was rearranged as a whole, and cast to a wider type."""
    while node.target in OF_ALL or widens(node):
        node = first(node)
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a tensor, rearranged as a whole or cast to a wider type or not."""
    found, todo = [], [node]
    while todo:
        for user in todo.pop().users:
            found.append(user)
            if user.target in OF_ALL or widens(user):
                todo.append(user)
    return found
