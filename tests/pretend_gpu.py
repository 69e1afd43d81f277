"""Compile a training step for an sm_90 GPU on a machine that has none; run as a script, prints JSON.

The graphs are captured on CPU fake tensors, moved to a pretended GPU just before Inductor generates code, and every
Triton kernel of that code is compiled to a cubin. Patches torch and Triton all over: a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import json
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
from torch import Tensor, fx
from torch._dynamo import device_interface
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, config, cudagraph_utils, debug
from torch._inductor import utils as inductor_utils
from torch._inductor.fx_passes import post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }
"""
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 << 30, L2_cache_size=50 << 20,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    gcnArchName="",
)  # fmt: skip


def load_guard() -> None:
    """A device guard that does nothing, without which a CPU build refuses fake CUDA tensors. CUDA builds have one."""
    if torch.version.cuda is not None:
        return
    folder, root = Path(tempfile.mkdtemp()), Path(torch.__path__[0])
    (folder / "guard.cpp").write_text(GUARD)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "guard.cpp", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
    subprocess.run([*command, "-o", "guard.so"], cwd=folder, check=True)
    ctypes.CDLL(str(folder / "guard.so"))


class Interface(device_interface.CudaInterface):
    class device:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    class Worker:
        get_device_properties = staticmethod(lambda _=None: PROPERTIES)
        current_device = staticmethod(lambda: 0)

    get_device_properties = staticmethod(lambda _=None: PROPERTIES)
    current_device = device_count = exchange_device = maybe_exchange_device = get_raw_stream = staticmethod(
        lambda *_: 0
    )
    is_available = is_bf16_supported = is_triton_capable = staticmethod(lambda *_, **__: True)
    raise_if_triton_unavailable = set_device = synchronize = staticmethod(lambda *_: None)
    get_compute_capability = staticmethod(lambda _=None: 90)


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """Within it, torch.cuda answers as if the GPU were there."""
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "get_device_properties", lambda _=None: PROPERTIES),
        (torch.cuda, "get_device_capability", lambda _=None: (9, 0)),
        (torch.version, "cuda", "12.9"),
        (torch.utils._triton, "has_triton", lambda: True),
        (importlib.import_module("torch._inductor.runtime.triton_helpers"), "set_driver_to_gpu", lambda: None),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def install() -> None:
    """Once per process: device guard, device interface, Triton driver."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: GPU)
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)
        is_active = staticmethod(lambda: True)
        get_device_interface = staticmethod(lambda: Interface)
        get_benchmarker = staticmethod(lambda: None)

    load_guard()
    torch._C._ensureCUDADeviceGuardSet()
    device_interface.init_device_reg()
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, Interface)
    driver.set_active(Driver())


def generate(codes: list[str], module: fx.GraphModule, inputs: list[Any], is_backward: bool) -> Callable[..., Any]:
    """Inductor's inner_compile: append the code for the pretended GPU; return something that makes the outputs."""
    mode = next(v.fake_mode for v in inputs if isinstance(v, Tensor))
    graph = module.graph

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)
        return GPU if value == CPU and isinstance(value, torch.device) else value

    with mode:
        on_gpu = [moved(v) for v in inputs]
    for node, value in zip((n for n in graph.nodes if n.op == "placeholder"), on_gpu, strict=True):
        node.meta["val"] = value
    for node in graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
    with pretended(), V.set_fake_mode(mode):
        post_grad.view_to_reshape(module)
        with mode:
            compile_fx.fake_tensor_prop(module, on_gpu, force_allow_non_fake_inputs=True)
        compile_fx.record_original_output_strides(module)
        post_grad.post_grad_passes(module, False)
        lowering = GraphLowering(module, example_inputs=on_gpu, shape_env=mode.shape_env, is_backward=is_backward)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_debug_handler(debug.DebugContext()):
            with mode:
                lowering.run(*on_gpu)
            codes.append(lowering.codegen()[0].value)
    outputs = [o.meta["val"] if isinstance(o, fx.Node) else o for o in graph.output_node().args[0]]  # type: ignore[union-attr]

    def call(_: Any) -> list[Any]:
        return [
            torch.empty_strided(o.size(), o.stride(), dtype=o.dtype) if isinstance(o, Tensor) else o for o in outputs
        ]

    call._boxed_call = True  # type: ignore[attr-defined]
    call.lowering = lowering  # type: ignore[attr-defined]
    return call


