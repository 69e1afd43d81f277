"""All private torch names that fp8pass uses, so that an upgrade of torch changes only this file.

`fp8pass.base.versions` lists the versions of torch that have all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType, FrameType, FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx

from fp8pass.base.frames import with_room
from fp8pass.base.versions import check_version, required_names

check_version()
with required_names():
    from torch._C._distributed_c10d import _resolve_process_group
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, get_eval_frame_callback
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import device_interface, eval_frame
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.distributed import DDPOptimizer
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.code_context import code_context
    from torch._dynamo.convert_frame import CatchErrorsWrapper, ConvertFrame, output_codes
    from torch._dynamo.eval_frame import OptimizeContext, innermost_backend, skip_code
    from torch._dynamo.exc import (
        RestartAnalysis,
        SkipFrame,
        SpeculationRestartAnalysis,
        TensorifyScalarRestartAnalysis,
        TorchDynamoException,
    )
    from torch._dynamo.source import ConstantSource, FSDPNNModuleSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.types import ConvertFrameReturn
    from torch._dynamo.utils import counters, get_metrics_context, graph_break_reasons, to_fake_tensor
    from torch._dynamo.variables.misc import GetAttrVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._functorch import config as functorch_config
    from torch._functorch import partitioners
    from torch._functorch._aot_autograd.runtime_wrappers import (
        coerce_to_expected_memory_format as coerce_to_expected_memory_format,
    )
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.autograd_function import autograd_function_apply as autograd_function_apply
    from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_partition
    from torch._guards import CompileContext, TracingContext, compile_context, detect_fake_mode, tracing
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_functional,
        triton_kernel_wrapper_mutation,
    )
    from torch._inductor import compile_fx as inductor_compile_fx
    from torch._inductor import config as inductor_config
    from torch._inductor import custom_graph_pass, inductor_prims, list_mode_options
    from torch._inductor import debug as inductor_debug
    from torch._inductor import lowering as inductor_lowering
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen import simd as inductor_simd
    from torch._inductor.codegen import triton_combo_kernel
    from torch._inductor.codegen.common import Kernel as InductorKernel
    from torch._inductor.codegen.triton import FixedTritonConfig, TritonCSE, TritonKernel, TritonOverrides
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner, cudagraphify
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.cudagraph_utils import PlaceholderInfo
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.exc import InductorError, InvalidCxxCompiler, SubgraphLoweringException
    from torch._inductor.fx_passes import post_grad as inductor_post_grad
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import (
        ConcatKernel,
        ExternKernel,
        MutationLayoutSHOULDREMOVE,
        NonOwningLayout,
        Pointwise,
        TensorBox,
    )
    from torch._inductor.ops_handler import WrapperHandler
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.runtime.triton_heuristics import GridExpr
    from torch._inductor.scheduler import (
        BaseSchedulerNode,
        ForeachKernelSchedulerNode,
        FusedSchedulerNode,
        NopKernelSchedulerNode,
        SchedulerNode,
    )
    from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
    from torch._inductor.utils import _type_of, triton_type
    from torch._inductor.utils import get_first_incompatible_cudagraph_node as first_op_without_cuda_graphs
    from torch._inductor.virtualized import OpsValue
    from torch._inductor.virtualized import V as Virtualized
    from torch._inductor.virtualized import ops as inductor_ops
    from torch._library.custom_ops import CustomOpDef
    from torch._logging._internal import trace_structured
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import (
        FakeTensor,
        FakeTensorMode,
        in_kernel_invocation_manager,
        is_fake,
        unset_fake_temporarily,
    )
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
    from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
    from torch.distributed import _functional_collectives
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree
    from torch.fx.experimental.symbolic_shapes import (
        RelaxedUnspecConstraint,
        StrictMinMaxConstraint,
        free_unbacked_symbols,
    )
    from torch.fx.graph import CodeGen
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver
    from torch.nn.modules.loss import _Loss as Loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils import _pytree as pytree
    from torch.utils import _triton as torch_triton
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes_in_force
    from torch.utils._sympy.functions import FloorDiv, Identity, Mod, ModularIndexing, PythonMod
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy
    from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

    current_graph_task_id = torch._C._current_graph_task_id
    """A function that returns the number of the backward that runs in this thread; -1 if none runs."""

    current_autograd_node = torch._C._current_autograd_node
    """A function that returns the autograd node that runs in this thread; None if none runs."""

    set_grad_enabled = torch._C._set_grad_enabled
    """The function that Dynamo's graph calls for `torch.set_grad_enabled`."""

    enter_autocast, exit_autocast = _enter_autocast, _exit_autocast
    """The functions that Dynamo's graph calls for `with torch.autocast`."""

    pointer_type = _type_of
    """A function that returns the type of a pointer to numbers of a dtype in a Triton kernel's signature: "*bf16"."""

    MODE_CHANGES = frozenset(
        {set_grad_enabled, _enter_autocast, _exit_autocast, _enter_inference_mode, _exit_inference_mode}
    )
    """Calls in Dynamo's graph that change grad, autocast or inference mode for the ops after them."""

    is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
    """A function that returns whether two tensors share storage."""

    top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    """A function that returns the innermost hooks for saved tensors, (pack, unpack), or None."""

    FORCE_STRIDE_ORDER = inductor_prims.force_stride_order
    """The op that makes Inductor store a tensor in the order of given strides; without effect if it already is."""

    INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph
    """The op that calls the body of a `nested_compile_region` in Dynamo's graph: (body, its name, *operands)."""

    linear = torch._C._nn.linear
    """The function that `F.linear` is in some versions of torch."""

    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    """A function that makes a tensor of a subclass without storage."""

    COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
    """The dispatch key for which decompositions of ops are registered."""

    EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
    """The dispatch key of an op's implementation for all devices."""

    AUTOGRAD_KEYS = (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA)
    """The dispatch keys of autograd for tensors on the devices that fp8pass supports."""

    TracingMode = (FunctionalTensorMode, ProxyTorchDispatchMode, FakeTensorMode)
    """The modes in which AOTAutograd traces."""

    ensure_device_guard = torch._C._ensureCUDADeviceGuardSet
    """A function that puts the registered guard for CUDA devices in force."""

    RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
    """The code of the function that runs autograd's engine."""

