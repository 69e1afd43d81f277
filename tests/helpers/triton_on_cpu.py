"""Run the Triton code that Inductor generates for sm_90 on CPU tensors; run as a script, answers questions.

Needs TRITON_INTERPRET=1. A model is trained on the CPU, and each graph that Inductor would compile runs twice on the
same inputs: op by op, and as the code for sm_90, whose kernels Triton's interpreter runs with their own grids and blocks.
`torch._scaled_mm` is the CPU's in both. Because this patches many parts of torch and Triton, it needs its own process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import async_compile, config, select_algorithm
from torch._inductor.codecache import PyCodeCache
from torch._inductor.dependencies import ReadWrites, StarDep
from torch._inductor.runtime import triton_heuristics
from torch.utils._ordered_set import OrderedSet
from triton.runtime import interpreter

import fp8pass
from fp8pass.compiler import heuristics
from fp8pass.hardware import TARGETS
from fp8pass.inspect.fake_cuda import FakeCuda
from fp8pass.passes.kernels import fused_matmul
from fp8pass.passes.kernels import matmul_source as source
from fp8pass.passes.kernels.kernel_candidates import fitting
from fp8pass.quant.kernel_ops import WRITE
from fp8pass.states.slots import registry
from tests.helpers.asked import answer_all
from tests.helpers.own_recipes import TooLargeScaling
from tests.helpers.pretend_gpu import has_history

DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def convert_float(values: Any, source: Any, target: Any, _: Any) -> Any:
    """Return the bits of floating-point numbers in another type, rounded to nearest even, as sm_90 does it.

    This replaces the interpreter's function, which truncates bfloat16, rounds ties away from zero, and loses the carry of a
    mantissa that rounds up to the next power of two: 31.64 becomes 16 in e4m3. The cast to FP8 saturates, as
    `cvt.rn.satfinite` does.
    """
    of, to = DTYPES[source], DTYPES[target]
    x = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view("u1").copy()).view(of)
    if to.itemsize == 1:
        limit = torch.finfo(to).max
        x = x.float().clamp(-limit, limit)
    return x.to(to).view(torch.uint8).numpy().view(f"u{to.itemsize}").reshape(np.shape(values))


def reduce_by_halves(self: Any, tensors: Any) -> list[Any]:
    """Reduce as a GPU does, half of the elements with the other half.

    This replaces the interpreter's function, whose calls for each single element took most of the tests' time.
    """
    found, axis = self.unravel(tensors, self.axis)
    parts = [np.moveaxis(t.handle.data, axis, 0) for t in found]
    while (n := len(parts[0])) > 1:
        assert n % 2 == 0  # blocks are powers of two
        halves = [
            self.to_tensor(p[at], t.dtype)
            for at in np.s_[: n // 2, n // 2 :]
            for p, t in zip(parts, found, strict=True)
        ]
        reduced = self.combine_fn.fn(*halves)
        parts = [r.handle.data for r in (reduced if isinstance(reduced, tuple) else (reduced,))]
    if self.keep_dims:
        kept = tuple(range(len(tensors[0].shape))) if self.axis is None else axis
        parts = [np.expand_dims(p[0], kept) for p in parts]
    else:
        parts = [p[0] for p in parts]
    return [self.to_tensor(p, t.dtype) for p, t in zip(parts, found, strict=True)]


def hyperbolic_tangent(x: Any) -> Any:
    """Return tanh(x), instead of the function of NVIDIA's library."""
    return tl.core.tensor(interpreter.TensorHandle(np.tanh(x.handle.data), x.dtype.scalar), x.type)


def power(x: Any, y: Any) -> Any:
    """Return x ** y, instead of the function of NVIDIA's library."""
    data = np.power(x.handle.data, y.handle.data)
    return tl.core.tensor(interpreter.TensorHandle(data, x.dtype.scalar), x.type)


fused_matmuls: list[tuple[Tensor, ...]] = []
"""Operands and scales of the fused matmuls that the running code has computed."""


