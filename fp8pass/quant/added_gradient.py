"""The op `fp8pass::added_gradient`: compute a weight's gradient, added to the one that earlier microbatches have left.

Autograd adds gradients outside of compiled graphs: it reads and writes `.grad` once more, beside the product. The op
runs in the backward, where autograd tells it which parameter the product goes to. It takes that parameter's `.grad`
away, adds the product to its memory in one matmul, and returns it; autograd finds no `.grad`, and stores what it gets.
So nothing is copied. Only if a second gradient reaches the parameter in the same backward, autograd adds that to a new
tensor.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from fp8pass.base._torch import current_autograd_node, is_shared, will_accumulate

log = logging.getLogger(__name__)

TENSORWISE = 0
"""`torch.nn.functional.ScalingType.TensorWise`, which torch 2.11 lacks: one scale for each operand."""


# needs_exact_strides: Inductor could otherwise change the operands' strides
@torch.library.custom_op("fp8pass::added_gradient", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _added_gradient(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast_accum: bool, position: int, count: int
) -> Tensor:
    """Return f32[N, K]: a: float8[N, M] times b: float8[M, K], scaled, plus `.grad` of the parameter that it is for.

    position, count: of the parameter among the tensors that the graph's forward was called with, and their number.
    """
    held, why = _take(position, count, (a.shape[0], b.shape[1]))
    if held is None:
        _note(why)
        return _product(a, b, scale_a, scale_b, fast_accum)
    if a.device.type == "cuda":
        torch.ops.aten._scaled_addmm_(
            held, a, b, [scale_a], [TENSORWISE], [], [scale_b], [TENSORWISE], [], use_fast_accum=fast_accum
        )
    else:
        held.add_(_product(a, b, scale_a, scale_b, fast_accum))
    return held


@_added_gradient.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast_accum: bool, position: int, count: int) -> Tensor:
    return _product(a, b, scale_a, scale_b, fast_accum)


ADDED_GRADIENT = torch.ops.fp8pass.added_gradient.default


def _product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast_accum: bool) -> Tensor:
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.float32, use_fast_accum=fast_accum)


def _take(position: int, count: int, shape: tuple[int, int]) -> tuple[Tensor | None, str]:
    """Take the gradient away from the parameter that the running autograd node hands its result at `position` to.

    Return an alias of it, to which the product can be added; or None and the reason, "" in a first microbatch.
    """
    node = current_autograd_node()
    if node is None or torch.is_grad_enabled():
        return None, "the backward runs in another way than autograd's engine runs it"
    edges = _edges(node)
    if len(edges) != count:
        return None, f"the running backward has {len(edges)} results, where the forward had {count} tensors"
    accumulates = edges[position]
    if type(accumulates).__name__ != "AccumulateGrad":  # a Function's node may have a `variable` too
        return None, "the weight is not a parameter, but computed outside of the graph"
    p = accumulates.variable
    grad = p.grad
    if grad is None:
        return None, ""
    if why := _why_not(p, grad, shape):
        return None, why
    if not will_accumulate(accumulates):
        return None, "torch.autograd.grad asks for the gradient itself"
    p.grad = None
    return grad.detach(), ""


def _edges(node: Any) -> list[Any]:
    """Return the autograd nodes that a node hands its results to. They are kept on the node, as they never change."""
    edges: list[Any] | None = getattr(node, "fp8pass_edges", None)
    if edges is None:
        edges = node.fp8pass_edges = [edge for edge, _ in node.next_functions]
    return edges


def _why_not(p: Tensor, grad: Tensor, shape: tuple[int, int]) -> str:
    """Return the reason why a product may not be added to the memory of this gradient; "" if it may."""
    if not p.requires_grad:
        return "the weight was frozen after the forward, and autograd drops its gradient"
    if p._backward_hooks or p._post_accumulate_grad_hooks:
        return "a hook reads the gradient of each microbatch"
    if type(grad) is not Tensor or grad.dtype is not torch.float32 or grad.requires_grad:
        return f".grad is a {type(grad).__name__} of {grad.dtype}, and not a plain tensor of float32"
    if grad.shape != shape or not grad.is_contiguous() or grad.data_ptr() % 16:
        return ".grad is not laid out as the product: row by row, from a multiple of 16 bytes on"
    if is_shared(grad):
        return ".grad shares its memory with other tensors, which may be read meanwhile"
    if grad.is_cuda and torch.cuda.current_stream(grad.device) != torch.cuda.default_stream(grad.device):
        return "the backward runs on a stream of its own, and .grad may be written on another one"
    return ""


@functools.cache
def _note(why: str) -> None:
    """Log each reason once."""
    if why:
        log.info("a weight's gradient is added to .grad by a kernel after its matmul: %s", why)
