"""Save a sum that the backward reads, instead of the matmul output that is one of its terms.

before   y: bf16[M, N] = _scaled_mm(...)
         h             = add(x: bf16[M, N], y)            the residual stream, read by a norm, a later add, the backward
after    h is marked to be saved
changes  nothing but where it is computed

Torch's partitioner saves `y`, which is as large as `h`, and adds again: Inductor does so in each kernel that needs `h`,
and reads two tensors there instead of one. The pass skips checkpointed regions, and sums whose `y` has another reader:
there memory could grow.
"""

from __future__ import annotations

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.graph.builder import is_tensor, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.passes.common.patterns import VIEWS, aten, is_elementwise_in_high_precision, readers, sources
from fp8pass.passes.joint.list_matmuls import save_for_backward


class SaveSums:
    """Marks sums to be saved; adds no nodes."""

    name = "save_sums"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Mark every sum that passes `match` and `check`; return how many are new."""
        return save_for_backward(graph, lambda node, backward: match(node, backward) and check(node))


def match(node: fx.Node, backward: set[fx.Node]) -> bool:
    """Check whether `node`, read by the backward, adds an FP8 matmul's output to a tensor of its shape and dtype."""
    if node.target is not aten.add.Tensor or not all(is_tensor(a) and _is_alike(a, node) for a in node.args):
        return False
    reading = readers(node, lambda n: n not in backward and is_elementwise_in_high_precision(n))
    return any(n in backward and n.op != "output" for n in reading) and bool(_products(node))


def check(node: fx.Node) -> bool:
    """Check that saving takes no more memory: nothing else reads a matmul's output, and no checkpointing is asked for.

    `meta["recompute"]` is torch's tag for checkpointed regions.
    """
    alone = any(readers(product, lambda n: n.target in VIEWS) == [node] for product in _products(node))
    return alone and "recompute" not in node.meta and all(user.op != "output" for user in node.users)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = val(a), val(b)
    same_rank = x.dtype == y.dtype and x.dim() == y.dim()
    return same_rank and all(statically_known_true(m == n) for m, n in zip(x.shape, y.shape, strict=True))


def _products(node: fx.Node) -> list[fx.Node]:
    """Return the matmuls whose output `node` adds, directly or as a view."""
    return [n for n in sources(node, lambda n: n.target in VIEWS) if n.target is aten._scaled_mm.default]
