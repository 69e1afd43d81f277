"""List every matmul of the joint graph, so that each gets a verdict.

Does not change the graph. Each `mm`, `addmm`, `bmm`, `baddbmm` gets a `Gemm`: which of the three products of a layer
it is, the module it belongs to, its sizes and the user's line. It is declined until a later pass rewrites it. So does
each convolution, with the sizes of the matmuls that do as many operations, one for each group.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8pass.base._torch import OpOverload
from fp8pass.base.names import short, source_of
from fp8pass.base.node_meta import GEMM, IN_BACKWARD, IN_FORWARD, KIND, SAVED, SAVED_FP8
from fp8pass.graph.annotation import MatmulChoice
from fp8pass.graph.builder import val
from fp8pass.graph.pass_base import JointContext
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.graph.sizes import expression, varying
from fp8pass.graph.verdict import Gemm
from fp8pass.passes.common.patterns import (
    ADDING_MATMULS,
    ALL_MATMULS,
    CASTS,
    COPIES,
    DIVIDING,
    MULTIPLYING,
    RESHAPES,
    at,
    aten,
    changes_places,
    feeds_matmul,
    first,
    has_one_element,
    one_number,
    readers,
)
from fp8pass.passes.common.transforms import DERIVED
from fp8pass.passes.joint.operands import is_dequantizing
from fp8pass.quant.grouped import FALLBACK, FALLBACK_BACKWARD
from fp8pass.recipes import KINDS, Kind

LIMITS = {
    "declined": {
        "linear algebra": (
            "it is inside solvers, factorizations, norms of matrices or `cdist`, or their gradients",
            "nothing: their results need all digits of their dtype",
        ),
        "composite": ("it is inside another function that torch decomposes", "write it as a matmul"),
        "update": ("it is in an optimizer's update of parameters", "nothing: it stays in high precision"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""


class _ForwardMatmul(NamedTuple):
    """The operands of a matmul of the forward: [M, K] of one tensor by [K, N] of another."""

    a: fx.Node
    b: fx.Node
    m: Any
    n: Any


class ListMatmuls:
    """The pass, on the joint graph. The annotate pass left the index of each call's choice in `meta["custom"]`."""

    name = "list_matmuls"

    def run(self, graph: fx.Graph, context: JointContext) -> int:
        """Fill `context.gemms`; return 0, the number of changes."""
        context.notes += [] if context.is_update else _unread_dequantizes(graph)
        backward = backward_nodes(graph)
        forward: dict[int | None, list[_ForwardMatmul]] = {}
        for node in graph.nodes:
            for at_node, product, factors, sizes in (*_of_fallback(node), *_of_convolution(node)):
                context.gemms[at_node] = _gemm(at_node, product, _custom(node).get("fp8pass"), factors, sizes, context)
                if is_convolution(at_node):
                    at_node.meta[GEMM] = at_node.name
            if node.target not in ALL_MATMULS:
                continue
            a, b = operands(node)
            index = _custom(node).get("fp8pass")
            roots = root(a), root(b)
            kind: Any = node.meta.get(KIND, "output")
            if (told := _told(node, backward)) is not None:
                index, kind = told
            elif node in backward and KIND not in node.meta:
                kind = _custom(node).get("fp8pass_kind") or "output"
                if kind not in KINDS[1:]:
                    kind = _backward_kind(roots, val(a).shape[-1], forward.get(index, []), of_copy=kind != "output")
            elif not backward and _is_of_branchs_backward(node):
                index = _layer_of(roots, val(a).shape[-1], forward)
                kind = "grad_weight" if _is_turned(a) else "grad_input"
            else:
                forward.setdefault(index, []).append(_ForwardMatmul(*roots, val(a).shape[-2], val(b).shape[-1]))
            sizes = (*val(a).shape, val(b).shape[-1])
            context.gemms[node] = _gemm(node, kind, index, (a, b), sizes, context)
            node.meta[GEMM] = node.name
        return 0


