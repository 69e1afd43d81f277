"""A pretended GPU: Inductor generates code for it, and Triton compiles that code, on a machine without a GPU.

Graphs are captured on CPU fake tensors and moved to the pretended GPU just before code is generated. `FakeCuda`
replaces parts of torch and Triton for the whole process, so use it in a separate process.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import ctypes
import importlib.util
import itertools
import math
import re
import shutil
import subprocess
import sys
import tempfile
import types
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass.base._torch import (
    COMPOSITE,
    FakeTensorMode,
    GraphLowering,
    GridExpr,
    TracingContext,
    Virtualized,
    device_interface,
    ensure_device_guard,
    functorch_config,
    hint_of,
    inductor_compile_fx,
    inductor_config,
    inductor_debug,
    inductor_post_grad,
    known_values,
    pytree,
    torch_triton,
    triton_helpers,
)
from fp8pass.base.errors import Fp8Error
from fp8pass.gpu.target import Target, sizes
from fp8pass.inspect import machine_code, sectors
from fp8pass.inspect.inspector import Compiled
from fp8pass.inspect.kernel_time import Code

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }
"""
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def properties(target: Target) -> types.SimpleNamespace:
    """Return the values of `torch.cuda.get_device_properties` for the target."""
    gpu = sizes(target)
    major, minor = target.capability
    # CUDA reserves 1 KiB of shared memory for each block, hence `gpu.shared - 1024` below.
    return types.SimpleNamespace(
        name=f"NVIDIA {target.name.upper()}", major=major, minor=minor, multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=gpu.registers, warp_size=32, max_threads_per_multi_processor=gpu.threads,
        max_threads_per_block=1024, total_memory=gpu.memory, L2_cache_size=gpu.cache, shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.shared - 1024, shared_memory_per_multiprocessor=gpu.shared, gcnArchName="",
    )  # fmt: skip