def generated(function: Callable[..., Any], *inputs: Any, backward: bool = True, **options: Any) -> list[str]:
    """The generated code of `function(*inputs)`, and with `backward` of the backward of its sum."""
    codes: list[str] = []

    def inner(module: fx.GraphModule, inputs: list[Any], is_backward: bool = False, **_: Any) -> Callable[..., Any]:
        return generate(codes, module, inputs, is_backward)

    with lowered_by(inner):
        result = torch.compile(function, backend="fp8pass", options=options)(*inputs)
        if backward:
            result.sum().backward()
    return codes


@contextlib.contextmanager
def lowered_by(inner: Callable[..., Any]) -> Iterator[None]:
    """Within it, `inner` is Inductor's inner_compile for fp8pass, and first steps are compiled."""
    from fp8pass._torch import without_min_nan

    def compile_here(module: fx.GraphModule, inputs: list[Any], config_patches: Any) -> Any:
        guarded = without_min_nan(inner)
        return compile_fx.compile_fx(module, inputs, inner_compile=guarded, config_patches=config_patches)

    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(mock.patch.object(importlib.import_module("fp8pass.backend"), "compile_fx", compile_here))
        stack.enter_context(mock.patch("fp8pass.slots.SlotGroup.cold", return_value=[]))
        yield


def compile_kernels(code: str) -> int:
    """Compile every Triton kernel of the generated code to a cubin; returns how many there are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, flags=re.DOTALL)
    for name, source in kernels:
        file = Path(tempfile.mkdtemp()) / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with pretended():
            spec.loader.exec_module(module)
        tuner = getattr(module, name)
        choice = tuner.configs[0]
        constants = {**tuner.triton_meta.get("constants", {}), **choice.kwargs}
        signature = {**tuner.triton_meta["signature"], **dict.fromkeys(choice.kwargs, "constexpr")}
        signature = {n: signature[n] for n in tuner.fn.arg_names if n in signature}
        ast = ASTSource(tuner.fn, signature, constants, tuner.triton_meta["configs"][0])
        options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
        assert triton.compile(ast, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]
    return len(kernels)


def training_step(recipe: str) -> list[str]:
    """Forward and backward of a block, with a width that needs padding where that can be."""
    from fp8pass import hardware
    from tests.models import Block

    blocks = recipe in ("blockwise", "mxfp8")
    model = Block(512, 1024 if blocks else 1000).bfloat16()
    x = torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": recipe, "min_speedup": 0, "target": "sm_100" if recipe == "mxfp8" else "sm_90", "strict": True}

    def why(recipe: str, _: torch.device, target: Any) -> str:  # the tensors are on CPU until code is generated
        return hardware_says(recipe, GPU, target)

    hardware_says = hardware.why_no_block_kernel
    with (
        mock.patch("fp8pass.passes.block_scaled_mm.why_no_block_kernel", why),
        mock.patch("fp8pass.hardware.why_no_block_kernel", why),
        mock.patch("fp8pass.hardware._CPU_SCALES_ROWS", True),
        mock.patch.object(torch.version, "cuda", None),
    ):
        return generated(model, x, **options)


def rules() -> list[str]:
    """Every case of XLA's rules that runs on a GPU, in one graph."""
    from tests.xla_rules import CASES

    chosen = [c for c in CASES.values() if c.calls and c.target is None and not c.dynamic]
    functions, inputs = [c.function for c in chosen], [c.inputs for c in chosen]

    def everything(inputs: list[Any]) -> list[Any]:
        return [f(*i) for f, i in zip(functions, inputs, strict=True)]

    return generated(everything, inputs, backward=False, recipe=None, target="sm_90")


