"""Rewrite matrix products that torch expresses in other ways as matmuls.

before   y = einsum("bij,bjk,kl->bil", [x, v, w])
after    xv = einsum("abc,abd->acd", ...); y = einsum("abc,cd->abd", xv, w)       in the order that torch takes

before   h, c = lstm_cell(x, (h, c), w_ih, w_hh, b_ih, b_hh)
after    gates = linear(h, w_hh, b_hh) + linear(x, w_ih, b_ih); ...   as torch decomposes it (inline_composites.py)

before   y.addmm_(a, b)
after    y.copy_(addmm(y, a, b))
changes  nothing but the order in which a few sums are rounded

Runs on Dynamo's graph, before the annotate pass, which only knows the calls of matmul_calls.py. `refusal` says why any
other product stays as it is.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import OpOverload, OpOverloadPacket
from fp8pass.graph.pass_base import DynamoContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.graph.sizes import depends_on_data
from fp8pass.passes.common.checkpoint_regions import Part, in_its_modes, parts
from fp8pass.passes.common.function_graphs import with_functions
from fp8pass.passes.common.transforms import Transform, held_by
from fp8pass.passes.common.write_calls import CallWriter, rewrite
from fp8pass.passes.dynamo.inline_composites import inlined

LIMITS = {
    "declined": {
        "in place": (
            "it is `addmm_`, `addbmm_` or `baddbmm_` under autocast, which only casts the out-of-place ops",
            "assign the result of `torch.addmm`",
        ),
        "attention": (
            "it is in `scaled_dot_product_attention`, where torch decomposes that into matmuls; torch's kernels of "
            "attention take FP8 in the forward only",
            "nothing: its projections run in FP8; see [below](#attention)",
        ),
        "recurrent": (
            "it is in an `nn.LSTM`, `nn.GRU` or `nn.RNN` that Dynamo keeps as one call for all time steps",
            "a loop over `nn.LSTMCell`, `nn.GRUCell` or `nn.RNNCell`, which run in FP8",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

Term = list[str]
"""The letters of one operand of an einsum."""


class WriteMatmuls:
    """The pass over Dynamo's graph and its checkpointed regions."""

    name = "write_matmuls"

    def run(self, graph: fx.Graph, context: DynamoContext) -> int:
        """Rewrite every such call that is not inside a function transform; return how many were rewritten."""
        return sum(
            _write(part) for part in with_functions(parts(context.annotation.module, context.names), context.names)
        )


def _write(part: Part) -> int:
    graph = part.module.graph
    # a generator, so that each call is rewritten under its own autocast mode: `CallWriter` computes example values
    calls = (n for n in in_its_modes(graph) if n not in part.inside and name_of(n) in _WRITERS)
    return sum(rewrite(graph, node, _WRITERS[name_of(node)]) for node in calls)


def refusal(node: fx.Node, inside: Sequence[Transform] = ()) -> Reject | None:
    """Return why a call that multiplies matrices, but is not a matmul, stays as it is; None for any other call.

    inside: the function transforms that it is inside of.
    """
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return LeftOut(
            "attention",
            "attention stays in high precision: of its kernels in torch, those that take FP8 have no backward in it; "
            "the projections around it are matmuls of their own",
        )
    if name in _RECURRENT:
        return LeftOut("recurrent", f"{name} runs as one call for all time steps; a loop over nn.LSTMCell has matmuls")
    if name in CONVOLUTIONS or name == "convolution":
        return LeftOut("convolution", f"{name} is called in a form that is not understood as a matmul")
    if name not in _WRITERS or (name == "einsum" and len(_equation(node.args)[1]) < 2):
        return None
    if inside:
        return held_by(inside)
    if node.kwargs.get("out") is not None:
        return Reject("out=", f"{name} writes into out=; assign its result instead")
    if name in _OUT_OF_PLACE:
        function = _OUT_OF_PLACE[name].__name__
        return Reject("in place", f"{name} is not cast by autocast; assign the result of torch.{function} instead")
    return None