@contextlib.contextmanager
def replaced(*values: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes to other values within the context. values: (owner, name, value) of each."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _load_guard() -> None:
    """Build and load a device guard that does nothing, without which a CPU build of torch refuses fake CUDA tensors.

    Does nothing in a CUDA build, which has a guard. Raises Fp8Error if a C++ compiler is needed and missing.
    """
    if torch.version.cuda is not None:
        return
    if shutil.which("g++") is None:
        raise Fp8Error(
            "a torch without CUDA needs a C++ compiler to pretend a GPU: install g++, or a CUDA build of torch"
        )
    folder, root = Path(tempfile.mkdtemp()), Path(torch.__path__[0])
    (folder / "guard.cpp").write_text(GUARD)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "guard.cpp", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
    subprocess.run([*command, "-o", "guard.so"], cwd=folder, check=True)
    ctypes.CDLL(str(folder / "guard.so"))
    shutil.rmtree(folder)  # the library stays loaded


def _interface(target: Target) -> type[device_interface.DeviceInterface]:
    gpu, zero = properties(target), staticmethod(lambda *_: 0)
    nothing, yes = staticmethod(lambda *_: None), staticmethod(lambda *_, **__: True)
    major, minor = target.capability

    class Interface(device_interface.CudaInterface):
        class device:
            def __init__(self, *_: Any) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *_: Any) -> None: ...

        class Worker:  # by which torch asks in processes that may not use the GPU
            get_device_properties = staticmethod(lambda _=None: gpu)
            current_device = zero

        get_device_properties = staticmethod(lambda _=None: gpu)
        current_device = exchange_device = maybe_exchange_device = get_raw_stream = zero
        device_count = staticmethod(lambda: 1)
        is_available = is_bf16_supported = is_triton_capable = yes
        raise_if_triton_unavailable = set_device = synchronize = nothing
        get_compute_capability = staticmethod(lambda _=None: 10 * major + minor)

    return Interface


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Decompose `scaled_dot_product_attention` as CUDA does: FlashAttention-2, or the memory-efficient kernel.

    The latter takes masks and float32. Tensors that neither takes use the math implementation. Without this, the op
    would decompose to the CPU's kernel, since the graph's tensors are on the CPU.
    """
    aten, width = torch.ops.aten, query.shape[-1]
    if query.dim() != 4 or query.dtype == torch.float64:
        result = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return result[0]  # type: ignore[no-any-return]
    scale = width**-0.5 if scale is None else scale
    # torch pads head dims to multiples of 8 for FlashAttention-2, whose kernels end at a head dim of 256
    padded = [torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (query, key, value)]
    flash = attn_mask is None and query.dtype != torch.float32 and width == value.shape[-1] <= 256
    if flash:
        result = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
    else:
        # torch has grouped-query attention in FlashAttention and in the math implementation only.
        heads = [x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) if enable_gqa else x for x in padded]
        if attn_mask is not None:
            shape = (*query.shape[:-1], key.shape[-2])
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
            attn_mask = attn_mask.to(query.dtype).expand(shape)
        result = aten._scaled_dot_product_efficient_attention(
            *heads, attn_mask, True, dropout_p, is_causal, scale=scale
        )
    return result[0][..., : value.shape[-1]]  # type: ignore[no-any-return]


def _importers_of(function: Callable[..., Any]) -> list[Any]:
    """Return the imported modules with an attribute that is this function, under its name.

    Inductor's modules import such functions by name, so each that is loaded holds a separate reference.
    """
    return [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(function.__name__) is function]


class FakeCuda:
    """The pretended GPU, once installed in this process."""

    def __init__(self, target: Target) -> None:
        """Install the device guard, device interface and Triton driver.

        Raises Fp8Error without Triton, and in a CPU build of torch without a C++ compiler.
        """
        try:
            from triton.backends.compiler import GPUTarget
            from triton.runtime import driver
        except ImportError:
            raise Fp8Error("inspecting needs Triton, which generates the kernels: pip install triton") from None
        self.target = target
        self.properties = properties(target)
        self.gpu_target = gpu_target = GPUTarget("cuda", 10 * target.capability[0] + target.capability[1], 32)
        interface = _interface(target)

        class Driver:
            get_current_target = staticmethod(lambda: gpu_target)
            get_active_torch_device = staticmethod(lambda: GPU)
            get_current_device = get_current_stream = staticmethod(lambda *_: 0)
            is_active = staticmethod(lambda: True)
            get_device_interface = staticmethod(lambda: interface)
            get_benchmarker = staticmethod(lambda: None)

        _load_guard()
        ensure_device_guard()
        # torch calls it when it first looks for an interface: later, it would replace those that are registered here.
        device_interface.init_device_reg()
        for name in ("cuda", "cuda:0"):
            device_interface.register_interface_for_device(name, interface)
        driver.set_active(Driver())
        torch.ops.aten.scaled_dot_product_attention.default.py_impl(COMPOSITE)(_attention)

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Make torch.cuda answer within the context as if the machine had the GPU."""
        with replaced(
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "get_device_properties", lambda _=None: self.properties),
            (torch.cuda, "get_device_capability", lambda _=None: self.target.capability),
            (torch.version, "cuda", "12.9"),
            *((module, "has_triton", lambda: True) for module in _importers_of(torch_triton.has_triton)),
            # Inductor's generated code calls it; it accepts drivers of real GPUs only.
            (triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            yield

    @contextlib.contextmanager
    def compiles(
        self, instead: Callable[..., Any] | None = None, runs: Callable[[Generated], Callable[..., Any]] | None = None
    ) -> Iterator[list[Generated]]:
        """Make Inductor compile every graph for the GPU within the context; compiled graphs return uninitialized data.

        Yields a list to which each graph adds its generated code. The graphs' tensors are fake CPU tensors. instead:
        called with Inductor's arguments for each graph, as a replacement for all this. runs: returns what is called as
        the compiled graph.
        """
        collected: list[Generated] = []

        def compile_one(
            module: fx.GraphModule,
            inputs: Sequence[Any],
            *_: Any,
            is_backward: bool = False,
            is_inference: bool = False,
            **__: Any,
        ) -> Callable[..., Any]:
            generated = self.generate(module, inputs, is_backward, is_inference)
            collected.append(generated)
            return returns(generated.outputs) if runs is None else runs(generated)

        with (
            # A hit in AOTAutograd's cache, which needs Inductor's, would not call `compile_one`.
            inductor_config.patch(fx_graph_cache=False, compile_threads=1),
            functorch_config.patch(enable_autograd_cache=False),
            replaced(
                (inductor_compile_fx, "_compile_fx_inner", instead or compile_one), (hardware, "pretended_device", GPU)
            ),
        ):
            yield collected

    def compile_kernels(
        self, code: str, values: Mapping[str, int] | None = None, *, read: Container[str] | None = None
    ) -> dict[str, list[Compiled]]:
        """Compile every Triton kernel of the generated code to a cubin.

        Returns {kernel's name: its configurations}. values: of the symbols in the code. read: the names of the kernels
        that are compiled in each configuration, and whose machine code is read, which takes longer than compiling; None
        for all. Others are compiled in their first configuration, without `Compiled.code`.
        """
        calls = dict(reversed(_CALL.findall(code)))
        kernels = {}
        for called, name, source in _KERNEL.findall(code):
            with tempfile.TemporaryDirectory() as folder:
                tuner = self._tuner(name, source, Path(folder))
                given = _given(calls.get(called, ""), dict(values or {}))
                reads = read is None or called in read
                choices = _choices(tuner) if reads else tuner.configs[:1]
                tried = [self._compiled(tuner, c, source, given, folder, reads) for c in choices]
                kernels[called] = self._fitting(called, tried)
        return kernels

    def _fitting(self, name: str, tried: Sequence[Compiled]) -> list[Compiled]:
        """Return the configurations whose shared memory the GPU has, as Inductor does there; raise Fp8Error if none."""
        most = self.properties.shared_memory_per_block_optin
        if fits := [compiled for compiled in tried if compiled.shared <= most]:
            return fits
        raise Fp8Error(
            f"the kernel {name} takes {min(compiled.shared for compiled in tried)} bytes of shared memory, and a block "
            f"has {most} on {self.target.name}: it does not run there"
        )

    def _tuner(self, name: str, source: str, folder: Path) -> Any:
        """Return Inductor's tuner of a kernel, by importing the kernel's source."""
        file = folder / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with self.there():
            spec.loader.exec_module(module)
        return getattr(module, name)

    def _compiled(
        self, tuner: Any, choice: Any, source: str, given: Sequence[int | None], folder: str, reads: bool
    ) -> Compiled:
        """Compile a kernel in one configuration.

        given: the numbers that it is called with, by position. reads: whether to read its machine code.
        """
        import triton
        from triton.compiler import ASTSource

        constants = {**tuner.triton_meta.get("constants", {}), **choice.kwargs}
        signature = {**tuner.triton_meta["signature"], **dict.fromkeys(choice.kwargs, "constexpr")}
        signature = {n: signature[n] for n in tuner.fn.arg_names if n in signature}
        ast_source = ASTSource(tuner.fn, signature, constants, tuner.triton_meta["configs"][0])
        options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
        kernel = triton.compile(ast_source, target=self.gpu_target, options=options)
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        registers, spilled = resources(run_tool("cuobjdump", "--dump-resource-usage", file))
        names = [name for name in tuner.fn.arg_names if name not in choice.kwargs]
        names += tuner.inductor_meta.get("extra_launcher_args", ())
        numbers = {name: n for name, n in zip(names, given, strict=False) if n is not None}
        code = None
        if reads and (programs := _programs(tuner.inductor_meta, choice, numbers)) is not None:
            once, loop = machine_code.work(run_tool("nvdisasm", "-c", file), choice.kwargs.get("R0_BLOCK", 0))
            sizes = {**choice.kwargs, **dict(_FIXED_BLOCK.findall(source))}
            config = ", ".join(f"{name} {value}" for name, value in sizes.items())
            vain = 0
            if "combo_grid_meta" not in tuner.inductor_meta:
                vain = sectors.in_vain(source, signature, choice.kwargs, numbers)
            code = Code(
                config, choice.num_warps, registers, kernel.metadata.shared, programs,
                _iterations(choice.kwargs, numbers), once, loop, vain,
            )  # fmt: skip
        ptx_widths = widths(kernel.asm["ptx"])
        return Compiled(*ptx_widths, registers, spilled, len(tuner.configs), code, kernel.metadata.shared)

    def generate(
        self, module: fx.GraphModule, inputs: Sequence[Any], is_backward: bool, is_inference: bool = False
    ) -> Generated:
        """Generate the code of a graph of fake CPU tensors, after moving the graph to the GPU in place."""
        # a graph may have no inputs, for example if it only makes constants
        values = itertools.chain(inputs, (n.meta.get("val") for n in module.graph.nodes))
        mode = next(v.fake_mode for v in values if isinstance(v, Tensor))
        with mode:
            on_gpu = [_moved(v) for v in inputs]
        for node, value in zip((n for n in module.graph.nodes if n.op == "placeholder"), on_gpu, strict=True):
            node.meta["val"] = value
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.args, node.kwargs = pytree.tree_map(_moved, (node.args, node.kwargs))
        with self.there(), Virtualized.set_fake_mode(mode):
            # the steps of Inductor's `_InProcessFxCompile.codegen_and_compile`, without loading the code
            inductor_post_grad.view_to_reshape(module)
            with mode:
                inductor_compile_fx.fake_tensor_prop(module, on_gpu, force_allow_non_fake_inputs=True)
            inductor_compile_fx.record_original_output_strides(module)
            inductor_post_grad.post_grad_passes(module, is_inference)
            lowering = _Lowering(
                module,
                example_inputs=on_gpu,
                shape_env=mode.shape_env,
                is_backward=is_backward,
                is_inference=is_inference,
            )
            handlers = Virtualized.set_graph_handler(lowering), Virtualized.set_extern_kernel_nodes([])
            with handlers[0], handlers[1], Virtualized.set_debug_handler(inductor_debug.DebugContext()):
                with mode:
                    lowering.run(*on_gpu)
                code = lowering.codegen()[0].value
        return Generated(code, is_backward, is_inference, module, lowering, lowering.launches, _n_returned())


@contextlib.contextmanager
def fakes() -> Iterator[FakeTensorMode]:
    """Make new tensors fake within the context, so that they take no memory; modules can still be converted.

    `torch.utils.swap_tensors`, which converts parameters, refuses tensors with weak references. Fake tensors always
    have one, so `weakref.getweakrefs` finds none here.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, replaced((weakref, "getweakrefs", lambda _: [])):
        yield mode


@dataclass
class Generated:
    """The code of one graph.

    launches: the launches of Inductor's kernels, in order. n_returned: number of leading outputs that a forward returns
    to its caller; the others are saved for the backward.
    """

    code: str
    is_backward: bool
    is_inference: bool
    module: fx.GraphModule
    lowering: GraphLowering
    launches: list[Launch]
    n_returned: int

    @property
    def outputs(self) -> list[Any]:
        """The graph's outputs: fake tensors and numbers."""
        nodes: Any = self.module.graph.output_node().args[0]
        return [o.meta["val"] if isinstance(o, fx.Node) else o for o in nodes]

    @property
    def values(self) -> dict[str, int]:
        """The values that the symbols of sizes have in the call that is compiled."""
        env: Any = self.lowering.sizevars.shape_env
        return {str(symbol): value for symbol, value in known_values(env).items()}

    @property
    def bytes_saved(self) -> int:
        """Bytes that a forward saves for the backward, without returned outputs and inputs; 0 for a backward.

        Parameters are inputs. Tensors that share storage count once.
        """
        kept = {x.untyped_storage()._cdata: hint_of(x.untyped_storage().nbytes()) for x in _tensors(self.outputs)}
        inputs = [n.meta["val"] for n in self.module.graph.nodes if n.op == "placeholder"]
        for x in _tensors([*inputs, *self.outputs[: self.n_returned]]):
            kept.pop(x.untyped_storage()._cdata, None)
        return 0 if self.is_backward else sum(kept.values())


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    name: of the Triton kernel, or of the ATen op that reduces a kernel's partial results. node: Inductor's scheduler
    node. scratch: bytes of partial results that the op reads and the kernel before it wrote.
    """

    name: str
    node: Any
    scratch: int = 0


# PTX: "ld.global.nc.v4.b32" loads 4 x 32 bits; "cp.async.cg.shared.global [...], [...], 16" loads 16 bytes.
_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-zA-Z_]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[a-z](\d+)\b")
_ASYNCHRONOUS = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], \[[^]]*\], (\w+)")


def widths(ptx: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (loads, stores): widths in bits of the global memory accesses of one thread, widest first."""
    bits_of: dict[str, set[int]] = {"ld": set(), "st": set()}
    for kind, vector, bits in _ACCESS.findall(ptx):
        bits_of[kind].add(int(vector or 1) * int(bits))
    bits_of["ld"] |= {8 * int(size, 0) for size in _ASYNCHRONOUS.findall(ptx)}
    loads, stores = (tuple(sorted(bits, reverse=True)) for bits in bits_of.values())
    return loads, stores


def resources(report: str) -> tuple[int, int]:
    """Return (registers, bytes of local memory) of one thread, from cuobjdump's report.

    Spilled registers are on the stack, which cuobjdump counts apart from local memory, so the two are added.
    """
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def run_tool(name: str, option: str, file: Path) -> str:
    """Return what one of NVIDIA's tools, which come with Triton, prints about a cubin. Raises Fp8Error if it fails."""
    import triton

    tool = Path(triton.__path__[0]) / "backends/nvidia/bin" / name
    done = subprocess.run([str(tool), option, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Fp8Error(
            f"{name} of Triton {triton.__version__} says: {done.stderr.strip()}. A newer Triton may know this GPU; "
            "without ptx, kernels are predicted by the bytes that they move"
        )
    return done.stdout


_KERNEL = re.compile(r"(\w+) = async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
# A block whose size the kernel's code has itself, as that of a program that holds all that it reduces.
_FIXED_BLOCK = re.compile(r"^ *(\w*BLOCK): tl\.constexpr = (\d+)$", re.MULTILINE)
_CALL = re.compile(r"^ *(\w+)\.run\((.*), stream=\w+\)", re.MULTILINE)


def _given(arguments: str, values: dict[str, int]) -> list[int | None]:
    """Return the numbers among the arguments of a call in generated code, by position; None for tensors."""
    call = ast.parse(f"f({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    sizes: list[int | None] = []
    for argument in call.args:
        try:
            number = eval(ast.unparse(argument), {"__builtins__": {}}, values)  # of code that Inductor has written
        except (NameError, TypeError):
            number = None
        sizes.append(number if isinstance(number, int) else None)
    return sizes


def _choices(tuner: Any) -> list[Any]:
    """Return the configurations that Inductor times: of kernels that share a launch, it times each one's in turn.

    These are reduced to as many as one kernel has: each kernel's first ones together, each one's second, and so on.
    """
    groups = tuner.inductor_meta.get("combo_tuning_groups", ())
    choices = list(tuner.configs)
    for n in range(1, max((len(g["configs"]) for g in groups), default=1)):
        (base, *_), chosen = tuner.configs, [(g, g["configs"][min(n, len(g["configs"]) - 1)]) for g in groups]
        blocks = {f"{k}_{i}": v for g, c in chosen for i in g["member_indices"] for k, v in c.kwargs.items()}
        choice = copy.copy(base)
        choice.kwargs = {k: blocks.get(k, v) for k, v in base.kwargs.items()}
        choices.append(choice)
    return choices


def _programs(inductor_meta: dict[str, Any], choice: Any, numbers: dict[str, int]) -> int | None:
    """Return the number of programs in the grid; None if it is not known."""
    if "grid_type" not in inductor_meta:
        return None
    try:
        return math.prod(GridExpr.from_meta(inductor_meta, choice).eval_slow(dict(numbers)))
    except (NameError, KeyError, TypeError):
        return None


def _iterations(blocks: dict[str, int], numbers: dict[str, int]) -> int:
    """Return how often a program's loops run: over the reduced dimension, or over the rows that it takes in turn."""
    if "RSPLIT_SIZE" in blocks:
        return -(-blocks["RSPLIT_SIZE"] // blocks["XBLOCK"])
    dimensions = [(size, numbers.get(name.replace("_BLOCK", "_numel").lower())) for name, size in blocks.items()
                  if re.fullmatch(r"R\d_BLOCK", name)]  # fmt: skip
    return math.prod(-(-n // size) for size, n in dimensions if n is not None)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor)]


def _n_returned() -> int:
    """Return how many outputs the forward that is being compiled returns to its caller.

    AOTAutograd puts these before the outputs that are saved for the backward. 0 outside of a compilation.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    return metadata.num_forward_returns if metadata else 0


# The line in Inductor's wrapper code that reduces the float32 partial results that a kernel left in a workspace.
_PARTIAL = re.compile(r"\bworkspace_\d+\[.*?\]\.view\((\d+), (\d+)\)\.(\w+)\(dim=0\)")


class _Lowering(GraphLowering):
    """Inductor's lowering, which also records the scheduler node of each launch."""

    def init_wrapper_code(self, *args: Any, **kwargs: Any) -> None:
        """Create the wrapper code writer and record the launches that are written to it."""
        super().init_wrapper_code(*args, **kwargs)
        self.launches: list[Launch] = []
        wrapper = self.wrapper_code
        call, write = wrapper.generate_kernel_call, wrapper.writeline

        def note_call(name: str, *args: Any, **kwargs: Any) -> Any:
            self.launches.append(Launch(name, self.scheduler.current_node))
            return call(name, *args, **kwargs)

        def note_line(line: Any) -> Any:
            if isinstance(line, str) and (partial := _PARTIAL.search(line)):
                node, (parts, width, reduction) = self.scheduler.current_node, partial.groups()
                self.launches.append(Launch(f"aten.{reduction}", node, 4 * int(parts) * int(width)))
                if ".to(" in line or ".copy_(" in line:  # which rounds the float32 sums to the output's type
                    self.launches.append(Launch("aten.copy_", node))
            return write(line)

        wrapper.generate_kernel_call, wrapper.writeline = note_call, note_line


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        size, stride, offset = value.size(), value.stride(), value.storage_offset()
        memory = torch.empty_strided(size, stride, dtype=value.dtype, device=GPU)
        # Inductor reads from the place in the storage whether it is aligned
        return torch.as_strided(memory, size, stride, offset) if offset else memory
    return GPU if value == CPU and isinstance(value, torch.device) else value


def returns(outputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a replacement for a compiled graph, which returns uninitialized tensors like `outputs`."""

    def call(_: Any) -> list[Any]:
        return [
            torch.empty_strided(o.size(), o.stride(), dtype=o.dtype) if isinstance(o, Tensor) else o for o in outputs
        ]

    call._boxed_call = True  # AOTAutograd passes boxed functions one list of arguments
    return call
