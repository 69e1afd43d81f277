"""Let the backward of elementwise ops and norms read FP8 copies of the tensors that they are computed from: `save_fp8`.

before   h: bf16[M, K] = silu(gate) * up               the backward reads gate and up
         y             = linear(qdq_operand(h, q), w_)
after    gate_ = qdq_operand(gate, q1);  up_ = qdq_operand(up, q2)
         h_    = silu(gate_) * up_
         y     = differentiated_as(linear(qdq_operand(h, q), w_), linear(qdq_as(h_, h, q), w_))
changes  gradients: those of the ops are taken at the quantized tensors, and the weight's is computed from h_. Values do
         not change: only gradients are computed from gate_, up_ and h_

A part of the annotate pass. Where the copied ops end, the original takes the gradient of its copy:

    at an operand of a matmul        in the matmul, so that the backward needs `h` no more than `gate`: it computes its
                                     operand again from what is saved
    anywhere else, or after a norm   in `differentiated_as(h, h_)`: a matmul that reads `h` saves its operand as before

A tensor is quantized as the recipe quantizes operands, with its own slot, `gate.saved`; by rows if an op reduces its
rows, as norms do. A tensor that is quantized for a matmul already is not quantized again.

The backward of some ops, such as attention or softmax, reads the op's own result. If the result's only other reader is
a matmul, the pass marks both, and `read_copies` lets the backward read what is quantized for the matmul.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fp8pass.base.names import short, source_of
from fp8pass.base.node_meta import PIECE, QUANTIZED, SAVED_FP8, SAVED_RESULT, QuantizedTensor
from fp8pass.graph.refusal import LeftOut, Reject
from fp8pass.graph.verdict import SavedTensor
from fp8pass.options import overrides
from fp8pass.options.setting import within
from fp8pass.passes.common.checkpoint_regions import in_its_modes
from fp8pass.passes.common.patterns import reach
from fp8pass.passes.common.repeatable_ops import (
    RepeatableOp,
    float_inputs,
    is_as_large,
    is_plain,
    keeps_its_result,
    op_of,
    value_of,
)
from fp8pass.passes.common.state_inputs import NewSlot
from fp8pass.passes.dynamo.check_matmul import for_instance
from fp8pass.passes.dynamo.quantize_call import Walk
from fp8pass.passes.dynamo.quantizers import quantizer_of
from fp8pass.quant import ops
from fp8pass.recipes import Calibration, Recipe, RowwiseScaling, StaticScaling

LIMITS = {
    "saved": {
        "other reader": (
            "the graph returns it, or another op reads it whose backward needs it as it is: FP8 would be one more copy",
            "nothing",
        ),
        "mutation": ("it is written in place after it is computed", "write it out of place"),
        "type": ("it is not a plain tensor of float32, bfloat16 or float16: for example a DTensor", "nothing yet"),
        "recipe, block size, bisect": ("as above", ""),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

NAME = "save_fp8"


def save(walk: Walk) -> list[SavedTensor]:
    """Save tensors of the walk's graph in FP8; return the verdicts on all that `save_fp8` selects."""
    verdicts = []
    candidates = match(walk.graph)
    for tensor in candidates.tensors.values():
        name = walk.names.module_of(tensor.named_by) or tensor.node.name
        if not walk.config.saves(name):
            continue
        verdict = SavedTensor(
            name, _shape(tensor.node), short(value_of(tensor.node).dtype), source_of(tensor.readers[0])
        )
        try:
            tensor.quantizer = check(walk, candidates, tensor, name)
            tensor.verdict = verdict
        except Reject as reject:
            verdict.rule, verdict.reason = reject.rule, str(reject)
        verdicts.append(verdict)
    _SaveRewriter(walk, candidates).rewrite()
    return verdicts + list(_results(walk, candidates))


