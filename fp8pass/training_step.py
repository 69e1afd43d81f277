"""`@fp8pass.train_step`: an ordinary training step, run as a few graphs.

Dynamo compiles the function with this backend: forward and loss are one graph, the backward belongs to it, and the
optimizer's update is another. What it can't capture runs as it is, between graphs; modules that are called there are
compiled by themselves (`module_calls.py`). One call is one step of delayed scaling, however many forwards and backwards
are in it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8pass._torch import counters, frames_op_by_op, optimizers_ranges_ignored
from fp8pass.backend import compile_graph
from fp8pass.dynamo.module_calls import ModuleCalls
from fp8pass.dynamo.outside import Outside, warn_of
from fp8pass.errors import Fp8Error, gone_on_after, warn_once
from fp8pass.fsdp import write_shards
from fp8pass.names import PACKAGE, base_name
from fp8pass.options.config import WEIGHT_CACHES, Config, make_config
from fp8pass.options.unmatched import check_compiled, check_models, patterns_of, scope_of
from fp8pass.quant.moments import nbytes_saved, save_plainly
from fp8pass.report.report import Report, break_of, collect, recompile_of
from fp8pass.runtime.update_graph import UpdateGraph
from fp8pass.runtime.weight_cache import settle, weights_of
from fp8pass.states.checkpoint import State, goes_along, state
from fp8pass.states.steps import accumulate

DEPTH, MOST = 3, 64
"""How deep, and into how many elements of a container, models and optimizers are looked for."""


def train_step(function: Callable[..., Any] | None = None, /, **config: Any) -> Any:
    """Run a training step in FP8: `@fp8pass.train_step` or `@fp8pass.train_step(recipe="delayed", min_speedup=0)`.

    function: of any signature, a method too; does one optimizer step per call, with as many forwards and backwards as
    it likes. Its models and optimizers are found among its arguments, in its closure, among the globals that it names,
    and the attributes of these. config: fields of `fp8pass.Config`; `weight_cache` is "fp8+transpose" unless given.

    Returns a `TrainStep`, which is called as the function is. Raises ValueError for unknown fields. The first call
    raises Fp8Error for a function without model, optimizer or backward, for an optimizer whose step leaves all
    parameters of the model as they were, and for a model on several devices.
    """
    if function is None:
        make_config(config)  # raises at the line with the options
        return functools.partial(train_step, **config)
    if not callable(function):
        raise TypeError(f"train_step takes a function, and options by name: train_step(recipe=...), not {function!r}")
    return TrainStep(function, make_config(config, defaults={"weight_cache": WEIGHT_CACHES[-1]}))


class TrainStep:
    """A training step in FP8. Called as the function that it was made of."""

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        functools.update_wrapper(self, function)
        self.config = config
        self._function = function
        backend = _held_weakly(self._compile)
        self._compiled = torch.compile(function, backend=backend)
        by_path = callable(config.filter) or any(patterns_of(config))
        self._calls = ModuleCalls(backend, by_path)
        self.forget()

    def forget(self) -> None:
        """As before the first call: nothing is compiled and reported. What is trained stays as it is."""
        self._collected = Report()
        self._compiled_ids: set[str] = set()
        self._breaks: Counter[str] = Counter()
        """Why graphs broke, by Dynamo's count: also where there was nothing to compile in front of the break."""
        self._updates: weakref.WeakSet[UpdateGraph] = weakref.WeakSet()
        self._counts: list[Tensor] = []
        """See `UpdateGraph`. Not the graphs themselves, which hold on to the parameters of the optimizer."""
        self._op_by_op: dict[tuple[str, str], int] = {}
        """Functions, and their files, that run op by op: a line of each that calls something that is compiled."""
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One optimizer step."""
        models, optimizers = self._found(args, kwargs)
        with ExitStack() as stack:
            stack.enter_context(optimizers_ranges_ignored())
            for model in models:
                stack.enter_context(accumulate(model))
            known = all(x in self._checked for x in (*models, *optimizers)) and models and optimizers
            stack.enter_context(self._calls.caught(models, is_first=not known))
            run = self._compiled if known else functools.partial(self._first_call, models, optimizers)
            before, faults = Counter(counters["graph_break"]), len(gone_on_after)
            result = run(*args, **kwargs)
            self._breaks += Counter(counters["graph_break"]) - before
            # a backward may be compiled when it runs, in a thread of autograd's, where nobody collects
            late = [fault for fault in gone_on_after[faults:] if fault not in self._collected.faults]
            self._collected.add(Report(faults=late))
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"] if p.requires_grad]
        settle(parameters)
        write_shards(parameters)
        self._store_moments(optimizers)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As of a function: bound to the instance."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def report(self) -> Report:
        """What has been compiled so far: every matmul, where the graph breaks, and what FP8 copies of weights take."""
        report = Report()
        report.add(self._collected)
        if silent := sum(self._breaks.values()) - len(report.breaks):
            reasons = ", ".join(sorted({_called(reason) for reason in self._breaks}))
            report.notes.append(f"{silent} more graph breaks have nothing in front of them. All: {reasons}")
        if places := [f"{name} ({base_name(file)}:{line})" for (name, file), line in self._op_by_op.items()]:
            runs = "itself runs" if len(places) == 1 else "themselves run"
            report.notes.append(
                f"{' and '.join(places)} {runs} op by op: torch gives up a whole function where its graph breaks in a "
                "for or while loop, at backward() say, or in what it can't leave and enter again. The modules and "
                "functions called there are compiled, each call by itself; what stands between the calls, a loss say, "
                "is not: put it into a function together with the model's call"
            )
        parameters = [p for model in self._models for p in model.parameters()]
        if weights := weights_of(parameters):
            mine, theirs = sum(w.nbytes for w in weights), sum(p.nbytes for w in weights for p in w.parts)
            report.notes.append(
                f"FP8 copies of {len(weights)} weights take {mine / 1e6:.1f} MB beside their {theirs / 1e6:.1f} MB "
                f"(weight_cache={self.config.weight_cache!r})"
            )
            if again := [w for w in weights if w.refreshed > w.expected]:
                times = max(w.refreshed - w.expected for w in again)
                report.notes.append(
                    f"{len(again)} weights were quantized again by kernels of their own, up to {times} times, because "
                    "something else than a compiled update had changed them: an optimizer that runs eagerly (with "
                    "fused=True, say: use foreach=True), a state that was loaded, an edit"
                )
        if self.config.optimizer_state == "fp8":
            count, saved = nbytes_saved(list(self._optimizers))
            report.notes.append(
                f"{count} moments of optimizers are in FP8, which saves {saved / 1e6:.1f} MB"
                if count
                else "optimizer_state='fp8' has had no effect: no update of an optimizer was compiled that has moments"
            )
        return report

    @property
    def skipped(self) -> int:
        """How many optimizer steps were skipped, for gradients that were not finite. Waits for the device."""
        return sum(int(counts[1]) for counts in self._counts)

    def state(self) -> State:
        """The FP8 state of the model that the step trains. Raises TypeError if that is not known, or not one."""
        models = list(self._models) or _owners(*self._found((), {}))
        if len(models) != 1:
            raise TypeError(f"the step trains {len(models)} models, as far as is known: write fp8pass.state(model)")
        return state(models[0])

    def _compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend."""
        running = frames_op_by_op(until=TrainStep.__call__.__code__)
        callers = [f for f in running if not f.f_code.co_filename.startswith(PACKAGE)]
        for frame in callers:
            self._op_by_op.setdefault((_plain_name(frame), frame.f_code.co_filename), frame.f_lineno)
        if callers:
            self._calls.place(module, callers[0])
        check_compiled(self.config, module.graph, judged=True)
        with collect() as report:
            compiled = compile_graph(module, example_inputs, self.config)
        if (found := break_of(module)) is not None:
            report.breaks.append(found)
        if (again := recompile_of(module, self._compiled_ids)) is not None:
            report.recompiles.append(again)
        self._collected.add(report)
        if isinstance(compiled, UpdateGraph):
            self._updates.add(compiled)
            self._counts += [] if compiled.counts is None else [compiled.counts]
        return compiled

    def _found(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[nn.Module], list[Optimizer]]:
        reached = list(_reached([*args, *kwargs.values(), self._function]))
        return [x for x in reached if isinstance(x, nn.Module)], [x for x in reached if isinstance(x, Optimizer)]

    def _first_call(self, models: list[nn.Module], optimizers: list[Optimizer], *args: Any, **kwargs: Any) -> Any:
        where = f"{_name(self._function)} ({_place(self._function)})"
        _check_found(models, optimizers, where)
        trained = _owners(models, optimizers) or models
        _check_divided(trained, self.config)
        check_models(self.config, models, scope_of(self._function, args, kwargs), where)
        parameters = [p for model in trained for p in model.parameters()]
        before = [(p._version, p.data_ptr()) for p in parameters]
        outside = Outside(models)
        with _Backwards(parameters) as backwards, outside.watching():
            result = self._compiled(*args, **kwargs)
        changed = before != [(p._version, p.data_ptr()) for p in parameters]
        if not changed:
            _check_trained(models, optimizers, backwards.count, where, self._has_scaler(args, kwargs))
        self._models.update(trained)
        for model in trained:
            goes_along(model)
        self._optimizers.update(optimizers)
        for x in (*models, *optimizers):
            self._checked.add(x)
        self._collected.add(Report(warn_of(outside.gemms(self.config), where, self.config.strict)))
        return result

    def _store_moments(self, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers their moments in FP8, where an update knows them only as plain tensors."""
        for update in list(self._updates):
            if not (moments := update.stored()):
                continue
            for optimizer in optimizers:
                save_plainly(optimizer)
                for of in optimizer.state.values():
                    of.update({name: moments[id(x)] for name, x in of.items() if id(x) in moments})
            update.retire()

    def _has_scaler(self, args: Any, kwargs: Any) -> bool:
        return any(_is_scaler(x) for x in _reached([*args, *kwargs.values(), self._function]))


def _held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a method as long as its object is there.

    torch keeps each backend until `torch._dynamo.reset`, and a step has its function, whose closure may have the model.
    """
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = ref()
        assert found is not None, "what is being called can't be gone"
        return found(*args)

    return call


# ---------------------------------------------------------------------------------------------------------------------
# What a step works on


def reached(roots: Sequence[Any], wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """What is wanted of these and what they hold."""
    seen: set[int] = set()
    todo = [(x, 0) for x in roots]
    while todo:
        x, depth = todo.pop(0)
        if id(x) in seen or isinstance(x, _LEAVES):
            continue
        seen.add(id(x))
        if wanted(x):
            yield x
        if depth < DEPTH:
            todo += [(value, depth + 1) for value in _held(x)]


def _reached(roots: Sequence[Any]) -> Iterator[Any]:
    """Models, optimizers and gradient scalers, among these and what they hold."""
    return reached(roots, lambda x: isinstance(x, (nn.Module, Optimizer)) or _is_scaler(x))


_LEAVES = (Tensor, str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType)


def _held(x: Any) -> list[Any]:
    """What an object holds."""
    if isinstance(x, TrainStep):
        return [x._function]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, types.FunctionType):
        cells = [c.cell_contents for c in x.__closure__ or () if c != types.CellType()]
        named = (x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__)
        return [*cells, *named, *(x.__defaults__ or ())]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, Optimizer):
        return []
    if isinstance(x, nn.Module):
        return [v for name, v in vars(x).items() if name not in _OF_MODULES]
    if isinstance(x, Mapping):
        return list(itertools.islice(x.values(), MOST))
    if isinstance(x, (list, tuple, set, frozenset)):
        return list(itertools.islice(x, MOST))
    slots = [getattr(x, name) for name in getattr(type(x), "__slots__", ()) if hasattr(x, name)]
    return [*vars(x).values(), *slots] if hasattr(x, "__dict__") else slots


