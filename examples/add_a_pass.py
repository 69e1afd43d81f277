"""Write a pass that keeps an FP8 tensor instead of dequantizing it and quantizing it again at the same scale."""

import math

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fp8pass
from fp8pass._torch import select_decomp_table
from fp8pass.graph.builder import val
from fp8pass.graph.pass_base import Context
from fp8pass.graph.refusal import Reject
from fp8pass.graph.verify import verify
from fp8pass.options.config import Config
from fp8pass.passes.common.patterns import CASTS, MULTIPLYING, aten, constant, dtype_name, dtype_of, first
from fp8pass.scaling import E4M3, E5M2, FP8_DTYPES, fp8_max


class Requantize:
    """before   x: f32[...] = convert(x_q: f8e4m3fn[...]) * scale_inv;  y_q: f8e4m3fn[...] = quantize(x, scale)
    after    y_q = x_q
    changes  no bit
    """

    name = "requantize"

    def match(self, y_q: fx.Node) -> tuple[fx.Node, float, float] | None:
        """Return x_q and the two numbers that it is multiplied with; None if `y_q` is something else. (The pattern.)"""
        if y_q.target not in CASTS or dtype_of(y_q) not in FP8_DTYPES:
            return None
        node, limit = first(y_q), fp8_max(dtype_of(y_q))
        for target, bound in (aten.clamp_max.default, limit), (aten.clamp_min.default, -limit):
            if node.target is not target or node.args[1:] != (bound,):
                return None
            node = first(node)
        numbers = []
        for _ in range(2):
            if node.target not in MULTIPLYING or dtype_of(node) != torch.float32:
                return None
            numbers.append(constant(node.args[1]))
            node = first(node)
        if node.target not in CASTS or dtype_of(first(node)) not in FP8_DTYPES or None in numbers:
            return None
        return first(node), numbers[1], numbers[0]

    def check(self, y_q: fx.Node, x_q: fx.Node, scale_inv: float, scale: float) -> None:
        """Raise Reject, with one sentence that has names and numbers, unless the rewrite is exact. (The check.)"""
        old, new = val(x_q), val(y_q)
        if old.dtype != E4M3 or new.dtype != E4M3:  # e5m2 has infinities, which quantizing clamps
            raise Reject(
                "dtype", f"{x_q.name} is {dtype_name(old.dtype)} and {y_q.name} {dtype_name(new.dtype)}, not e4m3"
            )
        if (old.shape, old.stride()) != (new.shape, new.stride()):
            raise Reject("layout", f"{x_q.name} is laid out as {old.stride()}, {y_q.name} as {new.stride()}")
        if scale_inv * scale != 1:
            raise Reject("scale", f"{y_q.name} is {scale_inv:g} * {scale:g} = {scale_inv * scale:g} times {x_q.name}")
        if abs(math.frexp(scale)[0]) != 0.5 or not 2**-100 < abs(scale) < 2**100:
            raise Reject("rounding", f"{x_q.name} is scaled by {scale:g}, not a power of two: its product is rounded")

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Replace each y_q that passes the check, and note each refusal. Without a match, do nothing. (The rewrite.)"""
        applied = 0
        for y_q in list(graph.nodes):
            if (found := self.match(y_q)) is None:
                continue
            try:
                self.check(y_q, *found)
            except Reject as reason:
                context.notes.append(f"{self.name} [{reason.rule}]: {reason}")
                continue
            y_q.replace_all_uses_with(found[0])
            applied += 1
        if applied:
            graph.eliminate_dead_code()
        return applied


def again(scale: float, dtype: torch.dtype):
    """Return a function that dequantizes its argument and quantizes the result again."""
    return lambda x_q: fp8pass.quantize(fp8pass.dequantize(x_q, 1 / scale, torch.float32), scale, dtype)


for scale, dtype in (8.0, E4M3), (3.0, E4M3), (8.0, E5M2):
    x_q = torch.randn(16, 32).to(dtype)
    module = make_fx(again(scale, dtype), decomposition_table=select_decomp_table(), tracing_mode="fake")(x_q)
    context, expected, before = Context(Config(recipe=None)), module(x_q), len(module.graph.nodes)
    applied = Requantize().run(module.graph, context)
    verify(module.graph)
    module.recompile()
    assert torch.equal(module(x_q).view(torch.uint8), expected.view(torch.uint8))  # not a bit differs
    print(f"scale {scale:g}: applied {applied}, nodes {before} -> {len(module.graph.nodes)}", *context.notes)
