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

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fp8pass.base._torch import (
    coerce_to_expected_memory_format,
    is_traceable_wrapper_subclass,
    keeps_graph,
    top_saved_tensors_hooks,
    without_autocast,
    without_switch,
)
from fp8pass.compiler.cuda_graphs import Boxed, Recorder
from fp8pass.compiler.line import Line, Op
from fp8pass.weights.parameter_bytes import storages_of

MOST_BYTES = 1 << 30
"""The most bytes of gradients that one node hands over at its end."""


def one_node_of(
    line: Line,
    functions: Mapping[str, Any],
    attributes: Sequence[Any] = (),
    recorder: Recorder | None = None,
    state: int = 0,
) -> OneNode:
    """Return the line as one node. Raises `Other` if it can't be one.

    functions: by name, the class that AOTAutograd has made of each, whose backward is compiled, or the function itself
    if nothing in it has gradients. attributes, recorder, state: see `OneNode`.
    """
    ops = {op.function: op for op in line.ops if op.split is None}
    bodies = {
        name: _Body(f, len(ops[name].inputs), ops[name].count) if hasattr(f, "compiled_bw") else _Constant(f)
        for name, f in functions.items()
    }
    return OneNode(line, bodies, attributes, recorder, state)


def line_without_gradients(
    line: Line, functions: Mapping[str, Callable[..., Any]], attributes: Sequence[Any], recorder: Recorder | None
) -> Callable[..., Any]:
    """Return what calls the functions of a graph that has no backward. attributes, recorder: see `OneNode`."""
    node = OneNode(line, {name: _Constant(f) for name, f in functions.items()}, attributes, recorder)

    def run(*inputs: Any) -> tuple[Any, ...]:
        with without_autocast(), torch.no_grad():
            return tuple(node.forward([*inputs, *attributes]))

    return run


def _does_more(known: Any) -> bool:
    """Return whether AOTAutograd does more around compiled code than to hand over tensors. known: its metadata."""
    return bool(
        known.num_mutated_inp_runtime_indices
        or known.num_intermediate_bases
        or known.num_outputs_aliased
        or known.num_unsafe_view_outputs
        or known.tokens
        or known.num_backward_tokens
        or known.num_graphsafe_rng_states
        or known.is_rng_op_functionalized
    )


def without_wrappers(compiled: Callable[..., Any], code: Boxed, known: Any, inputs: Sequence[Any]) -> None:
    """Let lines call the compiled code of a function without gradients past AOTAutograd, if that does nothing around.

    compiled: the function as AOTAutograd returns it. known: its metadata. inputs: examples.
    """
    is_plain = not any(map(is_traceable_wrapper_subclass, inputs))
    same = len(known.input_info) == len(inputs)  # else, some are passed once, or as parts of others
    if is_plain and same and not _does_more(known) and known.grad_enabled_mutation is None:
        compiled.direct = code, tuple(known.mutated_graph_handled_indices_seen_by_autograd)  # type: ignore[attr-defined]


class _Body:
    """The compiled code of a function, and what AOTAutograd knows of its results. Raises Other if it does more.

    tangents: {result that has a gradient: the memory format in which the backward takes it}. saved: the results that
    are saved; unchecked: those of them whose versions are not checked.
    """

    def __init__(self, function: Any, arguments: int, results: int) -> None:
        known = function.metadata
        is_plain = function.maybe_subclass_metadata is None and not function.num_symints_saved_for_bw
        # torch 2.11 has one name for both: that a result requires a gradient, and that the backward takes one
        has_tangent = [getattr(out, "requires_grad_for_backward", out.requires_grad) for out in known.output_info]
        outputs = [i for i, has_one in enumerate(has_tangent) if has_one]
        same = len(known.input_info) == arguments and known.num_forward_returns == results
        if not is_plain or _does_more(known) or not same or len(outputs) != len(known.subclass_tangent_meta):
            raise Other("one of its functions returns views of its inputs, or does more than compute")
        self.forward, self.backward = without_switch(function.compiled_fw), without_switch(function.compiled_bw)
        self.donates = bool(known.bw_donated_idxs)
        formats = [meta.memory_format for meta in known.subclass_tangent_meta]
        self.tangents = dict(zip(outputs, formats, strict=True))
        self.saved, self.unchecked = slice(results, None), known.tensors_saved_for_backwards_no_vc_check_slice
        self.not_differentiable = [i for i, out in enumerate(known.output_info) if not out.requires_grad]
        self.likes: dict[int, Tensor] = {}
        """Results that have gradients, as tensors without memory, once the function has run."""
        self.count, self.checked = 0, 0
        """How many results are saved, and how many of them, the first, with a check, once the function has run."""

    def run(self, arguments: list[Any]) -> Any:
        """Run the forward; return its results, and then what it saves."""
        results = self.forward(arguments)
        if len(self.likes) < len(self.tangents):
            self.count = len(results[self.saved])
            self.checked = self.count - len(results[self.unchecked])
            self.likes = {i: results[i].to("meta") for i in self.tangents}
        return results


