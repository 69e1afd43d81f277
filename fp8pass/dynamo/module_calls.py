"""Calls of modules by code that runs op by op within a training step: each is compiled by itself.

Dynamo gives up a whole function where its graph breaks in a loop, at the backward() of each microbatch say. What the
function calls is compiled as long as it is the user's code; torch's own modules, `nn.Sequential` and `nn.Linear` too,
are skipped, and so is whatever `torch.utils.checkpoint` calls.
"""

from __future__ import annotations

import functools
import linecache
import re
import traceback
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from fp8pass._torch import (
    MODULE_CALL,
    Loss,
    callback_handler,
    current_graph_task_id,
    disabled_functions,
    dynamo_is_on,
    skip_code,
)

Call = Callable[..., Any]


class ModuleCalls:
    """Compiles calls of modules with a backend, where code that runs op by op makes them.

    by_path: what the backend makes of a matmul depends on its name in the whole model. Then each part of a model is
    compiled as that part; else instances of a class share code if their parameters have the same shapes.
    """

    def __init__(self, backend: Call, by_path: bool) -> None:
        self._backend = backend
        self.by_path = by_path
        self.paths: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = (
            weakref.WeakKeyDictionary()
        )
        """Where each module is: in which one, and by what path."""
        self._of_kind: dict[Hashable, Call] = {}
        """Holds what is compiled, by what it depends on."""
        self._of_module: weakref.WeakKeyDictionary[nn.Module, Call] = weakref.WeakKeyDictionary()
        self._compiles: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        """Says if the latest call of a module in a forward was compiled: a backward that repeats it does the same."""
        self.stays = False
        """Whether to catch calls from the beginning of a step on."""

    def caught(self, modules: Iterable[nn.Module], is_first: bool) -> Caught:
        """Return a context: within it, calls of these modules, and of their parts, are compiled.

        is_first: nothing has been compiled yet. A step that was all compiled has nothing to catch: later this begins
        only when Dynamo begins to compile something, unless a call has been caught before.
        """
        return Caught(self, modules, at_once=is_first or self.stays)

    def place(self, graph: fx.GraphModule, caller: FrameType) -> None:
        """Say of a graph of a module's call, in all that tells where its ops come from, where that call is."""
        file, line = caller.f_code.co_filename, caller.f_lineno
        at, code = f'  File "{file}", line {line}, in ', linecache.getline(file, line).strip()
        for part in graph.modules():
            for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
                if trace := node.stack_trace:
                    node.stack_trace = _OWN_LINE.sub(lambda found: f"{at}{found[1]}\n    {code}", trace)
        stack = getattr(getattr(graph, "compile_subgraph_reason", None), "user_stack", [])
        stack[:] = [traceback.FrameSummary(file, line, f.name) if f.filename == __file__ else f for f in stack]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def choose(self, module: nn.Module, is_on: bool) -> Call:
        """Return what to call in a module's place: compiled, unless the user forbids that, or it has no matmul.

        is_on: Dynamo is.
        """
        if current_graph_task_id() == -1:
            self._compiles[module] = (is_on or _is_off_for_checkpointing()) and _is_worth_it(module)
        if not self._compiles.get(module, False):
            return functools.partial(type(module)._call_impl, module)
        root, path = self._place_of(module)
        if (call := self._of_module.get(module)) is None:
            shapes = tuple((name, p.shape) for name, p in module.named_parameters())
            kind = type(root), path, type(module), shapes
            if kind not in self._of_kind:
                self._of_kind[kind] = torch.compile(_own(_call, type(module).__name__), backend=self._backend)
            call = self._of_module[module] = self._of_kind[kind]
        self.stays = True
        return functools.partial(call, root, path)

    def _place_of(self, module: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the module in which it is to be called, and its path there; itself, unless that matters."""
        holder, path = self.paths.get(module, (None, ""))
        root = holder() if holder is not None else None
        return (module, ()) if root is None or not path else (root, tuple(path.split(".")))


class Caught:
    """Within it, calls of modules go to a `ModuleCalls`: at once, or from when Dynamo begins to compile something."""

    def __init__(self, calls: ModuleCalls, modules: Iterable[nn.Module], at_once: bool) -> None:
        self._calls = calls
        self._modules = modules
        self._at_once = at_once
        self._caught: list[nn.Module] = []

    def __enter__(self) -> None:
        if self._at_once:
            self._catch()
        callback_handler.register_start_callback(self._begin)

    def __exit__(self, *_: object) -> None:
        callback_handler.remove_start_callback(self._begin)
        for module in self._caught:
            vars(module).pop(MODULE_CALL, None)

    def _begin(self, _: Any) -> None:
        if not self._caught:
            self._catch()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _catch(self) -> None:
        wholes = sorted(self._modules, key=lambda m: sum(1 for _ in m.modules()))  # a whole after its parts
        paths = {part: (weakref.ref(m), path) for m in wholes for path, part in m.named_modules()}
        if self._calls.by_path:
            self._calls.paths.update(paths)
        for module in paths:
            self._calls.stays |= _is_called_in_full(module)
            if MODULE_CALL not in vars(module):
                vars(module)[MODULE_CALL] = functools.partial(_called, self._calls, module)
                self._caught.append(module)


def _called(calls: ModuleCalls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():  # Dynamo traces all that `nn.Module.__call__` does, for hooks say
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    return calls.choose(module, dynamo_is_on())(*args, **kwargs)


def _call(module: nn.Module, path: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    for name in path:
        module = module._modules[name]  # type: ignore[assignment]
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


_OWN_LINE = re.compile(rf'  File "{re.escape(__file__)}", line \d+, in (.*)\n.*')


def _own(function: Any, name: str) -> Any:
    """The function with code of its own, by this name: Dynamo compiles each code anew only so many times."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


for _function in (_called, Caught._begin):
    skip_code(_function.__code__)


def _is_off_for_checkpointing() -> bool:
    """Whether nothing but torch's own checkpointing has switched Dynamo off, and `choose`."""
    return all(f.__module__ == "torch.utils.checkpoint" for f in disabled_functions()[1:])


def _is_worth_it(module: nn.Module) -> bool:
    return isinstance(module, Loss) or any(p.dim() > 1 for p in module.parameters())


def _is_called_in_full(module: nn.Module) -> bool:
    """Whether Dynamo traces all that `nn.Module.__call__` does, and compiles anew when `MODULE_CALL` comes or goes."""
    is_plain = type(module).__call__ is nn.Module.__call__ and "forward" not in vars(module)
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not is_plain or any(hooks)
