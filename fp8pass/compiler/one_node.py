"""Run the calls of functions that a graph consists of, forward and backward, as one node of autograd's.

AOTAutograd makes a node of each call, whose Python takes longer than the kernels of a small layer. Once all functions
are compiled, forward and backward, this calls their compiled code by itself, adds the gradients, and frees what is
saved call by call. The numbers are the same, except that gradients of a parameter which several calls read are added
before they are added to its `.grad`.

Gradients are complete when the whole backward has run, as in a graph that is compiled in one piece. So a graph stays a
line of nodes where something waits for the gradients of a layer, such as other ranks or `update_in_backward`; where all
gradients together are large, since a step that accumulates them would hold them twice; and where a function does more
than compute: its outputs are views of its inputs, for example.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from fp8pass.base._torch import coerce_to_expected_memory_format, keeps_graph, without_autocast

MOST_BYTES = 1 << 30
"""The most bytes of gradients that one node hands over at its end."""


@dataclass(frozen=True)
class _Op:
    """A call of a function, or the split of a state tensor.

    function: its name. inputs: slots of the arguments. first, count: slots of the results. frees: slots that no later
    op reads. split: the sizes and the dimension of a split; None for a call.
    """

    function: str
    inputs: tuple[int, ...]
    first: int
    count: int
    frees: tuple[int, ...]
    split: tuple[list[int], int] | None = None


class Line(NamedTuple):
    """The ops of a graph in order. slots: of all its values; the graph's inputs come first. outputs: slots."""

    ops: list[_Op]
    slots: int
    outputs: tuple[int, ...]


def one_node_of(line: Line, functions: Mapping[str, Any]) -> OneNode | None:
    """Return the line as one node, once all functions are compiled; None before. Raises `Other` if it can't be one.

    functions: the class that AOTAutograd has made of each, or the function itself if nothing in it has gradients, by
    name; None before it has run.
    """
    if any(f is None or getattr(f, "compiled_bw", f) is None for f in functions.values()):
        return None
    ops = {op.function: op for op in line.ops if op.split is None}
    return OneNode(
        line,
        {
            name: _Body(f, len(ops[name].inputs), ops[name].count) if hasattr(f, "compiled_bw") else _Constant(f)
            for name, f in functions.items()
        },
    )


def line_of(graph: fx.Graph) -> Line | None:
    """Return the ops of a graph of calls; None if it has others, or returns an input, or anything twice."""
    slots: dict[Any, int] = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    inputs = used = len(slots)
    firsts: dict[Any, int] = {}
    planned: list[tuple[fx.Node, tuple[int, ...], int, int]] = []
    for node in graph.nodes:
        args: Any = node.args
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and args[0] in firsts:
            slots[node] = firsts[args[0]] + args[1]
            continue
        is_split = node.target is torch.split_with_sizes
        read = args[:1] if is_split else args
        if not (is_split or node.op == "call_module") or not all(n in slots for n in read):
            return None
        indices: list[Any] = [user.args[1] for user in node.users]
        count = len(args[1]) if is_split else 1 + max(indices, default=-1)
        planned.append((node, tuple(slots[n] for n in read), used, count))
        firsts[node] = used
        used += count
    results: Any = graph.output_node().args[0]
    if not isinstance(results, tuple) or not all(n in slots for n in results):
        return None
    outputs = tuple(slots[n] for n in results)
    if len({*outputs}) < len(outputs) or min(outputs, default=0) < inputs:
        return None
    return Line(list(_ops(planned, {*outputs})), used, outputs)