def launches_behind() -> dict[str, int]:
    """For every epilogue of XLA's rules: how many kernels run behind the last matmul; those with an amax also large."""
    from tests.xla_rules import CASES, q

    launches = {}
    with mock.patch("fp8pass.passes.epilogue.casts_saturate", return_value=True):  # as GPUs do
        for name, case in CASES.items():
            if name[0] != "E":
                continue
            launches[name] = _launches_behind(case.function, *case.inputs)
            if name[:2] in ("E7", "E8", "E9"):
                launches[f"{name}, large"] = _launches_behind(case.function, q(1024, 64), q(64, 1024), *case.inputs[2:])
    return launches


def _launches_behind(function: Callable[..., Any], *inputs: Any) -> int:
    torch._dynamo.reset()
    (code,) = generated(function, *inputs, backward=False, recipe=None, target="sm_90")
    return code.rpartition("extern_kernels._scaled_mm(")[2].count(".run(")


def main() -> None:
    install()
    what = sys.argv[1]
    if what == "behind":
        print(json.dumps(launches_behind()))
        return
    if what == "cudagraphs":
        print(json.dumps(cudagraphs(sys.argv[2])))
        return
    codes = rules() if what == "rules" else training_step(what)
    print(json.dumps({
        "kernels": [compile_kernels(code) for code in codes],
        "strides": [strides_of_scaled_mm(code) for code in codes],
        "min_nan": sum(code.count("PropagateNan") for code in codes),
        "record_ops": sum(code.count("fp8pass") for code in codes),
    }))  # fmt: skip


def cudagraphs(recipe: str) -> list[dict[str, Any]]:
    """What Inductor decides about CUDA graphs for the forward and backward of a training step, and for evaluation.

    placeholders, mutated and static: names of the graph's inputs; reasons: why there would be no CUDA graph.
    """
    from tests.models import Block

    found: list[dict[str, Any]] = []

    def inner(module: fx.GraphModule, inputs: list[Any], is_backward: bool = False, **kwargs: Any) -> Any:
        names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        call: Any = generate([], module, inputs, is_backward)
        found.append(_decided(module, call.lowering, names, is_backward, **kwargs))
        return call

    model = Block(64, 128).bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    options = {"recipe": recipe, "min_speedup": 0, "target": "sm_90", "strict": True, "mode": "reduce-overhead"}
    with lowered_by(inner), mock.patch("fp8pass.hardware._CPU_SCALES_ROWS", True):
        run = torch.compile(model, backend="fp8pass", options=options)
        run(x).sum().backward()
        with torch.no_grad():
            run(x)
    return found


def _decided(
    module: fx.GraphModule, lowering: GraphLowering, names: list[str], is_backward: bool, **kwargs: Any
) -> dict[str, Any]:
    mutated, static = list(lowering.mutated_input_idxs), list(kwargs["static_input_idxs"])
    # behind a forward of several CUDA graphs, only what comes from outside of it counts as static
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
    """The texts of the arguments of a call, given what follows its opening bracket."""
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
    """For every call of `_scaled_mm`, the strides of both operands and both scales."""
    before, *calls = code.split("extern_kernels._scaled_mm(")
    found = []
    for call in calls:
        found.append([_strides(argument, before, code) for argument in arguments(call)[:4]])
        before += call
    return found


def _strides(tensor: str, before: str, code: str) -> tuple[int, ...] | None:
    """Of a view, as it is written, or of a name, as it was made: last in `before`, or as an input. None: by an op."""
    if not tensor.startswith("reinterpret_tensor("):
        pattern = rf"^ +{tensor} = ((?:empty_strided_cuda|reinterpret_tensor|rand_strided)\(|buf\d+; del)(.*)"
        made = re.findall(pattern, before, flags=re.MULTILINE) or re.findall(pattern, code, flags=re.MULTILINE)
        if not made:
            return None
        tensor = "".join(made[-1])
        if tensor.startswith("buf"):  # takes the memory of one that is done with
            return _strides(tensor.partition(";")[0], before, code)
    called, _, rest = tensor.partition("(")
    strides: tuple[int, ...] = ast.literal_eval(arguments(rest)[2 if called == "reinterpret_tensor" else 1])
    return strides


if __name__ == "__main__":
    main()
