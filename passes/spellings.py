"""The torch spellings of a matmul in Dynamo's graph: where their operands are, and what sizes they come down to."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass.rewrite import Reject

Where = tuple[int, str]
"""Position and keyword of an argument."""


@dataclass(frozen=True)
class Spelling:
    """Where the two operands are; a third one that is added, and the product without it."""

    name: str
    a: Where = (0, "input")
    b: Where = (1, "other")
    bias: Where | None = None
    product: Callable[..., Any] | None = None


LINEAR = Spelling("linear", b=(1, "weight"), bias=(2, "bias"), product=F.linear)
MATMUL = Spelling("matmul")
MM = Spelling("mm", b=(1, "mat2"))
BMM = Spelling("bmm", b=(1, "mat2"))
ADDMM = Spelling("addmm", a=(1, "mat1"), b=(2, "mat2"), bias=(0, "input"), product=torch.mm)
BADDBMM = Spelling("baddbmm", a=(1, "batch1"), b=(2, "batch2"), bias=(0, "input"), product=torch.bmm)
EINSUM = Spelling("einsum", a=(1, ""), b=(2, ""))
TENSORDOT = Spelling("tensordot", a=(0, "a"), b=(1, "b"))

_aten = torch.ops.aten
_FUNCTIONS: dict[Any, Spelling] = {
    F.linear: LINEAR,
    torch._C._nn.linear: LINEAR,  # what F.linear is on some versions
    _aten.linear.default: LINEAR,  # from the inline pass
    torch.matmul: MATMUL,
    torch.linalg.matmul: MATMUL,
    operator.matmul: MATMUL,
    _aten.matmul.default: MATMUL,
    torch.mm: MM,
    torch.bmm: BMM,
    _aten.bmm.default: BMM,
    torch.addmm: ADDMM,
    torch.baddbmm: BADDBMM,
    _aten.baddbmm.default: BADDBMM,
    torch.einsum: EINSUM,
    torch.tensordot: TENSORDOT,
}
_METHODS = {"matmul": MATMUL, "__matmul__": MATMUL, "mm": MM, "bmm": BMM, "addmm": ADDMM, "baddbmm": BADDBMM}


def spelling_of(node: fx.Node) -> Spelling | None:
    """How the node spells a matmul; None if it is something else."""
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def argument(node: fx.Node, where: Where | None) -> Any:
    """The argument of a call by position or keyword; None if it is not given."""
    if where is None:
        return None
    index, keyword = where
    return node.args[index] if index < len(node.args) else node.kwargs.get(keyword)


@dataclass(frozen=True)
class Sizes:
    """`batches` products of [M, K] by [K, N]. Ints or SymInts."""

    batches: Any
    m: Any
    k: Any
    n: Any


def sizes_of(spelling: Spelling, node: fx.Node, a: Tensor, b: Tensor) -> Sizes:
    """The sizes of the 2-D products that the call comes down to. Raises Reject if it can't be told."""
    if spelling is EINSUM:
        return _einsum_sizes(str(node.args[0]), a, b)
    if spelling is TENSORDOT:
        return _tensordot_sizes(argument(node, (2, "dims")), a, b)
    if spelling is LINEAR:
        return Sizes(1, math.prod(a.shape[:-1]), a.shape[-1], b.shape[0])
    *batch_a, m, k = a.shape
    *batch_b, _, n = b.shape
    if not batch_b:
        return Sizes(1, math.prod(batch_a) * m, k, n)
    if not batch_a:
        return Sizes(1, m, k, math.prod(batch_b) * n)
    batch = torch.broadcast_shapes(batch_a, batch_b)  # type: ignore[no-untyped-call]
    return Sizes(math.prod(batch), m, k, n)


def _einsum_sizes(equation: str, a: Tensor, b: Tensor) -> Sizes:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    left, right = (_letters(t, x.dim()) for t, x in zip(inputs.split(","), (a, b), strict=True))
    if not arrow:  # torch's rule: dimensions of the ellipsis, then the letters that appear once
        output = "..." + "".join(sorted(c for c in set(left + right) if (left + right).count(c) == 1))
    out = {*output.replace("...", ""), *(c for c in (*left, *right) if len(c) > 1 and "..." in output)}
    size = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    both = set(left) & set(right)

    def product(letters: set[str]) -> Any:
        return math.prod(size[c] for c in sorted(letters))

    if not both - out:
        raise Reject("form", f"einsum {equation!r} contracts nothing; it is no matmul")
    if len(set(left)) < len(left) or len(set(right)) < len(right) or not set(left) ^ set(right) <= out:
        raise Reject(
            "form", f"einsum {equation!r} takes a diagonal or a sum before it multiplies; do that first, by itself"
        )
    return Sizes(
        product(both & out), product((set(left) - both) & out), product(both - out), product(set(right) - both)
    )


def _letters(term: str, dims: int) -> list[str]:
    """One name per dimension; those of an ellipsis are counted from the right, as broadcasting does."""
    head, dots, tail = term.partition("...")
    if not dots:
        return list(term)
    return [*head, *(f"...{i}" for i in reversed(range(dims - len(head) - len(tail)))), *tail]


def _tensordot_sizes(dims: Any, a: Tensor, b: Tensor) -> Sizes:
    dims = 2 if dims is None else dims
    contracted = list(range(a.dim() - dims, a.dim())) if isinstance(dims, int) else list(dims[0])
    k = math.prod(a.shape[d] for d in contracted)
    if not isinstance(k, int) or k == 0:
        raise Reject("form", f"tensordot contracts {k} elements")
    return Sizes(1, a.numel() // k, k, b.numel() // k)


def mutates(node: fx.Node) -> bool:
    """Whether the call may write into one of its inputs."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if getattr(node.target, "__module__", "") == "_operator":
        return name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__") and name not in _PURE)
    return node.kwargs.get("out") is not None or _inplace_argument(node)


_PURE = {"index", "inv", "invert"}


def _inplace_argument(node: fx.Node) -> bool:
    """`inplace=True`, by keyword or by position."""
    if any(a is True for a in node.args) and inspect.isroutine(node.target):
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        except (
            TypeError,
            ValueError,
        ):  # a builtin without a signature: take it that a True among its arguments is this
            return True
        return bound.arguments.get("inplace") is True
    return node.kwargs.get("inplace") is True
