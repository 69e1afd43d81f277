"""Let an FP8 matmul add to a tensor that the graph adds its product to, as `weight.main_grad` in Megatron-LM's layers.

before   g: bf16[N, K] = _scaled_mm(a: e5m2[N, M], b: e4m3[M, K], s_a, s_b)
         sum: f32[N, K] = add(main_grad, g);  copy_(main_grad, sum)
after    sum            = _scaled_addmm(main_grad, a, b, [s_a], ..., [s_b], ...);  copy_(main_grad, sum)
changes  the product is not rounded to bf16 before it is added

cuBLASLt reads and writes the sum as it computes the product, which is never stored: Inductor runs the op in place. Only
for tensors in float32 that the graph gets and writes into, and for the sums of several products in them.

Runs on the graphs of forward and backward, on GPUs, from torch 2.15 on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base.node_meta import GEMM
from fp8pass.graph.builder import Builder, erase_unused, is_tensor, laid_out_alike, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.patterns import as_node, aten
from fp8pass.passes.common.summed_products import SummedProduct, check, is_row_major, summed_product
from fp8pass.quant.added_gradient import TENSORWISE

ADDS = "its kernel adds to the tensor that the product is added to"


class AddProducts:
    """Rewrites the sums of one graph."""

    name = "add_products"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite all sums whose product a matmul may add; say why others may not. Return their number."""
        build, added = context.builder(graph, self.name), 0
        for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
            for node, product in match(copy):
                why = check([product], node, val(node).dtype)
                note = f"its product is added by a kernel after it: {why}" if why else ADDS
                context.fused.setdefault(product.matmul.meta.get(GEMM, ""), note)
                if not why:
                    build.replace(node, _added(build, node, product))
                    added += 1
        if added:
            erase_unused(graph)
        return added


def match(copy: fx.Node) -> list[tuple[fx.Node, SummedProduct]]:
    """Return the sums, in their order, that a `copy_` writes into an input that they add to, with what each adds."""
    into, value = map(as_node, copy.args[:2])
    if into.op != "placeholder" or val(into).dtype is not torch.float32 or not is_row_major(val(into)):
        return []
    is_aligned = statically_known_true(val(into).storage_offset() % 4 == 0)  # to 16 bytes, which cuBLASLt asks for
    return (_sums(value, into) or []) if is_aligned else []


def _sums(value: fx.Node, into: fx.Node) -> list[tuple[fx.Node, SummedProduct]] | None:
    """Return the sums from `into` to `value`; None if anything else is between them."""
    if value is into:
        return []
    if value.target is not aten.add.Tensor or value.kwargs or len(value.users) > 1:
        return None
    for summed, term in (value.args, value.args[::-1]):
        alike = all(is_tensor(x) and laid_out_alike(val(x), val(into)) for x in (value, summed, term))
        earlier = _sums(as_node(summed), into) if alike else None
        if earlier is not None and (product := summed_product(as_node(term))) is not None:
            return [*earlier, (value, product)]
    return None


def _added(build: Builder, node: fx.Node, product: SummedProduct) -> fx.Node:
    summed = next(x for x in node.args if x is not product.nodes[-1])
    a, b, scale_a, scale_b, fast_accum = product.operands(build)
    given: Any = summed, a, b, [scale_a], [TENSORWISE], [], [scale_b], [TENSORWISE], []
    return build.emit(node, aten._scaled_addmm.default, *given, use_fast_accum=fast_accum)
