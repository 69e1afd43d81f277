"""`@fp8pass.train_step`: compile an ordinary training step into a few graphs.

Dynamo compiles the function with fp8pass's backend: forward and loss are one graph, to which the backward belongs, and
the optimizer's update is another. Code that it can't capture runs op by op between graphs; modules that are called
there are compiled separately (`module_calls.py`). One call is one step of delayed scaling, however many forwards and
backwards it does.
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
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8pass.backend import compile_graph
from fp8pass.base._torch import break_at_backward_at_once, counters, frames_op_by_op, optimizers_ranges_ignored
from fp8pass.base.errors import Fp8Error, gone_on_after, warn_once
from fp8pass.base.names import PACKAGE, location_of
from fp8pass.compiler.ddp_cuts import configured
from fp8pass.compiler.module_calls import ModuleCalls
from fp8pass.compiler.not_compiled import Outside, warn_of
from fp8pass.fsdp import write_shards
from fp8pass.options.config import WEIGHT_CACHES, Config, make_config
from fp8pass.options.unmatched import check_compiled, check_models, patterns_of, scope_of
from fp8pass.quant.moments import nbytes_saved, save_plainly
from fp8pass.quant.sharded import divided_several_times, part_of
from fp8pass.report.report import Report, break_of, collect, recompile_of
from fp8pass.states.checkpoint import State
from fp8pass.states.model_state import goes_along, state
from fp8pass.states.steps import accumulate_all
from fp8pass.train.dtensors import dtensors_op_by_op
from fp8pass.train.early_updates import EarlyUpdates
from fp8pass.train.write_copies import CopyWriter, note_fused
from fp8pass.weights.parameter_bytes import ParameterBytes, parameter_bytes
from fp8pass.weights.update_count import count_updates
from fp8pass.weights.update_graph import UpdateGraph
from fp8pass.weights.weight_bounds import predict
from fp8pass.weights.weight_cache import WeightsOf, trained, weights_of
from fp8pass.weights.weight_copy import DelayedWeight, WeightCopy

MAX_DEPTH, MAX_ITEMS = 3, 64
"""Limits of the search for models and optimizers: depth, and number of elements of a container."""


def train_step(function: Callable[..., Any] | None = None, /, **config: Any) -> Any:
    """Run a training step in FP8: `@fp8pass.train_step` or `@fp8pass.train_step(recipe="delayed", min_speedup=0)`.

    Args:
        function: A function or method of any signature that does one optimizer step per call, with any number of
            forwards and backwards. Its models and optimizers are found among its arguments, in its closure, among the
            globals that it names, and among the attributes of these. None for a decorator.
        **config: Fields of `fp8pass.Config`; `weight_cache` is "fp8+transpose" unless given.

    Returns:
        A `TrainStep`, which is called as the function is; without `function`, a decorator that returns one.

    Raises:
        ValueError: If a field of `config` is unknown or has an invalid value, or if both `update_in_backward` and
            `skip_nonfinite` are set.
        TypeError: If `function` is not callable.
        Fp8Error: From the first call, if the function has no model, no optimizer or no backward, if its optimizer does
            not update the model's parameters, if a model is on several devices, if `optimizer_state` or
            `update_rounding` is set for parameters sharded over several dimensions of a mesh, or if
            `update_in_backward` is set for a step that uses gradients after they are complete.
    """
    if function is None:
        make_config(config)  # raises at the line with the options
        return functools.partial(train_step, **config)
    if not callable(function):
        raise TypeError(f"train_step takes a function, and options by name: train_step(recipe=...), not {function!r}")
    return TrainStep(function, make_config(config, defaults={"weight_cache": WEIGHT_CACHES[-1]}))


class TrainStep:
    """A training step in FP8, called with the arguments of the function that it was made from."""

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        functools.update_wrapper(self, function)
        self.config = config
        self._function = function
        backend = configured(lambda: config)(_held_weakly(self._compile))
        break_at_backward_at_once()
        self._compiled = torch.compile(function, backend=backend)
        self._writer = CopyWriter(config)
        self._weights_of = WeightsOf(trained)
        self._early: EarlyUpdates | None = None
        if config.update_in_backward:
            _check_early(config)
            of_part = configured(lambda: config)(_held_weakly(self._compile_part))
            compile_part = functools.partial(torch.compile, backend=of_part)
            self._early = EarlyUpdates(compile_part, config.update_bucket_bytes)
        by_path = callable(config.filter) or any(patterns_of(config))  # names decide what runs in FP8
        self._calls = ModuleCalls(backend, by_path)
        self.forget()

    def forget(self) -> None:
        """Drop reports and found models, as before the first call. Parameters and FP8 state stay unchanged."""
        self._collected = Report()
        self._compiled_ids: set[str] = set()
        self._measured: list[str] = []
        """Reasons why amaxes of weights are not predicted."""
        self._breaks: Counter[str] = Counter()
        """Reasons of graph breaks, by Dynamo's count, which includes breaks before which nothing was compiled."""
        self._updates: weakref.WeakSet[UpdateGraph] = weakref.WeakSet()
        self._counts: list[Tensor] = []
        """`UpdateGraph.counts` of each update; the graphs themselves would keep the optimizer's parameters alive."""
        self._op_by_op: dict[tuple[str, str], int] = {}
        """{(function, file) that runs op by op: a line of it that calls something compiled}."""
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        if self._early is not None:
            self._early.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one optimizer step and return the function's result."""
        models, optimizers = self._found(args, kwargs)
        if self.config.moments is not None or self.config.rounds_stochastically:
            count_updates(optimizers)
        are_checked = models and optimizers and all(x in self._checked for x in (*models, *optimizers))
        run = self._run if are_checked else functools.partial(self._first_call, models, optimizers)
        caught = self._calls.caught(models, is_first=not are_checked)
        breaks, faults = dict(counters["graph_break"]), len(gone_on_after)
        with optimizers_ranges_ignored(), dtensors_op_by_op(), accumulate_all(models), caught:
            result = run(*args, **kwargs)
        if breaks != (now := dict(counters["graph_break"])):
            self._breaks += Counter(now) - Counter(breaks)
        if len(gone_on_after) > faults:
            # A backward may be compiled when it runs, in one of autograd's threads, where `collect` does not see it.
            late = [fault for fault in gone_on_after[faults:] if fault not in self._collected.faults]
            self._collected.add(Report(faults=late))
        copies = self._weights_of(optimizers)
        self._writer.write(copies, self._collected)
        copies.end_step()
        write_shards(trained(optimizers))
        if self.config.moments is not None:
            self._store_moments(optimizers)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind the step to an instance, as a function in a class is bound."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def report(self) -> Report:
        """The report of what has been compiled so far: matmuls, graph breaks, and memory of FP8 copies of weights."""
        report = Report()
        report.add(self._collected)
        if silent := sum(self._breaks.values()) - len(report.breaks):
            reasons = ", ".join(sorted({_called(reason) for reason in self._breaks}))
            report.notes.append(f"{silent} more graph breaks have no ops before them to compile. All: {reasons}")
        if functions := [f"{name} ({location_of(file, line)})" for (name, file), line in self._op_by_op.items()]:
            runs = "itself runs" if len(functions) == 1 else "themselves run"
            report.notes.append(
                f"{' and '.join(functions)} {runs} op by op: torch does not compile a function whose graph breaks "
                "inside a loop (for example at backward()) or inside a block that it cannot resume. The modules and "
                "functions that it calls are still compiled, one by one. To compile the code between those calls, such "
                "as a loss, move it into one function with the model's call"
            )
        parameters = [p for model in self._models for p in model.parameters()]
        if weights := weights_of(parameters):
            # under rowwise scaling a weight has two copies, by rows and by columns, each with its scales: count it once
            by_parts = {tuple(map(id, w.parts)): w.parts for w in weights}
            original_bytes = sum(part_of(p).nbytes for parts in by_parts.values() for p in parts)
            copied_bytes = sum(w.nbytes for w in weights)
            report.notes.append(
                f"FP8 copies of {len(by_parts)} weights take {copied_bytes / 1e6:.1f} MB beside their "
                f"{original_bytes / 1e6:.1f} MB (weight_cache={self.config.weight_cache!r})"
            )
            if later := [w for w in weights if not w.knows_next_scale]:
                report.notes.append(
                    f"FP8 copies of {len(later)} sharded weights are made by separate kernels before each step, "
                    "because ranks share amaxes only once in several steps (reduce_amax_interval)"
                )
            if again := [w for w in weights if w.requantized > w.expected and w.knows_next_scale]:
                times = max(w.requantized - w.expected for w in again)
                changed = {tuple(map(id, w.parts)) for w in again}
                report.notes.append(
                    f"{len(changed)} weights were quantized again by separate kernels, up to {times} times, because "
                    "something other than an optimizer had changed them: a state that was loaded, an edit"
                )
        if self.config.weight_amax == "predicted":
            report.notes.append(self._note_of_predictions(weights))
        if self.config.moments is not None:
            count, saved = nbytes_saved(list(self._optimizers))
            report.notes.append(
                f"{count} moments of optimizers are in FP8, which saves {saved / 1e6:.1f} MB"
                if count
                else f"optimizer_state={self.config.optimizer_state!r} has had no effect: no update of an optimizer "
                "was compiled that has moments"
            )
        if self._early is not None and (note := self._early.note()):
            report.notes.append(note)
        if self.config.rounds_stochastically and not any(p.dtype == torch.bfloat16 for p in parameters):
            report.notes.append("update_rounding='stochastic' has had no effect: no parameter is in bfloat16")
        if self._optimizers:
            report.notes.append(str(self.bytes_per_parameter()))
        return report

    def _note_of_predictions(self, weights: Sequence[WeightCopy]) -> str:
        weights = [w for w in weights if isinstance(w, DelayedWeight)]
        predicted = sum(w.is_predicted for w in weights)
        note = (
            f"the amaxes of {predicted} of {len(weights)} weights are predicted for the update that writes their copies"
        )
        if self._measured:
            note += f"; the others are measured: {'; '.join(self._measured)}"
        if (most := max((u.overshoot for u in self._updates), default=0.0)) > 1:
            note += f". A weight became {most:.2f} times as large as predicted, and saturated: its update was larger"
        return note

    def bytes_per_parameter(self) -> ParameterBytes:
        """Return the bytes of memory of the trained parameters and all that belongs to them, counted now: see there."""
        parameters = list({id(p): p for model in self._models for p in model.parameters()}.values())
        # a list: the weak set may lose elements while it is iterated
        of_updates = [n for update in list(self._updates) if (n := update.gradient_bytes) is not None]
        held = self._early.held_bytes if self._early is not None else None
        gradients = held if held is not None else sum(of_updates) if of_updates else None
        return parameter_bytes(parameters, list(self._optimizers), gradients)

    @property
    def skipped(self) -> int:
        """Number of optimizer steps that were skipped for gradients that were not finite. Waits for the device."""
        return sum(int(counts[1]) for counts in self._counts)

    def state(self) -> State:
        """Return the FP8 state of the model that the step trains, see `fp8pass.state`.

        Raises:
            TypeError: If the step trains no known model, or several.
        """
        models = list(self._models) or _owners(*self._found((), {}))
        if len(models) != 1:
            raise TypeError(
                f"the step trains {len(models)} models, as far as fp8pass can see: write fp8pass.state(model)"
            )
        return state(models[0])

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function; with `update_in_backward`, also the updates while it runs its backward."""
        if self._early is None:
            return self._compiled(*args, **kwargs)
        self._early.begin()
        result = self._compiled(*args, **kwargs)
        self._early.end()
        return result

    def _compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph; Dynamo calls this as its backend."""
        running = frames_op_by_op(until=TrainStep.__call__.__code__)
        users = [frame for frame in running if not frame.f_code.co_filename.startswith(PACKAGE)]
        for frame in users:
            self._op_by_op.setdefault((_plain_name(frame), frame.f_code.co_filename), frame.f_lineno)
        self._calls.place(module)
        # a step runs op by op where it loops over microbatches; another one has a single gradient of each parameter
        return self._compile_part(module, example_inputs, self.config.accumulate_in_matmul and bool(users))

    def _compile_part(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], accumulates: bool = False
    ) -> Callable[..., Any]:
        """Compile one graph, of the step or of an update that the backward calls."""
        # `_first_call` has checked the patterns against all models of the step
        check_compiled(self.config, module.graph, models_checked=True)
        with collect() as report:
            config = replace(self.config, accumulate_in_matmul=accumulates)
            compiled = compile_graph(module, example_inputs, config)
        if (graph_break := break_of(module)) is not None:
            report.breaks.append(graph_break)
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
        note_fused(optimizers)
        parameters = [p for model in trained for p in model.parameters()]
        # in-place ops change the version, `p.data = x` only the address
        before = [(p._version, p.data_ptr()) for p in parameters]
        outside = Outside(models)
        if self.config.weight_amax == "predicted":
            self._measured = _predict(optimizers, self.config)
        if self._early is not None:
            self._early.rehearse(models, optimizers)
            self._early.begin()
        with _Backwards(parameters) as backwards, outside.watching():
            result = self._compiled(*args, **kwargs)
        changed = before != [(p._version, p.data_ptr()) for p in parameters]
        if self._early is not None:
            self._early.end(changed)
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
        """Put the FP8 moments of updates, which know only plain tensors, into the optimizers' state."""
        for update in list(self._updates):
            if not (moments := update.stored()):
                continue
            for optimizer in optimizers:
                save_plainly(optimizer)
                for of_parameter in optimizer.state.values():
                    of_parameter.update({name: moments[id(x)] for name, x in of_parameter.items() if id(x) in moments})
            update.retire()

    def _has_scaler(self, args: Any, kwargs: Any) -> bool:
        return any(_is_scaler(x) for x in _reached([*args, *kwargs.values(), self._function]))


