"""Find the function transforms of torch.func in Dynamo's graph, and the nodes inside each.

_vmap_increment_nesting(8, 'error')       opens a region
x = _add_batch_dim(batch, 0, 1)           one example: ops that follow do not see its dimension of 8
y = matmul(x, w)                          inside `vmap`
ys = _remove_batch_dim(y, 1, 8, 0)
_vmap_decrement_nesting()                 closes it: `ys` is an ordinary tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fp8pass.graph.refusal import Reject

LIMITS = {
    "declined": {
        "torch.func": (
            "it is inside `vmap`, `grad`, `vjp` or `jvp` of `torch.func`; matmuls around these run in FP8",
            "write the dimension that `vmap` maps over as a dimension of the matmul; take the gradient with "
            "`backward()`",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


@dataclass(frozen=True)
class Transform:
    """A kind of region of Dynamo's graph, by the names of the calls that open and close it.

    why: why FP8 is impossible there, and what the user can do; completes "inside of torch.func.vmap, ...".
    """

    name: str
    opened_by: str
    closed_by: str
    why: str


DERIVED = (
    "whose derivative is taken in the forward and differentiated in the backward: quantization has no second "
    "derivative; take the first with backward()"
)
"""The reason that matmuls of a derivative taken in the forward are declined."""
VMAP = Transform(
    "torch.func.vmap",
    "_vmap_increment_nesting",
    "_vmap_decrement_nesting",
    "where tensors do not show the dimension that is mapped over, and each example would have its own scale; "
    "write that dimension as one of the matmul's",
)
TRANSFORMS = (
    VMAP,
    Transform("torch.func.grad or vjp", "_grad_increment_nesting", "_grad_decrement_nesting", DERIVED),
    Transform("torch.func.jvp", "_jvp_increment_nesting", "_jvp_decrement_nesting", DERIVED),
    Transform("torch.autograd.forward_ad", "_enter_dual_level", "_exit_dual_level", DERIVED),
)
_OPENING = {t.opened_by: t for t in TRANSFORMS}
_CLOSING = {t.closed_by: t for t in TRANSFORMS}


def transforms(graph: fx.Graph, around: tuple[Transform, ...] = ()) -> dict[fx.Node, tuple[Transform, ...]]:
    """Return the transforms around each node that is inside any, the outermost first.

    around: the transforms around the graph itself.
    """
    transforms_of: dict[fx.Node, tuple[Transform, ...]] = {}
    inside = around
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name in _OPENING:
            inside = *inside, _OPENING[name]
        if inside:
            transforms_of[node] = inside
        if name in _CLOSING and inside[len(around) :]:  # the call that closes a transform is still inside of it
            last = max(i for i, t in enumerate(inside) if t is _CLOSING[name])
            inside = inside[:last]
    return transforms_of


def held_by(inside: Sequence[Transform]) -> Reject:
    """Return why a matmul inside these transforms, the outermost first, is declined."""
    transform = VMAP if VMAP in inside else inside[0]
    return Reject("torch.func", f"inside of {transform.name}, {transform.why}")