def _results(walk: Walk, candidates: SaveCandidates) -> Iterator[SavedTensor]:
    """Mark each result whose only readers are its own op's backward and a matmul; yield the verdicts."""
    for operand in walk.graph.find_nodes(op="call_function", target=ops.qdq_operand):
        if (result := result_of(operand, candidates)) is None:
            continue
        quantized, value, quantizer = operand.meta[QUANTIZED][0], value_of(result), operand.args[1]
        name = re.sub(rf"\.{quantized.role}(_\d+)?$", "", quantized.name)
        if quantized.role != "input" or not walk.config.saves(name):
            continue
        if _is_tried_otherwise(name, quantized.source, quantizer.recipe):
            continue
        for node, part in ((result, "op"), (operand, "quantize")):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), SAVED_RESULT: part}
        size = _known(value.numel()) * value.element_size()
        how: Any = {"scaling": quantizer.recipe.name, "status": "in FP8", "bytes": size}
        yield SavedTensor(name, _shape(result), short(value.dtype), quantized.source, **how)


def result_of(operand: fx.Node, candidates: SaveCandidates) -> fx.Node | None:
    """Return the op, such as attention, of whose result `operand` quantizes a view; None if others read the result too.

    Elementwise ops and matmuls do not read their results in their backward, or are copied.
    """
    node: Any = operand
    while node is operand or (node in candidates.again and candidates.again[node].moves):
        node = node.args[0]
        if not isinstance(node, fx.Node) or not all(_is_ours(user) or user in candidates.again for user in node.users):
            return None
        if node is not operand.args[0] and len(node.users) > 1:
            return None
    return node if node in candidates.keeping else None


# ---------------------------------------------------------------------------------------------------------------------
# Pattern.


@dataclass
class Candidate:
    """A tensor that is not computed again, and that the backward of ops reads that are.

    readers: those ops, in the part of the graph that has the number `piece`. reduced: True if rows of it are reduced.
    quantizer, verdict: None if it stays in high precision.
    """

    node: fx.Node
    piece: int | None
    readers: list[fx.Node] = field(default_factory=list)
    reduced: bool = False
    quantizer: ops.Quantizer | None = None
    verdict: SavedTensor | None = None

    @property
    def named_by(self) -> fx.Node:
        """The node whose module path names the tensor: itself or its first reader, whichever is in the inner module."""
        return max(self.node, self.readers[0], key=lambda n: len(n.meta.get("nn_module_stack") or ()))


@dataclass
class SaveCandidates:
    """The ops of a graph that can be computed again, and the tensors, by node and piece, to compute them from."""

    again: dict[fx.Node, RepeatableOp] = field(default_factory=dict)
    keeping: set[fx.Node] = field(default_factory=set)
    """The other ops whose backward reads their own result."""
    tensors: dict[tuple[fx.Node, int | None], Candidate] = field(default_factory=dict)
    made_of: dict[tuple[fx.Node, int | None], set[fx.Node]] = field(default_factory=dict)
    """The candidates that other nodes can be computed from."""


def match(graph: fx.Graph) -> SaveCandidates:
    """Return what the backward of elementwise ops and norms reads, and could read in FP8."""
    candidates = SaveCandidates()
    for node in in_its_modes(graph):  # autocast, with which a function may take tensors of several dtypes
        if (op := op_of(node)) is not None:
            candidates.again[node] = op
        elif keeps_its_result(node):
            candidates.keeping.add(node)
    for node, op in candidates.again.items():
        if not op.linear:
            for read in float_inputs(node):
                _provide(candidates, read, piece_of(node), node)
    for candidate in candidates.tensors.values():
        candidate.reduced = _is_reduced(candidates, candidate)
    return candidates


def _provide(candidates: SaveCandidates, node: fx.Node, piece: int | None, reader: fx.Node) -> None:
    """Note that the backward of `reader`, in this part of the graph, reads `node`; add candidates to compute it from.

    Walks back through unary ops. The result of an op with several inputs is computed again if all of these can be
    computed from candidates; otherwise it becomes a candidate.
    """
    key = node, piece
    if key in candidates.tensors:
        candidates.tensors[key].readers.append(reader)
    if key in candidates.tensors or _made_of(candidates, node, piece, set()) is not None:
        return
    large = _large_inputs(node) if node in candidates.again and piece_of(node) == piece else []
    if len(large) == 1:
        _provide(candidates, large[0], piece, reader)
    # what is broadcast is small, and the caller holds the graph's inputs
    elif node.op not in ("placeholder", "get_attr") and is_as_large(node, reader):
        candidates.tensors[key] = Candidate(node, piece, [reader])