def _held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method without keeping its object alive.

    torch keeps each backend until `torch._dynamo.reset`; it would keep the step, its function, and with the function's
    closure the model.
    """
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = ref()
        assert bound is not None, "what is being called can't be gone"
        return bound(*args)

    return call


# ---------------------------------------------------------------------------------------------------------------------
# Models and optimizers of a step


def reached(roots: Sequence[Any], wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the objects for which `wanted` is true, among the roots and what they hold, to the depth `MAX_DEPTH`."""
    seen: set[int] = set()
    level = list(roots)  # breadth first, so that each object is reached at its least depth
    for depth in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for x in level:
            if isinstance(x, _LEAVES) or id(x) in seen:
                continue
            seen.add(id(x))
            if wanted(x):
                yield x
            if depth < MAX_DEPTH:
                below += _held(x)
        level = below


def _reached(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield the models, optimizers and gradient scalers among the roots and what they hold."""
    return reached(roots, lambda x: isinstance(x, _WANTED))


_WANTED = (nn.Module, Optimizer, torch.amp.GradScaler)
_LEAVES = (Tensor, str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType)


def _held(x: Any) -> list[Any]:
    """Return the objects that an object holds: attributes, elements, a function's closure and globals."""
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, types.FunctionType):
        # The cell of a name that is not yet assigned is empty, and raises ValueError when read.
        cells = [c.cell_contents for c in x.__closure__ or () if c != _EMPTY]
        named = (x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__)
        return [*cells, *named, *(x.__defaults__ or ())]
    if isinstance(x, TrainStep):
        return [x._function]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, Optimizer):
        return []
    if isinstance(x, nn.Module):
        return [v for name, v in vars(x).items() if name not in _OF_MODULES]
    if isinstance(x, Mapping):
        return list(itertools.islice(x.values(), MAX_ITEMS))
    if isinstance(x, (list, tuple, set, frozenset)):
        return list(itertools.islice(x, MAX_ITEMS))
    slots = [getattr(x, name) for name in getattr(type(x), "__slots__", ()) if hasattr(x, name)]
    return [*vars(x).values(), *slots] if hasattr(x, "__dict__") else slots


