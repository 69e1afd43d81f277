"""Compile a training step for an sm_90 GPU on a machine that has none; run as a script, answers questions.

`fp8pass.pretend` patches many parts of torch and Triton, so it needs its own process, which `pretend` asks.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import fx, nn
from torch._inductor import cudagraph_utils
from torch._inductor import utils as inductor_utils
from torch._inductor.graph import GraphLowering

import fp8pass
from fp8pass.base import scaling
from fp8pass.base._torch import CompiledFxGraph
from fp8pass.compiler import lower
from fp8pass.compiler.cuda_graphs import Recorder
from fp8pass.compiler.line import Line, line_of
from fp8pass.graph.annotation import Annotation
from fp8pass.hardware import TARGETS
from fp8pass.inspect import inspector
from fp8pass.inspect import process as inspect_process
from fp8pass.inspect.fake_cuda import FakeCuda, fakes, returns
from fp8pass.states.slots import InstanceState, registry
from tests.helpers.asked import answer_all, ask
from tests.helpers.harness import without_caches
from tests.helpers.other_libraries import strides_of

if TYPE_CHECKING:
    from tests.helpers.xla_rules import Case


def pretend(*what: str) -> Any:
    """Return what `answer` returns in the process with the fake GPU."""
    return ask("tests.helpers.pretend_gpu", *what, PYTHONHASHSEED="0")  # the hash seed that `inspect` sets


@contextlib.contextmanager
def inspects_there(run: str = "") -> Iterator[None]:
    """Let `fp8pass.inspect.inspector.inspect` ask the process with the fake H100 instead of starting one.

    run: the name of the only run that is made; all by default.
    """

    def asked(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        request, answer = command[-2:]
        return subprocess.CompletedProcess(command, pretend("inspect", request, answer, run), stderr="")

    with mock.patch("fp8pass.inspect.inspector.subprocess.run", asked):
        yield


def inspect_there(*arguments: Any, run: str = "", **named: Any) -> inspector.Inspection:
    """Return the result of `inspect` within `inspects_there`."""
    with inspects_there(run):
        return inspector.inspect(*arguments, **named)


def inspection(gpu: FakeCuda, request: str, answer: str, run: str) -> int:
    """Do what the process that `inspect` starts does, with a GPU that is already faked. Return its exit status."""
    ways = inspect_process._ways

    def chosen(*arguments: Any) -> list[Any]:
        return [way for way in ways(*arguments) if run in ("", way.name)]

    hook = sys.excepthook
    with (
        mock.patch.object(inspect_process, "FakeCuda", return_value=gpu),
        mock.patch.object(inspect_process, "_ways", chosen),
        mock.patch.object(registry, "on_new", registry.on_new[:]),
    ):
        try:
            inspect_process.main(json.loads(request), Path(answer))
        except Exception as error:  # noqa: BLE001  # goes to the hook that `main` has installed
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        finally:
            sys.excepthook = hook
    return 0


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def has_history(state: InstanceState) -> None:
    """Treat the first step, which would run eagerly, as done, so that scales come from the history."""
    state.assume_scales()


def generated(
    gpu: FakeCuda, function: Callable[..., Any], *inputs: Any, backward: bool = True, **options: Any
) -> list[str]:
    """Return the generated code of `function(*inputs)`, and with `backward` that of the backward of its sum."""
    with gpu.compiles() as found:
        result = torch.compile(function, backend="fp8pass", options=options)(*inputs)
        if backward:
            result.sum().backward()
    return [graph.code for graph in found]


EVALUATED = ("delayed", "rowwise")
"""Recipes whose evaluation is compiled, too: one with state and one without."""


@dataclass
class Graph:
    """The generated code of one graph, and what Inductor decides about a CUDA graph of it."""

    code: str
    decided: dict[str, Any]


def model_of(of: str, width: int, hidden: int) -> nn.Module:
    """Return a "block", or with fewer kernels a "layer" between a norm and an activation, or a "linear" layer alone."""
    from tests.helpers.models import Block

    if of == "block":
        return Block(width, hidden)
    if of == "layer":
        return nn.Sequential(nn.RMSNorm(width), nn.Linear(width, hidden), nn.GELU())
    return nn.Linear(width, hidden, bias=False)


@functools.cache
def graphs(gpu: FakeCuda, what: str, of: str) -> list[Graph]:
    """Return the graphs of a model's forward and backward, or of a decorated step, compiled once for all questions.

    what: a recipe, whose evaluation comes last; or "step", for a decorated one, which has two updates: the first, and
    the second, which finds moments in FP8. of: see `model_of`.
    """
    found: list[Graph] = []

    def inner(module: fx.GraphModule, inputs: list[Any], is_backward: bool = False, **kwargs: Any) -> Any:
        names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        generated = gpu.generate(module, inputs, is_backward)
        found.append(Graph(generated.code, _decided(module, generated.lowering, names, is_backward, **kwargs)))
        return returns(generated.outputs)

    blocks = what in ("blockwise", "mxfp8")
    sizes = (1024, 2048) if what == "step" else (512, 1024 if blocks else 1000)  # a width of 1000 needs padding
    model = model_of(of, *sizes).bfloat16()
    x = torch.randn(256, sizes[0], dtype=torch.bfloat16, requires_grad=True)
    target = "sm_100" if what == "mxfp8" else "sm_90"
    options: dict[str, Any] = {"min_speedup": 0, "target": target, "strict": True, "mode": "reduce-overhead"}
    with gpu.compiles(inner):
        if what == "step":
            _step_twice(model, x, options)
            return found
        run = torch.compile(model, backend="fp8pass", options={"recipe": what, **options})
        with mock.patch.object(torch.version, "cuda", None):  # blocks need CUDA 12.9, which torch 2.11 may not have
            run(x).sum().backward()
        if what in EVALUATED:
            with torch.no_grad():
                run(x)
    return found


def experts(gpu: FakeCuda, layers: str) -> list[str]:
    """Return the code of forward and backward of one or two layers of experts; M is not a multiple of 16."""
    from tests.helpers.models import Experts

    x = torch.randn(500, 256, dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([100, 100, 333, 470], dtype=torch.int32)
    both = Experts(4, 256, 512)

    def one(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, both.up.transpose(-2, -1), offs=offs)

    return generated(gpu, both if layers == "2" else one, x, offs, min_speedup=0, target="sm_90", strict=True)


def accumulating(gpu: FakeCuda, what: str) -> dict[str, int]:
    """Return how often the code of a backward calls FP8 matmuls: alone, and with an addition.

    what: "grad", of two layers within `accumulate`; or "main_grad", of a Function that adds to that.
    """
    from tests.helpers.functions import WithMainGrad
    from tests.helpers.models import Block

    model, x = (Block(64, 128), torch.randn(64, 64)) if what == "grad" else (WithMainGrad(), torch.randn(64, 32))
    torch._dynamo.reset()
    with fp8pass.accumulate(model) if what == "grad" else contextlib.nullcontext():
        _, code = generated(gpu, model, x.requires_grad_(), min_speedup=0, target="sm_90", strict=True)
    calls = Counter(re.findall(r"= torch\.ops\.(?:fp8pass|aten)\.(added_gradient|_scaled_addmm_?)\.default\(", code))
    return {"_scaled_mm": code.count("extern_kernels._scaled_mm("), **calls}


def slices(gpu: FakeCuda, which: str, width: int = 256) -> list[int]:
    """Return where the code of a backward writes gradients of a table's slices, as offsets in the table's gradient.

    which: "columns", where the table is the only one, or "rows", where rows have one too.
    """
    from tests.helpers.models import Modulated, ModulatedRows

    model, n = (Modulated(width), 4) if which == "columns" else (ModulatedRows(width), 2)
    x = torch.randn(1, 32768, width, requires_grad=True)
    _, code = generated(gpu, model, x, min_speedup=0, target="sm_90", recipe="dynamic", strict=True)
    views = re.findall(rf"reinterpret_tensor\(buf\d+, \(1, 1, {width}\), \({n * width}, {width}, 1\), (\d+)\)", code)
    return sorted({int(offset) for offset in views})


def dropped(gpu: FakeCuda) -> list[bool]:
    """Return whether the code of a forward and of a backward with dropout draws four random numbers at a time."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5))
    x = torch.randn(64, 64, requires_grad=True)
    return ["rand4x(" in code for code in generated(gpu, model, x, min_speedup=0, target="sm_90")]