def _made_of(candidates: SaveCandidates, node: fx.Node, piece: int | None, unmade: set[fx.Node]) -> set[fx.Node] | None:
    """Return the candidates that `node` can be computed from; None if it needs other tensors.

    A sum of tensors from several candidates is not computed again: this would recompute a whole residual stream.
    unmade: nodes for which None has been returned; not kept for later, since more candidates may be added.
    """
    key = node, piece
    if key in candidates.tensors:
        return {node}
    if key not in candidates.made_of and node not in unmade and node in candidates.again and piece_of(node) == piece:
        parts = [_made_of(candidates, n, piece, unmade) for n in _large_inputs(node)]
        made = {n for part in parts for n in part or ()}
        if parts and None not in parts and not (candidates.again[node].linear and len(made) > 1):
            candidates.made_of[key] = made
    if key not in candidates.made_of:
        unmade.add(node)
    return candidates.made_of.get(key)


def _large_inputs(node: fx.Node) -> list[fx.Node]:
    return [n for n in float_inputs(node) if is_as_large(n, node)]


def _is_reduced(candidates: SaveCandidates, candidate: Candidate) -> bool:
    """Return whether ops that are computed again from this candidate alone reduce rows."""

    def computed_again(node: fx.Node) -> bool:
        key = node, candidate.piece
        return node in candidates.again and piece_of(node) == candidate.piece and key not in candidates.tensors

    met = reach([candidate.node], lambda node: filter(computed_again, node.users))
    return any(candidates.again[node].reduces for node in met if node is not candidate.node)


def piece_of(node: fx.Node) -> int | None:
    """Return the number of the part of the graph that a node is in; None if the graph is not split."""
    piece: int | None = node.meta.get(PIECE)
    return piece


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


def check(walk: Walk, candidates: SaveCandidates, tensor: Candidate, name: str) -> ops.Quantizer:
    """Return how a tensor is quantized. Raises Reject if it stays in high precision."""
    node = tensor.node
    if not is_plain(value_of(node)):
        raise Reject("type", f"it is a {type(value_of(node)).__name__} of {short(value_of(node).dtype)}")
    if node in walk.mutated:
        raise Reject("mutation", f"{node.name} is written to after it is computed")
    recipe, why = within(node, walk.config).recipe_of(name)
    if recipe is None or isinstance(recipe, (StaticScaling, Calibration)):
        raise LeftOut("recipe", why or "no recipe for training selects it")
    if reader := _reads_it_too(candidates, node):
        raise Reject("other reader", f"{reader}, so it is kept anyway")
    if _is_tried_otherwise(name, source_of(tensor.readers[0]), recipe):
        raise LeftOut("bisect", "this trial of fp8pass.bisect leaves it in high precision")
    if (operand := operand_of(tensor)) is not None:
        quantizer: Any = operand.args[1]
        return quantizer  # type: ignore[no-any-return]
    recipe = RowwiseScaling() if tensor.reduced else for_instance(recipe, name, bool(walk.names.owned))
    return quantizer_of(recipe, "input", value_of(node), (value_of(node).dim() - 1,), record=True)


def operand_of(tensor: Candidate) -> fx.Node | None:
    """Return the node that quantizes a tensor for matmuls in its part of the graph; None if there is none."""
    operands = (u for u in tensor.node.users if u.target is ops.qdq_operand and piece_of(u) == tensor.piece)
    return next(operands, None)


def _is_tried_otherwise(name: str, source: str, recipe: Recipe) -> bool:
    """Return whether a trial of `fp8pass.bisect` keeps a tensor in high precision."""
    trial = overrides.current()
    return trial is not None and not trial.see(overrides.Unit("saved", name, source), recipe)


def _reads_it_too(candidates: SaveCandidates, node: fx.Node) -> str:
    """Return a clause about an op whose backward reads the original `node`, or a view of it; "" if there is none."""
    for user in node.users:
        value = user.meta.get("example_value")
        if user.op == "output":
            return "the graph returns it"
        if user in candidates.again or _is_ours(user):
            is_view = user in candidates.again and _shares_storage(value_of(user), value_of(node))
            if is_view and (reader := _reads_it_too(candidates, user)):
                return reader
        elif isinstance(value, (tuple, list)):  # of views, as `chunk` returns
            if reader := _reads_it_too(candidates, user):
                return reader
        elif not isinstance(value, Tensor) or value.requires_grad:
            return f"{_called(user)} reads it too"
    return ""