_EMPTY = types.CellType()
# Every module has these, the dict of submodules among them: what they hold belongs to the module that was found.
_OF_MODULES = set(vars(nn.Module()))


def _called(reason: str) -> str:
    """Return the name in Dynamo's reason of a graph break: the function in backquotes, otherwise its first line."""
    names = re.findall(r"`([^`]+)`", reason.partition("Hint:")[0])
    return names[0] if names else reason.strip().splitlines()[0]


def _is_scaler(x: Any) -> bool:
    return isinstance(x, torch.amp.GradScaler)


def _owners(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[nn.Module]:
    """Return the models that the optimizers update, without models that are part of another of these."""
    updated = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    owners = [m for m in models if any(id(p) in updated for p in m.parameters())]
    return [m for m in owners if not any(m is not other and m in set(other.modules()) for other in owners)]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _plain_name(frame: FrameType) -> str:
    """Return the function's name: "step", also for Dynamo's "torch_dynamo_resume_in_step_at_12"."""
    return re.sub(r"^torch_dynamo_resume_in_(.*)_at_\d+$", r"\1", frame.f_code.co_name)


def _place(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__ if hasattr(inspect.unwrap(function), "__code__") else None
    return location_of(code.co_filename, code.co_firstlineno) if code else "?"


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def _check_divided(models: Sequence[nn.Module], config: Config) -> None:
    """Raise Fp8Error for options that don't support parameters sharded over several dimensions of a mesh."""
    for model in models:
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor):
                continue
            _check_division(name, p, config)


def _check_division(name: str, p: DTensor, config: Config) -> None:
    """Raise Fp8Error for such an option if a parameter is sharded over several dimensions of a mesh."""
    for option, off in (("optimizer_state", "off"), ("update_rounding", "nearest")):
        value = getattr(config, option)
        if value != off and divided_several_times(p):
            raise Fp8Error(
                f"train_step: {option}={value!r} supports parameters sharded over one dimension of a mesh, and {name} "
                f"is sharded over several, {p.placements}. Shard it over one of them, or leave the option out"
            )


def _predict(optimizers: Sequence[Optimizer], config: Config) -> list[str]:
    """Predict the amaxes of the optimizers' weights; return reasons why some, or all, are not predicted."""
    if config.optimizer_state != "off":
        return [f"moments that are stored in 8 bits (optimizer_state={config.optimizer_state!r}) bound no update"]
    return predict(optimizers, config.max_grad)


def _check_early(config: Config) -> None:
    """Raise ValueError for an option that needs all gradients before any update."""
    if config.skip_nonfinite:
        raise ValueError(
            "skip_nonfinite=True decides by all gradients whether a parameter is updated, and update_in_backward=True "
            "updates and frees them one after another: choose one of the two"
        )


def _check_found(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], where: str) -> None:
    looked = "among its arguments, in its closure, the globals that it names, and the attributes of these"
    for objects, what in ((models, "torch.nn.Module"), (optimizers, "torch.optim.Optimizer")):
        if not objects:
            raise Fp8Error(f"train_step: {where} has no {what} {looked}. Pass it to the function")
    for model in models:
        devices = {p.device: name for name, p in model.named_parameters()}
        if len(devices) > 1:
            listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise Fp8Error(
                f"train_step: {type(model).__name__} is on several devices: {listed}. A step supports one: move the "
                "model to one device, or train each part by a separate step"
            )