def _ops(planned: Sequence[tuple[fx.Node, tuple[int, ...], int, int]], kept: Set[int]) -> Iterator[_Op]:
    """Yield the ops, with the slots that each frees. kept: slots to free in none."""
    last: dict[int, int] = {}
    for i, (_, read, first, count) in enumerate(planned):
        last.update(dict.fromkeys((*read, *range(first, first + count)), i))
    for i, (node, read, first, count) in enumerate(planned):
        touched = dict.fromkeys((*read, *range(first, first + count)))
        frees = tuple(slot for slot in touched if last[slot] == i and slot not in kept)
        args: Any = node.args
        is_call = node.op == "call_module"
        yield _Op(str(node.target) if is_call else "", read, first, count, frees, None if is_call else args[1:3])


class _Body:
    """The compiled code of a function, and what AOTAutograd knows of its results. Raises Other if it does more.

    tangents: {result that has a gradient: the memory format in which the backward takes it}. checked, unchecked: the
    results that are saved, with and without a check of their versions.
    """

    def __init__(self, function: Any, arguments: int, results: int) -> None:
        known = function.metadata
        does_more = (
            function.maybe_subclass_metadata is not None
            or function.num_symints_saved_for_bw
            or known.num_mutated_inp_runtime_indices
            or known.num_intermediate_bases
            or known.num_outputs_aliased
            or known.num_unsafe_view_outputs
            or known.tokens
            or known.num_backward_tokens
            or known.num_graphsafe_rng_states
            or known.is_rng_op_functionalized
        )
        # torch 2.11 has one name for both: that a result requires a gradient, and that the backward takes one
        has_tangent = [getattr(out, "requires_grad_for_backward", out.requires_grad) for out in known.output_info]
        outputs = [i for i, has_one in enumerate(has_tangent) if has_one]
        same = len(known.input_info) == arguments and known.num_forward_returns == results
        if does_more or not same or len(outputs) != len(known.subclass_tangent_meta):
            raise Other
        self.forward, self.backward = function.compiled_fw, function.compiled_bw
        self.donates = bool(known.bw_donated_idxs)
        formats = [meta.memory_format for meta in known.subclass_tangent_meta]
        self.tangents = dict(zip(outputs, formats, strict=True))
        self.checked = known.tensors_saved_for_backwards_with_vc_check_slice
        self.unchecked = known.tensors_saved_for_backwards_no_vc_check_slice
        self.not_differentiable = [i for i, out in enumerate(known.output_info) if not out.requires_grad]
        self.likes: dict[int, Tensor] = {}
        """Results that have gradients, as tensors without memory, once the function has run."""
        self.counts = 0, 0
        """How many results are saved with a check, and without, once the function has run."""

    def run(self, arguments: list[Any]) -> Any:
        """Run the forward; return its results, and what it saves with and without a check."""
        results = self.forward(arguments)
        checked, unchecked = results[self.checked], results[self.unchecked]
        if len(self.likes) < len(self.tangents):
            self.counts = len(checked), len(unchecked)
            self.likes = {i: results[i].to("meta") for i in self.tangents}
        return results, checked, unchecked


class _Constant:
    """A function whose results have no gradients."""

    donates = False
    tangents: ClassVar[dict[int, Any]] = {}

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def run(self, arguments: list[Any]) -> Any:
        """Run the function; return its results, and nothing to save."""
        return self.function(*arguments), [], []


class Other(Exception):
    """Raised for a function that needs AOTAutograd's wrappers."""