def _told(node: fx.Node, backward: Container[fx.Node]) -> tuple[int, Kind] | None:
    """Return the index of the choice, and which product it is, for a matmul of a Function; None for any other."""
    custom = _custom(node)
    told: Any = custom.get(IN_BACKWARD, custom.get(IN_FORWARD) if node not in backward else None)
    return None if told is None else (told[0], told[1])


def _gemm(
    node: fx.Node,
    kind: Kind,
    index: int | None,
    factors: tuple[fx.Node, fx.Node],
    sizes: Sequence[Any],
    context: JointContext,
) -> Gemm:
    """Return the verdict so far. sizes: M, K and N, with the number of batches before them if there are batches."""
    a, b = factors
    choice = context.choices[index] if index is not None else MatmulChoice("", source_of(node))
    *batch, m, k, n = sizes
    if index is None and context.declined:
        choice.rule, choice.reason = "internal", context.declined
    elif index is None and context.config.recipe is not None:
        reject = _OF_UPDATE if context.is_update else _why_unknown(node)
        choice.rule, choice.reason = reject.rule, str(reject)
    elif index is None and is_convolution(node):
        choice.rule, choice.reason = _CONVOLUTION.rule, str(_CONVOLUTION)
    declined = choice.declined.get(kind)
    gemm = Gemm(
        kind=kind,
        name=choice.name,
        M=expression(m),
        K=expression(k),
        N=expression(n),
        dtypes=(_dtype(a), _dtype(b), _dtype(node)),
        source=choice.source or source_of(node),
        batches=expression(batch[0]) if batch else 1,
        scaling=choice.scaling if declined is None else "",
        rule=choice.rule if declined is None else declined.rule,
        reason=choice.reason if declined is None else str(declined),
        fast_accum=kind in choice.fast_accum,
        choice=index,
        note=choice.note if kind == "output" else "",
        sizes=tuple(dict.fromkeys(varying(sizes))),
    )
    return gemm.predicted(choice.prediction)


def _of_fallback(node: fx.Node) -> Iterator[tuple[fx.Node, Kind, tuple[fx.Node, fx.Node], tuple[Any, Any, Any]]]:
    """Yield the products that transformers' custom op of experts computes.

    Each is the result's node, which of a layer's products it is, its factors, and M, K and N.
    """
    name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
    if name not in (FALLBACK, FALLBACK_BACKWARD):
        return
    x, w, _, *gradient = node.args
    assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
    m, (_, k, n) = val(x).shape[0], val(w).shape
    if name == FALLBACK:
        yield node, "output", (x, w), (m, k, n)
        return
    (g,) = gradient
    assert isinstance(g, fx.Node)
    for result in node.users:  # getitem nodes of the returned tuple
        if result.args[1] == 0:
            yield result, "grad_input", (g, w), (m, n, k)
        else:
            yield result, "grad_weight", (x, g), (k, m, n)


def _of_convolution(node: fx.Node) -> Iterator[tuple[fx.Node, Kind, tuple[fx.Node, fx.Node], tuple[Any, ...]]]:
    """Yield what a convolution, or its backward, multiplies.

    Each is the result's node, which of a layer's products it is, its factors, and the number of groups, M, K and N.
    """
    if node.target is aten.convolution.default:
        x, w, _, *_, transposed, _, groups = node.args
        assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
        m, k, n = _sizes(x, w, node, bool(transposed), groups)
        yield node, "output", (x, w), (groups, m, k, n)
    elif node.target is aten.convolution_backward.default:
        g, x, w, *_, transposed, _, groups, _ = node.args
        assert isinstance(g, fx.Node) and isinstance(x, fx.Node) and isinstance(w, fx.Node)
        m, k, n = _sizes(x, w, g, bool(transposed), groups)
        for result in node.users:  # getitem nodes of the returned tuple
            if result.args[1] == 0:
                yield result, "grad_input", (g, w), (groups, m, n, k)
            elif result.args[1] == 1:
                yield result, "grad_weight", (g, x), (groups, n, m, k)


