"""Compile one graph of Dynamo's with a configuration: annotate it, lower it, and fall back if a part of ours fails."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fp8pass.base._torch import as_fakes, context_for_later, first_call_is_fake, tracing
from fp8pass.compiler.compiled_graph import Compilation, Run
from fp8pass.compiler.dynamo_passes import annotated
from fp8pass.compiler.faults import Later, fall_back
from fp8pass.compiler.lower import lower
from fp8pass.dump.writer import Dump
from fp8pass.graph.annotation import Annotation, graphs_of
from fp8pass.graph.attempt import Attempt
from fp8pass.options.config import Config
from fp8pass.recipes import Disabled
from fp8pass.weights.weight_uses import Notes


class GraphCompiler:
    """Compiles one graph of Dynamo's, with one configuration after another, in the modes of this moment.

    name: that of its dumps. is_reference: True to run the annotated graph eagerly.
    """

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any], name: str, is_reference: bool) -> None:
        self._module = module
        self._name = name
        self._example_inputs = example_inputs
        self._is_reference = is_reference
        self._context = context_for_later()
        self._modes = modes_of(example_inputs)

    def compile(self, config: Config) -> Compilation:
        """Compile with a configuration, while Dynamo compiles."""
        compilation = self._reference(config) if self._is_reference else self._with_fallback(config)
        self.forget_inputs()
        return compilation

    def compile_later(self, config: Config) -> Compilation:
        """Compile with a configuration when the graph is called."""
        with tracing(self._context):
            return self.compile(config)

    def forget_inputs(self) -> None:
        """Replace the example inputs by fakes.

        Dynamo keeps this object as long as the code; with real tensors it would keep the first model and batch alive.
        """
        self._example_inputs = as_fakes(self._example_inputs)

    def _reference(self, config: Config) -> Compilation:
        annotation = annotated(self._module, config)
        return Compilation(config, annotation, annotation.run, lambda: annotation.bootstrapped.run, Notes())

    def _with_fallback(self, config: Config) -> Compilation:
        compile_with = functools.partial(self._compile, config)
        has_collectives = functools.partial(_has_collectives, self._module)
        (compilation, later), _ = fall_back(compile_with, config, self._dump_of, has_collectives=has_collectives)
        # the forward may run from now on, before its backward is compiled; without gradients there is no backward
        later.has_run = torch.is_grad_enabled()
        return compilation

    def _dump_of(self, config: Config, kind: str) -> Dump:
        return Dump.of(config, self._name, kind)

    def _compile(self, config: Config, attempt: Attempt, dump: Dump) -> tuple[Compilation, Later]:
        """Compile as `attempt` says, and write dumps. The backward may be compiled later."""
        example_inputs = self._example_inputs
        annotation = annotated(self._module, config, attempt, dump, lambda partial: partial.examples(example_inputs))
        examples = annotation.examples(example_inputs)
        again = functools.partial(self._compile_in_backward, config)
        # `compilation` is assigned below: only a backward that fails later calls the lambda
        later = Later(again, attempt, config, dump, self._dump_of, lambda other: compilation.become(other))
        run = lower(annotation, examples, config, dump, attempt, later)
        # a call within `enabled(False)` does not say how the model trains
        notes = Notes([] if isinstance(config.recipe, Disabled) else annotation.weights)
        joins = not annotation.tables and torch.is_grad_enabled() and not first_call_is_fake()
        cold = functools.partial(self._compile_for_cold_slots, config, annotation, attempt)
        compilation = Compilation(config, annotation, run, cold, notes, config.reduction if joins else None)
        return compilation, later

    def _compile_in_backward(self, config: Config, attempt: Attempt, dump: Dump) -> Compilation:
        """Compile again in a backward, which runs without grad mode and autocast: restore both."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(self._context))
            for mode in self._modes:
                stack.enter_context(mode())
            return self._compile(config, attempt, dump)[0]

    def _compile_for_cold_slots(self, config: Config, warm: Annotation, first: Attempt) -> Run:
        """Compile for slots without history, which scale tensors by their own amax."""
        annotation, examples = warm.bootstrapped, warm.examples(self._example_inputs)

        def compile_with(attempt: Attempt, dump: Dump) -> Run:
            if attempt.form != "fp8":
                return annotation.run
            with tracing(self._context):
                return lower(annotation, examples, config, dump, attempt)

        def dump_of(config: Config, kind: str) -> Dump:
            return self._dump_of(config, ".".join(filter(None, ("cold", kind))))

        run, _ = fall_back(compile_with, config, dump_of, first)
        return run


def _has_collectives(module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo's communicates with other ranks: it has collectives, or DTensors."""
    # functional collectives are ops of the namespace _c10d_functional
    nodes = (n for part in graphs_of(module) for n in part.graph.nodes)
    return any("c10d" in str(n.target) or isinstance(n.meta.get("example_value"), DTensor) for n in nodes)


def modes_of(example_inputs: Sequence[Any]) -> list[Callable[[], Any]]:
    """Return functions that make contexts of the current grad and autocast modes, which graphs of Dynamo's rely on."""
    kinds = sorted({x.device.type for x in example_inputs if isinstance(x, Tensor)})
    autocasts = [
        functools.partial(
            torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
        )
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
    ]
    return [functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()), *autocasts]
