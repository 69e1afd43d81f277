"""Expand ops on lists of tensors whose scalar may change between calls into one op for each tensor.

before   torch._foreach_addcdiv_([p_0, p_1], [m_0, m_1], [d_0, d_1], lr: SymFloat)
after    p_0.addcdiv_(m_0, d_0, value=lr); p_1.addcdiv_(m_1, d_1, value=lr)
changes  nothing

In ops on lists, torch compiles a learning rate as a constant, and compiles again for each value.
"""

from __future__ import annotations

from torch import fx

from fp8pass.passes.common.foreach import expand_symbolic
from fp8pass.passes.update.context import UpdateContext


class ExpandForeach:
    """The pass over Dynamo's graph of an update."""

    name = "expand_foreach"

    def run(self, graph: fx.Graph, context: UpdateContext) -> int:
        """Expand every op on lists that has a symbolic number among its arguments; return how many were expanded."""
        return expand_symbolic(graph)
