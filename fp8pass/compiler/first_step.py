"""Check the first training step of what `torch.compile` returns: warn if next to nothing runs in FP8, and say why.

Dynamo calls no backend for functions that it skips, and what a backend declines is only in its report. So the first
call that trains is watched. Layers of torch that it ran op by op are compiled one by one from the next call on, which
is watched instead. The warning comes when the step ends, for all functions together that it called: there may be one
for each block of a model.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from fp8pass.base._torch import before_eager_optimizers, compiles_first_calls
from fp8pass.base.errors import warn_once
from fp8pass.base.names import location_of
from fp8pass.compiler.module_calls import ModuleCalls, compiles_alone
from fp8pass.compiler.not_compiled import Outside, missed, raise_if_missed
from fp8pass.graph.verdict import Gemm
from fp8pass.options import overrides
from fp8pass.options.config import Config
from fp8pass.options.setting import current_setting
from fp8pass.options.unmatched import check_models, patterns_of
from fp8pass.report.report import Report, caller_warns, collect

Compile = Callable[[fx.GraphModule, Sequence[Any], Config], Callable[..., Any]]

NOT_COUNTED = ("recipe", "filter", "high precision", "not float8", "bisect", "internal")
"""The rules of matmuls that the user leaves out ("not float8" under the recipe None), or that a fault has reported."""
REMEDIES = {
    "outside": "change what breaks the graph, or move it out of the function that multiplies; train_step compiles more",
    "custom op": "multiply outside of the op",
    "min_speedup": "larger batches or layers; min_speedup=0 runs it in FP8 anyway",
    "dtype": "cast the model to bfloat16, or train within torch.autocast",
}
"""{rule: what to do}; docs/limits.md has the other rules."""
OTHER_REMEDY = "see docs/limits.md, 'Declined, by rule'"
MOST_RULES = 3

checked: list[tuple[str, Report]] = []
"""The functions that the current step has called, and their reports, until `tell`."""


class FirstStep:
    """The calls of one function that `torch.compile` returned, until one that trains has been checked.

    function: the user's. compiled: what it was compiled to. config: returns its options. compile_graph: the backend for
    modules that are compiled one by one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        compiled: Callable[..., Any],
        config: Callable[[], Config],
        compile_graph: Compile,
    ) -> None:
        self.is_checked = False
        self.calls: ModuleCalls | None = None
        """Compiles layers one by one; None where Dynamo compiles them all."""
        self._function = function
        self._compiled = compiled
        self._config = config
        self._compile_graph = compile_graph
        self._report = Report()

    # Disabled, because code that Dynamo runs op by op may call it. Dynamo is on in what it calls.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and check the call if it is the first one that trains."""
        if caller_warns():  # within the call of another function, which this one's matmuls count for
            self.is_checked = True
        with self._modules_compiled():
            if self.is_checked or not _may_train():
                return self._compiled(*args, **kwargs)
            outside = Outside([] if self._model is None else [self._model])
            try:
                with collect(warns=True) as report, outside.watching():
                    result = self._compiled(*args, **kwargs)
                self._check(report, outside)
            finally:
                outside.forget()
        return result

    @property
    def _model(self) -> nn.Module | None:
        called = getattr(self._function, "__wrapped__", self._function)  # Dynamo wraps torch's own modules
        called = getattr(called, "__self__", called)
        return called if isinstance(called, nn.Module) else None

    @contextmanager
    def _modules_compiled(self) -> Iterator[None]:
        """Compile calls of caught modules within this context; elsewhere they run as if they were not caught."""
        calls = self.calls
        if calls is None:
            yield
            return
        before, calls.is_on = calls.is_on, True
        try:
            yield
        finally:
            calls.is_on = before

    def _check(self, report: Report, outside: Outside) -> None:
        setting, options = current_setting(), self._config()
        config = options if setting is None else setting.applied(options)
        self._report.add(report)
        outside_layers = {} if self.calls is not None else outside.layers(self._model, config)
        if layers := {layer: model for layer, model in outside_layers.items() if compiles_alone(layer)}:
            self.calls = self._compiling(layers, options)
            return  # not checked yet: the next call runs these layers compiled, and is watched instead
        gemms = outside.gemms(config)
        if config.strict:
            raise_if_missed(gemms)
        self._report.add(Report(gemms))
        self.is_checked = True
        checked.append((_described(self._model, self._function), self._report))
        before_eager_optimizers(_before_optimizer)

    def _compiling(self, layers: dict[nn.Module, nn.Module], config: Config) -> ModuleCalls:
        """Return what compiles calls of these layers from now on, one by one. layers: {layer: its model}."""
        models = list(dict.fromkeys(layers.values()))
        if self._model is not None:  # what a function calls may be a part of a model that has more names
            check_models(config, [self._model], {}, type(self._model).__name__)
        compile_graph = self._compile_graph

        # `calls` is assigned below: Dynamo calls the backend later
        def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            calls.place(module)
            return compile_graph(module, example_inputs, config)

        by_path = callable(config.filter) or any(patterns_of(config))  # names decide what runs in FP8
        calls = ModuleCalls(backend, by_path)
        calls.is_on = False
        # For good: a checkpoint calls them in the backward too, and what saves them leaves out how they are called.
        calls.catch(models, layers)
        return calls


