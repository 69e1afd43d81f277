"""The torch functions that spell a matmul in Dynamo's graph: where their operands are, and their 2-D sizes."""

from __future__ import annotations

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8pass.base._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, linear
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.graph.wanted import MatmulSizes
from fp8pass.quant import grouped
from fp8pass.recipes import Kind

BLOCK_ROWS = 16
"""Rows are padded to a multiple of it for scales of blocks. cuBLASLt takes multiples of 4 (vllm-project/vllm#49932:
others end in CUBLAS_STATUS_NOT_SUPPORTED), as each column of the M scales begins at a multiple of 16 bytes; torch
checks no M."""

Where = tuple[int, str]
"""Position and keyword of an argument."""


@dataclass(frozen=True)
class MatmulSignature:
    """The positions of a matmul's arguments in a call.

    a, b: the operands. bias: the tensor that is added. product: the function for the product without the bias. offs:
    where groups of rows end.
    """

    name: str
    a: Where = (0, "input")
    b: Where = (1, "other")
    bias: Where | None = None
    product: Callable[..., Any] | None = None
    offs: Where | None = None


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """Multiply batches and add the products up: one matmul that sums over the batches, too."""
    return torch.einsum("bmk,bkn->mn", a, b)


LINEAR = MatmulSignature("linear", b=(1, "weight"), bias=(2, "bias"), product=F.linear)
MATMUL = MatmulSignature("matmul")
MM = MatmulSignature("mm", b=(1, "mat2"))
BMM = MatmulSignature("bmm", b=(1, "mat2"))
ADDMM = MatmulSignature("addmm", a=(1, "mat1"), b=(2, "mat2"), bias=(0, "input"), product=torch.mm)
BADDBMM = MatmulSignature("baddbmm", a=(1, "batch1"), b=(2, "batch2"), bias=(0, "input"), product=torch.bmm)
ADDBMM = MatmulSignature("addbmm", a=(1, "batch1"), b=(2, "batch2"), bias=(0, "input"), product=_sum_of_products)
INNER = MatmulSignature("inner")
RMATMUL = MatmulSignature("matmul", a=(1, "other"), b=(0, "input"))
# torch.einsum takes its operands by position only
EINSUM = MatmulSignature("einsum", a=(1, ""), b=(2, ""))
TENSORDOT = MatmulSignature("tensordot", a=(0, "a"), b=(1, "b"))
GROUPED_MM = MatmulSignature("_grouped_mm", b=(1, "mat2"), bias=(3, "bias"), offs=(2, "offs"))
GROUPED_FALLBACK = MatmulSignature("_grouped_mm", b=(1, "weight"), product=grouped.in_bfloat16, offs=(2, "offs"))
"""The arguments of the op that transformers' experts call if torch's grouped matmul does not take their type."""

_aten = torch.ops.aten
_FUNCTIONS: dict[Any, MatmulSignature] = {
    F.linear: LINEAR,
    linear: LINEAR,
    _aten.linear: LINEAR,
    torch.matmul: MATMUL,
    torch.linalg.matmul: MATMUL,
    operator.matmul: MATMUL,
    operator.imatmul: MATMUL,  # tensors have no `__imatmul__`: Python assigns the product
    _aten.matmul: MATMUL,
    _aten.linalg_matmul: MATMUL,
    torch.mm: MM,
    _aten.mm: MM,
    torch.bmm: BMM,
    _aten.bmm: BMM,
    torch.addmm: ADDMM,
    _aten.addmm: ADDMM,
    torch.baddbmm: BADDBMM,
    _aten.baddbmm: BADDBMM,
    torch.addbmm: ADDBMM,
    _aten.addbmm: ADDBMM,
    torch.inner: INNER,
    _aten.inner: INNER,
    torch.einsum: EINSUM,
    torch.tensordot: TENSORDOT,
    torch._grouped_mm: GROUPED_MM,
    _aten._grouped_mm: GROUPED_MM,
}
"""Spellings by function. An ATen op packet stands for all its overloads."""
_METHODS = {
    "matmul": MATMUL,
    "__matmul__": MATMUL,
    "__rmatmul__": RMATMUL,
    "mm": MM,
    "bmm": BMM,
    "addmm": ADDMM,
    "baddbmm": BADDBMM,
    "addbmm": ADDBMM,
    "inner": INNER,
}


def signature_of(node: fx.Node) -> MatmulSignature | None:
    """Return how the node spells a matmul; None if it is not a matmul."""
    if node.op == "call_function":
        target = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
        if isinstance(target, OpOverloadPacket) and target._qualified_op_name == grouped.FALLBACK:
            return GROUPED_FALLBACK
        signature = _FUNCTIONS.get(target)
        # an einsum of one operand is a sum or a transpose
        return None if signature is EINSUM and len(node.args) < 3 else signature
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def argument(node: fx.Node, where: Where | None) -> Any:
    """Return an argument of a call by position or keyword; None if it is not given."""
    if where is None:
        return None
    index, keyword = where
    return node.args[index] if index < len(node.args) else node.kwargs.get(keyword)


