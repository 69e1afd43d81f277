"""Split large tensors off an optimizer's `_foreach_` ops, into one op per tensor.

before   updated       = _foreach_addcdiv([p_0: bf16[N, K], p_1: bf16[K]], [m_0, m_1], [d_0, d_1], -0.001)
         x_q           = quantize(updated[0])
after    updated_0     = addcdiv(p_0, m_0, d_0, value=-0.001)
         updated       = _foreach_addcdiv([p_1], [m_1], [d_1], -0.001)
         x_q           = quantize(updated_0)
changes  nothing

Inductor puts all tensors of a `_foreach_` op into one launch, and fuses no op that reduces or transposes with it: the
kernel that quantizes a weight would read it once more. For small tensors one launch is better.

Runs on graphs of updates that quantize, after they are traced to ATen ops.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from fp8pass.base._torch import OpOverload, hint_of
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.foreach import SPLITS
from fp8pass.passes.common.patterns import aten, dtype_of
from fp8pass.passes.kernels.combo_kernels import SMALL_KERNEL_BYTES


def match(node: fx.Node) -> str:
    """Return the name of the op that a `_foreach_` op applies to each tensor; "" for any other node."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return ""
    name = node.target._schema.name.removeprefix("aten::")
    base = name.removeprefix("_foreach_")
    # overload "Tensor" takes one tensor with a number for each tensor of the lists
    odd = base in ("addcdiv", "addcmul") and node.target._overloadname == "Tensor"
    return base if name != base and base in SPLITS and not odd else ""


def large(node: fx.Node) -> list[int]:
    """Return the indices of the large tensors; none if a node reads the whole list of results."""
    if any(u.target is not operator.getitem for u in node.users):
        return []
    lists = [a for a in node.args if isinstance(a, (list, tuple)) and all(map(is_tensor, a))]
    count = len(lists[0])
    # not `nbytes`, which tensors of symbolic sizes lack
    sizes = [max(hint_of(x.numel()) * x.element_size() for a in lists for x in (val(a[i]),)) for i in range(count)]
    return [i for i, size in enumerate(sizes) if size > SMALL_KERNEL_BYTES]


class SplitForeach:
    """Rewrites all `_foreach_` ops of a graph that quantizes."""

    name = "split_foreach"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite every op that has large tensors, if the graph quantizes; return their number."""
        matches = [n for n in graph.nodes if match(n)]
        if not matches or not any(dtype_of(n) in FP8_DTYPES for n in graph.nodes if n.op == "call_function"):
            return 0
        build, applied = context.builder(graph, self.name), 0
        for node in matches:
            if apart := large(node):
                _rewrite(build, node, match(node), apart)
                applied += 1
        return applied


def _rewrite(build: Builder, node: fx.Node, op: str, apart: list[int]) -> None:
    lists = [a for a in node.args if isinstance(a, (list, tuple))]
    together = [i for i in range(len(lists[0])) if i not in apart]
    rest = None
    if together:
        args = [[a[i] for i in together] if isinstance(a, (list, tuple)) else a for a in node.args]
        rest = build.emit(node, node.target, *args, **node.kwargs)
    of_each = {i: _one(build, node, op, i) for i in apart}
    for user in list(node.users):
        i = user.args[1]
        if i in of_each:
            new = of_each[i]  # type: ignore[index]
        else:
            assert rest is not None
            new = build.emit(user, operator.getitem, rest, together.index(i))  # type: ignore[arg-type]
        build.replace(user, new)
    build.graph.erase_node(node)


def _one(build: Builder, node: fx.Node, op: str, i: int) -> fx.Node:
    """Emit the op on the i-th tensor of each list."""
    args = [a[i] if isinstance(a, (list, tuple)) else a for a in node.args]
    tensors = [a for a in args if is_tensor(a)]

    def computed(*given: Tensor) -> Tensor:
        more = iter(given)
        values: list[Any] = [next(more) if is_tensor(a) else a for a in args]
        kwargs = dict(node.kwargs)
        if op in ("addcdiv", "addcmul") and len(values) > 3:  # `value` is positional in `_foreach_` ops only
            kwargs["value"] = values.pop()
        result: Tensor = getattr(aten, op)(*values, **kwargs)
        return result

    (result,) = build.inline(node, computed, *tensors)
    return result