MODULE_CALL = "_compiled_call_impl"
"""Attribute of a module: if it is set, `nn.Module.__call__` calls it instead of the module."""

EXACT_INPUTS = "eager_input_vals"
"""Key of a node's metadata: fake tensors (args, kwargs); Inductor gives the node's inputs their strides."""

CACHEABLE = "unsafe_marked_cacheable_functions"
"""Inductor's setting {name of a function: hash}. AOTAutograd does not cache graphs that call other functions."""


TRITON_IMPORTS = """\
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""
"""The imports of a module with a Triton kernel whose lines Inductor's lowerings write."""


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has matmul kernels for bfloat16 or float16 on this CPU, within ONEDNN_MAX_CPU_ISA.

    torch checks the same at every matmul: https://github.com/pytorch/pytorch/issues/146508.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    ops = torch.ops.mkldnn
    checks = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return bool(checks[dtype]())


@contextlib.contextmanager
def optimizers_ranges_ignored() -> Iterator[None]:
    """Suppress Dynamo's warning that it ignores `torch.profiler.record_function` within the context.

    `Optimizer.step` opens such a range for the profiler, so every compiled training step would give a warning that its
    user could do nothing about. Only the name of that range in a profile is lost.
    """
    global _ranges_ignored
    _filter_warnings()
    _ranges_ignored += 1
    try:
        yield
    finally:
        _ranges_ignored -= 1


_ranges_ignored = 0
"""Number of open `optimizers_ranges_ignored` contexts."""


@functools.cache
def _filter_warnings() -> None:
    for module in ("ctx_manager", "torch"):
        logging.getLogger(f"torch._dynamo.variables.{module}").addFilter(_is_not_of_range)


def _is_not_of_range(record: logging.LogRecord) -> bool:
    if not _ranges_ignored:
        return True
    message = record.getMessage()
    return not ("record_function" in message and message.endswith("will be ignored"))


def dynamo_is_on() -> bool:
    """Return whether Dynamo would compile a function that is called now."""
    return get_eval_frame_callback() is not None


# Dynamo would compile the function where code that runs op by op calls it, and warn that it can't trace the call
skip_code(dynamo_is_on.__code__)


def disabled_functions() -> list[Any]:
    """Return the running functions that have switched Dynamo off since it was last switched on, innermost first."""
    off, on = _switches()
    functions: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not on:
        if frame.f_code is off:
            functions.append(frame.f_locals["fn"])  # the wrapper's local for the function that it runs
        frame = frame.f_back
    return functions