def _sizes(x: fx.Node, w: fx.Node, y: fx.Node, transposed: bool, groups: Any) -> tuple[Any, Any, Any]:
    """Return M, K and N of a convolution's forward, of one group."""
    first, second, *kernel = val(w).shape
    if transposed:  # a weight [C, O / groups, ...], and a product for each position of the input
        return val(x).numel() // first, first // groups, second * math.prod(kernel)
    return val(y).numel() // first, second * math.prod(kernel), first // groups


def is_convolution(node: fx.Node) -> bool:
    """Return whether a node with a verdict is a convolution, or one of the results of its backward."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and source.target in _CONVOLUTIONS


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the two factors of an `mm`, `addmm`, `bmm`, `baddbmm` or `_grouped_mm` node."""
    first = 1 if node.target in ADDING_MATMULS else 0
    a, b = node.args[first], node.args[first + 1]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b


def added(node: fx.Node) -> fx.Node | None:
    """Return the tensor that an `addmm` or `baddbmm` node adds to the product; None for other matmuls."""
    bias = node.args[0] if node.target in ADDING_MATMULS else None
    assert bias is None or isinstance(bias, fx.Node)
    return bias


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on an incoming gradient."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        # AOTAutograd's name for the gradients of the outputs in a joint graph
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or any(n in backward for n in node.all_input_nodes):
            backward.add(node)
    return backward


def save_for_backward(graph: fx.Graph, chosen: Callable[[fx.Node, set[fx.Node]], bool]) -> int:
    """Mark nodes of the forward that the backward reads instead of recomputing; return how many are new.

    chosen: called with a node and the set of all backward nodes; True for nodes to mark.
    """
    backward = backward_nodes(graph)
    new = [n for n in graph.nodes if n not in backward and SAVED not in n.meta and chosen(n, backward)]
    for node in new:
        node.meta[SAVED] = True
    return len(new)


def _unread_dequantizes(graph: fx.Graph) -> list[str]:
    """Return a sentence for every FP8 tensor that is dequantized and not read by a matmul."""
    notes = []
    for node in filter(is_dequantizing, graph.nodes):
        nodes = readers(node, changes_places)
        if not nodes or _is_scale(node) or feeds_matmul(node) or SAVED_FP8 in _custom(node):
            continue
        names = " and ".join(map(_name, nodes[:3]))
        matmuls = "not for mm, addmm, bmm or baddbmm, the only ops that run in FP8"
        notes.append(f"{at(first(node))} is dequantized for {names}, {matmuls}")
    return list(dict.fromkeys(notes))


def _is_scale(node: fx.Node) -> bool:
    """Return whether `node` is a scale that is itself stored in FP8."""
    scaled = (u for u in node.users if u.target in MULTIPLYING or u.target in DIVIDING)
    return has_one_element(node) and not all(map(has_one_element, scaled))


def _name(node: fx.Node) -> str:
    return "the graph's output" if node.op == "output" else at(node)


_CLAMP = {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default}
_WHOLE = {*RESHAPES, *COPIES, *CASTS, *MULTIPLYING, *DIVIDING, *_CLAMP, aten.permute.default, aten.expand.default}
"""Ops that keep all elements of a tensor. A part of a tensor counts as another tensor, as q, k and v do."""


def root(node: fx.Node) -> fx.Node:
    """Return the tensor that an operand comes from, through views, casts, scaling and clamps (so quantization, too)."""
    while node.target in _WHOLE:
        source = node.args[0]
        scales = node.target in MULTIPLYING or node.target in DIVIDING
        if not isinstance(source, fx.Node) or (scales and one_number(node.args[1]) is None):
            break  # the product of two tensors, such as an activation and its gate, is another tensor
        node = source
    return node


