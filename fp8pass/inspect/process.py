"""The child process of `inspector.inspect`: pretends that the machine has the GPU, and compiles the model for it.

Run as `python -m fp8pass.inspect.process REQUEST ANSWER`: the request as JSON, the path of a file for the answer.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.backend import compile_graph
from fp8pass.base._torch import pytree
from fp8pass.base.errors import Fp8Error
from fp8pass.graph.prediction import in_words
from fp8pass.hardware import TARGETS, Target
from fp8pass.inspect.fake_cuda import FakeCuda, Generated, fakes
from fp8pass.inspect.inspector import Compiled, InspectedRun, Inspection, Kernel
from fp8pass.inspect.kernel_time import fastest, kernel_seconds
from fp8pass.inspect.kernels import kernel_rows
from fp8pass.inspect.memory import Memory
from fp8pass.options.config import WEIGHT_CACHES, make_config
from fp8pass.passes.kernels.combo_kernels import SMALL_KERNEL_BYTES
from fp8pass.report.report import collect
from fp8pass.roofline import load_machine
from fp8pass.states.slots import InstanceState, registry

_BUILT = (
    "It is built with fake tensors on the CPU, which have sizes but no values: the factory can't load weights or read "
    "values"
)
_TRACED = "torch.compile(model, fullgraph=True)(*inputs) on the CPU, with its backward, shows where"
_NAMED = tuple(
    f"{kind.__name__}: " for kind in (AttributeError, Fp8Error, KeyError, RuntimeError, TypeError, ValueError)
)


@dataclass(frozen=True)
class _Contender:
    """One way to train the model.

    name: as tables show it. prepare: called with the model, returns the model to compile. backend, options: arguments
    of `torch.compile`; options is None for a backend other than fp8pass.
    """

    name: str
    prepare: Callable[[Any], Any]
    backend: str
    options: dict[str, Any] | None = None


@dataclass
class _Work:
    """The current task, for error messages.

    answer: the file for the error. doing: what has failed if an error comes now. advice: what the user can do then.
    """

    answer: Path
    doing: str
    advice: str = ""

    def failed(self, _: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
        """Write the error as one line for the user; a `sys.excepthook`."""
        self.answer.write_text(json.dumps({"error": self.line(error)}))

    def line(self, error: BaseException) -> str:
        """Return what went wrong and what to do next, in one line."""
        lines = [line.strip() for line in str(error).splitlines()]
        # Dynamo's BackendCompilerFailed begins with a line "backend='...' raised:", and then has the error with its
        # type.
        said = next((line for line in lines if line and not line.endswith("raised:")), "")
        if isinstance(error, Fp8Error):
            return said
        reason = said if said.startswith(_NAMED) else f"{type(error).__name__}: {said}"
        return ". ".join(part.rstrip(".") for part in (f"{self.doing}: {reason}", self.advice) if part)


def main(request: dict[str, Any], answer: Path) -> None:
    """Compile the runs that the request asks for; write an `Inspection` as JSON, or {"error": one line}."""
    spec = request["spec"]
    work = _Work(answer, f"{request['machine']} is not a machine file")
    sys.excepthook = work.failed
    target = load_machine(request["machine"]) if request["machine"] else TARGETS[request["target"]]
    TARGETS[target.name] = target
    work.doing, work.advice = f"{spec} can't be imported", "Write module:factory, of the current directory or installed"
    factory = _factory(spec)
    gpu = FakeCuda(target)
    registry.on_new.append(_has_history)
    notes: list[str] = []
    runs = []
    for way in _ways(request, target, notes):
        work.doing, work.advice = f"{spec} can't be compiled with {way.name} for {target.name}", _TRACED
        runs.append(_run(gpu, way, factory, request["ptx"], work, request["optimizer"]))
    inspection = Inspection(spec, target.name, torch.__version__, tuple(runs), tuple(notes))
    answer.write_text(json.dumps(asdict(inspection)))


_OURS = "fp8pass", "torch could not compile what fp8pass"
"""How fp8pass's warnings begin, and those of its faults."""


def _has_history(state: InstanceState) -> None:
    """Mark an instance state as past the first step, which runs op by op and compiles nothing."""
    state.assume_scales()


def _factory(spec: str) -> Callable[[], Any]:
    module, _, name = spec.partition(":")
    attribute = getattr(importlib.import_module(module), name)
    if not callable(attribute):
        raise Fp8Error(f"{spec} is not callable: write module:factory, a function that returns (model, *inputs)")
    factory: Callable[[], Any] = attribute
    return factory


def _ways(request: dict[str, Any], target: Target, notes: list[str]) -> Iterator[_Contender]:
    # equal layers are not compiled once, for then one would be counted
    options = {**request["options"], "target": target.name, "compile_once": False}
    if request["optimizer"] is not None:
        options.setdefault("weight_cache", WEIGHT_CACHES[-1])
    yield _Contender(f"fp8pass {options['recipe']}", lambda model: model, "fp8pass", options)
    yield _Contender("bf16", lambda model: model, "inductor")
    if request["peer"] is None:
        return
    package, _, recipe = request["peer"].partition(":")
    if importlib.util.find_spec(package) is None:
        notes.append(f"{package} is not installed, so not compared with: pip install {package}")
        return
    yield _Contender(f"{package} {recipe}", lambda model: _torchao(model, recipe), "inductor")


