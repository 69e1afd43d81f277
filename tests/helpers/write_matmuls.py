"""Matmuls in many spellings, for the files test_write_matmuls.py of several tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Form = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]


def in_place(name: str) -> Callable[..., Tensor]:
    def function(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = y.clone()
        result: Tensor = getattr(y, name)(a, b, beta=0.5, alpha=2)
        return result + y

    return function


WRITTEN: dict[str, Form] = {
    "addmm_": (in_place("addmm_"), ((16, 24), (16, 32), (32, 24)), 1),
    "addbmm_": (in_place("addbmm_"), ((16, 24), (3, 16, 32), (3, 32, 24)), 1),
    "baddbmm_": (in_place("baddbmm_"), ((3, 16, 24), (3, 16, 32), (3, 32, 24)), 1),
    "multi_dot": (lambda *x: torch.linalg.multi_dot(x), ((16, 32), (32, 48), (48, 8), (8, 32)), 3),
    "multi_dot of vectors": (lambda *x: torch.linalg.multi_dot(x), ((32,), (32, 48), (48,)), 2),
    "chain_matmul": (lambda *x: torch.chain_matmul(*x), ((16, 32), (32, 48), (48, 8)), 2),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 5) + a.matrix_power(-2), ((16, 16),), 4),
    "bilinear": (F.bilinear, ((16, 24), (16, 32), (5, 24, 32), (5,)), 1),
    "bilinear, other side": (F.bilinear, ((2, 8, 32), (2, 8, 24), (5, 32, 24)), 1),
    "lstm_cell": (lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), ((4, 32), *[(4, 16)] * 2, (64, 32), (64, 16)), 2),
    "gru_cell": (torch.gru_cell, ((4, 32), (4, 16), (48, 32), (48, 16), (48,), (48,)), 2),
    "rnn_tanh_cell": (torch.rnn_tanh_cell, ((4, 32), (4, 16), (16, 32), (16, 16), (16,), (16,)), 2),
    "rnn_relu_cell": (torch.rnn_relu_cell, ((4, 32), (4, 16), (16, 32), (16, 16)), 2),
    "a list": (lambda *x: torch.einsum("ij,jk", x), ((16, 32), (32, 24)), 1),
    "numbers": (lambda a, b: torch.einsum(a, [..., 30], b, [30, 2], [2, ...]), ((2, 16, 32), (32, 24)), 1),
    "of aten": (lambda *x: torch.ops.aten.einsum("ij,jk->ik", x), ((16, 32), (32, 24)), 1),
    "three": (lambda *x: torch.einsum("ij,jk,kl->il", *x), ((16, 32), (32, 24), (24, 8)), 2),
    "four": (lambda *x: torch.einsum("...ij,jk,kl,lm", *x), ((2, 16, 32), (32, 24), (24, 8), (8, 16)), 3),
    "biaffine": (lambda *x: torch.einsum("bi,nij,bj->bn", *x), ((16, 32), (6, 32, 24), (16, 24)), 2),
    "a sum": (lambda *x: torch.einsum("...ij,jk->ik", *x), ((3, 16, 32), (32, 24)), 1),
    "a sum of both": (lambda *x: torch.einsum("ijb,cjk->ik", *x), ((16, 32, 3), (2, 32, 24)), 1),
    "a diagonal": (lambda *x: torch.einsum("iij,jkk->ik", *x), ((16, 16, 32), (32, 24, 24)), 1),
    "repeated": (lambda *x: torch.einsum("bij,bjk,kl->bil", *x), ((1, 16, 32), (3, 32, 24), (24, 8)), 2),
}


SPELLED: dict[str, Form] = {
    "__rmatmul__": (lambda a, b: b.__rmatmul__(a), ((16, 32), (32, 24)), 1),
    "imatmul": (lambda a, b: imatmul(a, b), ((16, 32), (32, 24)), 1),
    "inner": (lambda a, b: torch.inner(a, b) + a.inner(b), ((2, 16, 32), (24, 32)), 2),
    "addbmm": (lambda y, a, b: torch.addbmm(y, a, b, beta=0.5, alpha=2), ((16, 24), (3, 16, 32), (3, 32, 24)), 1),
    "aten.mm": (lambda a, b: torch.ops.aten.mm(a, b) + torch.ops.aten.mm.default(a, b), ((16, 32), (32, 24)), 2),
    "aten.addmm": (lambda y, a, b: torch.ops.aten.addmm(y, a, b, beta=2), ((16, 24), (16, 32), (32, 24)), 1),
    "an unbound method": (lambda a, b: torch.Tensor.mm(a, b), ((16, 32), (32, 24)), 1),
}


FORMS = {**WRITTEN, **SPELLED}


def imatmul(a: Tensor, b: Tensor) -> Tensor:
    a @= b
    return a


def leaves(form: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).div(4).requires_grad_() for shape in FORMS[form][1]]


def total(result: Any) -> Tensor:
    return sum(r.sin().sum() for r in (result if isinstance(result, tuple) else [result]))  # type: ignore[return-value]
