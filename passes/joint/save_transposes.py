"""Save the transposed FP8 copies that the backward needs in the forward, where that moves fewer bytes.

before   w_q: f8[N, K] = quantize(w: bf16[N, K])           forward, read by `_scaled_mm`
         w_t: f8[K, N] = clone(permute(w_q))                read by the backward only: the partitioner would quantize
                                                            `w` once more there, since `w` is at hand
after    w_t is marked to be saved: Inductor writes it with w_q, in the one kernel that reads `w`
changes  nothing but when it is computed

Saving costs one byte of memory per element between forward and backward. The pass does not save a copy

- if elementwise ops of the backward read the copy's sources anyway, or the FP8 tensor itself: then the copy costs only
  its own bytes. An example is the operand of a layer after an activation function, whose gradient needs the same
  tensors;
- in checkpointed regions;
- if it is computed from a weight that FSDP gathers.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8pass.base.node_meta import GATHERED
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.pass_base import JointContext
from fp8pass.passes.common.patterns import (
    VIEWS,
    aten,
    dtype_of,
    first,
    has_one_element,
    is_elementwise,
    is_elementwise_in_high_precision,
    readers,
    sources,
)
from fp8pass.passes.joint.list_matmuls import save_for_backward


class SaveTransposes:
    """Marks transposed copies to be saved; adds no nodes."""

    name = "save_transposes"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Mark every copy that passes `match` and `check`; return how many are new."""
        return save_for_backward(graph, lambda copy, backward: match(copy, backward) and check(copy, backward))


def match(copy: fx.Node, backward: set[fx.Node]) -> bool:
    """Check whether `copy`, read by the backward only, transposes an FP8 tensor that a matmul of the forward reads."""
    if copy.target is not aten.clone.default or dtype_of(copy) not in FP8_DTYPES:
        return False
    if first(copy).target is not aten.permute.default or not all(u in backward for u in _readers(copy)):
        return False
    return any(u.target is aten._scaled_mm.default and u not in backward for u in _readers(_source(copy)))


def check(copy: fx.Node, backward: set[fx.Node]) -> bool:
    """Check that saving moves fewer bytes, and that neither checkpointing nor FSDP is used to save this memory."""
    x_q = _source(copy)
    if (x_q.meta.get("custom") or {}).get(GATHERED):
        return False  # a saved copy of the whole weight would take the memory that FSDP frees
    if any(_is_read_dequantized(n, backward) for n in _readers(x_q)):
        return False
    # torch tags the nodes of checkpointed regions with "recompute", for its partitioner
    return "recompute" not in x_q.meta and not all(_is_read_anyway(n, x_q, backward) for n in _made_of(x_q))


def _source(copy: fx.Node) -> fx.Node:
    """Return the FP8 tensor of which `copy` is a copy, without views."""
    node = first(copy)
    while node.target in VIEWS and dtype_of(first(node)) in FP8_DTYPES:
        node = first(node)
    return node


def _readers(x_q: fx.Node) -> list[fx.Node]:
    """Return the nodes that read an FP8 tensor, directly or as a view."""
    return readers(x_q, lambda n: n.target in VIEWS)


def _made_of(x_q: fx.Node) -> list[fx.Node]:
    """Return the tensors that have to be read from memory to compute `x_q` elementwise, except scales."""
    wide = is_elementwise_in_high_precision
    tensors = sources(x_q, lambda n: (n is x_q or wide(n)) and not has_one_element(n))
    return [n for n in tensors if not has_one_element(n)]


def _is_read_anyway(node: fx.Node, x_q: fx.Node, backward: set[fx.Node]) -> bool:
    """Return whether an elementwise op of the backward reads `node`, in a kernel that can write the copy as well.

    False for reductions, such as the statistics of a norm: a kernel that reads them comes late, after the norm's
    backward.
    """
    if torch.Tag.reduction in getattr(node.target, "tags", ()):
        return False
    return any(n in backward and is_elementwise(n) for n in _read_in_high_precision(node, x_q, backward))


def _is_read_dequantized(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Return whether the backward reads what `node`, a cast from FP8, dequantizes, as `save_fp8` has it."""
    wide = is_elementwise_in_high_precision
    reading = readers(node, lambda n: n not in backward and wide(n)) if wide(node) and node not in backward else []
    return any(n in backward and n.op != "output" for n in reading)


def _read_in_high_precision(node: fx.Node, x_q: fx.Node, backward: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes that read `node` through elementwise ops of the forward; FP8 tensors end the search."""
    wide = is_elementwise_in_high_precision
    return readers(node, lambda n: n is not x_q and n not in backward and wide(n))