_OF_MODULES = set(vars(nn.Module()))


def _called(reason: str) -> str:
    """What broke a graph, as Dynamo names it: the function in backquotes, or else its first line."""
    names = re.findall(r"`([^`]+)`", reason.partition("Hint:")[0])
    return names[0] if names else reason.strip().splitlines()[0]


def _is_scaler(x: Any) -> bool:
    return isinstance(x, torch.amp.GradScaler)


def _owners(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """The models that the optimizers update, without those that are part of another."""
    updated = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    owners = [m for m in models if any(id(p) in updated for p in m.parameters())]
    return [m for m in owners if not any(m is not other and m in set(other.modules()) for other in owners)]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _plain_name(frame: FrameType) -> str:
    """ "step", also of what Dynamo makes to go on with it: "torch_dynamo_resume_in_step_at_12"."""
    return re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", frame.f_code.co_name)


def _place(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__ if hasattr(inspect.unwrap(function), "__code__") else None
    return f"{code.co_filename.replace(chr(92), '/').rsplit('/', 1)[-1]}:{code.co_firstlineno}" if code else "?"


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def _check_divided(models: Sequence[nn.Module], config: Config) -> None:
    """Of models in parts on several ranks, what a step can't do."""
    for model in models:
        is_fsdp = any(isinstance(m, FSDPModule) for m in model.modules())
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor):
                continue
            if not is_fsdp or sum(placement.is_shard() for placement in p.placements) > 1:
                raise Fp8Error(
                    f"train_step: {name} is divided by tensor parallel, {p.placements}, whose backward torch does not "
                    'compile in a step. Use torch.compile(model, backend="fp8pass") and an ordinary loop'
                )
            for option, off in (("skip_nonfinite", False), ("optimizer_state", "off")):
                if (value := getattr(config, option)) != off:
                    raise Fp8Error(
                        f"train_step: {option}={value!r} is not there for parameters in parts on several ranks, as "
                        f"{name} is: each rank would decide by its own part. Leave it out"
                    )


def _check_found(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], where: str) -> None:
    looked = "among its arguments, in its closure, the globals that it names, and the attributes of these"
    for found, what in ((models, "torch.nn.Module"), (optimizers, "torch.optim.Optimizer")):
        if not found:
            raise Fp8Error(f"train_step: {where} has no {what} {looked}. Pass it to the function")
    for model in models:
        devices = {p.device: name for name, p in model.named_parameters()}
        if len(devices) > 1:
            places = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise Fp8Error(
                f"train_step: {type(model).__name__} is on several devices: {places}. A step has one; move the model "
                "to one device, or train each part by a step of its own"
            )