def why_convolution(
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
    output_padding: Sequence[int] = (),
) -> LeftOut:
    """Return why a convolution stays one: it is more than one matmul."""

    def given(name: str, value: Sequence[int] | str, usual: int) -> str:
        if isinstance(value, str):
            return f", {name} {value}"
        return f", {name} {' x '.join(map(str, value))}" if any(n != usual for n in value) else ""

    how = f"a kernel of {' x '.join(map(str, kernel))}, stride {' x '.join(map(str, stride))}"
    how += given("padding", padding, 0) + given("dilation", dilation, 1) + given("output padding", output_padding, 0)
    how += f", {groups} groups" if groups != 1 else ""
    return LeftOut(
        "convolution",
        f"{how}: a convolution is a matmul where the kernel is 1 or equals the stride, without padding and groups",
    )


def name_of(node: fx.Node) -> str:
    """Return the name of the function, method or attribute of torch that the node calls; "" for any other node."""
    target = node.target
    if target is getattr:  # what Dynamo calls for `x.T`
        return str(node.args[1])
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        return ""
    if isinstance(target, OpOverload):
        target = target.overloadpacket
    if isinstance(target, OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return name if namespace == "aten" else ""
    is_torchs = str(getattr(target, "__module__", "")).partition(".")[0] in ("torch", "_operator")
    return str(getattr(target, "__name__", "")) if is_torchs else ""


def _shape(node: fx.Node) -> list[Any]:
    """Return the sizes of the node's tensor: ints, or SymInts, of which a comparison adds a guard.

    A size that depends on data can't be compared, and is 2.
    """
    return [2 if depends_on_data(size) else size for size in node.meta["example_value"].shape]


# ---------------------------------------------------------------------------------------------------------------------
# In-place products, chains of products, and powers.


_OUT_OF_PLACE: dict[str, Callable[..., Tensor]] = {
    "addmm_": torch.addmm,
    "addbmm_": torch.addbmm,
    "baddbmm_": torch.baddbmm,
}


def _in_place(function: Callable[..., Tensor]) -> Callable[..., fx.Node | None]:
    def writer(write: CallWriter, x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node | None:
        if torch.is_autocast_enabled(x.meta["example_value"].device.type):
            return None  # autocast casts torch.addmm and the like, but not their in-place forms
        return write.copy(x, write(function, x, *args, **kwargs))

    return writer


def _into(function: Callable[..., Tensor]) -> Callable[..., fx.Node | None]:
    """Return the writer of a matmul with `out=`: the product, and a copy of it into `out`."""

    def writer(write: CallWriter, *args: Any, out: Any = None, **kwargs: Any) -> fx.Node | None:
        if out is None or torch.is_autocast_enabled(out.meta["example_value"].device.type):
            return None  # autocast casts no call with `out=`
        return write.copy(out, write(function, *args, **kwargs))

    return writer


def _multi_dot(write: CallWriter, tensors: Sequence[fx.Node], out: Any = None) -> fx.Node | None:
    if out is not None or len(tensors) < 2:
        return None
    first, *between, last = tensors
    is_row, is_column = (len(_shape(x)) == 1 for x in (first, last))
    first = write(torch.unsqueeze, first, 0) if is_row else first
    last = write(torch.unsqueeze, last, 1) if is_column else last
    y = _chain(write, [first, *between, last])
    y = write(torch.squeeze, y, -1) if is_column else y
    return write(torch.squeeze, y, 0) if is_row else y


def _chain(write: CallWriter, tensors: list[fx.Node]) -> fx.Node:
    """Multiply in the order with the fewest operations."""
    if len(tensors) == 1:
        return tensors[0]
    sizes = [_shape(tensors[0])[0], *(_shape(x)[1] for x in tensors)]
    split = _best_split(tuple(sizes))[1]
    return write(torch.mm, _chain(write, tensors[:split]), _chain(write, tensors[split:]))


def _best_split(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the least cost of a product of [sizes[0], sizes[1]], [sizes[1], sizes[2]], ... and where to split it."""
    # the dynamic program of matrix-chain multiplication: cost[i, j] is for the matrices i to j - 1
    cost = {(i, i + 1): (0, i) for i in range(len(sizes) - 1)}
    for length in range(2, len(sizes)):
        for i in range(len(sizes) - length):
            j = i + length
            cost[i, j] = min(
                (cost[i, k][0] + cost[k, j][0] + sizes[i] * sizes[k] * sizes[j], k) for k in range(i + 1, j)
            )
    return cost[0, len(sizes) - 1]


def _chain_matmul(write: CallWriter, *tensors: fx.Node, out: Any = None) -> fx.Node | None:
    return _multi_dot(write, tensors, out)


def _matrix_power(write: CallWriter, A: fx.Node, n: Any, out: Any = None) -> fx.Node | None:
    if out is not None or not isinstance(n, int) or n in (-1, 0, 1):
        return None  # these powers multiply nothing
    square, power, left = A if n > 0 else write(torch.linalg.inv, A), None, abs(n)
    while True:
        if left & 1:
            power = square if power is None else write(torch.matmul, power, square)
        left >>= 1
        if not left:
            return power
        square = write(torch.matmul, square, square)


# ---------------------------------------------------------------------------------------------------------------------
# Layers.


def _bilinear(
    write: CallWriter, input1: fx.Node, input2: fx.Node, weight: fx.Node, bias: fx.Node | None = None
) -> fx.Node:
    """Multiply `weight`, [N, I, J], by the input with the smaller product first: [..., N, J] or [..., N, I]."""
    _, i, j = _shape(weight)
    if i >= j:
        y = write(torch.mul, write(torch.einsum, "...i,nij->...nj", input1, weight), write(torch.unsqueeze, input2, -2))
    else:
        y = write(torch.mul, write(torch.einsum, "...j,nij->...ni", input2, weight), write(torch.unsqueeze, input1, -2))
    y = write(torch.sum, y, -1)
    return y if bias is None else write(torch.add, y, bias)


# ---------------------------------------------------------------------------------------------------------------------
# Einsums that are not a product of two operands.


def _einsum(write: CallWriter, *args: Any) -> fx.Node | None:
    equation, operands = _equation(args)
    if len(operands) < 2:
        return None
    terms, out = _terms(equation, [len(_shape(x)) for x in operands])
    if len(operands) == 2 and not _takes_more(terms, out):
        return None if args == (equation, *operands) else write(torch.einsum, equation, *operands)
    live = [_diagonal(write, x, term) for x, term in zip(operands, terms, strict=True)]
    for i, j in _path(terms, out, operands):
        (x, a), (y, b) = live[i], live[j]
        live = [of for k, of in enumerate(live) if k not in (i, j)]
        kept = {*out, *itertools.chain.from_iterable(term for _, term in live)}
        x, a = _summed(write, x, a, kept.union(b))
        y, b = _summed(write, y, b, kept.union(a))
        # the last product has its dimensions in the order of the result
        c = [letter for letter in dict.fromkeys([*a, *b]) if letter in kept] if live else out
        live.append((write(torch.einsum, f"{''.join(a)},{''.join(b)}->{''.join(c)}", x, y), c))
    return live[0][0]


def _equation(args: Sequence[Any]) -> tuple[str, list[fx.Node]]:
    """Return the equation and the operands of an einsum call in any of its forms."""
    if isinstance(args[0], str):
        operands = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else args[1:]
        return args[0], list(operands)
    # torch.einsum's sublist form: operand, numbers, operand, numbers, ..., then optionally the numbers of the result
    terms = [_spelled(term) for term in args[1::2]]
    arrow = f"->{_spelled(args[-1])}" if len(args) % 2 else ""
    return ",".join(terms) + arrow, list(args[: len(args) - len(args) % 2 : 2])


def _spelled(term: Sequence[Any]) -> str:
    """Return a term of numbers as letters, which sort as the numbers do."""
    letters = string.ascii_uppercase + string.ascii_lowercase
    return "".join("..." if i is Ellipsis else letters[i] for i in term)


def _terms(equation: str, dims: Sequence[int]) -> tuple[list[Term], Term]:
    """Return the letters of each operand and of the result, with letters for the dimensions of an ellipsis."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = [n - len(t.replace("...", "")) if "..." in t else 0 for t, n in zip(terms, dims, strict=True)]
    dots = spare[: max(hidden)]
    if not arrow:  # torch.einsum's rule: the dimensions of the ellipsis, then the letters that appear once, sorted
        plain = inputs.replace(",", "").replace("...", "")
        output = "..." + "".join(sorted(c for c in set(plain) if plain.count(c) == 1))
    found = [_with_dots(t, dots[len(dots) - n :]) for t, n in zip(terms, hidden, strict=True)]
    return found, _with_dots(output, dots)


def _with_dots(term: str, dots: Sequence[str]) -> Term:
    head, ellipsis, tail = term.partition("...")
    return [*head, *dots, *tail] if ellipsis else list(term)


def _takes_more(terms: Sequence[Term], out: Term) -> bool:
    """Return whether an einsum of two operands takes a diagonal or a sum before it multiplies."""
    a, b = terms
    alone = set(a) ^ set(b)
    return len(set(a)) < len(a) or len(set(b)) < len(b) or not alone <= set(out)


def _diagonal(write: CallWriter, x: fx.Node, term: Term) -> tuple[fx.Node, Term]:
    """Take the diagonal of dimensions that share a letter."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            i = term.index(letter)
            j = term.index(letter, i + 1)
            x = write(torch.diagonal, x, 0, i, j)  # torch puts the diagonal's dimension last
            term = [*(c for k, c in enumerate(term) if k not in (i, j)), letter]
    return x, term


def _summed(write: CallWriter, x: fx.Node, term: Term, kept: Container[str]) -> tuple[fx.Node, Term]:
    """Sum over the dimensions whose letters are not in `kept`."""
    over = [i for i, letter in enumerate(term) if letter not in kept]
    return (write(torch.sum, x, over) if over else x), [letter for letter in term if letter in kept]


def _path(terms: Sequence[Term], out: Term, operands: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Return the pair of operands of each step, in torch's order. A step removes its pair and appends the product."""
    settings: Any = torch.backends.opt_einsum
    # the condition under which torch.functional.einsum asks opt_einsum, and its settings
    if len(operands) > 2 and settings.enabled and (module := settings.get_opt_einsum()) is not None:
        equation = f"{','.join(map(''.join, terms))}->{''.join(out)}"
        path, _ = module.contract_path(
            equation, *map(_shape, operands), shapes=True, optimize=settings.strategy or "auto"
        )
        if all(len(step) == 2 for step in path):
            return [(min(step), max(step)) for step in path]
    # without opt_einsum torch goes from left to right: the last product is at left - 1, the next operand at 0
    return [(0, 1), *((left - 1, 0) for left in range(len(operands) - 1, 1, -1))]


CONVOLUTIONS = frozenset(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))
"""The names of torch's functions of convolutions."""
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_WRITERS: dict[str, Callable[..., Any]] = {
    **{name: _in_place(function) for name, function in _OUT_OF_PLACE.items()},
    # not by torch's decompositions, whose order of products differs among builds of torch: slots are named in order
    **dict.fromkeys(("multi_dot", "linalg_multi_dot"), _multi_dot),
    "chain_matmul": _chain_matmul,
    **dict.fromkeys(("matrix_power", "linalg_matrix_power"), _matrix_power),
    "bilinear": _bilinear,
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), inlined),
    "einsum": _einsum,
    **{name: _into(getattr(torch, name)) for name in ("addmm", "baddbmm", "bmm", "matmul", "mm")},
}
