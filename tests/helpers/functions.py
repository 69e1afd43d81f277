"""Models with matmuls inside `torch.autograd.Function`s, in the shapes that other libraries write them in."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearFunction(torch.autograd.Function):
    """A linear layer by hand, as Megatron-LM's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        y = torch.matmul(x, w.t())
        return y if b is None else y + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        rows = g.flatten(0, -2)
        grad_b = rows.sum(0) if ctx.needs_input_grad[2] else None
        return g.matmul(w), rows.t().matmul(x.flatten(0, -2)), grad_b


class ProductFunction(torch.autograd.Function):
    """The forward of a layer by hand, for Functions with other backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()


class MainGradFunction(ProductFunction):
    """A linear layer that adds its weight's gradient to `weight.main_grad`."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        w.main_grad.add_(g.t() @ x)
        return g @ w, None


class SignFunction(torch.autograd.Function):
    """A layer that rounds its output to signs, and passes a scaled gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w.t()).sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 3 * (g @ w), 0.5 * (g.t() @ x)


class LoraFunction(torch.autograd.Function):
    """A frozen layer and its adapter, whose backward multiplies by the adapter again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, a: Tensor, b: Tensor, s: float) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.w, ctx.s = w, s
        return x @ w.t() + s * ((x @ a.t()) @ b.t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, a, b = ctx.saved_tensors
        through = ctx.s * (g @ b)
        return g @ ctx.w + through @ a, None, through.t() @ x, ctx.s * (g.t() @ (x @ a.t())), None


class GramFunction(ProductFunction):
    """A layer whose backward multiplies two gradients."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return ((g @ g.t()) @ g) @ w, g.t() @ x


class ChunkedLossFunction(torch.autograd.Function):
    """A head with cross-entropy that computes both gradients in its forward, chunk by chunk, as Liger's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, target: Tensor, chunks: int) -> Tensor:
        grad_x, grad_w, loss = torch.zeros_like(x), torch.zeros_like(w), x.new_zeros(())
        size = x.shape[0] // chunks
        for i in range(chunks):
            rows = slice(i * size, (i + 1) * size)
            p = (x[rows] @ w.t()).softmax(-1)
            loss += -p.gather(1, target[rows].unsqueeze(1)).log().sum() / len(x)
            p.scatter_add_(1, target[rows].unsqueeze(1), -torch.ones_like(p[:, :1]))
            grad = p / len(x)
            grad_x[rows] = grad @ w
            grad_w += torch.mm(grad.t(), x[rows])
        ctx.save_for_backward(grad_x, grad_w)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * g, grad_w * g, None, None


class FunctionLinear(nn.Module):
    """A layer of `LinearFunction`."""

    def __init__(self, k: int, n: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) * 0.1)
        self.bias = nn.Parameter(torch.zeros(n)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = LinearFunction.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


class FunctionBlock(nn.Module):
    """An MLP of such layers, with a residual."""

    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.up, self.down = FunctionLinear(width, hidden), FunctionLinear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class WithMainGrad(nn.Module):
    """A layer of `MainGradFunction`, of the input of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(32, 64), nn.Parameter(torch.randn(48, 64) * 0.1)
        self.weight.main_grad = torch.zeros(48, 64)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = MainGradFunction.apply(self.first(x), self.weight)  # type: ignore[no-untyped-call]
        return y


class OfTwo(nn.Module):
    """A layer of a Function of an input and a weight. function: `SignFunction` or `GramFunction`."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight, self.last = function, nn.Parameter(torch.randn(48, 32) * 0.1), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function.apply(x, self.weight))
        return y


class Lora(nn.Module):
    """A layer of `LoraFunction`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(48, 32) * 0.1, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(16, 32) * 0.1), nn.Parameter(torch.randn(48, 16) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = LoraFunction.apply(x, self.w, self.a, self.b, 2.0)  # type: ignore[no-untyped-call]
        return y


class WithLoss(nn.Module):
    """Layers of Functions, and the loss of `ChunkedLossFunction`; the targets follow from the input."""

    def __init__(self, chunks: int = 4, layers: int = 1) -> None:
        super().__init__()
        self.chunks = chunks
        self.layers = nn.Sequential(*(FunctionBlock() for _ in range(layers)))
        self.head = nn.Linear(32, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        target = (x[..., 0].abs() * 40).long() % 96
        hidden = self.layers(x).flatten(0, -2)
        loss: Tensor = ChunkedLossFunction.apply(hidden, self.head.weight, target.flatten(), self.chunks)  # type: ignore[no-untyped-call]
        return loss