def _check_trained(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], backwards: int, where: str, scaler: bool
) -> None:
    """After a first call that has left all parameters as they were."""
    if not backwards:
        raise Fp8Error(
            f"train_step: {where} computed no gradient of any parameter: a step calls backward() on a loss that "
            "depends on the model, with gradients enabled"
        )
    if not _owners(models, optimizers):
        theirs = [tuple(p.shape) for o in optimizers for group in o.param_groups for p in group["params"]]
        names = ", ".join(type(m).__name__ for m in models)
        raise Fp8Error(
            f"train_step: {where} has gradients of {names}, and its optimizer updates {len(theirs)} other parameters, "
            f"of shapes {', '.join(map(str, theirs[:3]))}. Make the optimizer of this model's parameters(), after "
            "whatever replaces them; or copy what it updates into the model, within the step"
        )
    stepped = any(o.state for o in optimizers)  # into p.data, say, or by a fused kernel, which versions do not count
    if not scaler and not stepped:
        warn_once(f"fp8pass: {where} computed gradients, and its first call updated no parameter: optimizer.step()?")


class _Backwards:
    """Within it, counts gradients that reach any of the parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.count = 0
        with torch.enable_grad():
            edges = [p.view_as(p).grad_fn.next_functions[0][0] for p in parameters if p.requires_grad and p.is_leaf]  # type: ignore[union-attr]
        self._edges = [e for e in edges if e is not None]

    def __enter__(self) -> _Backwards:
        self._handles = [e.register_prehook(self._saw) for e in self._edges]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _saw(self, _: Any) -> None:
        self.count += 1
