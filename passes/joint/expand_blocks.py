"""Expand dequantizes by blocks or groups that did not become part of a scaled matmul into ATen ops.

before   x: bf16[R, C] = dequantize_blocks(x_q: f8e4m3fn[R, C], scale_inv: f32[R, C/128], bf16)
after    x: bf16[R, C] = view(to(to(view(x_q, [R, 1, C/128, 128]), f32) * view(scale_inv, [R, 1, C/128, 1]), bf16),
                              [R, C])
and likewise `rows_apart`, the row indices that move groups of rows apart
changes  nothing: this is the op's own formula, which Inductor can fuse
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from fp8pass.base._torch import FORCE_STRIDE_ORDER
from fp8pass.graph.builder import Builder, is_tensor
from fp8pass.graph.pass_base import JointContext
from fp8pass.quant.grouped import DEQUANTIZE_GROUPS, ROWS_APART, dequantized_groups, rows_apart_formula
from fp8pass.quant.ops import DEQUANTIZE_BLOCKS, dequantized_blocks

_FORMULAS: dict[object, Callable[..., Tensor]] = {
    DEQUANTIZE_BLOCKS: dequantized_blocks,
    DEQUANTIZE_GROUPS: dequantized_groups,
    ROWS_APART: rows_apart_formula,
}


class ExpandBlocks:
    """The pass. Expands each op independently of the others."""

    name = "expand_blocks"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Expand every such op; return how many there were."""
        nodes = [n for n in graph.nodes if n.target in _FORMULAS]
        for node in nodes:
            _expand(context.builder(graph, self.name), node)
        return len(nodes)


def _expand(build: Builder, node: fx.Node) -> None:
    inputs = list(filter(is_tensor, node.all_input_nodes))

    def formula(*tensors: Tensor) -> Tensor:
        tensor_of = dict(zip(inputs, tensors, strict=True))
        # a size that varies is its symbol, of which `inline` makes nodes
        return _FORMULAS[node.target](
            *fx.map_arg(node.args, lambda n: tensor_of[n] if n in tensor_of else n.meta["val"])
        )

    (result,) = build.inline(node, formula, *inputs)
    if node.target is ROWS_APART:  # materialize: Inductor would recompute the indices for each element that it gathers
        result = build.emit(node, FORCE_STRIDE_ORDER, result, [1])
    node.replace_all_uses_with(result)
    build.graph.erase_node(node)