class Kernel:
    """A generated kernel, which runs with one of its configurations.

    chosen: the number of the configuration, or of the last one if there are fewer.
    """

    chosen = 0

    def __init__(self, tuner: Any) -> None:
        self.tuner = tuner

    def run(self, *args: Any, stream: int) -> None:
        """Launch the kernel, as generated code does."""
        function, configs, meta = self.tuner.fn, self.tuner.configs, self.tuner.inductor_meta
        choice = configs[min(self.chosen, len(configs) - 1)]
        names = [name for name in function.arg_names if name not in choice.kwargs]
        of_launch = meta.get("extra_launcher_args", [])  # the grid of a kernel that is not Inductor's
        given = dict(zip([*names, *of_launch], args, strict=True))
        grid = triton_heuristics.GridExpr.from_meta(meta, choice).eval_slow(given)
        given = {name: given[name] for name in names}
        if function.fn.__name__ == source.NAME:
            fused_matmuls.append(_matmul([given[name] for name in ("a", "b", "scale_a", "scale_b")]))
        # the interpreter patches Triton at each call of a function; once in a launch is enough
        with mock.patch.object(interpreter, "_patch_lang", functools.cache(interpreter._patch_lang)):
            function[grid](**given, **choice.kwargs)


def load_kernel(gpu: FakeCuda, name: str, source: str, device_str: str) -> Kernel:
    """Load a kernel, instead of `AsyncCompile.triton`."""
    file = Path(tempfile.mkdtemp()) / f"{name}.py"
    file.write_text(source)  # the interpreter reads the source from the file
    module = types.ModuleType(name)
    vars(module)["__file__"] = str(file)
    with gpu.there():
        exec(compile(source, file, "exec"), vars(module))
    vars(module)["libdevice"] = tl.math  # the interpreter can't call NVIDIA's library of the same functions
    return Kernel(getattr(module, name))


@contextlib.contextmanager
def generating() -> Iterator[None]:
    """Let Inductor read kernels that are not its own as functions to compile, although the interpreter runs them.

    It finds out which tensors such a kernel writes by compiling it, which the interpreter's functions can't be.
    """

    def written(kernel: Any, given: dict[str, Any], _: Any) -> Any:
        return [name for name in given if name.startswith("out")]

    def accessed(kernel: Any, given: dict[str, Any], _: Any) -> Any:
        names = written(kernel, given, _)
        reads, writes = (OrderedSet(map(StarDep, of)) for of in (given.keys() - names, names))
        return triton_kernel_wrap.TensorAccesses(ReadWrites(reads, writes, OrderedSet()), False)

    finds = {"identify_accessed_tensors": accessed, "identify_mutated_tensors": written}
    with contextlib.ExitStack() as stack:
        stack.enter_context(triton.knobs.runtime.scope())
        triton.knobs.runtime.interpret = False
        stack.enter_context(mock.patch.object(fused_matmul, "shared_memory", return_value=0))
        for name in finds.keys() & vars(triton_kernel_wrap).keys():
            stack.enter_context(mock.patch.object(triton_kernel_wrap, name, finds[name]))
        yield


