"""Functions for tests: they capture a graph, run passes on it, train a model, and compare results."""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import expecttest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.backend import reference
from fp8pass.base._torch import select_decomp_table
from fp8pass.base.names import Names
from fp8pass.compiler.first_step import checked
from fp8pass.graph.annotation import Annotation, copy_to_edit
from fp8pass.graph.other_libraries import arguments_of
from fp8pass.graph.pass_base import Context, DynamoContext, JointContext, KernelsContext, Pass
from fp8pass.graph.verdict import Gemm
from fp8pass.graph.verify import verify
from fp8pass.options.config import Config, make_config
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from fp8pass.passes.update.context import UpdateContext
from fp8pass.report.report import Report, collect
from fp8pass.weights.update_key import UpdateKey

T = TypeVar("T", bound=Context)
aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
gc.set_threshold(50_000, 20, 50)  # graphs are many long-lived objects: garbage collection took 6% of the time
gc.freeze()  # garbage collection skips what is imported by now
atexit.register(gc.unfreeze)  # otherwise C++ bindings report leaks at exit


def _not_profiled(*_: Any) -> float:
    """Replace Dynamo's measurement of guards for its log, which empties the CPU's caches and takes 18 ms each time."""
    return 0.0  # a `Mock` would keep the frame's locals


@contextlib.contextmanager
def without_caches(share: bool = False) -> Iterator[None]:
    """Switch off the caches of compiled graphs inside, because a graph from a cache would skip the passes.

    share: keep what Dynamo has compiled before in this process, which models of one class share. Then no shape becomes
    dynamic because another model had another one, and no recompile limit is reached.
    """
    torch.manual_seed(0)
    checked.clear()
    if not share:
        torch._dynamo.reset()
    limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 10000, "automatic_dynamic_shapes": False}
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        dynamo_config.patch(run_gc_after_compile=False, **(limits if share else {})),
        mock.patch("torch._dynamo.guards.profile_guard_manager", _not_profiled),
    ):
        yield
    if not share:
        torch._dynamo.reset()


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Return random FP8 numbers."""
    return torch.randn(shape).mul(4).to(dtype)


def scale(value: float = 0.25) -> Tensor:
    """Return a scale or a scale_inv, as a 0-dim tensor."""
    return torch.tensor(value)


def dq(q: Tensor, s: Tensor | float, dtype: torch.dtype = F32) -> Tensor:
    """Dequantize `q` in `dtype` with the scale_inv `s`."""
    return q.to(dtype) * (s.to(dtype) if isinstance(s, Tensor) else s)


def capture(function: Callable[..., Any], *inputs: Any, device: str = "cpu", dynamic: bool = False) -> fx.GraphModule:
    """Return the graph of ATen ops of `function`, after Inductor's decompositions, on fake tensors.

    device: that of the fake tensors. dynamic: with symbolic sizes.
    """
    if dynamic:
        return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(*inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
        if device != "cpu":
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in fakes]
        return make_fx(function, decomposition_table=select_decomp_table())(*fakes)


def apply(module: fx.GraphModule, *passes: Pass[JointContext], config: Config | None = None) -> list[Gemm]:
    """Run passes of `JOINT` over a captured graph, verify it, and return the verdicts."""
    return list(run(module, *passes, config=config).gemms.values())


def run(module: fx.GraphModule, *passes: Pass[JointContext], config: Config | None = None) -> JointContext:
    """Run passes of `JOINT` over a captured graph, verify it, and return their context: verdicts and notes."""
    return _run_in(JointContext(config or Config(recipe=None)), module, passes)


def on_kernels(module: fx.GraphModule, *passes: Pass[KernelsContext], config: Config | None = None) -> KernelsContext:
    """Run passes of `KERNELS` over a captured graph, verify it, and return their context."""
    return _run_in(KernelsContext(config or Config(recipe=None)), module, passes)


def _run_in(context: T, module: fx.GraphModule, passes: Sequence[Pass[T]]) -> T:
    before = arguments_of(module.graph)
    for p in passes:
        p.run(module.graph, context)
    verify(module.graph, before=before)
    module.recompile()
    return context


def on_dynamos_graph(
    module: fx.GraphModule, *passes: Pass[DynamoContext], config: Config | None = None
) -> tuple[fx.GraphModule, list[int]]:
    """Run passes over a copy of Dynamo's graph. Return the copy, and how often each pass was applied."""
    annotation = Annotation(copy_to_edit(module), [], [])
    names = Names(annotation.module.graph.find_nodes(op="placeholder"))
    context = DynamoContext(config or Config(), annotation=annotation, names=names)
    applied = [p.run(annotation.module.graph, context) for p in passes]
    annotation.module.graph.lint()
    annotation.module.recompile()
    return annotation.module, applied


def on_update(module: fx.GraphModule, key: UpdateKey, *passes: Pass[UpdateContext]) -> UpdateContext:
    """Run passes over Dynamo's graph of an update, in place, and return their context."""
    context = UpdateContext(Config(), key=key)
    for p in passes:
        p.run(module.graph, context)
    module.graph.lint()
    module.recompile()
    return context