class OneNode:
    """A line of calls whose functions are compiled. bodies: of the functions, by name."""

    def __init__(self, line: Line, bodies: Mapping[str, _Body | _Constant]) -> None:
        self.line = line
        self.bodies = [bodies.get(op.function) for op in line.ops]
        self.donates = any(body.donates for body in bodies.values())
        differentiable = {
            op.first + i
            for op, body in zip(line.ops, self.bodies, strict=True)
            if isinstance(body, _Body)
            for i in range(op.count)
            if i not in body.not_differentiable
        }
        self.not_differentiable = [i for i, slot in enumerate(line.outputs) if slot not in differentiable]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the forward with the graph's inputs; return its outputs, which have one grad_fn."""
        results: tuple[Any, ...] = _Node.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return results

    def forward(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Tensor], list[Tensor]]:
        """Return the outputs, and the tensors to save, with and without a check of their versions."""
        slots = [*inputs, *[None] * (self.line.slots - len(inputs))]
        checked, unchecked = list[Tensor](), list[Tensor]()
        for op, body in zip(self.line.ops, self.bodies, strict=True):
            if body is None:
                assert op.split is not None
                slots[op.first : op.first + op.count] = torch.split_with_sizes(slots[op.inputs[0]], *op.split)
            else:
                results, *saved = body.run([slots[i] for i in op.inputs])
                slots[op.first : op.first + op.count] = results[: op.count]
                checked += saved[0]
                unchecked += saved[1]
                del results, saved
            for i in op.frees:
                slots[i] = None
        return [slots[i] for i in self.line.outputs], checked, unchecked

    def backward(self, checked: list[Tensor], unchecked: list[Tensor], tangents: Sequence[Any]) -> dict[int, Tensor]:
        """Return the gradients by slot; the first slots are the graph's inputs. Empties the lists."""
        grads = {slot: g for slot, g in zip(self.line.outputs, tangents, strict=True) if g is not None}
        if not grads:
            return {}
        tangents_device = next(iter(grads.values())).device
        for op, body in zip(reversed(self.line.ops), reversed(self.bodies), strict=True):
            if not isinstance(body, _Body):
                continue
            saved = [*_taken(checked, body.counts[0]), *_taken(unchecked, body.counts[1])]
            given = {i: g for i in body.tangents if (g := grads.pop(op.first + i, None)) is not None}
            if not given:  # nothing that this call computes is differentiated
                continue
            for i, memory_format in body.tangents.items():
                g = given[i] if i in given else torch.zeros_like(body.likes[i], device=tangents_device)
                saved.append(coerce_to_expected_memory_format(g, memory_format))
            del given, g
            for slot, g in zip(op.inputs, body.backward(saved), strict=True):
                if g is not None:
                    grads[slot] = grads[slot] + g if slot in grads else g
        return grads


def _taken(saved: list[Tensor], count: int) -> list[Tensor]:
    """Remove the last `count` tensors, and return them."""
    taken = saved[len(saved) - count :]
    del saved[len(saved) - count :]
    return taken


class _Node(torch.autograd.Function):
    # in a compiled training step, Dynamo would trace these as the user's code
    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(ctx: Any, node: OneNode, *inputs: Any) -> Any:
        with without_autocast():
            outputs, checked, unchecked = node.forward(inputs)
        ctx.node, ctx.count = node, len(inputs)
        ctx.save_for_backward(*(x.detach() if x._is_view() else x for x in checked))
        ctx.unchecked = [x.detach() if x._is_view() else x for x in unchecked]
        ctx.mark_non_differentiable(*(x for i in node.not_differentiable if isinstance(x := outputs[i], Tensor)))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *tangents: Any) -> Any:
        keeps = keeps_graph()
        if keeps and ctx.node.donates:
            raise RuntimeError(
                "This backward was compiled to overwrite what its forward has saved, so it runs once: call backward "
                "without retain_graph=True, or set torch._functorch.config.donated_buffer = False before compiling"
            )
        checked, unchecked = list(ctx.saved_tensors), list(ctx.unchecked)
        if not keeps:
            ctx.maybe_clear_saved_tensors()
            ctx.unchecked = None
        with without_autocast(), torch.no_grad():
            by_slot = ctx.node.backward(checked, unchecked, tangents)
        grads = [by_slot.get(i) for i in range(ctx.count)]
        if torch.is_grad_enabled():  # create_graph=True
            return None, *_NotTwice.apply(torch.empty(0, requires_grad=True), *grads)  # type: ignore[no-untyped-call]
        return None, *grads


class _NotTwice(torch.autograd.Function):
    """The identity of gradients, which raises an error where they are differentiated."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")
