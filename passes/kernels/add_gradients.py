"""Let the matmul of a weight's gradient add to the gradient that earlier microbatches have left in `.grad`.

before   g: bf16[N, K] = _scaled_mm(a: e5m2[N, M], b: e4m3[M, K], s_a, s_b);  return convert(g, f32)
after    return fp8pass.added_gradient(a, b, s_a, s_b, position of the weight)
changes  the product is not rounded to bf16 before it is added

Autograd adds the result to `.grad`: it reads both, and writes one. The op adds in the matmul, if there is something to
add to when it runs, and nothing else reads the gradient of one microbatch: see `fp8pass/quant/added_gradient.py`.
Weights that share a matmul get one each, of their rows.

Runs on the graphs of backwards, within `fp8pass.accumulate`, and in training steps that loop over microbatches.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8pass.base.node_meta import GEMM
from fp8pass.graph.builder import Builder, erase_unused, is_tensor, val
from fp8pass.graph.pass_base import GradientOf, KernelsContext
from fp8pass.passes.common.summed_products import SummedProduct, check, is_row_major, summed_product
from fp8pass.quant.added_gradient import ADDED_GRADIENT

ADDS = "its kernel adds to the gradient of earlier microbatches"


class AddGradients:
    """Rewrites the matmuls of one backward."""

    name = "add_gradients"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite all matmuls that may add; say why others may not. Return the number of gradients."""
        if not any(context.gradients):
            return 0
        build, added = context.builder(graph, self.name), 0
        for matmul, found in match(graph, context).items():
            products = [product for product, _ in found]
            why = check(products, graph.output_node(), val(products[0].nodes[-1]).dtype)
            note = f"its product is added to .grad by a kernel after it: {why}" if why else ADDS
            context.fused.setdefault(matmul.meta.get(GEMM, ""), note)
            for product, of in () if why else found:
                build.replace(product.nodes[-1], _added(build, product, of))
                added += 1
        if added:
            erase_unused(graph)
        return added


Found = list[tuple[SummedProduct, GradientOf]]


def match(graph: fx.Graph, context: KernelsContext) -> dict[fx.Node, Found]:
    """Return the FP8 matmuls whose product, or rows of it, are gradients of weights, and of which ones."""
    found: dict[fx.Node, Found] = {}
    results: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    # the results of the forward, which come first, are not among those of the backward
    for result, of in zip(reversed(results), reversed(context.gradients), strict=False):
        if of is None or results.count(result) > 1 or not is_tensor(result) or not is_row_major(val(result)):
            continue
        product = summed_product(result)
        if product is not None and product.matmul.meta.get(GEMM, "") in context.of_weights:
            found.setdefault(product.matmul, []).append((product, of))
    return found


def _added(build: Builder, product: SummedProduct, of: GradientOf) -> fx.Node:
    return build.emit(product.matmul, ADDED_GRADIENT, *product.operands(build), of.position, of.count)