def detect(function: Callable[..., Any], *inputs: Any, **config: Any) -> tuple[fx.GraphModule, list[Gemm]]:
    """Capture `function` and rewrite its matmuls. Return the graph and the verdicts."""
    module = capture(function, *inputs)
    return module, apply(module, ListMatmuls(), ScaledMM(), config=Config(recipe=None, **config))


def text(module: fx.GraphModule) -> str:
    """Return the graph's code, one op per line, without signature, comments and deletions."""
    lines = module.print_readable(print_output=False, expanded_def=True).splitlines()
    kept = [line.split(";")[0].strip().replace("torch.ops.", "") for line in lines]
    return "\n".join(
        line for line in kept if line and not line.startswith(("class ", "#", "def ", "self,", "_ =", ")"))
    )


def expect_graph(module: fx.GraphModule, expected: str) -> None:
    """Compare with an inline snapshot; EXPECTTEST_ACCEPT=1 rewrites it."""
    expecttest.assert_expected_inline(text(module) + "\n", expected, skip=1)


def expect_text(actual: str, expected: str) -> None:
    """Compare with an inline snapshot."""
    expecttest.assert_expected_inline(actual + "\n", expected, skip=1)


def count(module: fx.GraphModule, target: Any) -> int:
    """Return how many nodes call `target`."""
    return sum(n.target is target for n in module.graph.nodes)


def sqnr(reference: Tensor, actual: Tensor) -> float:
    """Return the signal to quantization noise ratio in dB; 300 for equal tensors."""
    wanted, got = reference.detach().double(), actual.detach().double()
    signal, noise = float(wanted.square().mean()), float((wanted - got).square().mean())
    return 10 * math.log10(signal / noise) if noise and signal else 300.0 if not noise else -300.0


def train(
    model: nn.Module, run: Callable[..., Tensor], batches: Sequence[Tensor], rate: float = 0.01
) -> Iterator[dict[str, Tensor]]:
    """Train by plain SGD on mean squares. Yield output, input gradient and all parameter gradients of every step."""
    for batch in batches:
        x = batch.clone().requires_grad_(batch.is_floating_point())
        y = run(x)
        y.float().square().mean().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        yield {"output": y.detach().clone(), **({"input": x.grad} if x.grad is not None else {}), **grads}
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(rate * p.grad)
                    p.grad = None


def compiled(function: Any, **options: Any) -> Callable[..., Any]:
    """Compile `function` with the fp8pass backend; its graphs run op by op unless `lowering` says otherwise."""
    dynamic = options.pop("dynamic", None)
    return torch.compile(function, backend="fp8pass", dynamic=dynamic, options={"lowering": "eager", **options})


def annotated(function: Any, **options: Any) -> Callable[..., Any]:
    """Compile `function` so that its annotated graph runs eagerly: the numerical reference."""
    dynamic = options.pop("dynamic", None)
    return torch.compile(function, backend=_Reference(make_config(options)), dynamic=dynamic)


@dataclass(frozen=True)
class _Reference:
    """A backend that compares equal for equal options, so that models of one class share what Dynamo has compiled."""

    config: Config

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return reference(module, inputs, options={"config": self.config})


@contextlib.contextmanager
def verdicts() -> Iterator[Report]:
    """Collect the verdicts of what is compiled inside; earlier compiled code is not used."""
    torch._dynamo.reset()
    with collect() as report:
        yield report


class RefusedByCuda(Exception):
    """CUDA would refuse this `_scaled_mm`."""


def _hints(size: Any) -> int:
    """Return the hint of a symbolic size, without a guard on it."""
    return size if isinstance(size, int) else int(size.node.hint)


def check_legal_on_cuda(graph: fx.Graph) -> int:
    """Call every `_scaled_mm` of the graph on fake CUDA tensors, which applies CUDA's rules without a GPU.

    Return how many there are. Raise RefusedByCuda with the node's name.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    nodes = [n for n in graph.nodes if n.target is aten._scaled_mm.default]

    def on_cuda(node: Any) -> Any:
        v = node.meta["val"] if isinstance(node, fx.Node) else node
        if not isinstance(v, Tensor):
            return v
        shape, stride = map(_hints, v.shape), map(_hints, v.stride())
        return torch.empty_strided(list(shape), list(stride), dtype=v.dtype, device="cuda")

    for node in nodes:
        devices = {a.meta["val"].device for a in node.all_input_nodes}
        assert len(devices) == 1, (node, devices)
        with mode:
            try:
                out = torch._scaled_mm(*(on_cuda(a) for a in node.args))
            except (RuntimeError, ValueError) as error:
                raise RefusedByCuda(f"{node.name}: {error}") from error
        assert list(out.shape) == list(map(_hints, node.meta["val"].shape)), node
        if node.args[5] is not None:
            raise RefusedByCuda(f"{node.name}: scale_result with a 16- or 32-bit output")
    return len(nodes)
