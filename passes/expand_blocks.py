"""Dequantization by blocks that became no scaled matmul becomes the ATen ops that it stands for.

before   x: bf16[R, C] = dequantize_blocks(x_q: f8e4m3fn[R, C], scale_inv: f32[R, C/128], bf16)
after    x: bf16[R, C] = view(to(to(view(x_q, [R, 1, C/128, 128]), f32) * view(scale_inv, [R, 1, C/128, 1]), bf16),
                              [R, C])
changes  nothing: it is the op's own formula, which Inductor can fuse
"""

from __future__ import annotations

from torch import Tensor, fx

from fp8pass.graph import Builder, val
from fp8pass.ops import DEQUANTIZE_BLOCKS, dequantized_blocks
from fp8pass.rewrite import Context


class ExpandBlocks:
    """Op by op."""

    name = "expand_blocks"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Expand every `dequantize_blocks`; returns how many there were."""
        found = [n for n in graph.nodes if n.target is DEQUANTIZE_BLOCKS]
        for node in found:
            _expand(Builder(graph, self.name), node)
        return len(found)


def _expand(build: Builder, node: fx.Node) -> None:
    def formula(x_q: Tensor, scale_inv: Tensor) -> Tensor:
        return dequantized_blocks(x_q, scale_inv, val(node).dtype)

    (result,) = build.inline(node, formula, *node.all_input_nodes)
    node.replace_all_uses_with(result)
    build.graph.erase_node(node)