def set_argument(node: fx.Node, where: Where, value: fx.Node) -> None:
    """Replace the argument that `argument` returns."""
    index, keyword = where
    if index < len(node.args):
        node.update_arg(index, value)
    else:
        node.update_kwarg(keyword, value)


Letters = tuple[str, ...]
BATCH = "batch"
GROUP = "group"
"""The dimension of the second operand's matrices: one for each group of rows of the first operand."""


@dataclass(frozen=True)
class Dims:
    """Letters for the dimensions of the two operands and of the result: equal letters are one dimension.

    A letter in both factors of a product and not in its result is contracted. This holds for the gradients, too: the
    gradient of the first operand contracts the letters that the second operand and the result share and the first
    operand does not have.
    """

    a: Letters
    b: Letters
    out: Letters

    @property
    def has_groups(self) -> bool:
        """True if the rows of the first operand and of the result are in groups."""
        return GROUP in self.b

    def contracted(self, kind: Kind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the dimensions that this product sums over, in each of its two factors.

        The factors are (a, b) for the output, (gradient, b) for grad_input and (a, gradient) for grad_weight.
        """
        x, y, result = {
            "output": (self.a, self.b, self.out),
            "grad_input": (self.out, self.b, self.a),
            "grad_weight": (self.a, self.out, self.b),
        }[kind]
        both = (set(x) & set(y)) - set(result)
        return tuple(i for i, c in enumerate(x) if c in both), tuple(i for i, c in enumerate(y) if c in both)

    def sizes(self, a: Tensor, b: Tensor) -> MatmulSizes:
        """Return the sizes of the 2-D products that the call computes for operands of these shapes.

        For rows in groups, M is the average number of rows of a group, rounded up.
        """
        if self.has_groups:
            (rows, k), (groups, _, n) = a.shape, b.shape
            return MatmulSizes(groups, -(-rows // groups), k, n)
        size = {**dict(zip(self.b, b.shape, strict=True)), **dict(zip(self.a, a.shape, strict=True))}
        in_a, in_b, out = set(self.a), set(self.b), set(self.out)
        of_a, of_b = ({c for c in out & (x - y) if c.startswith(BATCH)} for x, y in ((in_a, in_b), (in_b, in_a)))
        if of_a and of_b:  # both broadcast over each other's batches: one product for every pair
            in_a, in_b = in_a | of_b, in_b | of_a

        def product(letters: set[str]) -> Any:
            return math.prod(size[c] for c in sorted(letters))

        return MatmulSizes(
            product(in_a & in_b & out), product(in_a - in_b), product((in_a & in_b) - out), product(in_b - in_a)
        )


def dims_of(signature: MatmulSignature, node: fx.Node, a: Tensor, b: Tensor) -> Dims:
    """Return letters for the dimensions of the call's operands and result. Raises Reject if they are not known."""
    if signature is EINSUM:
        return _einsum_dims(str(node.args[0]), a, b)
    if signature is TENSORDOT:
        return _tensordot_dims(argument(node, (2, "dims")), a, b)
    if signature.offs is not None and a.dim() + b.dim() < 6:  # of two 3-D tensors, `_grouped_mm` is a bmm
        if (a.dim(), b.dim()) != (2, 3):
            raise Reject(
                "form", f"_grouped_mm of {_shape(a)} by {_shape(b)}; taken are [M, K] by [G, K, N], and batches"
            )
        return Dims(("m", "k"), (GROUP, "k", "n"), ("m", "n"))
    if signature is LINEAR:
        rows = tuple(f"m{i}" for i in range(a.dim() - 1))
        return Dims((*rows, "k"), ("n", "k"), (*rows, "n"))
    if signature is INNER:
        rows, columns = (tuple(f"{letter}{i}" for i in range(x.dim() - 1)) for letter, x in (("m", a), ("n", b)))
        return Dims((*rows, "k"), (*columns, "k"), (*rows, *columns))
    if signature is ADDBMM:
        return Dims(("k0", "m", "k1"), ("k0", "k1", "n"), ("m", "n"))
    in_a, in_b, out = _broadcast(a.shape[:-2], b.shape[:-2])
    return Dims((*in_a, "m", "k"), (*in_b, "k", "n"), (*out, "m", "n"))


def result_type(signature: MatmulSignature, node: fx.Node) -> torch.dtype:
    """Return the dtype of the product."""
    value: Tensor = node.meta["example_value"]
    device = value.device.type
    # autocast leaves this op of transformers as it is, but its `product` multiplies as if autocast included it
    autocasts = signature is GROUPED_FALLBACK and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocasts else value.dtype


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _broadcast(a: Sequence[Any], b: Sequence[Any]) -> tuple[Letters, Letters, Letters]:
    """Return letters for dimensions that broadcast, counted from the right: of a, of b, and of the result.

    A dimension of size 1 that is broadcast gets its own letter.
    """
    in_a, in_b, out = [], [], []
    for i in reversed(range(max(len(a), len(b)))):
        shared = f"{BATCH}{i}"
        x, y = (sizes[-1 - i] if i < len(sizes) else None for sizes in (a, b))
        a_is_one, b_is_one = _is_one(x) and y is not None, _is_one(y) and x is not None
        if x is not None:
            in_a.append(f"{shared} of a" if a_is_one and not b_is_one else shared)
        if y is not None:
            in_b.append(f"{shared} of b" if b_is_one and not a_is_one else shared)
        out.append(shared)
    return tuple(in_a), tuple(in_b), tuple(out)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _einsum_dims(equation: str, a: Tensor, b: Tensor) -> Dims:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    spare = [x.dim() - len(t.replace("...", "")) if "..." in t else 0 for t, x in zip(terms, (a, b), strict=True)]
    starts = [t.partition("...")[0] for t in terms]
    of_a, of_b = (x.shape[len(s) :][:n] for s, n, x in zip(starts, spare, (a, b), strict=True))
    dots_a, dots_b, dots = _broadcast(of_a, of_b)
    left, right = _letters(terms[0], dots_a), _letters(terms[1], dots_b)
    size_a, size_b = dict(zip(left, a.shape, strict=True)), dict(zip(right, b.shape, strict=True))
    repeated = {c for c in left if c in size_b and _is_one(size_a[c]) != _is_one(size_b[c])}
    left = tuple(f"{c} of a" if c in repeated and _is_one(size_a[c]) else c for c in left)
    right = tuple(f"{c} of b" if c in repeated and _is_one(size_b[c]) else c for c in right)
    if not arrow:  # torch.einsum's implicit output: dimensions of the ellipsis, then the letters that appear once
        once = Counter(inputs.replace(",", "").replace("...", ""))
        output = "..." + "".join(sorted(c for c, n in once.items() if n == 1))
    out = _letters(output, dots) if "..." in output else tuple(output)
    if not (set(left) & set(right)) - set(out):
        raise LeftOut("vector", f"einsum {equation!r} contracts nothing; it is not a matmul")
    return Dims(left, right, out)


def _letters(term: str, dots: Letters) -> Letters:
    """Return one name for each dimension of an operand of einsum. dots: the names for its ellipsis."""
    head, ellipsis, tail = term.partition("...")
    return (*head, *dots, *tail) if ellipsis else tuple(term)


def _tensordot_dims(dims: Any, a: Tensor, b: Tensor) -> Dims:
    dims = 2 if dims is None else dims  # torch's default
    if isinstance(dims, int):
        in_a, in_b = list(range(a.dim() - dims, a.dim())), list(range(dims))
    else:
        in_a, in_b = ([d % x.dim() for d in ds] for ds, x in zip(dims, (a, b), strict=True))
    left, right = [f"m{i}" for i in range(a.dim())], [f"n{i}" for i in range(b.dim())]
    for i, (d, e) in enumerate(zip(in_a, in_b, strict=True)):
        left[d] = right[e] = f"k{i}"
    # torch.tensordot sums a dimension first if the other operand has size 1 there
    if any(_is_one(a.shape[d]) != _is_one(b.shape[e]) for d, e in zip(in_a, in_b, strict=True)):
        raise Reject("form", "tensordot takes a sum before it multiplies; do that first, by itself")
    k = math.prod(a.shape[d] for d in in_a)
    if not isinstance(k, int) or k == 0:
        raise Reject("form", f"tensordot contracts {k} elements")
    return Dims(tuple(left), tuple(right), tuple(c for c in (*left, *right) if not c.startswith("k")))


def mutates(node: fx.Node) -> bool:
    """Return whether the call may write into one of its inputs."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":  # where `and_` and `or_` write nothing
        return name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__") and name not in _PURE)
    # torch's names of in-place ops end in one underscore
    if name in _MUTATING_METHODS or (name.endswith("_") and not name.endswith("__")):
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, OpOverloadPacket):
        return any(getattr(node.target, overload)._schema.is_mutable for overload in node.target.overloads())  # type: ignore[no-untyped-call]
    if isinstance(node.target, HigherOrderOperator):
        return True  # a graph or a user's kernel: assumed to write
    return node.kwargs.get("out") is not None or _inplace_argument(node)


_PURE = {"imatmul", "index", "inv", "invert"}
_MUTATING_METHODS = {"__setitem__", *(n for n in dir(torch.Tensor) if n.startswith("__i") and hasattr(operator, n))}
_MUTATING_METHODS -= {"__index__", "__inv__", "__invert__"}


def _inplace_argument(node: fx.Node) -> bool:
    """Return whether the call has `inplace=True`, or `max_norm` of an embedding, by keyword or by position.

    With `max_norm`, an embedding scales the rows that it looks up, in the weight itself.
    """
    if node.kwargs.get("inplace") is True or node.kwargs.get("max_norm") is not None:
        return True
    if not inspect.isroutine(node.target) or not any(a is True or isinstance(a, float) for a in node.args):
        return False
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # a builtin without a signature: assume that a True is `inplace`
        return any(a is True for a in node.args)
    return bound.arguments.get("inplace") is True or bound.arguments.get("max_norm") is not None