def parts(gpu: FakeCuda) -> list[str]:
    """Return the code that rounds this rank's parts of a parameter and of a moment, with keys i32[n, 2]."""
    from fp8pass.quant import ops
    from fp8pass.quant.moments import Moments

    x, p = torch.randn(65, 64), torch.randn(65, 64, dtype=torch.bfloat16)
    stored_as = Moments(block=64).format("second", x)
    x_q, blocks = torch.zeros(65, 64, dtype=stored_as.dtype), torch.ones(1, 65)
    updates, seeds = torch.ones(1, dtype=torch.int32), torch.tensor([[1, 0], [2, 4160]], dtype=torch.int32)

    def write(x: torch.Tensor) -> torch.Tensor:
        keys = ops.keys_of(updates, seeds)
        ops.write_rounded(x, p, keys, 0)
        return ops.write_moment(stored_as, x.square(), x_q, torch.ones(1, device=x.device), 0, keys, blocks)

    return generated(gpu, write, x, backward=False, recipe=None)


def rules(gpu: FakeCuda, which: str) -> list[str]:
    """Return the code of XLA's rules' cases for a GPU, except `epilogues`, in four graphs. which: see `on_gpu`."""
    from tests.helpers.xla_rules import on_gpu

    chosen = [c for n, c in on_gpu(which).items() if n[0] != "E" and c.calls and c.target is None and not c.dynamic]
    # a single graph would take 1.5 times as long, because Inductor considers every pair of kernels for fusion
    return [code for i in range(4) for code in _together(gpu, chosen[i::4])]