class _Constant:
    """A function whose results have no gradients."""

    saved, donates = slice(0), False

    def __init__(self, function: Callable[..., Any]) -> None:
        run = without_switch(function)
        self.run: Boxed = lambda arguments: run(*arguments)
        """Runs the function with a list of arguments, and returns its results."""
        self.written: Sequence[int] = ()
        """The arguments whose versions count up in each call, by position: AOTAutograd's wrappers do that, no code."""
        if hasattr(function, "direct"):
            self.run, self.written = function.direct


class Other(Exception):
    """Raised for a function that needs AOTAutograd's wrappers."""


class OneNode:
    """A line of calls whose functions are compiled. bodies: of the functions, by name.

    attributes: the tensors that the line takes after the graph's inputs. recorder: records forward and backward as CUDA
    graphs; None to run them as they are. state: how many of the graph's inputs, the last ones, have no gradients:
    autograd does not see them.
    """

    def __init__(
        self,
        line: Line,
        bodies: Mapping[str, _Body | _Constant],
        attributes: Sequence[Any] = (),
        recorder: Recorder | None = None,
        state: int = 0,
    ) -> None:
        self.line = line
        self.state = slice(line.inputs - len(attributes) - state, line.inputs - len(attributes))
        self.attributes = attributes
        self.bodies = [bodies.get(op.function) for op in line.ops]
        self.donates = any(body.donates for body in bodies.values())
        self._written = line.written({name: getattr(body, "written", ()) for name, body in bodies.items()})
        differentiable = {
            op.first + i
            for op, body in zip(line.ops, self.bodies, strict=True)
            if isinstance(body, _Body)
            for i in range(op.count)
            if i not in body.not_differentiable
        }
        self.not_differentiable = [i for i, slot in enumerate(line.outputs) if slot not in differentiable]
        self.checked: list[int] = []
        """The tensors, of those that are saved, whose versions are checked, by position, once the forward has run."""
        self.shown: list[int] = []
        """Those of them that have memory of inputs or outputs: no one else has the others, and could overwrite them."""
        self._recorder = recorder
        self._parts: dict[int, Sequence[Tensor]] = {}
        """The parts of state tensors, by the first slot."""
        self.forward = (
            self._forward if recorder is None else recorder.forward(self._forward, line, bool(differentiable))
        )
        self._backwards: dict[tuple[bool, ...], Boxed] = {}

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the forward with the graph's inputs; return its outputs, which have one grad_fn."""
        state, start = inputs[self.state], self.state.start
        results: tuple[Any, ...] = _Node.apply(self, state, *inputs[:start], *self.attributes)  # type: ignore[no-untyped-call]
        return results

    def _forward(self, slots: list[Any]) -> list[Any]:
        """Return the outputs, then the tensors to save. Empties `slots`. slots: the inputs."""
        increment_version([slots[i] for i in self._written])  # once for all calls
        slots += [None] * (self.line.slots - len(slots))
        saved: list[Tensor] = []
        for op, body in zip(self.line.ops, self.bodies, strict=True):
            if body is None:
                slots[op.first : op.first + op.count] = self._parts_of(op, slots[op.inputs[0]])
            else:
                results = body.run([slots[i] for i in op.inputs])
                slots[op.first : op.first + op.count] = results[: op.count]
                saved += results[body.saved]
                del results
            for i in op.frees:
                slots[i] = None
        outputs = [slots[i] for i in self.line.outputs]
        if saved and not self.checked:
            self._note_saved(saved, slots[: self.line.inputs] + outputs)
        slots.clear()
        return outputs + saved

    def _note_saved(self, saved: Sequence[Tensor], shown: Sequence[Any]) -> None:
        """Note which of the saved tensors are checked, and which of these share memory with inputs and outputs."""
        counts = [(body.count, body.checked) for body in self.bodies if isinstance(body, _Body)]
        are_checked = [i < checked for count, checked in counts for i in range(count)]
        self.checked = [i for i, is_checked in enumerate(are_checked) if is_checked]
        memory = storages_of(x for x in shown if isinstance(x, Tensor))
        self.shown = [i for i in self.checked if not memory.keys().isdisjoint(storages_of([saved[i]]))]

    def _parts_of(self, op: Op, whole: Tensor) -> Sequence[Tensor]:
        """Return the parts of a state tensor: those of the last call, unless that had a tensor in other memory.

        They keep their memory, so no other tensor gets it. Nothing counts up the versions of what they are views of.
        """
        assert op.split is not None
        parts = self._parts.get(op.first)
        if parts is None or parts[0].data_ptr() != whole.data_ptr():
            parts = [part.detach() for part in torch.split_with_sizes(whole, *op.split)]
            if self._recorder is None:  # else, the memory may be that of a recording
                self._parts[op.first] = parts
        return parts

    def backward(self, saved: list[Tensor], tangents: Sequence[Any]) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs. Empties the list."""
        given = tuple(g is not None for g in tangents)
        if not any(given):
            return [None] * self.line.inputs
        if given not in self._backwards:
            run = functools.partial(self._backward, given)
            recorder = self._recorder
            self._backwards[given] = run if recorder is None else recorder.backward(run, len(saved), sum(given))
        saved += [g for g in tangents if g is not None]
        return self._backwards[given](saved)

    def _backward(self, given: Sequence[bool], args: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the inputs. given: the outputs that have one. args: what is saved, and these."""
        device, grads = args[-1].device, list[Any]([None] * self.line.slots)
        of_outputs = itertools.compress(self.line.outputs, given)
        for slot, g in zip(of_outputs, _taken(args, sum(given)), strict=True):
            grads[slot] = g
        for op, body in zip(reversed(self.line.ops), reversed(self.bodies), strict=True):
            if not isinstance(body, _Body):
                continue
            saved, known = _taken(args, body.count), [grads[op.first + i] for i in body.tangents]
            if all(g is None for g in known):  # nothing that this call computes is differentiated
                continue
            for (i, memory_format), g in zip(body.tangents.items(), known, strict=True):
                g = torch.zeros_like(body.likes[i], device=device) if g is None else g
                saved.append(coerce_to_expected_memory_format(g, memory_format))
            grads[op.first : op.first + op.count] = [None] * op.count
            del known, g
            for slot, g in zip(op.inputs, body.backward(saved), strict=True):
                if g is not None:
                    grads[slot] = g if grads[slot] is None else grads[slot] + g
        return grads[: self.line.inputs]