def _backward_kind(
    roots: tuple[fx.Node, fx.Node], contracted: Any, forward: list[_ForwardMatmul], of_copy: bool
) -> Kind:
    """Return which product of its layer a matmul of the backward is.

    grad_weight reads the forward's first operand and contracts M; grad_input reads its second operand and contracts N.
    "output" if neither operand is one of the forward's. of_copy: True if the first operand was computed again, for
    `save_fp8`, so that the forward does not read it.
    """
    kinds: list[tuple[bool, Kind]] = []
    for f in forward:
        if f.b in roots and f.a is not f.b:
            kinds.append((_equal(contracted, f.n), "grad_input"))
        if f.a in roots:
            kinds.append((_equal(contracted, f.m), "grad_weight"))
    # one whose sizes fit; if none is known to, as sizes may be symbolic, the first
    return max(kinds, key=lambda kind: kind[0], default=(False, "grad_weight" if of_copy else "output"))[1]


def _is_of_branchs_backward(node: fx.Node) -> bool:
    """Return whether a matmul without a note is a gradient: a branch of `torch.cond` in the backward computes its
    forward again, with the notes of that, and then its gradients.
    """
    return node.meta.get("partitioner_tag") == "is_backward" and "fp8pass" not in _custom(node)


def _layer_of(
    roots: tuple[fx.Node, fx.Node], contracted: Any, forward: dict[int | None, list[_ForwardMatmul]]
) -> int | None:
    """Return the index of the choice of the only layer that a matmul of its backward can belong to; None if unknown."""
    layers = {
        index
        for index, matmuls in forward.items()
        for f in matmuls
        if (f.b in roots and _equal(contracted, f.n)) or (f.a in roots and _equal(contracted, f.m))
    }
    return layers.pop() if len(layers) == 1 else None


def _is_turned(operand: fx.Node) -> bool:
    """Return whether an operand is the transpose of what it comes from."""
    turned = False
    while operand.target in _WHOLE:
        turned ^= operand.target is aten.permute.default
        operand = first(operand)
    return turned


def _equal(a: Any, b: Any) -> bool:
    return bool(statically_known_true(a == b))


def _custom(node: fx.Node) -> dict[str, Any]:
    """Return what the annotate pass noted on the call that this node comes from; {} if nothing."""
    custom = node.meta.get("custom")
    return custom if isinstance(custom, dict) else {}


_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
_CONVOLUTION = LeftOut("convolution", "a convolution that the annotate pass has not seen as a call of torch")
_OF_UPDATE = LeftOut(
    "update", "in an update of parameters, which computes in high precision without update_matmuls='fp8'"
)


def _why_unknown(node: fx.Node) -> Reject:
    """Return why a matmul that the annotate pass has not seen is declined."""
    origin = _origin(node)
    if is_convolution(node):
        return _CONVOLUTION
    if origin == str(node.target):
        return Reject("region", "inside a separate graph, which fp8pass does not enter; compile its body separately")
    if origin == "_autograd_grad":  # the function by which torch.func takes gradients
        return Reject("torch.func", f"of a gradient of torch.func, {DERIVED}")
    if origin.startswith("linalg_") or origin in _LINEAR_ALGEBRA:
        return LeftOut("linear algebra", f"part of {origin}, which needs all digits of what it multiplies")
    return Reject("composite", f"comes from {origin}, which fp8pass does not quantize; write it as a matmul")


_LINEAR_ALGEBRA = frozenset(
    {"cdist", "cholesky", "cholesky_inverse", "cholesky_solve", "inverse", "lu", "lu_solve", "norm", "orgqr", "ormqr"}
    | {"pca_lowrank", "pinverse", "qr", "svd", "svd_lowrank", "triangular_solve"}
)
"""Functions of linear algebra whose names do not begin with "linalg_": solvers, factorizations, and functions that
subtract nearly equal numbers."""


def _origin(node: fx.Node) -> str:
    """Return the name of the function that the user called; the name of the op if Dynamo recorded none."""
    for key in ("source_fn_stack", "fwd_source_fn_stack"):  # AOTAutograd's name for it on nodes of the backward
        if stack := node.meta.get(key):
            function = stack[-1][1]
            return getattr(function, "__name__", str(function))
    return str(node.target)


def _dtype(node: fx.Node) -> str:
    return short(val(node).dtype)
