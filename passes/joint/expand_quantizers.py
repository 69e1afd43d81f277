"""Write the ATen ops of quantizers, for which AOTAutograd has traced one op each.

before   x_, new = fp8pass_quantizer(Delayed(slot=3), x: bf16[M, K], scales: f32[T], amax: f32[F])
after    scale = scales[3];  amax_x = float(amax(amax(abs(x), -1)))
         x_q: f8e4m3fn[M, K] = to(clamp(float(x) * scale, -448, 448))
         x_ = to(float(x_q) * where(amax_x < inf, 1 / scale, nan))
         new = fp8pass.record(amax, amax_x, 3, ...)
changes  nothing: these are the quantizer's own ops, as AOTAutograd would have traced them
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from fp8pass.base._torch import OpOverload
from fp8pass.base.node_meta import MADE_BY
from fp8pass.graph.builder import Builder, laid_out_alike, val
from fp8pass.graph.pass_base import JointContext
from fp8pass.quant.one_op import QUANTIZER, Elementwise
from fp8pass.quant.ops import RECORD, Delayed


class ExpandQuantizers:
    """The pass. Expands each quantizer independently of the others."""

    name = "expand_quantizers"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Expand every quantizer; return how many there were."""
        nodes = graph.find_nodes(op="call_function", target=QUANTIZER)
        if nodes:
            build = context.builder(graph, self.name)
            for node in nodes:
                _expand(build, node)
        return len(nodes)


def _expand(build: Builder, node: fx.Node) -> None:
    before, items = node.prev, list(node.users)
    quantizer, *inputs = cast(tuple[Any, ...], node.args)
    results = _results(build, node, quantizer, *inputs)
    while (before := before.next) is not node:  # as if AOTAutograd had traced it
        _inherit(before, node)
    for item in items:
        result = results[cast(int, item.args[1])]
        assert laid_out_alike(val(result), val(item)), (node, val(result), val(item))
        item.replace_all_uses_with(result)
        build.graph.erase_node(item)
    build.graph.erase_node(node)


def _results(build: Builder, node: fx.Node, quantizer: Elementwise, *inputs: fx.Node) -> list[fx.Node]:
    """Insert the ops of a quantizer; return the nodes of its results. Only the first of a kind is traced."""
    if not isinstance(quantizer, Delayed):
        return build.inline(node, quantizer.results, *inputs, key=quantizer)
    x, scales, amax = inputs
    scale = build.emit(node, torch.ops.aten.select.int, scales, 0, quantizer.slot)
    of_no_slot = replace(quantizer, slot=0, index=0)
    x_, new = build.inline(node, of_no_slot.by_scale, x, scale, key=of_no_slot)
    if not quantizer.record:
        return [x_]
    return [x_, build.emit(node, RECORD, amax, new, quantizer.index, quantizer.recipe.on_nonfinite)]


def _inherit(new: fx.Node, node: fx.Node) -> None:
    del new.meta[MADE_BY]
    if isinstance(new.target, OpOverload):
        new.meta["original_aten"] = new.target
    for key, value in node.meta.items():
        new.meta.setdefault(key, value)
