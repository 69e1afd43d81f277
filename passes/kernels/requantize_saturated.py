"""Quantize by the delayed scale in the kernel that counts what it saturates, and again where that was too much.

before   flag: b8[]    = count > threshold;  scale: f32[] = where(flag, own, delayed)       count and own read x: [R, C]
         x_q: f8[R, C] = quantize(x, scale)                                                  and wait for both
         x_t: f8[C, R] = clone(permute(x_q))                                                 where there is one
after    q: f8[R, C]   = quantize(x, delayed);  t: f8[C, R] = clone(permute(q))
         x_q, x_t      = requantize_if_saturated(x, scale, flag, q, t)                       in place
changes  nothing: where the flag is not set, `scale` is `delayed`; the kernel returns at once then

So x is read once in steps that do not saturate, as without the option. If the quantizing kernel computes x, as the
result of an activation, it also writes x, for the second kernel to read. Only on GPUs, for contiguous tensors of known
sizes; others are quantized after their amax is known, as under dynamic scaling.

Runs on the graphs of forward and backward, after the partitioner. FuseMatmuls, which runs before, quantizes no result
by such a scale, for the scale depends on the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import torch
from torch import fx

from fp8pass import hardware
from fp8pass.base._torch import call_of_kernel, triton_kernel_wrapper_functional
from fp8pass.graph.builder import Builder, erase_unused, val
from fp8pass.graph.pass_base import KernelsContext
from fp8pass.passes.common.gpu import gpu_of
from fp8pass.passes.common.patterns import RESHAPES, as_node, aten, first, sources
from fp8pass.passes.common.transposed_copies import saturation_flag
from fp8pass.passes.kernels import requantize_kernel
from fp8pass.quant.kernel_ops import QUANTIZE

PROGRAMS = 4
"""Programs for each multiprocessor, which loop over tiles: those that find the flag unset are launched all the same."""


def match(x_q: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the flag and the delayed scale of a quantize whose scale is chosen by saturation; None of any other."""
    if (flag := saturation_flag(x_q)) is None:
        return None
    delayed, x = as_node(as_node(x_q.args[1]).args[2]), first(x_q)
    # while a tensor has no history, its delayed scale is computed from the tensor itself
    return None if x in sources(delayed, lambda n: n is not x) else (flag, delayed)


def check(x_q: fx.Node) -> bool:
    """Check that the tensor is on a GPU, contiguous, and of known sizes."""
    x = val(first(x_q))
    device = hardware.pretended_device or x.device
    is_static = all(isinstance(size, int) for size in x.shape)
    return device.type == "cuda" and is_static and x.is_contiguous() and x.numel() > 0 and val(x_q).is_contiguous()


class RequantizeSaturated:
    """Rewrites the quantizes of one graph."""

    name = "requantize_saturated"

    def run(self, graph: fx.Graph, context: KernelsContext) -> int:
        """Rewrite every match that passes `check`; return their number."""
        matches = [(n, m) for n in graph.nodes if (m := match(n)) is not None and check(n)]
        if not matches:
            return 0
        build = context.builder(graph, self.name)
        for x_q, (flag, delayed) in matches:
            _rewrite(build, x_q, flag, delayed)
        erase_unused(graph)
        return len(matches)


def _rewrite(build: Builder, x_q: fx.Node, flag: fx.Node, delayed: fx.Node) -> None:
    x, scale, dtype = first(x_q), as_node(x_q.args[1]), val(x_q).dtype
    rows, columns = val(x).numel() // val(x).shape[-1], val(x).shape[-1]
    copies = list(_transposed(x_q, rows, columns))
    # after `x_q`, so that the scale, which `x_q` reads, is computed already
    at = x_q.next
    q = build.emit(at, QUANTIZE, x, delayed, dtype)
    written = {"out0": q}
    if copies:
        turned = build.emit(at, aten.permute.default, build.emit(at, aten.reshape.default, q, [rows, columns]), [1, 0])
        written["out1"] = build.emit(at, aten.clone.default, turned, memory_format=torch.contiguous_format)
    programs = min(PROGRAMS * gpu_of(val(x).device).multiprocessors, math.ceil(rows / 64) * math.ceil(columns / 64))
    kernel = requantize_kernel.kernel_of(requantize_kernel.Requantize(rows, columns, dtype, bool(copies), programs))
    call = call_of_kernel(kernel, [programs], {"x": x, "scale": scale, "flag": flag, **written}, list(written))
    result = build.emit(at, triton_kernel_wrapper_functional, **call)
    for name, old in zip(written, ([x_q], copies), strict=False):
        made = build.emit(at, operator.getitem, result, name)
        for node in old:
            node.replace_all_uses_with(made)


def _transposed(x_q: fx.Node, rows: int, columns: int) -> Iterator[fx.Node]:
    """Yield the transposed copies [columns, rows] of a quantized tensor."""
    views, todo = [x_q], [x_q]
    while todo:
        todo = [u for n in todo for u in n.users if u.target in RESHAPES]
        views += todo
    for view in views:
        for turned in view.users:
            if turned.target is aten.permute.default and turned.args[1] == [1, 0]:
                for copy in turned.users:
                    if copy.target is aten.clone.default and val(copy).shape == (columns, rows):
                        yield copy