@contextlib.contextmanager
def on_cpu(gpu: FakeCuda) -> Iterator[None]:
    """Let generated code load and run in the CPU's memory inside."""
    guards: Any = torch._C._dynamo.guards
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (async_compile.AsyncCompile, "triton", functools.partial(load_kernel, gpu)),
            (guards, "_empty_strided_cuda", guards._empty_strided_cpu),
            (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
            (torch.cuda, "_DeviceGuard", lambda _: contextlib.nullcontext()),
            (torch.cuda, "set_device", lambda _: None),
            (tl.math, "mul_rn", lambda x, y: x * y),  # NumPy rounds every product
            (tl.math, "pow", power),
            (tl.math, "tanh", hyperbolic_tangent),
            (interpreter, "_convert_float", convert_float),
            (interpreter.ReduceOps, "generic_reduce", reduce_by_halves),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


@dataclass(frozen=True)
class Compared:
    """A comparison of a tensor that the code for sm_90 makes with that of the graph run op by op.

    what: "output", "input" (state that the graph writes), "operand" or "scale" of a scaled matmul; "fused matmuls", whose
    shape is their number.
    error: the largest difference, relative to the largest element; sqnr: in dB, 300 for equal tensors.
    differing: share of elements. steps: the largest difference of FP8 codes, 0 for other types.
    """

    what: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    sqnr: float
    differing: float
    steps: int


def compare(what: str, wanted: Tensor, got: Tensor) -> Compared:
    from tests.helpers.harness import sqnr

    assert (wanted.dtype, wanted.shape) == (got.dtype, got.shape)
    steps = 0
    if wanted.dtype.itemsize == 1 and wanted.is_floating_point():
        steps = int((_place(wanted) - _place(got)).abs().max())
    w, g = wanted.detach().double(), got.detach().double()
    error = float((w - g).abs().max() / w.abs().max().clamp(min=1e-30)) if w.numel() else 0.0
    name, shape = str(wanted.dtype).removeprefix("torch."), tuple(wanted.shape)
    return Compared(what, name, shape, error, sqnr(w, g), float((w != g).double().mean()), steps)


def _place(x: Tensor) -> Tensor:
    """Return the ranks of FP8 numbers among all values of the format, in order; both zeros are 0."""
    code = x.contiguous().view(torch.uint8).int()
    return torch.where(code < 128, code, 128 - code)


Matmul = tuple[Tensor, ...]
"""Both operands and both scales of a call of `_scaled_mm`."""


def _matmul(args: Any) -> Matmul:
    """Return copies of operands and scales, with a scale of one element as 0-dim, since its dimensions may differ."""
    return tuple(x.reshape(()).clone() if x.numel() == 1 else x.clone() for x in args[:4])


class OpByOp(fx.Interpreter):
    """Runs a graph, and keeps the operands and scales of its scaled matmuls."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.matmuls: list[Matmul] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._scaled_mm.default:
            self.matmuls.append(_matmul(args))
        return super().call_function(target, args, kwargs)


def compared_matmuls(wanted: Sequence[Matmul], got: Sequence[Matmul]) -> Iterator[Compared]:
    """Compare each matmul of the graph with the nearest one of the code, because Inductor may reorder them."""
    left = list(got)
    for of_graph in wanted:
        shapes = [x.shape for x in of_graph]
        fitting = [i for i, m in enumerate(left) if [x.shape for x in m] == shapes]
        each = [
            [
                compare("operand" if j < 2 else "scale", w, g)
                for j, (w, g) in enumerate(zip(of_graph, left[i], strict=True))
            ]
            for i in fitting
        ]
        nearest = max(range(len(fitting)), key=lambda i: sum(c.sqnr for c in each[i]))
        del left[fitting[nearest]]
        yield from each[nearest]
    assert not left


def run_code(gpu: FakeCuda, code: Callable[[list[Any]], Any], inputs: list[Any]) -> tuple[Sequence[Any], list[Matmul]]:
    """Call generated code. Return its outputs, and the operands and scales of its scaled matmuls."""
    matmuls: list[Matmul] = []
    fused_matmuls.clear()
    kernels: Any = select_algorithm.extern_kernels
    real = kernels._scaled_mm

    def scaled_mm(*args: Any, **kwargs: Any) -> Any:
        matmuls.append(_matmul(args))
        return real(*args, **kwargs)

    with on_cpu(gpu), mock.patch.object(kernels, "_scaled_mm", scaled_mm):
        outputs = code(inputs)
    return outputs, [*matmuls, *fused_matmuls]


def _written(module: fx.GraphModule) -> list[int]:
    """Return the positions of inputs that a graph writes.

    The code may also overwrite other inputs that it no longer needs: tensors that were saved for it alone.
    """
    nodes = list(module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    written = {n.args[0] for n in nodes if n.target in (torch.ops.aten.copy_.default, WRITE)}
    viewed = {n.args[0] for n in written if n.target is torch.ops.aten.as_strided.default}
    return [i for i, p in enumerate(placeholders) if p in written or p in viewed]


def both(
    gpu: FakeCuda, found: list[list[Compared]], module: fx.GraphModule, inputs: list[Any], is_backward: bool
) -> Any:
    """Stand in for Inductor's inner_compile: return a callable that runs the graph op by op and its code.

    It appends the comparisons of each call to `found`, and returns the graph's outputs.
    """
    graph = copy.deepcopy(module)
    with generating():
        generated = gpu.generate(module, inputs, is_backward)
    with on_cpu(gpu):
        code = PyCodeCache.load(generated.code).call

    def call(args: list[Any]) -> Any:
        inputs = [x.detach() if isinstance(x, Tensor) else x for x in args]
        copies = copy.deepcopy(inputs)  # inputs that share memory share it in the copies, too
        outputs, matmuls = run_code(gpu, code, list(copies))
        reference = OpByOp(graph)
        wanted = reference.run(*inputs)
        pairs = [("output", w, g) for w, g in zip(wanted, outputs, strict=True)]
        pairs += [("input", inputs[i], copies[i]) for i in _written(graph)]
        tensors = [compare(what, w, g) for what, w, g in pairs if isinstance(w, Tensor)]
        count = Compared("fused matmuls", "", (len(fused_matmuls),), 0.0, 300.0, 0.0, 0)
        found.append([count, *tensors, *compared_matmuls(reference.matmuls, matmuls)])
        return wanted

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class Gated(nn.Module):
    """A gated MLP large enough for tiles: merged weights with one input, a saved residual stream, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.RMSNorm(64), nn.RMSNorm(64)
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down, self.head = nn.Linear(128, 64, bias=False), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, 64]."""
        y = self.norm(x)
        hidden = F.silu(self.gate(y)) * self.up(y)
        result: Tensor = self.head(self.last_norm(x + self.down(hidden)))
        return result


def train(
    gpu: FakeCuda,
    name: str,
    recipe: str,
    dtype: torch.dtype,
    steps: int,
    updates: bool = False,
    epilogues: str = "auto",
) -> list[list[Compared]]:
    """Train a model. Return the comparisons of each call of a graph.

    name: "block", with a bias, an odd width and a residual; "gated"; "one" or "two" layers, large enough for tiles.
    updates: compare only AdamW's updates, which write FP8 weights and moments and skip a step with a nonfinite gradient.
    """
    from tests.helpers.models import Block

    found: list[list[Compared]] = []
    made: dict[str, Callable[[], nn.Module]] = {
        "block": lambda: Block(32, 24),
        "gated": Gated,
        "one": lambda: nn.Linear(64, 128),
        "two": lambda: nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False)),
    }
    model, shape = made[name]().to(dtype), (16, 32) if name == "block" else (64, 64)

    def inner(
        module: fx.GraphModule, inputs: list[Any], is_backward: bool = False, is_inference: bool = False, **_: Any
    ) -> Any:
        if updates and not is_inference:
            return make_boxed_func(module.forward)
        return both(gpu, found, module, inputs, is_backward)

    assert TooLargeScaling().name == "test-requantize"  # its import gives it the name
    options = {"recipe": recipe, "strict": True, "merge_siblings": True, "epilogues": epilogues}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def inputs() -> Iterator[Tensor]:
        return (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(steps))

    with gpu.compiles(inner):
        if updates:
            run = fp8pass.train_step(optimizer_state="fp8+float16", skip_nonfinite=True, **options)(step)
            for x in inputs():
                run(x)
        else:
            compiled = torch.compile(model, backend="fp8pass", options=options)
            for x in inputs():
                compiled(x).square().mean().backward()
    return found


def answer(gpu: FakeCuda, name: str, recipe: str, dtype: str, steps: str, *how: str) -> list[list[dict[str, Any]]]:
    """Return what `train` returns.

    how: "updates"; "emulate" rounds after each op, as the graph does; "always" fuses; "candidate", last and followed by a
    number, runs kernels in tiles with that configuration, even if it is larger than the tensor.
    """
    chosen = int(how[-1]) if "candidate" in how else 0
    fits = (lambda tiles, *_: list(tiles)) if "candidate" in how else fitting
    with (
        config.patch(emulate_precision_casts="emulate" in how),
        mock.patch.object(heuristics, "fitting", fits),
        mock.patch.object(Kernel, "chosen", chosen),
    ):
        epilogues = "always" if "always" in how else "auto"
        found = train(gpu, name, recipe, getattr(torch, dtype), int(steps), "updates" in how, epilogues)
    return [[asdict(c) for c in call] for call in found]


if __name__ == "__main__":
    registry.on_new.append(has_history)
    torch.backends.mkldnn.set_flags(False)  # some CPUs take minutes for oneDNN's FP8 matmuls
    answer_all(functools.partial(answer, FakeCuda(TARGETS["h100"])))