def _check_trained(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], backwards: int, where: str, scaler: bool
) -> None:
    """Raise Fp8Error, or warn, with the reason why a first call has changed no parameter."""
    if not backwards:
        raise Fp8Error(
            f"train_step: {where} computed no gradient of any parameter: a step calls backward() on a loss that "
            "depends on the model, with gradients enabled"
        )
    if not _owners(models, optimizers):
        shapes = [tuple(p.shape) for o in optimizers for group in o.param_groups for p in group["params"]]
        names = ", ".join(type(m).__name__ for m in models)
        raise Fp8Error(
            f"train_step: {where} has gradients of {names}, and its optimizer updates {len(shapes)} other parameters, "
            f"of shapes {', '.join(map(str, shapes[:3]))}. Make the optimizer of this model's parameters(), after "
            "whatever replaces them; or copy what it updates into the model, within the step"
        )
    # A GradScaler may skip the first step, whose gradients it has scaled by 65536 unless told otherwise.
    stepped = any(o.state for o in optimizers)  # p.data and fused kernels change parameters, but not their versions
    if not scaler and not stepped:
        warn_once(
            f"fp8pass: {where} computed gradients, and its first call updated no parameter: call optimizer.step()"
        )


class _Backwards:
    """A context that counts the gradients that reach any of the parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.count = 0
        with torch.enable_grad():
            # a view's grad_fn leads to the parameter's AccumulateGrad node, which the parameter itself does not expose
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