def _may_train() -> bool:
    setting = current_setting()
    is_fp8 = overrides.current() is None and (setting is None or setting.enabled)
    return torch.is_grad_enabled() and is_fp8 and compiles_first_calls()


def _described(model: nn.Module | None, function: Callable[..., Any]) -> str:
    """Return the name and source line of a function, or the name of its model and the line of the model's forward."""
    function = function if model is None else type(model).forward
    name = getattr(function, "__qualname__", "a function") if model is None else type(model).__name__
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({location_of(code.co_filename, code.co_firstlineno)})"


def _before_optimizer(_: torch.optim.Optimizer) -> None:
    if checked:
        tell()


def tell() -> None:
    """Warn if the functions in `checked`, together, have no matmul in FP8 or most of their FLOPs outside of graphs."""
    report, names = Report(), dict.fromkeys(name for name, _ in checked)
    for _, each in checked:
        report.add(each)
    checked.clear()  # before the warning, which the user's filters may turn into an error
    wanted = [g for g in report.matmuls if g.rule not in NOT_COUNTED and not _pays_elsewhere(g)]
    trains = any(g.kind != "output" for g in wanted)  # each graph tells by itself where nothing trains
    has_verdicts = all(timing.passes for timing in report.timings)  # graphs from torch's caches have none
    if not (trains and has_verdicts):
        return
    flops = sum(g.in_call(g.flops) for g in wanted)
    outside = sum(g.in_call(g.flops) for g in missed(wanted))
    is_told = any(g.rule == "no kernel" and g.quantized for g in wanted)  # by a warning of its own: see annotate.py
    if (report.rewritten or is_told) and outside <= flops / 2:
        return
    where = ", ".join([*names][:3]) + (f" and {len(names) - 3} more functions" if len(names) > 3 else "")
    ran = f"; {outside / flops:.0%} of the FLOPs ran outside of what is compiled" if outside else ""
    counts = Counter(g.rule for g in wanted if g.status == "declined")
    warn_once(
        f"fp8pass: {len(report.rewritten)} of {len(wanted)} matmuls run in FP8 in the first training step of {where}"
        f"{ran}. Declined, by rule:"
        + "".join(_of_rule(rule, count, wanted) for rule, count in counts.most_common(MOST_RULES))
        + "\nprint(fp8pass.explain(model, *inputs)) lists all of them"
    )


def _pays_elsewhere(g: Gemm) -> bool:
    """Return whether FP8 pays for other sizes, for which there is another compilation."""
    return g.rule == "min_speedup" and g.predicted_ends is not None and bool(g.pays_from)


def _of_rule(rule: str, count: int, gemms: Sequence[Gemm]) -> str:
    """Return a line of the warning: a rule with its count, an example and a remedy."""
    g = next(g for g in gemms if g.rule == rule and g.status == "declined")
    example = f"{g.kind} of {g.name or 'a matmul'}, [{g.M}, {g.K}] by [{g.K}, {g.N}]: {g.reason}"
    return f"\n  {count} {rule}, such as {example}. What to do: {REMEDIES.get(rule, OTHER_REMEDY)}"
