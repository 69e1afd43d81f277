"""The zoo's samples of torch itself: the modules and operators of its own tests that multiply matrices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from zoo_row import Matmuls

Made = tuple[nn.Module, Mapping[str, Any]]
SAMPLES = 3
"""How many calls of an operator make a model."""
MODULES = """
GRU LSTM Linear LinearCrossEntropyLoss MultiheadAttention RNN Transformer TransformerDecoderLayer TransformerEncoder
TransformerEncoderLayer
"""
"""Those of module_db that multiply matrices: cells do not, whose samples are single vectors."""
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
"""Lists the operators that `multiplying` finds, by the names that op_db has for them."""


def multiplies(call: Callable[[], Any]) -> bool:
    """Return whether a matmul is called by it, or by its backward."""
    with Matmuls() as seen:
        found = [y for y in _tensors(call()) if y.requires_grad]
        if found:
            torch.stack([y.abs().sum().float() for y in found]).sum().backward()
    return seen.number > 0


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def module(name: str) -> Made:
    """Return a module as torch's tests make it, and what they call it with: the first that multiplies matrices."""
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
    """Calls of an operator, whose tensors are the parameters."""

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
        """Return what all calls return."""
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
    """Stands for a parameter among the arguments of a call."""

    def __init__(self, index: int) -> None:
        self.index = index


def operator(name: str) -> Made:
    """Return a model that calls an operator as torch's tests do, in the first ways that multiply matrices."""
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
    """Yield the names of all operators of op_db that multiply matrices: what `OPERATORS` has to be."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if torch.float32 in op.dtypes and op.supports_autograd and len(operator(op.full_name)[0].calls):
            yield op.full_name