def _together(gpu: FakeCuda, cases: Sequence[Case]) -> list[str]:
    def everything(inputs: list[Any]) -> list[Any]:
        return [c.function(*i) for c, i in zip(cases, inputs, strict=True)]

    torch._dynamo.reset()
    return generated(gpu, everything, [c.inputs for c in cases], backward=False, recipe=None, target="sm_90")


def epilogues(gpu: FakeCuda, which: str) -> dict[str, dict[str, Any]]:
    """Compile the epilogues of XLA's rules, those with an amax also large; see `epilogue`. which: see `on_gpu`."""
    from tests.helpers.xla_rules import on_gpu, q

    found = {}
    for name, case in on_gpu(which).items():
        if name[0] != "E":
            continue
        found[name] = epilogue(gpu, case.function, *case.inputs)
        if name[:2] in ("E7", "E8", "E9"):
            large = q(1024, 64), q(64, 1024), *case.inputs[2:]
            found[f"{name}, large"] = epilogue(gpu, case.function, *large)
    return found


def epilogue(gpu: FakeCuda, function: Callable[..., Any], *inputs: Any) -> dict[str, Any]:
    """Return the result of `checked`, and as "after" the number of kernels that run after the last matmul."""
    torch._dynamo.reset()
    (code,) = generated(gpu, function, *inputs, backward=False, recipe=None, target="sm_90")
    return {"after": code.rpartition("extern_kernels._scaled_mm(")[2].count(".run("), **checked(gpu, [code])}