def around_compilations(begin: Callable[[], None], end: Callable[[CodeType, Any], None]) -> None:
    """Call `begin` before, and `end` after, each of Dynamo's attempts to compile a function, from now on.

    `end` is not called if the attempt raises. It gets the function's code and a `ConvertFrameReturn`, which says how
    calls of the function run and which it may edit.
    """
    # Dynamo has no public hook for attempts: its callbacks do not get the frame's code or the result.
    # the class, not an object: Dynamo makes a ConvertFrame for each call of `torch.compile`
    compile_frame = with_room(ConvertFrame.__call__)

    def compile_and_tell(self: ConvertFrame, frame: Any, *args: Any, **kwargs: Any) -> Any:
        begin()
        result = compile_frame(self, frame, *args, **kwargs)
        end(frame.f_code, result)
        return result

    ConvertFrame.__call__ = compile_and_tell  # type: ignore[method-assign]


def leave_op_by_op(is_left: Callable[[CodeType], bool]) -> None:
    """Run functions for whose code `is_left` is true op by op where Dynamo would begin to compile them, from now on.

    Dynamo still compiles them as part of functions that call them, and the functions that they call.
    """
    compile_frame = ConvertFrame.__call__

    # by default, a ConvertFrameReturn has no code and is for all later calls too: Dynamo does not ask about it again
    def compile_or_leave(self: ConvertFrame, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if is_left(frame.f_code):
            return ConvertFrameReturn()
        return compile_frame(self, frame, *args, **kwargs)

    ConvertFrame.__call__ = compile_or_leave  # type: ignore[method-assign]


@functools.cache
def break_at_backward_at_once() -> None:
    """Let Dynamo trace what is before a call of `backward` once, from now on.

    Dynamo goes back to the beginning of a function if it can't trace one of its calls, and breaks the graph when it
    gets there again: the call may have changed much before it failed. That of a tensor's `backward` fails at once.
    """
    if (opcode := dis.opmap.get("CALL")) is None:  # before Python 3.11
        return
    call: Any = InstructionTranslator.dispatch_table[opcode]

    def call_or_break(self: Any, instruction: Any) -> None:
        before = self.stack[:], self.kw_names, self.speculation_log.index
        try:
            call(self, instruction)
        except SpeculationRestartAnalysis:
            if not _calls_backward(before[0][-instruction.arg - 2 :]):
                raise
            self.stack[:], self.kw_names, self.speculation_log.index = before
            call(self, instruction)  # Dynamo knows now that it fails, and breaks the graph

    InstructionTranslator.dispatch_table[opcode] = call_or_break


def _calls_backward(function_and_arguments: Sequence[Any]) -> bool:
    if dynamo_config.trace_autograd_ops:  # it traces some of these calls
        return False
    named = (x for x in function_and_arguments[:2] if isinstance(x, GetAttrVariable) and x.name == "backward")
    return any(isinstance(x.obj, TensorVariable) for x in named)


def leave_steps_op_by_op(is_left: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Run the steps of optimizers for which `is_left` is true op by op, with all that they call, from now on."""
    catch_errors = CatchErrorsWrapper.__call__
    step: Any = torch.optim.Optimizer.profile_hook_step(len)  # all steps are wrapped in functions of this code
    skipped = ConvertFrameReturn(
        frame_exec_strategy=_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP), apply_to_code=False
    )

    # what Dynamo calls first, since it asks again at every step
    def compile_or_leave(self: CatchErrorsWrapper, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if frame.f_code is step.__code__ and is_left(frame.f_locals["args"][0]):
            return skipped
        return catch_errors(self, frame, *args, **kwargs)

    CatchErrorsWrapper.__call__ = compile_or_leave  # type: ignore[method-assign]


def context_of(code: CodeType) -> dict[str, Any]:
    """Return Dynamo's dict for a function's code, which lives as long as Dynamo knows the code."""
    context: dict[str, Any] = code_context.get_context(code)
    return context


def skips_for_good(result: Any) -> bool:
    """Return whether Dynamo will run this call and all later calls of a function op by op."""
    return bool(result.apply_to_code) and result.frame_exec_strategy.cur_action == _FrameAction.SKIP


def only_run_what_is_compiled(result: Any) -> None:
    """Run a function's compiled code where its guards hold, op by op elsewhere, and never compile it again."""
    result.frame_exec_strategy = _FrameExecStrategy(_FrameAction.RUN_ONLY, _FrameAction.DEFAULT)


def disabled_by(frame: FrameType) -> tuple[Any, str] | None:
    """Return the function that a frame runs without Dynamo, and the reason that the user gave; None if it does not."""
    if frame.f_code is not _switches()[0]:
        return None
    return frame.f_locals["fn"], frame.f_locals["self"].msg or ""


def frames_op_by_op(until: CodeType) -> list[FrameType]:
    """Return the frames of running functions that Dynamo has not compiled, innermost first, up to the code `until`.

    Leaves out torch's functions. [] in a thread in which the function with that code does not run.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        if not frame.f_code.co_filename.startswith(_TORCH) and frame.f_code not in output_codes:
            frames.append(frame)
        frame = frame.f_back
    return frames if frame is not None else []


_TORCH = torch.__path__[0]


@functools.cache
def _switches() -> tuple[CodeType, CodeType]:
    """Return the code of the wrappers that `torch.compiler.disable` and `torch.compile` return."""
    # the wrappers that torch makes of different functions have the same code
    off = torch.compiler.disable(_nothing)  # type: ignore[no-untyped-call]
    return off.__code__, torch.compile(_nothing, backend="eager").__code__


def _nothing() -> None:
    pass


def cancel_compilations() -> None:
    """Cancel the C++ compilations that Inductor has not begun; Python would wait for them before it exits."""
    # to call `pool` makes one, and it must be forgotten afterwards: a pool that is shut down takes no more work
    if AsyncCompile.pool.cache_info().currsize:
        AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
        AsyncCompile.pool.cache_clear()


def hint_of(size: Any) -> Any:
    """Return the hint of a symbolic number, without a guard on it; 2 if it has none. Plain numbers as they are."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    return size.node.hint if size.node.has_hint() else 2


def known_values(env: Any) -> dict[Any, int]:
    """Return the values that the symbols of a shape environment had in the call that is compiled."""
    values = getattr(env, "backed_var_to_val", None)  # torch 2.13's name
    known = (env.var_to_val if values is None else values).items()
    # a jagged tensor has a symbol that stands for its lengths, not for a number
    return {symbol: int(value) for symbol, value in known if isinstance(value, int) or value.is_Integer}


def example_of(env: Any, symbol: Any) -> int:
    """Return the value that a symbol of a shape environment had in the call that is compiled."""
    return known_values(env)[symbol]


TAKES_LISTS_OF_PASSES = hasattr(custom_graph_pass, "get_custom_graph_passes")
"""True if Inductor's settings for custom passes may be lists of passes."""


def kernel_nodes(kernel: str) -> list[str]:
    """Return the names of the nodes that a kernel of the last generated code computes; [] if Inductor did not track."""
    return list(inductor_debug._inductor_triton_kernel_to_post_grad_node_info.get(kernel, ()))


def why_compiled_again() -> str:
    """Return the failed guard because of which Dynamo now compiles a frame again; "" if it is the first compilation."""
    return str(get_metrics_context()._metrics.get("recompile_reason") or "")


@contextlib.contextmanager
def all_compilations() -> Iterator[None]:
    """Make torch remember up to 65536 compilations within the context, for `compilations`, instead of the last 64."""
    limit = dynamo_utils._compilation_metrics.maxlen or 0  # a deque
    dynamo_utils.set_compilation_metrics_limit(1 << 16)
    try:
        yield
    finally:
        dynamo_utils.set_compilation_metrics_limit(limit)


def compilations() -> list[Any]:
    """Return torch's records of its latest compilations: function, source line, and the reason of a failure."""
    return list(dynamo_utils.get_compilation_metrics())


def kernel_keys(tensors: Sequence[torch.Tensor]) -> Any:
    """Return the dispatch keys with which an op runs its kernel for these tensors' device; None if they are not known.

    They are not known for tensor subclasses, and for tensors on several devices.
    """
    devices = {x.device.type for x in tensors}
    if len(devices) != 1 or any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return None
    key = torch._C._dispatch_key_for_device(devices.pop())
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))


