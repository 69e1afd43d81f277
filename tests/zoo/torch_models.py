"""The zoo's samples of torch itself: the modules and operators of torch's own tests that multiply matrices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.row import Matmuls

Made = tuple[nn.Module, Mapping[str, Any]]
SAMPLES = 3
"""The number of calls of an operator in its model, if there are so many."""
MODULES = """
GRU LSTM Linear LinearCrossEntropyLoss MultiheadAttention RNN Transformer TransformerDecoderLayer TransformerEncoder
TransformerEncoderLayer
"""
"""The modules of module_db that multiply matrices. Recurrent cells do not: their samples are single vectors."""
OPERATORS = """
addbmm addmm addmm.decomposed baddbmm bmm cdist cholesky cholesky_inverse cholesky_solve einsum
linalg.cholesky linalg.cholesky_ex linalg.cond linalg.eigh linalg.eigvalsh linalg.householder_product
linalg.inv linalg.inv_ex linalg.lu linalg.lu_factor linalg.lu_factor_ex linalg.lu_solve linalg.matrix_norm
linalg.matrix_power linalg.multi_dot linalg.norm.subgradients_at_zero linalg.pinv linalg.pinv.hermitian
linalg.pinv.singular linalg.qr linalg.solve linalg.solve_ex linalg.solve_triangular linalg.svd linalg.svdvals
linalg.tensorinv lu lu_solve matmul mm nn.functional.linear nn.functional.linear_cross_entropy
nn.functional.linear_cross_entropy.chunked nn.functional.multi_head_attention_forward
nn.functional.scaled_dot_product_attention norm.nuc ormqr pca_lowrank pinverse qr svd svd_lowrank
tensordot triangular_solve __rmatmul__
"""
"""The operators that `multiplying` finds, by their names in op_db."""


def multiplies(call: Callable[[], Any]) -> bool:
    """Return whether a call, or its backward, multiplies matrices."""
    with Matmuls() as seen:
        found = [y for y in _tensors(call()) if y.requires_grad]
        if found:
            torch.stack([y.abs().sum().float() for y in found]).sum().backward()
    return seen.number > 0


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def module(name: str) -> Made:
    """Return the first of the module's samples in torch's tests that multiplies matrices: the module, its arguments."""
    from torch.testing._internal.common_modules import module_db

    (info,) = (m for m in module_db if m.name == f"nn.{name}")
    for sample in info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True):
        made, called = sample.constructor_input, sample.forward_input
        model = info.module_cls(*made.args, **made.kwargs).train()
        inputs = inspect.signature(model.forward).bind(*called.args, **called.kwargs).arguments
        if multiplies(functools.partial(model, **inputs)):
            model.zero_grad()
            return model, inputs
    raise LookupError(f"no sample of nn.{name} multiplies matrices")


class Operator(nn.Module):
    """Calls an operator several times; the parameters are the tensors in these calls that require gradients."""

    def __init__(self, op: Callable[..., Any], calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__()
        self.op = op
        self.tensors = nn.ParameterList()
        self.calls = torch.utils._pytree.tree_map_only(Tensor, self._kept, calls)

    def _kept(self, x: Tensor) -> Any:
        if not x.requires_grad:
            return x
        self.tensors.append(nn.Parameter(x.detach().clone()))
        return _Parameter(len(self.tensors) - 1)

    def forward(self) -> list[Any]:
        """Return the results of all calls."""
        outputs = []
        for args, kwargs in self.calls:
            positional = [self._given(a) for a in args]
            outputs.append(self.op(*positional, **{name: self._given(a) for name, a in kwargs.items()}))
        return outputs

    def _given(self, x: Any) -> Any:
        if isinstance(x, _Parameter):
            return self.tensors[x.index]
        return type(x)(self._given(y) for y in x) if isinstance(x, (list, tuple)) else x


class _Parameter:
    """Replaces a parameter in the arguments of a call."""

    def __init__(self, index: int) -> None:
        self.index = index


def operator(name: str) -> Made:
    """Return a model that calls an operator with the first samples of torch's tests that multiply matrices."""
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (o for o in op_db if o.full_name == name)
    calls = []
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        call = (sample.input, *sample.args), sample.kwargs
        if multiplies(functools.partial(op.op, *call[0], **call[1])):
            calls.append(call)
        if len(calls) == SAMPLES:
            break
    return Operator(op.op, calls), {}


def multiplying() -> Iterator[str]:
    """Yield the names of all operators of op_db that multiply matrices, which `OPERATORS` must list."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if torch.float32 in op.dtypes and op.supports_autograd and len(operator(op.full_name)[0].calls):
            yield op.full_name
