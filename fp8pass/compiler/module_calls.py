"""Compile each module by itself that code running op by op in a training step calls.

Dynamo skips a whole function if its graph breaks in a loop, for example at the backward() of each microbatch. Functions
of the user that it calls are still compiled, but Dynamo skips torch's own modules, such as `nn.Sequential` and
`nn.Linear`, and all functions that `torch.utils.checkpoint` calls.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from fp8pass.base._torch import (
    MODULE_CALL,
    Loss,
    callback_handler,
    current_graph_task_id,
    disabled_functions,
    dynamo_is_on,
    skip_code,
)
from fp8pass.base.names import is_users_file

Call = Callable[..., Any]


class ModuleCalls:
    """Compiles modules with a backend when code that runs op by op calls them.

    by_path: True if the backend's treatment of a matmul depends on its name in the whole model. Then each submodule is
    compiled under its path in the model; otherwise instances of a class share compiled code if their parameters have
    the same shapes.
    """

    def __init__(self, backend: Call, by_path: bool) -> None:
        self._backend = backend
        self.by_path = by_path
        self.paths: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        """{module: (the module that contains it, its path there)}."""
        self._of_kind: dict[Hashable, Call] = {}
        """{type of the root, path, type of the module, shapes of its parameters: compiled function}."""
        self._of_module: weakref.WeakKeyDictionary[nn.Module, Call] = weakref.WeakKeyDictionary()
        self._compiles: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        """True if a module's latest call in a forward was compiled: its recomputation in a backward does the same."""
        self._before: weakref.WeakKeyDictionary[nn.Module, Call] = weakref.WeakKeyDictionary()
        """{module: the call of another `ModuleCalls`, which runs it where this one does not compile it}."""
        self.stays = False
        """True if calls are caught from the beginning of each step."""
        self.is_on = True
        """False while calls of modules run as if they were not caught, other than recomputations in a backward."""

    def caught(self, modules: Iterable[nn.Module], is_first: bool) -> Caught:
        """Return a context in which calls of these modules and their submodules are compiled.

        is_first: True if nothing has been compiled yet. A fully compiled step has no calls to catch: after the
        first step, catching begins only when Dynamo begins to compile something, unless a call was caught before.
        """
        return Caught(self, modules, at_once=is_first or self.stays)

    def catch(self, wholes: Sequence[nn.Module], modules: Iterable[nn.Module]) -> dict[nn.Module, Call | None]:
        """Catch the calls of modules; return what another `ModuleCalls` had set for each, or None.

        wholes: the modules that name them. What `module.compile()` set stays in force.
        """
        if self.by_path:
            ordered = sorted(wholes, key=lambda m: sum(1 for _ in m.modules()))  # the largest last: its paths win
            self.paths.update({part: (weakref.ref(m), path) for m in ordered for path, part in m.named_modules()})
        before = {module: vars(module).get(MODULE_CALL) for module in modules}
        # `_called`: set by a `ModuleCalls`; any other call is of `module.compile()`
        caught = {m: call for m, call in before.items() if call is None or getattr(call, "func", None) is _called}
        for module, call in caught.items():
            vars(module)[MODULE_CALL] = functools.partial(_called, self, module)
            if isinstance(call, functools.partial) and call.args[0] is not self:
                self._before[module] = call
        return caught

    def place(self, graph: fx.GraphModule) -> None:
        """Replace this file's lines in the stack traces of a module's graph by the user's line that calls it."""
        if (caller := _users_caller()) is None:
            return
        file, line = caller.f_code.co_filename, caller.f_lineno
        at, code = f'  File "{file}", line {line}, in ', linecache.getline(file, line).strip()
        for part in graph.modules():
            for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
                if trace := node.stack_trace:
                    node.stack_trace = _OWN_LINE.sub(lambda match: f"{at}{match[1]}\n    {code}", trace)
        stack = getattr(getattr(graph, "compile_subgraph_reason", None), "user_stack", [])
        stack[:] = [traceback.FrameSummary(file, line, f.name) if f.filename == __file__ else f for f in stack]

    # Disabled, because `skip_code` keeps Dynamo from the caller only. Returns a function instead of calling it, because
    # within `choose` Dynamo is off.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def choose(self, module: nn.Module, is_on: bool) -> Call:
        """Return the function to call instead of a module: compiled, unless the user disables that or it has no matmul.

        is_on: True if Dynamo is on.
        """
        # In a backward, a checkpoint recomputes its forward and must save the same tensors: the earlier choice is kept.
        if current_graph_task_id() == -1:
            compiles = self.is_on and (is_on or _is_off_for_checkpointing())
            self._compiles[module] = compiles and compiles_alone(module)
        if not self._compiles.get(module, False):
            # not `module` itself, whose call would come back here
            return self._before.get(module) or functools.partial(type(module)._call_impl, module)
        root, path = self._place_of(module)
        if (call := self._of_module.get(module)) is None:
            # In the key: the path, because recipes and filters may go by names; shapes, because a call with others
            # would recompile the same code, up to Dynamo's recompile limit.
            shapes = tuple((name, p.shape) for name, p in module.named_parameters())
            function = _forward if _has_backward_hooks(module) else _call
            kind = function, type(root), path, type(module), shapes
            if kind not in self._of_kind:
                self._of_kind[kind] = torch.compile(_own(function, type(module).__name__), backend=self._backend)
            call = self._of_module[module] = self._of_kind[kind]
        self.stays = True
        compiled = functools.partial(call, root, path)
        return functools.partial(_hooked, module, compiled) if _has_backward_hooks(module) else compiled

    def _place_of(self, module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the root through which to call a module, and its path there; the module and () without a path."""
        holder, path = self.paths.get(module, (None, ""))
        root = holder() if holder is not None else None
        return (module, ()) if root is None or not path else (root, tuple(path.split(".")))


class Caught:
    """A context that sends calls of modules to a `ModuleCalls`: at once, or after Dynamo begins a compilation."""

    def __init__(self, calls: ModuleCalls, modules: Iterable[nn.Module], at_once: bool) -> None:
        self._calls = calls
        self._modules = modules
        self._at_once = at_once
        self._caught: dict[nn.Module, Call | None] = {}

    def __enter__(self) -> None:
        if self._at_once:
            self._catch()
        callback_handler.register_start_callback(self._begin)

    def __exit__(self, *_: object) -> None:
        callback_handler.remove_start_callback(self._begin)
        for module, before in self._caught.items():
            if before is None:
                vars(module).pop(MODULE_CALL, None)
            else:
                vars(module)[MODULE_CALL] = before

    def _begin(self, _: Any) -> None:
        if not self._caught:
            self._catch()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _catch(self) -> None:
        wholes = list(self._modules)
        parts = dict.fromkeys(part for whole in wholes for part in whole.modules())
        self._calls.stays |= any(map(_is_called_in_full, parts))
        self._caught = self._calls.catch(wholes, parts)


def _called(calls: ModuleCalls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # Dynamo traces all of `nn.Module.__call__` here, for example for its hooks
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    return calls.choose(module, dynamo_is_on())(*args, **kwargs)


def _users_caller() -> FrameType | None:
    """Return the user's frame that calls the innermost caught module, whether Dynamo has compiled it or not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _called.__code__:
        frame = frame.f_back
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _call(module: nn.Module, path: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    for name in path:
        module = module._modules[name]  # type: ignore[assignment]
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _forward(module: nn.Module, path: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    for name in path:
        module = module._modules[name]  # type: ignore[assignment]
    return type(module).forward(module, *args, **kwargs)


def _hooked(module: nn.Module, forward: Call, *args: Any, **kwargs: Any) -> Any:
    """Call a module whose hooks run op by op, and whose forward is replaced."""
    vars(module)["forward"] = forward  # `_call_impl` calls `self.forward`, so an attribute of the instance
    try:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        del vars(module)["forward"]


_OWN_LINE = re.compile(rf'  File "{re.escape(__file__)}", line \d+, in (.*)\n.*')


def _own(function: Any, name: str) -> Any:
    """Return a copy of the function with a separate code object of this name: Dynamo's recompile limit is per code."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


for _function in (_called, _hooked, Caught._begin):  # Dynamo compiles no frame of these functions
    skip_code(_function.__code__)


def _is_off_for_checkpointing() -> bool:
    """Return whether only torch's own checkpointing, and `choose`, have disabled Dynamo."""
    return all(f.__module__ == "torch.utils.checkpoint" for f in disabled_functions()[1:])


def compiles_alone(module: nn.Module) -> bool:
    """Return whether a module is worth compiling by itself, and can be, if it has hooks around its backward."""
    # Hooks that are not full get the gradients of autograd's last node: that would be the node of the compiled graph.
    is_hookable = "forward" not in vars(module) and module._is_full_backward_hook is not False
    # Only matrices are multiplied: biases and the weights of norms are vectors. A loss multiplies nothing, but run op
    # by op it makes more passes over memory.
    is_worth_it = isinstance(module, Loss) or any(p.dim() > 1 for p in module.parameters())
    return is_worth_it and (is_hookable or not _has_backward_hooks(module))


def _has_backward_hooks(module: nn.Module) -> bool:
    """Return whether the graph breaks at a call of a module, for hooks around its backward, but not in its forward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _is_called_in_full(module: nn.Module) -> bool:
    """Return whether Dynamo traces all of `nn.Module.__call__`: it then recompiles if `MODULE_CALL` comes or goes."""
    # As in Dynamo's UnspecializedNNModuleVariable.call_function, which traces only `forward` of a plain module.
    is_plain = type(module).__call__ is nn.Module.__call__ and "forward" not in vars(module)
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not is_plain or any(hooks)
