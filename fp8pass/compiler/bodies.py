"""Compile a graph that calls functions: each function once, for all equal layers that it stands for.

The compiled graph is a sequence of Python calls: each layer calls its function with its own parameters and its parts of
the state. Autograd connects the calls, as it does where each layer is compiled by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from fp8pass.base._torch import FakeTensor, FakeTensorMode, as_fakes, detect_fake_mode, function_class
from fp8pass.compiler.cuda_graphs import Recorder
from fp8pass.compiler.line import Line, line_of
from fp8pass.compiler.one_node import MOST_BYTES, OneNode, Other, line_without_gradients, one_node_of
from fp8pass.graph.annotation import Annotation, copy_to_edit, graphs_of, is_state_input
from fp8pass.quant import ops
from fp8pass.weights.update_key import attribute

CompileBody = Callable[[str, fx.GraphModule, list[Any]], Callable[..., Any]]
"""Compiles a function, from its name, its graph and examples of its inputs."""


def lower_bodies(
    annotation: Annotation,
    inputs: Sequence[Any],
    compile_body: CompileBody,
    joins: bool = False,
    recorder: Recorder | None = None,
) -> Callable[..., Any]:
    """Compile each function of the graph; return the callable that calls them. inputs: examples, of the whole graph.

    joins: True to make one node of all calls, once each function is compiled: see `one_node.py`. recorder: records the
    calls as CUDA graphs.
    """
    compiler = _Compiler(annotation.module, compile_body, detect_fake_mode(inputs))
    compiler.run(*as_fakes(inputs))
    line = line_of(annotation.module.graph)
    if line is None:
        if recorder is not None:
            recorder.refuse("it returns an input, or one result twice, or computes something outside of its layers")
        return _line_of_calls(annotation.module, compiler.compiled)
    attributes = [attribute(annotation.module, name) for name in line.attributes]
    if joins:
        return LineOfCalls(annotation, compiler, line, attributes, recorder)
    if recorder is not None and not recorder.accepts(line, trains=False):
        recorder = None
    return line_without_gradients(line, compiler.compiled, attributes, recorder)


class _Compiler(fx.Interpreter):
    """Runs a graph on examples, and compiles each function where it is first called."""

    def __init__(self, module: fx.GraphModule, compile_body: CompileBody, mode: FakeTensorMode | None) -> None:
        super().__init__(module)
        self.extra_traceback = False  # fx.Interpreter would add the text of the call to errors
        self.compile_body = compile_body
        self.mode = mode or contextlib.nullcontext()
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.parts: list[Tensor] = []
        """Parts of state tensors. They differ in alignment, so functions are compiled for unaligned examples."""
        self.results: dict[str, list[Any]] = {}
        """Examples of the results of each function whose results share no storage, with inputs or each other."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Compile the function at its first call; return examples of its results."""
        if target not in self.compiled:
            with self.mode:
                examples = [_unaligned(x) if any(x is part for part in self.parts) else x for x in args]
            self.compiled[target] = self.compile_body(target, self.fetch_attr(target), examples)
        with self.mode:
            if target in self.results:
                return [_another(result) for result in self.results[target]]
            # with hooks of its own: a checkpointed region around this call would count the tensors saved here
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                results = _InHighPrecision(self.fetch_attr(target)).run(*args)
        if _are_separate(args, results):
            self.results[target] = results
        return results

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return an example of a tensor that the graph's module holds, as an update holds moments."""
        return as_fakes([super().get_attr(target, args, kwargs)])[0]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Split a state tensor, or get one of its parts."""
        with self.mode:
            result = super().call_function(target, args, kwargs)
        if target is torch.split_with_sizes:
            self.parts += result
        return result


class _InHighPrecision(fx.Interpreter):
    """Runs a function without quantizing: faster, and its results have the same shapes, strides and dtypes."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return args[0] if _is_like_first(target) else super().call_function(target, args, kwargs)


def _is_like_first(target: object) -> bool:
    return getattr(target, "is_like_first", False)