def _torchao(model: Any, recipe: str) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if not isinstance(model, nn.Module):
        raise Fp8Error("torchao converts modules: let the factory return an nn.Module, or drop --compare")
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def _run(
    gpu: FakeCuda, way: _Contender, factory: Callable[[], Any], ptx: bool, work: _Work, optimizer: str | None = None
) -> InspectedRun:
    torch.compiler.reset()  # Dynamo would reuse what it compiled of the model for the run before
    memory = Memory()

    def runs(graph: Generated) -> Callable[..., Any]:
        return memory.graph(graph, _names(generated)[-1])

    with (
        fakes(),
        collect() as verdicts,
        gpu.compiles(runs=runs) as generated,
        warnings.catch_warnings(record=True) as caught,
    ):
        traced = replace(work)
        work.doing, work.advice = "the model can't be built", _BUILT
        model, *inputs = _built(factory)
        model = way.prepare(model)
        work.doing, work.advice = traced.doing, traced.advice
        _backward(_compiled(model, way)(*inputs))
        if optimizer is not None:
            _update(model, optimizer, way)
    if not generated:
        raise Fp8Error(f"{work.doing}: no tensor operation of it was captured. {_TRACED}")
    listed = [
        k for name, graph in zip(_names(generated), generated, strict=True) for k in _kernels(gpu, graph, name, ptx)
    ]
    pays = {g.name: in_words(g.pays_from, g.pays_of) for g in verdicts.gemms if g.name}
    kernels = [replace(k, pays_from=pays.get(k.modules, "")) if k.kind == "gemm" else k for k in listed]
    notes = dict.fromkeys(str(w.message) for w in caught if str(w.message).startswith(_OURS))
    saved = sum(graph.bytes_saved for graph in generated)
    peak, held = (0, ()) if memory.unknown else (memory.peak, memory.at_peak)
    sizes = (f"{size}: bytes and times are those of this call" for size in verdicts.sizes)
    return InspectedRun(way.name, tuple(kernels), saved, (*notes, *sizes, *filter(None, [memory.unknown])), peak, held)


def _built(factory: Callable[[], Any]) -> tuple[Any, ...]:
    built = factory()
    if not isinstance(built, tuple) or len(built) < 2 or not callable(built[0]):
        raise Fp8Error(f"the factory returned {type(built).__name__}: let it return a tuple (model, *inputs)")
    model, *inputs = built
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    for x in (*tensors, *pytree.tree_leaves(inputs)):
        if isinstance(x, Tensor) and x.device.type != "cpu":
            raise Fp8Error(f"the factory returned a tensor on {x.device}: leave the model and its inputs on the CPU")
    return built


def _update(model: Any, name: str, way: _Contender) -> None:
    """Compile and run the optimizer's update."""
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, foreach=True)  # torch's default on GPUs
    _compiled(optimizer.step, way)()


def _compiled(function: Any, way: _Contender) -> Any:
    if way.options is None:
        return torch.compile(function, backend=way.backend)
    return torch.compile(function, backend=functools.partial(compile_graph, config=make_config(way.options)))


def _backward(result: Any) -> None:
    """Run the backward of the sum of all results that require a gradient."""
    sums = [x.sum() for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if sums:
        # converted, because `stack` takes one dtype
        torch.stack([x.float() for x in sums]).sum().backward()  # type: ignore[no-untyped-call]


def _names(generated: list[Generated]) -> list[str]:
    """Return the names of graphs: "forward", "backward" or "update", numbered from the second of a kind on."""
    names, counts = [], Counter[str]()
    for graph in generated:
        kind = "backward" if graph.is_backward else "update" if graph.is_inference else "forward"
        counts[kind] += 1
        names.append(kind if counts[kind] == 1 else f"{kind} {counts[kind]}")
    return names


def _kernels(gpu: FakeCuda, graph: Generated, name: str, ptx: bool) -> list[Kernel]:
    rows = kernel_rows(graph, name, gpu.target)
    # others take as long as a launch, whatever their code
    large = {row.name for row in rows if row.bytes_moved > SMALL_KERNEL_BYTES}
    compiled = gpu.compile_kernels(graph.code, graph.values, read=large) if ptx else {}
    return [_with_code(row, compiled.get(row.name, []), gpu.target) for row in rows]


def _with_code(row: Kernel, tried: list[Compiled], target: Target) -> Kernel:
    """Return a row with the fastest of a kernel's configurations, whose code predicts its time, but for matmuls."""
    codes = [compiled.code for compiled in tried if compiled.code is not None]
    if not tried:
        return row
    if len(codes) < len(tried):
        return replace(row, compiled=tried[0])
    moved = row.bytes_moved + row.scratch
    best = fastest(target, moved, codes)
    seconds = row.seconds if row.kind == "gemm" else kernel_seconds(target, moved, codes[best])
    return replace(row, compiled=tried[best], seconds=seconds)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