def plain(gpu: FakeCuda) -> dict[str, list[str]]:
    """Return the code of functions without FP8, by backend (inductor, fp8pass), and as "both" that of one with FP8."""
    from fp8pass.base.scaling import amax, quantize

    def both(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_q = quantize(x, s, torch.float8_e4m3fn)
        return amax(x), x_q, x_q.t().contiguous()

    rows, s = torch.randn(512, 2048, dtype=torch.bfloat16), torch.tensor(2.0)
    functions = [
        lambda x: x.softmax(-1),
        lambda x: x.sum(0),
        lambda x: x.float().square().sum(),
        lambda x: x[:4, :32].amax(),
        lambda x: torch.cat([x, x.exp()]).t().contiguous(),
    ]
    found: dict[str, list[str]] = {"inductor": [], "fp8pass": []}
    for backend, codes in found.items():
        for function in functions:
            torch._dynamo.reset()
            with gpu.compiles() as graphs:
                torch.compile(function, backend=backend)(rows)
            codes += [graph.code for graph in graphs]
    torch._dynamo.reset()
    few = rows[:256].clone()  # of more rows, a kernel that is not Inductor's quantizes
    return {**found, "both": generated(gpu, both, few, s, backward=False, recipe=None)}


def passes_after(gpu: FakeCuda) -> list[Any]:
    """Return how often a post-grad pass ran, how many graphs there were, and a tensor that was made afterwards."""
    seen: list[int] = []
    options = {"post_grad_custom_post_pass": lambda graph: seen.append(len(graph.nodes))}
    with fakes(), gpu.compiles() as found:
        x = torch.ones(64, 64, requires_grad=True)
        torch.compile(lambda x: x.sin() + 1, options=options)(x).sum().backward()
    return [len(seen), len(found), torch.ones(2).tolist()]


def answer(gpu: FakeCuda, what: str, *of: str) -> Any:
    """Answer a question.

    what: "passes", "plain", "inspect", "dropped", "parts"; "libraries", followed by a name of `LIBRARIES`; "epilogues"
    or "rules", followed by `which` of `on_gpu`; "experts", followed by the number of layers; "accumulating", followed by
    what; "slices", followed by which; "candidates" and an architecture, before a question about a model; "step" or a
    recipe, followed by a model of `model_of`. "cudagraphs" may come before the last two. Or "recorded".
    """
    if what == "inspect":
        return inspection(gpu, *of)
    if what == "passes":
        return passes_after(gpu)
    if what == "epilogues":
        return epilogues(gpu, *of)
    if what == "plain":
        return plain(gpu)
    if what == "candidates":
        return candidates(gpu, *of)
    if what == "cudagraphs":
        return cudagraphs(gpu, *of)
    if what == "recorded":
        return recorded(gpu, *of)
    if what == "accumulating":
        return accumulating(gpu, *of)
    if what == "slices":
        return slices(gpu, *of)
    if what == "dropped":
        return dropped(gpu)
    if what == "libraries":
        return strides_of(gpu, *of)
    functions = {"rules": rules, "experts": experts, "parts": parts}
    trained = 2 if what in EVALUATED else 4
    codes = functions[what](gpu, *of) if what in functions else [g.code for g in graphs(gpu, what, *of)[:trained]]
    return checked(gpu, codes)


def checked(gpu: FakeCuda, codes: list[str]) -> dict[str, Any]:
    """Compile all kernels. Return how many each graph has, its matmuls' strides, and unwanted code, or its count."""
    return {
        "kernels": [len(gpu.compile_kernels(code, read=())) for code in codes],
        "strides": [strides_of_scaled_mm(code) for code in codes],
        "unaligned": [scale for code in codes for scale in unaligned_scales(code)],
        "min_nan": sum(code.count("PropagateNan") for code in codes),
        "own_ops": sum("fp8pass" in line for code in codes for line in code.splitlines() if not _is_comment(line)),
    }


def normed(gpu: FakeCuda) -> list[str]:
    """Return the code of a norm with a residual that is quantized in both orientations."""
    from fp8pass.base.scaling import amax, quantize

    def both(x: torch.Tensor, residual: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.rms_norm(x + residual, x.shape[-1:])
        y_q = quantize(y, s, torch.float8_e4m3fn)
        return amax(y), y_q, y_q.t().contiguous()

    torch._dynamo.reset()
    x = torch.randn(512, 2048, dtype=torch.bfloat16)
    return generated(gpu, both, x, x.clone(), torch.tensor(2.0), backward=False, recipe=None)


def long_rows(gpu: FakeCuda) -> list[str]:
    """Return the code of a gated activation that is quantized with a scale for each of its long rows."""

    def by_rows(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.nn.functional.silu(gate) * up
        scale = scaling.power_of_2_from_amax(scaling.amax_along(x, (1,)), 448.0, 1.0)
        return scaling.quantize(x, scale, scaling.E4M3), scale

    torch._dynamo.reset()
    x = torch.randn(64, 14336, dtype=torch.bfloat16)
    return generated(gpu, by_rows, x, x.clone(), backward=False, recipe=None)


def long_columns(gpu: FakeCuda) -> list[str]:
    """Return the code of a tensor that is quantized with a scale for each of its long columns."""

    def by_columns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = scaling.power_of_2_from_amax(scaling.amax_along(x, (0,)), 448.0, 1.0)
        return scaling.quantize(x, scale, scaling.E4M3), scale

    torch._dynamo.reset()
    return generated(gpu, by_columns, torch.randn(2048, 65536, dtype=torch.bfloat16), backward=False, recipe=None)


def candidates(gpu: FakeCuda, capability: str, what: str, of: str) -> dict[str, list[int]]:
    """Return the bytes that each configuration spills, of every kernel of `graphs` that has several of ours."""
    from triton.backends.compiler import GPUTarget

    found: dict[str, list[int]] = {}
    listed = re.compile(r"configs=\[(triton\.Config\(.*\))\],$", flags=re.MULTILINE)
    functions = {"norm": normed, "long rows": long_rows, "long columns": long_columns}
    codes = functions[what](gpu) if what in functions else [graph.code for graph in graphs(gpu, what, of)]
    with mock.patch.object(gpu, "gpu_target", GPUTarget("cuda", int(capability), 32)):
        for i, text in enumerate(codes):
            kernels = re.findall(r"\w+ = async_compile\.triton\('\w+', '''.*?'''", text, flags=re.DOTALL)
            for code in (k for k in kernels if listed.search(k)):
                for config in re.findall(r"triton\.Config\(.*?\)", listed.findall(code)[0]):
                    only = listed.sub(f"configs=[{config}],", code)
                    for name, (compiled,) in gpu.compile_kernels(only, read=()).items():
                        found.setdefault(f"{i} {name}", []).append(compiled.spilled)
    return found


def unaligned_scales(code: str) -> list[str]:
    """Return the scales of `_scaled_mm` in generated code that do not begin at multiples of 16 bytes."""
    # memory of an input, which may begin anywhere, in which the code computes something else
    reused = set(re.findall(r"(\w+) = (?:reinterpret_tensor\()?(?!buf)\w+(?:, [^;]*)?; del \w+  # reuse", code))
    one = r"reinterpret_tensor\((\w+), \((?:1, 1)?\), \((?:1, 1)?\), (\d+)\)"
    calls = [line for line in code.splitlines() if "_scaled_mm(" in line and not _is_comment(line)]
    scales = [scale for line in calls for scale in re.findall(one, line)]
    return [f"{name} + {4 * int(offset)}" for name, offset in scales if int(offset) % 4 or name in reused]


def cudagraphs(gpu: FakeCuda, what: str, of: str) -> list[dict[str, Any]]:
    """Return what Inductor decides about CUDA graphs of `graphs`.

    placeholders, mutated and static: names of the graph's inputs; reasons: why there would be no CUDA graph.
    """
    return [graph.decided for graph in graphs(gpu, what, of)]


def recorded(gpu: FakeCuda) -> list[dict[str, Any]]:
    """Return what is decided about CUDA graphs of a step whose layers, and their updates, are compiled once.

    refusal: why none is recorded; inputs: all; written, static: those that are written, and that keep their addresses.
    """
    from tests.helpers.models import Block

    lowerings: list[GraphLowering] = []
    recorders: list[tuple[Recorder, Line]] = []

    def inner(module: fx.GraphModule, inputs: list[Any], is_backward: bool = False, **kwargs: Any) -> Any:
        assert not kwargs["cudagraphs"]  # Inductor's own
        generated = gpu.generate(module, inputs, is_backward)
        lowerings.append(generated.lowering)
        return returns(generated.outputs)

    class Noting(Recorder):
        def __init__(self, annotation: Annotation, inputs: Sequence[Any]) -> None:
            super().__init__(annotation, inputs)
            line = line_of(annotation.module.graph)
            assert line is not None
            recorders.append((self, line))

        def note(self, name: str, title: str, module: fx.GraphModule, compiled: Any, is_backward: bool) -> None:
            compiled = CompiledFxGraph.__new__(CompiledFxGraph)
            compiled.compiled_fn_runner = None
            for field in ("device_types", "device_idxs", "mutated_input_idxs"):
                setattr(compiled, field, getattr(lowerings[-1], field))
            super().note(name, title, module, compiled, is_backward)

        def accepts(self, line: Any, trains: bool) -> bool:
            super().accepts(line, trains)
            return False

    torch._dynamo.reset()
    model = nn.Sequential(*(Block(256, 512) for _ in range(12))).bfloat16()
    x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    options: dict[str, Any] = {"min_speedup": 0, "target": "sm_90", "strict": True, "mode": "reduce-overhead"}

    @fp8pass.train_step(skip_nonfinite=True, **options)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with mock.patch.multiple(lower, Recorder=Noting, _records=lambda *_: True), gpu.compiles(inner):
        step(x)
    return [_recorder_decided(*recorder) for recorder in recorders]


def _recorder_decided(recorder: Recorder, line: Line) -> dict[str, Any]:
    recorder.accepts(line, trains=bool(line.outputs))
    names = [*recorder._names, *line.attributes]
    chosen = {"written": line.written(recorder._written), "static": recorder._all_static(line)}
    found = {key: [names[i] for i in indices] for key, indices in chosen.items()}
    return {"refusal": recorder._refusal, "inputs": names, **found}


def _step_twice(model: nn.Module, x: torch.Tensor, options: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    @fp8pass.train_step(skip_nonfinite=True, optimizer_state="fp8", **options)
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(x)
    step(x)


def _decided(
    module: fx.GraphModule, lowering: GraphLowering, names: list[str], is_backward: bool, **kwargs: Any
) -> dict[str, Any]:
    mutated, static = list(lowering.mutated_input_idxs), list(kwargs["static_input_idxs"])
    # after a forward of several CUDA graphs, only inputs from outside of it count as static
    ways = [static, inductor_utils.get_static_bw_input_idxs(module)] if is_backward and _HAS_PARTS else [static]
    reasons = [lowering.disable_cudagraphs_reason, inductor_utils.get_first_incompatible_cudagraph_node(module)]
    reasons.append(cudagraph_utils.check_lowering_disable_cudagraph(dict(lowering.device_node_mapping)))
    reasons += [
        cudagraph_utils.check_for_mutation_ignore_cuda_graph_managed_tensor(
            module, lowering.mutated_inputs, lowering.mutated_input_idxs, way
        )
        for way in ways
    ]
    return {
        "wanted": bool(kwargs["cudagraphs"]),
        "mutated": [names[i] for i in mutated],
        "static": [names[i] for i in static],
        "inputs": names,
        "reasons": [str(r) for r in reasons if r is not None],
    }


_HAS_PARTS = hasattr(inductor_utils, "get_static_bw_input_idxs")


def arguments(call: str) -> list[str]:
    """Return the texts of the arguments of a call, given the code after its opening bracket."""
    found, depth = [""], 0
    for c in call:
        depth += (c in "([") - (c in ")]")
        if depth < 0:
            break
        if c == "," and depth == 0:
            found.append("")
        else:
            found[-1] += c
    return [argument.strip() for argument in found]


def strides_of_scaled_mm(code: str) -> list[list[tuple[int, ...] | None]]:
    """Return, for every call of `_scaled_mm` or `_scaled_grouped_mm`, the strides of both operands and both scales."""
    before, *calls = re.split(r"extern_kernels\._scaled(?:_grouped)?_mm\(", code)
    found = []
    for call in calls:
        found.append([strides_in(argument, before, code) for argument in arguments(call)[:4]])
        before += call
    return found


def strides_in(tensor: str, before: str, code: str) -> tuple[int, ...] | None:
    """Return the strides of a view, or of a name, last made in `before` or as an input; None if an op made it."""
    if not tensor.startswith("reinterpret_tensor("):
        pattern = rf"^ +{tensor} = ((?:empty_strided_cuda|reinterpret_tensor|rand_strided)\(|\w+; del)(.*)"
        made = re.findall(pattern, before, flags=re.MULTILINE) or re.findall(pattern, code, flags=re.MULTILINE)
        if not made:
            return None
        tensor = "".join(made[-1])
        if "; del" in tensor:  # reuses the memory of a tensor that is no longer needed
            return strides_in(tensor.partition(";")[0], before, code)
    called, _, rest = tensor.partition("(")
    strides: tuple[int, ...] = ast.literal_eval(arguments(rest)[2 if called == "reinterpret_tensor" else 1])
    return strides


if __name__ == "__main__":
    registry.on_new.append(has_history)
    with without_caches():
        answer_all(functools.partial(answer, FakeCuda(TARGETS["h100"])))
