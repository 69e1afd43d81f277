"""The zoo's other lowerings: Inductor on the CPU, and code generation for GPUs that the machine does not have."""

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

from fp8pass.backend import compile_graph
from fp8pass.hardware import TARGETS
from fp8pass.inspect.fake_cuda import FakeCuda, fakes
from fp8pass.options.config import make_config
from fp8pass.report.report import collect
from fp8pass.states.slots import InstanceState, registry
from tests.zoo.row import Failed, Row, Sample, Subject, loss_of


@dataclass
class Explained:
    """A subject that is only explained, and not trained."""

    subject: Subject

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return the checks: run in eager, and explain."""
        return self.subject.checks(row)[:2]

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        self.subject.train_with(backend)


@dataclass
class ThroughInductor:
    """A sample that is trained with Inductor."""

    sample: Sample

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return the checks: run in eager, explain, and train three steps.

        Sets torch's options without restoring them, because each row has its own process.
        """
        inductor_config.fallback_random = True  # Inductor then draws the random numbers that eager draws
        functorch_config.enable_autograd_cache = False  # a graph from the cache has no verdicts in this process
        return self.sample.checks(row, options={"lowering": "inductor"})[:3]

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        self.sample.train_with(backend)


def _has_history(state: InstanceState) -> None:
    """Mark an instance state as having scales, so that no graph of a first step is compiled."""
    state.assume_scales()


def _make_fake(model: nn.Module) -> None:
    """Replace each parameter and buffer by a fake tensor; modules that shared a tensor share its fake tensor."""
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
class ForGpu:
    """A model for which code is generated. target: the GPU's name. make: returns the sample."""

    target: str
    make: Callable[[], Sample]

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return the checks: generate code."""
        return [functools.partial(self.generate, row)]

    def generate(self, row: Row) -> None:
        """Generate the code of forward and backward, which must both call `_scaled_mm` if matmuls are rewritten."""
        gpu = FakeCuda(TARGETS[self.target])
        registry.on_new.append(_has_history)
        config = make_config({"target": self.target, "min_speedup": 0})
        sample = self.make()  # before tensors are fake, because initialization reads their values
        with fakes(), gpu.compiles() as found, collect() as report:
            _make_fake(sample.model)
            inputs = tree_map_only(Tensor, torch.empty_like, dict(sample.inputs))
            run = torch.compile(sample.model, backend=functools.partial(compile_graph, config=config))
            try:
                loss_of(run(**inputs)).backward()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise Failed("eager", "reads values of tensors, which fake tensors do not have") from error
        row.tell(report, sample.model)
        called = sum(graph.code.count("_scaled_mm") > 0 for graph in found)
        if row.rewritten and called < 2:
            raise Failed("generate", f"{row.rewritten} matmuls are rewritten, and {called} graphs call `_scaled_mm`")

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        self.make().train_with(backend)