def compiled_scope() -> dict[str, Any]:
    """Return {name: value} of the frame that Dynamo compiles now: its locals, and the globals that its code names.

    In a function of `*args`, with which decorators replace methods, the first argument is `self` too. {} if Dynamo
    compiles no frame. After a graph break the frame may lack `self`.
    """
    translator = _current_translator()
    if translator is None:
        return {}
    # the frame that Dynamo began with, not one that it inlines into it
    frame = translator.output.root_tx
    named = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return {**named, **_self_in_varargs(frame.f_code, frame.f_locals), **frame.f_locals}


def _self_in_varargs(code: CodeType, local: Mapping[str, Any]) -> dict[str, Any]:
    if code.co_argcount or not code.co_flags & inspect.CO_VARARGS:
        return {}
    # in `co_varnames`, *args comes after the keyword-only arguments
    args = local.get(code.co_varnames[code.co_kwonlyargcount], ())
    is_method = bool(args) and getattr(getattr(args[0], "forward", None), "__code__", None) is code
    return {"self": args[0]} if is_method else {}


def running_modules() -> list[torch.nn.Module]:
    """Return the modules with a running method, from the inside out."""
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(
            module := frame.f_locals.get("self"), torch.nn.Module
        ):
            modules.append(module)
        frame = frame.f_back
    return modules