def without_quantizing(function: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """Return a copy of a function that does not quantize, and its inputs: those of `function` without the state."""
    module = copy_to_edit(function)
    for part in graphs_of(module):
        for node in [n for n in part.graph.nodes if _is_like_first(n.target)]:
            node.replace_all_uses_with(node.args[0])
            part.graph.erase_node(node)
        part.recompile()
    output = module.graph.output_node()
    results: Any = output.args[0]
    output.args = (tuple(x for x in results if not _is_of_state(x)),)
    given = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    # from the end, so that the users of a node are erased before it
    for node in reversed(list(module.graph.nodes)):
        if not node.users and _is_of_state(node):
            module.graph.erase_node(node)
            given.pop(node, None)
    module.recompile()
    return module, list(given.values())


def _is_of_state(node: fx.Node) -> bool:
    """Return whether a node is a state tensor or is computed from those alone, or is a result of `quantize_once`."""
    read = node.all_input_nodes
    from_state = len(read) > 0 and all(map(_is_of_state, read))
    return is_state_input(node) or node.target is ops.quantize_once or from_state


def _are_separate(args: Sequence[Any], results: Sequence[Any]) -> bool:
    """Return whether all results are plain tensors that share storage neither with each other nor with `args`."""
    if not all(type(x) is FakeTensor for x in results):
        return False
    # `_cdata` identifies a storage: those of fake tensors have no data_ptr
    of_results, of_args = (
        [x.untyped_storage()._cdata for x in tensors if type(x) is FakeTensor] for tensors in (results, args)
    )
    return len({*of_results}) == len(of_results) and {*of_results}.isdisjoint(of_args)


def _another(x: Tensor) -> Tensor:
    """Return a tensor like `x`: AOTAutograd would take `x` itself, among the inputs of one function twice, for one."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


def _unaligned(x: Tensor) -> Tensor:
    """Return a tensor like `x` whose first element is not aligned, so that compiled code does not rely on that."""
    size = 2 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.new_empty(size).as_strided(x.shape, x.stride(), 1)


class LineOfCalls:
    """The calls of a graph: a node of autograd's each, until all functions are compiled; then one node.

    attributes: the tensors that the line takes after the graph's inputs. recorder: records CUDA graphs of the one node.
    These make gradients complete at the end of the backward in any case, as if the graph were compiled in one piece.
    """

    def __init__(
        self,
        annotation: Annotation,
        compiler: _Compiler,
        line: Line,
        attributes: Sequence[Any] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._functions: dict[str, Any] = dict.fromkeys(compiler.compiled)
        noting = {name: self._noting(name, run) for name, run in compiler.compiled.items()}
        self._calls = _line_of_calls(annotation.module, noting)
        self._line: Line | None = line
        self._attributes = attributes
        self._state = len(annotation.inputs)
        self._recorder = recorder
        self._node: OneNode | None = None

    def __call__(self, *args: Any) -> Any:
        """Call the functions."""
        if not torch.is_grad_enabled() or (self._recorder is None and _ranks_wait()):
            return self._calls(*args)
        if self._node is not None:
            return self._node(*args)
        if self._line is not None:
            self._join(args)
        return self._calls(*args) if self._node is None else self._node(*args)

    def _join(self, args: Sequence[Any]) -> None:
        """Make one node of the calls, if all functions are compiled and nothing waits for the gradients of one."""
        assert self._line is not None
        if any(f is None or getattr(f, "compiled_bw", f) is None for f in self._functions.values()):
            return
        if self._recorder is not None and not self._recorder.accepts(self._line, trains=True):
            self._recorder = None
        if self._recorder is None and _are_waited_for([x for x in args if isinstance(x, Tensor) and x.requires_grad]):
            self._line = None
            return
        try:
            self._node = one_node_of(self._line, self._functions, self._attributes, self._recorder, self._state)
        except Other as why:
            self._line = None
            if self._recorder is not None:
                self._recorder.refuse(str(why))

    def _noting(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes what AOTAutograd has made of it."""

        def call(*args: Any) -> Any:
            results = run(*args)
            if self._functions[name] is None:
                trained = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
                made = (f for x in trained if hasattr(f := function_class(x), "compiled_fw"))
                self._functions[name] = next(made, None) if trained else run
            return results

        return call


def _are_waited_for(trained: Sequence[Tensor]) -> bool:
    """Return whether a hook waits for the gradient of a tensor, or all gradients together are large."""
    is_hooked = any(x.is_leaf and x._post_accumulate_grad_hooks for x in trained)
    return is_hooked or sum(x.nbytes for x in trained) > MOST_BYTES


def _ranks_wait() -> bool:
    """Return whether other ranks may wait for gradients of each layer."""
    return dist.is_available() and dist.is_initialized()


def _line_of_calls(module: fx.GraphModule, compiled: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the graph as Python code that calls compiled functions."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        copies[node] = new = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_module":
            # a function, since the call of a module takes longer
            new.op, new.target = "call_function", _named(node.target, compiled[node.target])
    calls: Callable[..., Any] = fx.GraphModule(module, graph).forward
    return calls


def _named(name: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return compiled(*args)

    call.__name__ = name
    return call