def _taken(saved: list[Tensor], count: int) -> list[Tensor]:
    """Remove the last `count` tensors, and return them."""
    taken = saved[len(saved) - count :]
    del saved[len(saved) - count :]
    return taken


class _Node(torch.autograd.Function):
    # in a compiled training step, Dynamo would trace these as the user's code
    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(ctx: Any, node: OneNode, state: Sequence[Any], *others: Any) -> Any:
        start = node.state.start
        with without_autocast():
            results = node.forward([*others[:start], *state, *others[start:]])
        end = len(node.line.outputs)
        outputs, saved = results[:end], list[Any](results[end:])
        del results
        # hooks of users, such as those that move to the CPU what is saved, get all that AOTAutograd would give them
        ctx.node, ctx.checked = node, node.checked if top_saved_tensors_hooks(False) else node.shown
        ctx.save_for_backward(*[x.detach() if (x := saved[i])._is_view() else x for i in ctx.checked])
        for i in ctx.checked:
            saved[i] = None
        ctx.others = [x.detach() if x is not None and x._is_view() else x for x in saved]
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
        saved = [*ctx.others] if keeps else ctx.others
        for i, x in zip(ctx.checked, ctx.saved_tensors, strict=True):
            saved[i] = x
        if not keeps:
            ctx.maybe_clear_saved_tensors()
            ctx.others = None
        with without_autocast(), torch.no_grad():
            grads = [*ctx.node.backward(saved, tangents)]
        del grads[ctx.node.state]
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *_NotTwice.apply(torch.empty(0, requires_grad=True), *grads)  # type: ignore[no-untyped-call]
        return None, None, *grads


class _NotTwice(torch.autograd.Function):
    """The identity of gradients, which raises an error where they are differentiated."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")