def _current_translator() -> Any:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # no thread has set one
        return None


def modules_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that `module.modules()` yields, in another order, in a third of the time: without names."""
    modules: dict[torch.nn.Module, None] = {}  # an ordered set
    todo: list[torch.nn.Module | None] = [module]
    while todo:
        part = todo.pop()
        if part is not None and part not in modules:
            modules[part] = None
            todo += part._modules.values()
    return list(modules)


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module without those of its submodules."""
    return [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]


def gathered_parameters(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """Return {id of a parameter that `fully_shard` has sharded: the gathered parameter}.

    Only of parameters that have been gathered at least once.
    """
    states = (m._get_fsdp_state() for m in modules_of(module) if isinstance(m, FSDPModule))
    groups = (group for state in states for group in _groups_of(state))
    return {
        id(p.sharded_param): p._unsharded_param
        for group in groups
        for p in group.fsdp_params
        if hasattr(p, "_unsharded_param")  # set by the first all-gather
    }


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP state, which can be several from torch 2.13 on."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_of_fsdp(source: Any) -> bool:
    """Return whether a Dynamo source leads through a module that FSDP manages.

    Such a module's full parameter exists only while it is gathered.
    """
    while source is not None:
        if isinstance(source, FSDPNNModuleSource):
            return True
        source = getattr(source, "base", None)
    return False


def cpp_compiler() -> str:
    """Return the command of the C++ compiler that Inductor calls; "" if it finds none."""
    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return ""


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def cuda_driver_version() -> int:
    """Return the version of CUDA that the driver has, 13000 for 13.0; 0 in a build of torch without CUDA."""
    version: int = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return version


def store_of(group: dist.ProcessGroup, prefix: str) -> Store:
    """Return the key-value store through which a group's ranks were initialized, with a prefix to all keys."""
    return PrefixStore(prefix, _get_process_group_store(group))


def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """All-reduce a tensor among the ranks of a named group, within a graph or outside; returns the result."""
    result: torch.Tensor = _functional_collectives.all_reduce(x, op, _group_name(group))
    return result


def all_gather_single(output: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather the tensors `x` of a group's ranks into `output`. torch 2.13 renames it, and warns of the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, x, group=group)


def ranks_of(group: str) -> list[int]:
    """Return the global ranks of a named group."""
    return dist.get_process_group_ranks(_resolve_process_group(_group_name(group)))


def micro_pipelines(group: str) -> bool:
    """Return whether Inductor fuses matmuls with this group's collectives, for async tensor parallelism."""
    return bool(inductor_config._micro_pipeline_tp) and is_symm_mem_enabled_for_group(_group_name(group))


def _group_name(group: str) -> Any:
    """Return the name untyped: torch's type is a NewType, which mypy sees only if it reads torch in some orders."""
    return group


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a group's collectives on a device."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def flattened(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh. For a mesh of several dimensions all ranks of the world must call it."""
    return _flattened(mesh, dist.group.WORLD)


@functools.cache
def _flattened(mesh: DeviceMesh, _world: Any) -> dist.ProcessGroup:
    """Return the group of `flattened`, cached for each world.

    A mesh equals a mesh of the same ranks in an earlier world, so the world is part of the cache's key.
    """
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()


def trace_again(reason: str) -> NoReturn:
    """Make Dynamo trace the current frame again. To be called by a backend that has changed what the frame reads."""
    # of the exceptions that restart Dynamo, the one that it does not take for a backend's failure
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def checkpoint_reader(checkpoint_id: str) -> Any:  # a StorageReader, whose import takes long
    """Return the reader that `torch.distributed.checkpoint.load` takes for a folder or an fsspec address."""
    from torch.distributed.checkpoint._storage_utils import _storage_setup

    return _storage_setup(None, checkpoint_id, reader=True)


def context_for_later() -> TracingContext:
    """Return a copy of the current compilation's context, to compile the graph again when it is called.

    Without the state of DDPOptimizer, which splits a graph and counts the compilations of its parts.
    """
    context = copy.copy(TracingContext.get())
    context.ddp_optimizer_ctx, context.fakify_first_call = None, False
    return context


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast is off, for compiled code, whose dtypes are decided."""
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else contextlib.nullcontext()


def keeps_graph() -> bool:
    """Return whether the backward that runs now was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def without_switch(function: Any) -> Any:
    """Return a compiled function without what turns Dynamo off around it, for callers around which it is off."""
    return eval_frame.innermost_fn(function)


def function_class(x: torch.Tensor) -> Any:
    """Return the `torch.autograd.Function` that has computed a tensor; None if none has."""
    return getattr(type(x.grad_fn), "_forward_cls", None)


@contextlib.contextmanager
def context_of_one_graph() -> Iterator[None]:
    """Compile one graph, whose backward torch may compile when it first runs, in a context that no other graph has.

    AOTAutograd stores what it knows of a graph in the compilation's context: which saved tensors its backward may
    overwrite, for example. It reads that when it compiles the backward, which may be after it has compiled other graphs
    in the same context. With theirs, a backward overwrites parameters.
    """
    if (context := TracingContext.try_get()) is None:
        yield
        return
    of_graph = copy.copy(context)
    of_graph.ddp_optimizer_ctx = None  # DDPOptimizer's remedy, which counts on one graph for each of its parts
    with tracing(of_graph):
        yield
    context.fw_metadata = of_graph.fw_metadata  # which DDPOptimizer wants to see


@contextlib.contextmanager
def cuts_fast() -> Iterator[None]:
    """Make networkx, which torch's partitioner calls, find minimum cuts by Boykov and Kolmogorov within the context.

    The cut is the same as by networkx's default, preflow-push: both put on the sink's side all nodes that still reach
    the sink, which are the same for every maximum flow. Preflow-push takes several times as long on training graphs.
    """
    import networkx
    from networkx.algorithms.flow import boykov_kolmogorov

    plain = networkx.minimum_cut  # torch calls it by this name, and leaves the algorithm to its default
    networkx.minimum_cut = functools.partial(plain, flow_func=boykov_kolmogorov)
    try:
        yield
    finally:
        networkx.minimum_cut = plain


def computed_by_meta(mode: FakeTensorMode, target: Callable[..., Any], args: Any, kwargs: Any) -> FakeTensor:
    """Compute an op on fake tensors by its meta kernel, without the fake mode and its cache: in a quarter of the time.

    Only for ops whose result is one tensor, on the device of their first argument.
    """
    with in_kernel_invocation_manager(mode):
        result = target(*args, **kwargs)
    return FakeTensor(mode, result, args[0].device)


def another_like(x: FakeTensor, dtype: torch.dtype) -> FakeTensor:
    """Return a fake tensor of this dtype, with the shape, strides and device of `x`, and storage that no other has."""
    with in_kernel_invocation_manager(x.fake_mode):
        storage = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
    return FakeTensor(x.fake_mode, storage, x.device)


def as_fakes(inputs: Sequence[Any]) -> list[Any]:
    """Replace tensors among the inputs by AOTAutograd's fake tensors, to compile a graph again later.

    Call it in the context of the compilation, which knows the tensors' symbolic sizes as long as the tensors exist.
    Inputs stay as they are without a fake mode.
    """
    mode = detect_fake_mode(inputs)
    if mode is None:
        return list(inputs)
    return [_as_fake(x, mode) if isinstance(x, torch.Tensor) else x for x in inputs]


def _as_fake(x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if not is_fake(x):
        fake: torch.Tensor = to_fake_tensor(x, mode)
        return fake
    if not isinstance(x, FakeTensor) or x.fake_mode is mode:
        return x
    with mode:  # the user has a mode too, as to plan a model that no memory holds
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


def in_aot_compile() -> bool:
    """Return whether the graph is compiled by `torch.compile(...).aot_compile`, which will save what comes out.

    It sets this option while it calls the backend; `torch.compile` does not set it.
    """
    return bool(getattr(functorch_config, "bypass_autograd_cache_key", False))


def first_call_is_fake() -> bool:
    """Return whether the first call of the graph that is compiled now will be on fake tensors.

    DDPOptimizer calls each part of a graph so, to get the strides of its outputs.
    """
    context = TracingContext.try_get()
    return context is not None and context.fakify_first_call


def instead_of_ddp_optimizer(cuts: Callable[[Any, dict[str, Any], fx.GraphModule, int], bool]) -> None:
    """Hand a graph to its backend as a whole, from now on, where `cuts(backend, options, graph, bucket_bytes)` is true.

    DDPOptimizer cuts other graphs into one for each bucket, of parameters of that many bytes.
    """
    compile_buckets = DDPOptimizer.compile_fn

    def compile_fn(self: DDPOptimizer, module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if cuts(*_with_options(self.backend_compile_fn), module, self.bucket_bytes_cap):
            return self.backend_compile_fn(module, *args, **kwargs)
        return compile_buckets(self, module, *args, **kwargs)

    DDPOptimizer.compile_fn = compile_fn  # type: ignore[assignment, method-assign]


def _with_options(backend: Any) -> tuple[Any, dict[str, Any]]:
    """Return the backend that `torch.compile` was given, without Dynamo's wrappers, and its keyword arguments."""
    backend = innermost_backend(backend)
    return (backend.compiler_fn, backend.kwargs) if hasattr(backend, "compiler_fn") else (backend, {})


def instead_of_compiled(
    backend: Callable[..., Any],
    instead: Callable[[Callable[..., Any], Callable[..., Any], dict[str, Any]], Callable[..., Any]],
) -> None:
    """Let `torch.compile` with this backend return `instead(function, compiled, options)`, from now on.

    function: the user's. compiled: what `torch.compile` would return. options: keyword arguments of the backend. For a
    module, the function is what calls it. Dynamo traces `function` where code that it traces calls the result.
    """
    # Dynamo's own hook, `backend_ctx_ctor`, does not get the function, is lost in torch.compile's wrapper of a backend,
    # and can't leave a dispatch mode: Dynamo restores the dispatch keys from before.
    compile_function = OptimizeContext.__call__

    def compile_and_replace(self: OptimizeContext, fn: Any) -> Any:
        compiled = compile_function(self, fn)
        given, options = _with_options(self.callback)
        if given is not backend or not isinstance(compiled, FunctionType):
            return compiled
        result: Any = functools.update_wrapper(instead(fn, compiled, options), compiled)
        result._torchdynamo_wrapper_id = id(result)  # Dynamo takes no other function for torch.compile's
        module = getattr(fn, "__self__", None)
        if isinstance(
            module, torch.nn.Module
        ):  # transformers' Trainer gives a model only the columns that its forward takes
            result.__signature__ = inspect.signature(module.forward)
        skip_code(result.__code__)
        return result

    OptimizeContext.__call__ = compile_and_replace  # type: ignore[method-assign]


def compiles_first_calls() -> bool:
    """Return whether Dynamo compiles a function of `torch.compile` that is called now, for the first time.

    Not while something else traces the call, nor under a dispatch mode, as that of fake tensors, nor if compilation is
    switched off for the time being.
    """
    is_on = not dynamo_config.disable and eval_frame._stance.stance == "default"
    return is_on and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def ddp_goes_on() -> bool:
    """Return whether the running forward is of DistributedDataParallel under `no_sync`: later microbatches follow."""
    module = DistributedDataParallel._active_ddp_module
    return module is not None and not module.require_backward_grad_sync


def ddp_runs() -> bool:
    """Return whether the running forward is of DistributedDataParallel."""
    return DistributedDataParallel._active_ddp_module is not None


def ddp_joins() -> bool:
    """Return whether the running forward is of DistributedDataParallel under `join`, for uneven inputs.

    Ranks may then run out of inputs at different times.
    """
    module = DistributedDataParallel._active_ddp_module
    return module is not None and module._join_config.enable


def is_shared(x: torch.Tensor) -> bool:
    """Return whether other tensors share the memory of this one."""
    return bool(torch._C._storage_Use_Count(x.untyped_storage()._cdata) > 2)  # those of `x`, and of this call


def will_accumulate(node: Any) -> bool:
    """Return whether the running backward adds what it hands to this `AccumulateGrad` node to a tensor's `.grad`.

    `torch.autograd.grad` returns it instead; torch then raises an error if asked about the node of a leaf.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


@functools.cache
def before_eager_optimizers(callback: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call `callback` before each step of any optimizer that runs op by op, from now on.

    Further calls with the same callback have no effect. The callback is not called within what Dynamo traces: the
    optimizer calls hooks in a loop, and a graph break there would make its whole step run op by op.
    """

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            # its result is not returned: torch takes results of such hooks for new arguments
            callback(optimizer)

    register_optimizer_step_pre_hook(hook)


def undecorated_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the function that `step` calls, without torch's decorators: these break the graph, call the optimizer's
    hooks, and turn gradients off.
    """
    step: Any = type(optimizer).step
    # of the optimizer's hooks and of `torch.no_grad`: a decorator of the user's, in another file, stays
    files = {f.__code__.co_filename for f in (torch.optim.Optimizer.__repr__, torch.no_grad()(len))}
    while hasattr(step, "__wrapped__") and step.__code__.co_filename in files:
        step = step.__wrapped__
    undecorated: Callable[..., Any] = step
    return undecorated


@dataclass(frozen=True)
class PipelineCall:
    """A call that `torch.distributed.pipelining` makes: of a stage's module, or of the loss after the last stage.

    microbatch: number of the microbatch; None if the stage only infers the shapes of its outputs. Its input is
    uninitialized memory then, and the gradient of its output is 1.
    """

    stage: Any
    microbatch: int | None

    @property
    def has_rank_of_its_own(self) -> bool:
        """True if the pipeline includes all ranks, so that no other rank has this stage."""
        return dist.get_world_size(self.stage.group) == dist.get_world_size()


def pipeline_call() -> PipelineCall | None:
    """Return the pipeline's call that the running forward is in; None if there is none."""
    if "torch.distributed.pipelining" not in sys.modules:  # then there is no stage, and nothing to import it for
        return None
    calls = _pipeline_calls()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (names := calls.get(id(frame.f_code))) is not None:
            stage, microbatch = names
            return PipelineCall(frame.f_locals[stage], frame.f_locals[microbatch] if microbatch else None)
        frame = frame.f_back
    return None


@functools.cache
def _pipeline_calls() -> dict[int, tuple[str, str]]:
    """Return {id of code that makes such calls: names in it of the stage, and of the microbatch's number or ""}.

    By id, because the code of Dynamo's resume functions may have unhashable constants, and is unhashable then.
    """
    with required_names():
        from torch.distributed.pipelining.schedules import _PipelineSchedule
        from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase

        calls: dict[Any, tuple[str, str]] = {
            _PipelineStageBase.forward_one_chunk: ("self", "fwd_chunk_id"),
            _PipelineSchedule._maybe_compute_loss: ("stage", "mb_index"),
            PipelineStage._prepare_forward_infra: ("self", ""),
            PipelineStage._prepare_backward_infra: ("self", ""),
        }
    return {id(function.__code__): names for function, names in calls.items()}


def module_of_stage(stage: Any) -> Any:
    """Return the module of a pipeline's stage, and anything else as it is."""
    if "torch.distributed.pipelining" not in sys.modules:
        return stage
    with required_names():
        from torch.distributed.pipelining.stage import _PipelineStageBase

    return stage.submod if isinstance(stage, _PipelineStageBase) else stage


def is_deterministic() -> bool:
    """Return whether torch, or Inductor, is set to give the same bits in every run on one machine."""
    return torch.are_deterministic_algorithms_enabled() or inductor_config.deterministic


def call_of_kernel(
    kernel: Any, programs: Sequence[int], tensors: Mapping[str, Any], written: Sequence[str]
) -> dict[str, Any]:
    """Return the keyword arguments with which `triton_kernel_wrapper_functional` calls a Triton kernel.

    programs: their number, for each of the kernel's configurations. tensors: {parameter: tensor}. written: the
    parameters that the kernel writes, of whose tensors it returns copies.
    """
    return {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args({}),
        "grid": [(number, 1, 1) for number in programs],
        "tma_descriptor_metadata": {},
        "kwargs": dict(tensors),
        "tensors_to_clone": list(written),
    }


def kernel_called(node: fx.Node) -> Any:
    """Return the Triton kernel that a node calls; None if it calls none that is not Inductor's."""
    if node.target not in (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation):
        return None
    return kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
