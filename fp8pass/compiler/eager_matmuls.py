"""Find the matrices that an ATen op multiplies when it runs: those of a matmul, or of a recurrent layer's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8pass.base._torch import OpOverload

aten = torch.ops.aten
_FACTORS = {
    aten.mm: 0,
    aten.bmm: 0,
    aten._grouped_mm: 0,
    aten.addmm: 1,
    aten.addmm_: 1,
    aten._addmm_activation: 1,
    aten.baddbmm: 1,
    aten.baddbmm_: 1,
    aten.addbmm: 1,
    aten.addbmm_: 1,
}
"""{op: position of the first factor}. Ops on vectors are left out: in graphs they are not matmuls either."""


@dataclass(frozen=True)
class RunProduct:
    """`batches` products of [m, k] by [k, n].

    a, b: the factors, or the tensors that they are computed from. dtypes: of the two factors and the result.
    by_columns: for each factor True if it is column-major, as the transposed weight of a layer is; autograd then
    computes its gradient transposed. computed: True if the op computes the first factor from its inputs.
    """

    a: Tensor
    b: Tensor
    batches: Any
    m: Any
    k: Any
    n: Any
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    by_columns: tuple[bool, bool] = (False, False)
    computed: bool = False


def is_recurrent(func: OpOverload) -> bool:
    """Return whether an op is the kernel of a recurrent layer."""
    return func.overloadpacket in (aten.mkldnn_rnn_layer, aten._cudnn_rnn)


def products_of(func: OpOverload, args: Sequence[Any], result: Any) -> list[RunProduct]:
    """Return the products of a call of an ATen op; none for an op that is not a matmul, and for sparse matrices."""
    packet = func.overloadpacket
    if packet in _FACTORS:
        first = _FACTORS[packet]
        a, b = args[first], args[first + 1]
        return [_product(a, b, result)] if a.layout is b.layout is torch.strided else []
    if packet is aten.mkldnn_rnn_layer:
        # input, weight0, weight1, hx_, batch_sizes
        return _Recurrent(args[0], args[1:3], 2, args[5], 1, bool(args[8])).products(result[0])
    if packet is aten._cudnn_rnn:
        # input, weight, weight_stride0 (tensors per layer and direction), hx, bidirectional, batch_sizes
        return _Recurrent(args[0], args[1], args[2], args[4], 1 + args[13], bool(args[14])).products(result[0])
    return []


def _product(a: Tensor, b: Tensor, result: Tensor) -> RunProduct:
    *batch, m, k = a.shape
    dtypes = a.dtype, b.dtype, result.dtype
    return RunProduct(a, b, batch[0] if batch else 1, m, k, b.shape[-1], dtypes, (_by_columns(a), _by_columns(b)))


def _by_columns(x: Tensor) -> bool:
    """Return whether the backward of a matmul computes the gradient of its factor `x` transposed.

    The condition is that of `mm_mat1_backward` and `mm_mat2_backward` in torch/csrc/autograd/FunctionsManual.cpp; the
    backward of batched matmuls transposes nothing.
    """
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]


@dataclass(frozen=True)
class _Recurrent:
    """A kernel of recurrent layers.

    per_layer: number of weights of a layer in one direction, biases included. packed: True if time steps differ in
    their number of rows; then all time steps count as one product.
    """

    x: Tensor
    weights: Sequence[Tensor]
    per_layer: int
    hidden: Tensor
    directions: int
    packed: bool

    def products(self, result: Tensor) -> list[RunProduct]:
        """Return a product of all time steps with each layer's first weight, and one per time step with its others."""
        rows, of_step = self.x.numel() // self.x.shape[-1], self.hidden.shape[-2]
        products = []
        for i in range(0, len(self.weights), self.per_layer):
            matrices = [w for w in self.weights[i : i + self.per_layer] if w.dim() == 2]  # the others are biases
            for j, w in enumerate(matrices):
                # The first weight multiplies the input of all time steps at once; others multiply the hidden state,
                # step by step.
                batches, m = (rows // of_step, of_step) if j and not self.packed else (1, rows)
                computed = j > 0 or i >= self.per_layer * self.directions  # hidden states, and inputs of later layers
                dtypes = self.x.dtype, w.dtype, result.dtype
                products.append(
                    RunProduct(self.x, w, batches, m, w.shape[1], w.shape[0], dtypes, (False, True), computed)
                )
        return products