def _is_ours(node: fx.Node) -> bool:
    """Return whether a node is a quantize, or a matmul of quantized operands."""
    return _is_quantize(node) or _is_product(node)


def _called(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name} ({source_of(node)})" if source_of(node) else str(name)


def _shares_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


class _SaveRewriter:
    """Builds the copies. copies: of each node, by its piece; the node itself if nothing before it is in FP8."""

    def __init__(self, walk: Walk, candidates: SaveCandidates) -> None:
        self.walk = walk
        self.graph = walk.graph
        self.again = candidates.again
        self.tensors = {key: tensor for key, tensor in candidates.tensors.items() if tensor.quantizer is not None}
        self.copies: dict[tuple[fx.Node, int | None], fx.Node] = {}

    def rewrite(self) -> None:
        """Quantize the tensors, copy the ops that read them, and let the originals take the copies' gradients."""
        ends = dict(self._ends())
        for tensor in self.tensors.values():
            self.copies[tensor.node, tensor.piece] = quantized = self._quantized(tensor)
            if tensor.node in ends and quantized not in ends[tensor.node]:
                ends[tensor.node].append(quantized)
        # make all copies first: `_end` changes the inputs of the originals, which `_copy` follows
        copies = {node: self._copy(node, piece_of(node)) for node in ends}
        for node, readers in ends.items():
            self._end(node, copies[node], readers)

    def _ends(self) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
        """Yield each node that takes its copy's gradient, with the readers of the node that have no copy."""
        changed, depends = dict[fx.Node, None](), set(self.tensors)
        for node, op in self.again.items():
            piece = piece_of(node)
            inputs = [n for n in float_inputs(node) if value_of(n).requires_grad]
            # sums of several tensors end the copies: the gradient of a sum does not depend on its inputs
            changes_with_input = (
                op.linear and len(inputs) == 1 and inputs[0] in changed and piece_of(inputs[0]) == piece
            )
            if any((n, piece) in depends for n in float_inputs(node)):
                depends.add((node, piece))
                if changes_with_input or not op.linear:
                    changed[node] = None
        nodes = {tensor.node for tensor in self.tensors.values()}
        for node in changed:
            readers = [u for u in node.users if u not in changed or piece_of(u) != piece_of(node)]
            if readers or node in nodes:
                yield node, readers

    def _copy(self, node: fx.Node, piece: int | None) -> fx.Node:
        key = node, piece
        if key not in self.copies:
            self.copies[key] = node
            if node in self.again and piece_of(node) == piece:
                copies = {n: self._copy(n, piece) for n in node.all_input_nodes}
                if any(n is not copy for n, copy in copies.items()):
                    with self.graph.inserting_after(node):
                        self.copies[key] = self.graph.node_copy(node, copies.__getitem__)
        return self.copies[key]

    def _quantized(self, tensor: Candidate) -> fx.Node:
        """Return the tensor quantized and dequantized: by the node for its matmul, otherwise by a new node."""
        node, piece, verdict = tensor.node, tensor.piece, tensor.verdict
        quantizer: Any = tensor.quantizer
        assert verdict is not None and quantizer is not None
        first = next(n for n in self.again if piece_of(n) == piece and node in n.all_input_nodes)
        size, quantize = _known(value_of(node).numel()), operand_of(tensor)
        verdict.status, verdict.scaling = "in FP8", quantizer.recipe.name
        verdict.bytes = size * value_of(node).element_size()
        if quantize is None:
            with self.graph.inserting_before(first):
                quantize = self.graph.call_function(ops.qdq_operand, (node, quantizer))
            quantize.meta.update({**node.meta, **({} if piece is None else {PIECE: piece})})
            slot = self.walk.names.slot(verdict.name, "saved")
            quantize.meta[QUANTIZED] = [QuantizedTensor(slot, "saved", verdict.source)]
            if isinstance(quantizer, ops.Stateful):
                self.walk.slots.append(NewSlot(slot, "saved", -1, verdict.source, quantizer, quantize))
            verdict.bytes -= size
        elif quantize > first:  # the matmul's quantize may come after the first copied op, which reads it too
            first.prepend(quantize)
        quantize.meta["custom"] = {**(quantize.meta.get("custom") or {}), SAVED_FP8: True}
        return quantize

    def _end(self, node: fx.Node, copy: fx.Node, readers: list[fx.Node]) -> None:
        """Let the gradients of readers of `node` go to `copy`."""
        remaining = readers
        if not self._reduces(node):
            remaining = [u for u in readers if not self._in_matmul(u, node, copy)]
        if remaining:
            with self.graph.inserting_after(copy):
                new = self.graph.call_function(ops.differentiated_as, (node, copy))
            new.meta.update(node.meta)
            for user in remaining:
                user.replace_input_with(node, new)

    def _reduces(self, node: fx.Node) -> bool:
        """Return whether the ops from tensors in FP8 to `node` reduce rows."""

        def computed_again(other: fx.Node) -> bool:
            return other in self.again and (other, piece_of(node)) not in self.tensors

        met = reach([node], lambda other: filter(computed_again, float_inputs(other)))
        return any(self.again[other].reduces for other in met)

    def _in_matmul(self, reader: fx.Node, node: fx.Node, copy: fx.Node) -> bool:
        """Let the gradients of a matmul that reads `node` be those of the matmul of `copy`, if `reader` is part of one.

        Its operand is quantized for all three products, or for each: see `QuantizeCall`.
        """
        if reader.target is ops.qdq_operand and all(map(_is_product, reader.users)):
            self._all_products(reader, node, copy)
        elif reader.target is ops.qdq_no_grad and any(isinstance(a, ops.Rowwise | ops.Blockwise) for a in reader.args):
            self._own_products(reader, node, copy)
        elif _is_product(reader) and reader.meta["custom"]["fp8pass_kind"] != "output":
            reader.replace_input_with(node, copy)
        else:
            return False
        return True

    def _all_products(self, operand: fx.Node, node: fx.Node, node_copy: fx.Node) -> None:
        quantizer: Any = operand.args[1]
        with self.graph.inserting_after(operand):
            other = self.graph.call_function(ops.qdq_as, (node_copy, node, quantizer))
        other.meta.update({key: value for key, value in operand.meta.items() if key != QUANTIZED})
        for slot in (slot for slot in self.walk.slots if slot.node is operand):
            slot.also.append(other)
        for product in list(operand.users):
            with self.graph.inserting_after(product):
                copy = self.graph.node_copy(product, lambda n: other if n is operand else n)
            copy.meta["custom"] = {**copy.meta["custom"], "fp8pass_kind": "gradients"}
            with self.graph.inserting_after(copy):
                new = self.graph.call_function(ops.differentiated_as, (product, copy))
            new.meta.update(product.meta)
            product.replace_all_uses_with(new, delete_user_cb=functools.partial(_is_not, new))

    def _own_products(self, operand: fx.Node, node: fx.Node, copy: fx.Node) -> None:
        for_gradients = [product for product in operand.users if product.meta["custom"]["fp8pass_kind"] != "output"]
        if len(for_gradients) == len(operand.users):
            operand.replace_input_with(node, copy)
        elif for_gradients:
            with self.graph.inserting_after(operand):
                other = self.graph.node_copy(operand, lambda n: copy if n is node else n)
            other.meta.pop(QUANTIZED, None)
            for product in for_gradients:
                product.replace_input_with(operand, other)


def _is_product(node: fx.Node) -> bool:
    return "fp8pass_kind" in (node.meta.get("custom") or {}) and not _is_quantize(node)


def _is_quantize(node: fx.Node) -> bool:
    return (getattr(node.target, "__module__", None) or "").split(".")[0] == "fp8pass"


def _is_not(new: fx.Node, user: fx.Node) -> bool:
    return user is not new


def _known(size: Any) -> int:
    """Return a size; 0 if it is symbolic."""
    return size if isinstance(size, int) else 0


def _shape(node: fx.Node) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in value_of(node).shape)
