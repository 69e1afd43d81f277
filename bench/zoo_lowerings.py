"""The zoo's other lowerings: through Inductor on the CPU, and code for an H100 that is not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map_only
from zoo_row import Failed, Row, Sample, Subject, loss_of

from fp8pass.backend import compile_graph
from fp8pass.hardware import TARGETS
from fp8pass.inspect.fake_cuda import FakeCuda, fakes
from fp8pass.options.config import make_config
from fp8pass.report.report import collect
from fp8pass.states.slots import InstanceState, registry

TARGET = "h100"


@dataclass
class Explained:
    """A subject that is only explained: a first look at many."""

    subject: Subject

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return what is done to it: eager, and explained."""
        return self.subject.checks(row)[:2]

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        self.subject.train_with(backend)


@dataclass
class ThroughInductor:
    """A sample that is trained through Inductor."""

    sample: Sample

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return what is done to it: three steps, each beside eager's.

        Sets torch's options, for each row has a process.
        """
        inductor_config.fallback_random = True  # draw the numbers that eager draws
        functorch_config.enable_autograd_cache = False  # a graph from there has no verdicts in this process
        return self.sample.checks(row, options={"lowering": "inductor"})[:3]

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        self.sample.train_with(backend)


def _has_history(state: InstanceState) -> None:
    """Mark an instance state as past the first step, which compiles nothing."""
    state.assume_scales()


def _make_fake(model: nn.Module) -> None:
    """Put fake tensors in the place of all parameters and buffers, one for each, whatever shares it."""
    fake: dict[Tensor, Tensor] = {}
    for module in model.modules():
        both: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in both:
            for name, x in tensors.items():
                if x is None:
                    continue
                if x not in fake:
                    empty = torch.empty_like(x)
                    fake[x] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
                tensors[name] = fake[x]


@dataclass
class ForH100:
    """A model for which code is generated. make: makes the sample."""

    make: Callable[[], Sample]

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return what is done to it: code is generated, and counted."""
        return [functools.partial(self.generate, row)]

    def generate(self, row: Row) -> None:
        """Generate code of forward and backward; every matmul that is rewritten calls `_scaled_mm` in it."""
        gpu = FakeCuda(TARGETS[TARGET])
        registry.on_new.append(_has_history)
        config = make_config({"target": TARGET, "min_speedup": 0})
        sample = self.make()  # initializing reads values of tensors
        with fakes(), gpu.compiles() as found, collect() as report:
            _make_fake(sample.model)
            inputs = tree_map_only(Tensor, torch.empty_like, dict(sample.inputs))
            run = torch.compile(sample.model, backend=functools.partial(compile_graph, config=config))
            try:
                loss_of(run(**inputs)).backward()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise Failed("eager", "reads values of tensors, which fake ones have not") from error
        row.tell(report, sample.model)
        called = sum(graph.code.count("_scaled_mm") > 0 for graph in found)
        if row.rewritten and called < 2:
            raise Failed("generate", f"{row.rewritten} matmuls are rewritten, and {called} graphs call `_scaled_mm`")

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        self.make().train_with(backend)
