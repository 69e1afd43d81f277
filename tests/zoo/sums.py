"""Compute sums independently of their order, so that graphs with different layouts of operands have the same bits."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fp8pass.compiler import eager
from fp8pass.quant.grouped import SCALED_GROUPED_MM_ON_CPU

aten = torch.ops.aten
SUMMING = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.sum, aten.mean, aten.var_mean, aten.convolution,
    aten.convolution_backward, aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm,
    aten.native_group_norm_backward, aten._softmax, aten._softmax_backward_data, aten._log_softmax,
    aten._log_softmax_backward_data, aten.cumsum, aten.embedding_dense_backward,
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
}  # fmt: skip
"""The ops whose results depend on the memory layout of their operands."""


class ExactSums(TorchDispatchMode):
    """Computes sums of float32 in float64, and rounds them once, so that the order does not matter.

    The same holds for a sum of sums, as the column sums of tiles are.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.sums = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op; if it sums, on operands in float64."""
        kwargs = kwargs or {}
        if func in EXACT:
            return EXACT[func](*args, **kwargs)
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if getattr(func, "overloadpacket", None) not in SUMMING or all(_wide(x) is x for x in tensors):
            return func(*args, **kwargs)
        given, named = torch.utils._pytree.tree_map_only(Tensor, _wide, (args, kwargs))
        if named.get("dtype") == torch.float32:
            named["dtype"] = torch.float64
        if func.overloadpacket is aten.sum:
            wide = func(self.sums.get(args[0], given[0]), *given[1:], **named)
            self.sums[rounded := _narrow(wide)] = wide
            return rounded
        return torch.utils._pytree.tree_map_only(Tensor, _narrow, func(*given, **named))


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.dtype == torch.float32 else x


def _narrow(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply operands that are dequantized in float32, as torch does on a CPU."""
    product = (a.float() * scale_a).double() @ (b.float() * scale_b).double()
    return (product if bias is None else product + bias).to(out_dtype or torch.float32)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply group by group: rows [M, K] by [G, K, N]; or [C, R] by [R, D], summing over each group's part of R."""
    assert offs is not None and bias is None
    wide_a, wide_b, starts = a.double(), b.double(), [0, *offs.tolist()]
    groups = list(enumerate(itertools.pairwise(starts)))
    if b.dim() == 2:
        return torch.stack([wide_a[:, i:j] @ wide_b[i:j] for _, (i, j) in groups]).to(out_dtype or a.dtype)
    y = torch.cat([wide_a[i:j] @ wide_b[g] for g, (i, j) in groups])
    return F.pad(y, (0, 0, 0, len(a) - len(y))).to(out_dtype or a.dtype)


def _scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply in groups or in batches. Dequantizing is exact, because the scales are powers of two."""
    a, b = a.double(), b.double()
    if offs is None:
        return ((a * scale_a.unsqueeze(-1)) @ (b * scale_b.unsqueeze(-2))).to(dtype)
    if b.dim() == 3:
        return _grouped_mm(a * scale_a.unsqueeze(1), b * scale_b.unsqueeze(1), offs, out_dtype=dtype)
    group = torch.bucketize(torch.arange(a.shape[1]), offs, right=True).clamp(max=len(offs) - 1)
    of_a, of_b = scale_a.view(len(offs), -1)[group], scale_b.view(len(offs), -1)[group]
    return _grouped_mm(a * of_a.t(), b * of_b, offs, out_dtype=dtype)


EXACT: dict[Any, Callable[..., Tensor]] = {
    aten._scaled_mm.default: _scaled_mm,
    aten._grouped_mm.default: _grouped_mm,
    SCALED_GROUPED_MM_ON_CPU: _scaled_grouped_mm,
}


_asked: list[bool] = []


@contextlib.contextmanager
def exact_sums() -> Iterator[None]:
    """Within it, graphs that were lowered within `exactly_if_asked` compute exact sums."""
    _asked.append(True)
    try:
        yield
    finally:
        _asked.pop()


@contextlib.contextmanager
def exactly_if_asked() -> Iterator[None]:
    """Within it, op-by-op lowering makes graphs that compute exact sums whenever they run within `exact_sums`."""
    plain = eager.op_by_op

    def op_by_op(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
        run = plain(module)

        def boxed(args: list[Any]) -> Any:
            with ExactSums() if _asked else contextlib.nullcontext():
                return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    with mock.patch("fp8pass.compiler.eager.op_by_op", op_by_op):
        yield
