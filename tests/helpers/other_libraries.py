"""Models with ops that another library runs, and the strides that generated code passes to these ops.

`strides_of` runs in the process of pretend_gpu.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8pass.base._torch import COMPOSITE
from fp8pass.inspect.fake_cuda import FakeCuda


class Attention(nn.Module):
    """Attention between linear layers.

    heads_first: q and k lie in memory as [batch, heads, positions, channels], as a concatenation leaves them; else with
    positions before heads, as in transformers' layers.
    """

    def __init__(self, heads_first: bool, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads_first, self.size = heads_first, width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, positions, width] to the same shape."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (torch.cat(t.chunk(2, -1)[::-1], -1) if self.heads_first else t * 1.5 for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o(attended.transpose(1, 2).flatten(2))
        return result


class Convolutions(nn.Module):
    """Two convolutions in high precision, each with an activation, and one that runs in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(16, 64, 3), nn.Conv2d(64, 128, 3), nn.Conv2d(128, 256, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, 16, height, width] to [batch, 256, height - 4, width - 4]."""
        result: Tensor = self.last(F.gelu(self.second(F.gelu(self.first(x)))))
        return result


@torch.library.custom_op("fp8pass_tests::softened", mutates_args=())
def softened(x: Tensor) -> Tensor:
    """Compute a softmax, as a library does that has its own kernels for it."""
    return x.softmax(-1)


@softened.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fp8pass_tests::softened_backward", mutates_args=())
def softened_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the input, from that of the result and the result."""
    return y * (grad - (grad * y).sum(-1, keepdim=True))


@softened_backward.register_fake
def _(grad: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(y)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


softened.register_autograd(lambda ctx, grad: softened_backward(grad, *ctx.saved_tensors), setup_context=_keep)


class Custom(nn.Module):
    """A custom op whose backward reads its result, between a linear layer, an activation, and a linear layer."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, positions, width] to the same shape."""
        y = F.gelu(self.first(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        result: Tensor = self.last(softened(y).transpose(1, 2).flatten(2))
        return result


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, **named: Any) -> Tensor:
    """Decompose `scaled_dot_product_attention` to cuDNN's kernel, as a GPU may."""
    aten, scale = torch.ops.aten, named.get("scale")
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, dropout, causal, False, scale=scale)[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def cudnn_attention() -> Iterator[None]:
    """Let graphs that are captured within the context have cuDNN's attention."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    with mock.patch.dict(op.py_kernels, {COMPOSITE: _cudnn}):
        op._dispatch_cache.clear()
        yield
    op._dispatch_cache.clear()


LIBRARIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, str]]] = {
    "flash": (lambda: Attention(True), (2, 128, 256), ("aten._scaled_dot_product_flash_attention", "_backward")),
    "flash, positions first": (
        lambda: Attention(False), (2, 128, 256), ("aten._scaled_dot_product_flash_attention", "_backward"),
    ),
    "cudnn": (lambda: Attention(True), (2, 128, 256), ("aten._scaled_dot_product_cudnn_attention", "_backward")),
    "convolution": (Convolutions, (2, 16, 20, 20), ("convolution", "_backward")),
    "custom op": (Custom, (2, 128, 256), ("fp8pass_tests.softened", "_backward")),
}  # fmt: skip
"""By name: a factory of a model, the shape of its input, and the name of the op, with what its backward's adds to it."""


def strides_of(gpu: FakeCuda, name: str) -> dict[str, Any]:
    """Return the strides that the op's calls have in generated code with `save_fp8`; see `_calls`.

    With "plain", those without it, of an op whose backward reads nothing in FP8.
    """
    from tests.helpers.pretend_gpu import generated

    factory, shape, (op, suffix) = LIBRARIES[name]
    found = {}
    for way in ("saved",) if "attention" in op else ("plain", "saved"):
        torch.compiler.reset()
        torch.manual_seed(0)
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        with cudnn_attention() if name == "cudnn" else contextlib.nullcontext():
            forward, backward = generated(
                gpu, factory().bfloat16(), x, min_speedup=0, target="sm_90", save_fp8=way == "saved"
            )
        found[way] = {"forward": _calls(forward, op), "backward": _calls(backward, op + suffix)}
    return found


def _calls(code: str, op: str) -> list[dict[str, Any]]:
    """Return the calls of an op in generated code: strides of each tensor that it reads, and of its first result."""
    from tests.helpers.pretend_gpu import arguments, strides_in

    before, *calls = re.split(rf"(?:extern_kernels|torch\.ops(?:\.aten)?)\.{re.escape(op)}(?:\.default)?\((?!')", code)
    found = []
    for call in calls:
        tensors = [a for a in arguments(call) if re.match(r"reinterpret_tensor|[a-z]\w*$", a)]
        reads = [strides_in(a, before, code) or _asserted(a, before) for a in tensors]
        found.append({"reads": reads, "makes": _asserted(r"\w+", call)})
        before += call
    return found


def _asserted(name: str, code: str) -> list[int] | None:
    """Return the strides that the code asserts of a tensor, which an op has made; None without an assertion."""
    said = re.search(rf"assert_(?:size_stride|tensor_metadata)\({name}, \([^)]*\), \(([^)]*)\)", code)
    return [int(stride) for stride in said[1].split(",") if stride.strip()] if said else None
