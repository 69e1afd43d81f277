"""Every private torch name that fp8pass relies on, so that an upgrade of torch is a diff of this file.

`fp8pass.versions` says which versions of torch have them all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from fp8pass.versions import check_version, required_names

check_version()
with required_names():
    from torch._C._distributed_c10d import _resolve_process_group
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, get_eval_frame_callback
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import device_interface
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.code_context import code_context
    from torch._dynamo.convert_frame import ConvertFrame, output_codes
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.exc import RestartAnalysis, SkipFrame, TorchDynamoException
    from torch._dynamo.source import ConstantSource, FSDPNNModuleSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import counters, get_metrics_context, graph_break_reasons, to_fake_tensor
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_partition
    from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
    from torch._inductor import compile_fx as inductor_compile_fx
    from torch._inductor import config as inductor_config
    from torch._inductor import custom_graph_pass, inductor_prims, list_mode_options
    from torch._inductor import debug as inductor_debug
    from torch._inductor import lowering as inductor_lowering
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen import triton_combo_kernel
    from torch._inductor.codegen.triton import FixedTritonConfig, TritonOverrides
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.exc import InductorError, InvalidCxxCompiler
    from torch._inductor.fx_passes import post_grad as inductor_post_grad
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import ConcatKernel, MutationLayoutSHOULDREMOVE, Pointwise, TensorBox
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.scheduler import (
        BaseSchedulerNode,
        ForeachKernelSchedulerNode,
        FusedSchedulerNode,
        NopKernelSchedulerNode,
        SchedulerNode,
    )
    from torch._inductor.virtualized import V as Virtualized
    from torch._inductor.virtualized import ops as inductor_ops
    from torch._library.custom_ops import CustomOpDef
    from torch._logging._internal import trace_structured
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake, unset_fake_temporarily
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
    from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
    from torch.distributed import _functional_collectives
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store
    from torch.distributed.fsdp import FSDPModule
    from torch.fx.graph import CodeGen
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver
    from torch.nn.modules.loss import _Loss as Loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils import _pytree as pytree
    from torch.utils import _triton as torch_triton
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

    current_graph_task_id = torch._C._current_graph_task_id
    """The number of the backward that runs in this thread; -1 outside of any."""

    set_grad_enabled = torch._C._set_grad_enabled
    """What `torch.set_grad_enabled` is in Dynamo's graph."""

    enter_autocast, exit_autocast = _enter_autocast, _exit_autocast
    """Stands for `with torch.autocast` in Dynamo's graph."""

    MODE_CHANGES = frozenset(
        {set_grad_enabled, _enter_autocast, _exit_autocast, _enter_inference_mode, _exit_inference_mode}
    )
    """Calls in Dynamo's graph from which on others mean something else."""

    is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
    """Whether two tensors share storage."""

    top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    """The innermost hooks for saved tensors, (pack, unpack), or None."""

    FORCE_STRIDE_ORDER = inductor_prims.force_stride_order
    """The op that makes Inductor lay a tensor out in the order of given strides; nothing if it does so anyway."""

    INVOKE_SUBGRAPH = torch.ops.higher_order.invoke_subgraph
    """Calls the body of a `nested_compile_region` in Dynamo's graph: (body, its name, *operands)."""

    linear = torch._C._nn.linear
    """What `F.linear` is on some versions."""

    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    """Makes a tensor of a subclass that has no storage of its own."""

    COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
    """What the decomposition of an op is registered for."""

    ensure_device_guard = torch._C._ensureCUDADeviceGuardSet
    """Makes the guard for CUDA devices that is registered now the one in force."""

    RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
    """Calls autograd's engine."""

MODULE_CALL = "_compiled_call_impl"
"""Attribute of a module: what `nn.Module.__call__` calls in the module's place, if it is there."""

EXACT_INPUTS = "eager_input_vals"
"""Metadata of a node: the fake tensors (args, kwargs) whose strides Inductor gives its inputs."""

CACHEABLE = "unsafe_marked_cacheable_functions"
"""Setting of Inductor: {name of a function: hash}. AOTAutograd caches no graph that calls any other."""


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has matmul kernels for bfloat16 or float16 on this CPU, within the limit of ONEDNN_MAX_CPU_ISA.

    torch asks the same at every matmul: https://github.com/pytorch/pytorch/issues/146508.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    known = torch.ops.mkldnn
    asked = {torch.bfloat16: known._is_mkldnn_bf16_supported, torch.float16: known._is_mkldnn_fp16_supported}
    return bool(asked[dtype]())


@contextlib.contextmanager
def optimizers_ranges_ignored() -> Iterator[None]:
    """Within this, Dynamo does not warn that it ignores `torch.profiler.record_function`.

    `Optimizer.step` opens such a range for the profiler, so that each compiled training step gave a warning that its
    user could do nothing about. Nothing is lost but the name of that range in a profile.
    """
    loggers = [logging.getLogger(f"torch._dynamo.variables.{module}") for module in ("ctx_manager", "torch")]
    for logger in loggers:
        logger.addFilter(_is_not_of_range)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_not_of_range)


def _is_not_of_range(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not ("record_function" in message and message.endswith("will be ignored"))


def dynamo_is_on() -> bool:
    """Return whether Dynamo would compile a function that is called now."""
    return get_eval_frame_callback() is not None


skip_code(dynamo_is_on.__code__)


def disabled_functions() -> list[Any]:
    """Return the functions that are running and have switched Dynamo off, innermost first, since it was switched on."""
    off, on = _switches()
    found: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not on:
        if frame.f_code is off:
            found.append(frame.f_locals["fn"])
        frame = frame.f_back
    return found


def around_compilations(begin: Callable[[], None], end: Callable[[CodeType, Any], None]) -> None:
    """From now on, call these before Dynamo tries to compile a function, and after it, unless that raises.

    end: gets the function's code, and a `ConvertFrameReturn`, which it may edit: how calls of it are to run.
    """
    compile_frame = ConvertFrame.__call__

    def compile_and_tell(self: ConvertFrame, frame: Any, *args: Any, **kwargs: Any) -> Any:
        begin()
        result = compile_frame(self, frame, *args, **kwargs)
        end(frame.f_code, result)
        return result

    ConvertFrame.__call__ = compile_and_tell  # type: ignore[method-assign]


def context_of(code: CodeType) -> dict[str, Any]:
    """Return what is kept with the code of a function as long as Dynamo knows it."""
    context: dict[str, Any] = code_context.get_context(code)
    return context


def skips_for_good(result: Any) -> bool:
    """Return whether Dynamo is to run this call of a function, and all others, op by op."""
    return bool(result.apply_to_code) and result.frame_exec_strategy.cur_action == _FrameAction.SKIP


def only_run_what_is_compiled(result: Any) -> None:
    """Have a function run as it is compiled where that fits, and op by op elsewhere, and never compile it again."""
    result.frame_exec_strategy = _FrameExecStrategy(_FrameAction.RUN_ONLY, _FrameAction.DEFAULT)


def disabled_by(frame: FrameType) -> tuple[Any, str] | None:
    """Return the function that a frame runs without Dynamo, and the reason that the user gave; None if it does not."""
    if frame.f_code is not _switches()[0]:
        return None
    return frame.f_locals["fn"], frame.f_locals["self"].msg or ""


def frames_op_by_op(until: CodeType) -> list[FrameType]:
    """Return the running functions that Dynamo has not compiled, innermost first, and that this code led to.

    None of torch's; none at all in a thread in which that function does not run.
    """
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        if not frame.f_code.co_filename.startswith(_TORCH) and frame.f_code not in output_codes:
            found.append(frame)
        frame = frame.f_back
    return found if frame is not None else []


_TORCH = torch.__path__[0]


@functools.cache
def _switches() -> tuple[CodeType, CodeType]:
    """Return the code of whatever `torch.compiler.disable` returns, and of what `torch.compile` does."""
    off = torch.compiler.disable(_nothing)  # type: ignore[no-untyped-call]
    return off.__code__, torch.compile(_nothing, backend="eager").__code__


def _nothing() -> None:
    pass


def cancel_compilations() -> None:
    """Drop the C++ compilations that Inductor has not begun, for which Python would wait before it exits."""
    if AsyncCompile.pool.cache_info().currsize:
        AsyncCompile.pool().shutdown(wait=False, cancel_futures=True)
        AsyncCompile.pool.cache_clear()


def hint_of(size: Any) -> Any:
    """An example of a symbolic number, without a guard on it; 2 where there is none. Plain numbers as they are."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    return size.node.hint if size.node.has_hint() else 2


TAKES_LISTS_OF_PASSES = hasattr(custom_graph_pass, "get_custom_graph_passes")
"""Whether Inductor's settings for custom passes may be lists of them."""


def kernel_nodes(kernel: str) -> list[str]:
    """The names of the nodes that a kernel of code just generated computes; none unless Inductor tracked them."""
    return list(inductor_debug._inductor_triton_kernel_to_post_grad_node_info.get(kernel, ()))


def why_compiled_again() -> str:
    """While a graph of Dynamo's is compiled, not for the first time: the guard of an earlier one that failed; or ""."""
    return str(get_metrics_context()._metrics.get("recompile_reason") or "")


@contextlib.contextmanager
def all_compilations() -> Iterator[None]:
    """Within it, torch remembers all of its compilations, for `compilations`, and not only the last 64."""
    limit = dynamo_utils._compilation_metrics.maxlen or 0
    dynamo_utils.set_compilation_metrics_limit(1 << 16)
    try:
        yield
    finally:
        dynamo_utils.set_compilation_metrics_limit(limit)


def compilations() -> list[Any]:
    """Return what torch remembers of its latest compilations: function, place, and why it failed, if it did."""
    return list(dynamo_utils.get_compilation_metrics())


def kernel_keys(tensors: Sequence[torch.Tensor]) -> Any:
    """Return what to redispatch an op with, so that its kernel for these tensors runs; None if that is not known.

    It is not for tensors of a subclass, which have kernels of their own.
    """
    devices = {x.device.type for x in tensors}
    if len(devices) != 1 or any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return None
    key = torch._C._dispatch_key_for_device(devices.pop())
    return torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))


def compiled_scope() -> dict[str, Any]:
    """Return what the frame that Dynamo compiles now knows by which name: locals, and globals that its code names.

    As `self` also the first argument of a function of `*args`: decorators replace methods by such functions. Nothing
    where Dynamo compiles none, or goes on with one after a graph break that leaves out the frame's `self`.
    """
    translator = _current_translator()
    if translator is None:
        return {}
    frame = translator.output.root_tx
    named = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return {**named, **_self_in_varargs(frame.f_code, frame.f_locals), **frame.f_locals}


def _self_in_varargs(code: CodeType, local: Mapping[str, Any]) -> dict[str, Any]:
    if code.co_argcount or not code.co_flags & inspect.CO_VARARGS:
        return {}
    args = local.get(code.co_varnames[code.co_kwonlyargcount], ())
    is_method = bool(args) and getattr(getattr(args[0], "forward", None), "__code__", None) is code
    return {"self": args[0]} if is_method else {}


def running_modules() -> list[torch.nn.Module]:
    """Return the modules of which a method is running, from the inside out."""
    found: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(
            module := frame.f_locals.get("self"), torch.nn.Module
        ):
            found.append(module)
        frame = frame.f_back
    return found


def _current_translator() -> Any:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # no thread has set one
        return None


def gathered_parameters(module: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """{id of a parameter that `fully_shard` has sharded: the gathered one}, of those that have been gathered once."""
    states = (m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule))
    groups = (group for state in states for group in _groups_of(state))
    return {
        id(p.sharded_param): p._unsharded_param
        for group in groups
        for p in group.fsdp_params
        if hasattr(p, "_unsharded_param")
    }


def _groups_of(state: Any) -> list[Any]:
    """Several from torch 2.13 on."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_of_fsdp(source: Any) -> bool:
    """Whether Dynamo has something from a module that FSDP manages: a parameter is there only while it is gathered."""
    while source is not None:
        if isinstance(source, FSDPNNModuleSource):
            return True
        source = getattr(source, "base", None)
    return False


def cpp_compiler() -> str:
    """The command of the C++ compiler that Inductor calls; "" if it finds none."""
    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return ""


def queue_callback(callback: Callable[[], None]) -> None:
    """In a backward: call this when all of it is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def store_of(group: dist.ProcessGroup, prefix: str) -> Store:
    """The key-value store in which the ranks of a group met; with a prefix to all keys."""
    return PrefixStore(prefix, _get_process_group_store(group))


def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """In a graph, or out of one: of the ranks of a group that is known by its name."""
    result: torch.Tensor = _functional_collectives.all_reduce(x, op, _group_name(group))
    return result


def ranks_of(group: str) -> list[int]:
    """The ranks of a group that is known by its name."""
    return dist.get_process_group_ranks(_resolve_process_group(_group_name(group)))


def micro_pipelines(group: str) -> bool:
    """Whether Inductor makes one op of a matmul and a collective of this group: async tensor parallel."""
    return bool(inductor_config._micro_pipeline_tp) and is_symm_mem_enabled_for_group(_group_name(group))


def _group_name(group: str) -> Any:
    """A NewType to torch. Whether mypy sees that depends on the order in which it reads torch's modules."""
    return group


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a collective of a group may take."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def flattened(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh. Where it has several dimensions, all ranks of the world make it together."""
    return _flattened(mesh, dist.group.WORLD)


@functools.cache
def _flattened(mesh: DeviceMesh, _world: Any) -> dist.ProcessGroup:
    """A mesh of the same ranks equals that of a world that was there before."""
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()


def context_for_later() -> TracingContext:
    """The context of what is compiled now, to compile it once more when it is called.

    Without the notes of DDP's optimizer, which splits a graph and counts the compilations of its parts.
    """
    context = copy.copy(TracingContext.get())
    context.ddp_optimizer_ctx, context.fakify_first_call = None, False
    return context


@contextlib.contextmanager
def cuts_fast() -> Iterator[None]:
    """Within it, networkx, of which torch's partitioner is a user, finds a minimum cut by Boykov and Kolmogorov.

    The cut is the one that its own choice, preflow-push, finds: both take for the sink's side all that still reaches
    it, which is the same for every maximum flow. That one takes several times as long on the graphs of training.
    """
    import networkx  # type: ignore[import-untyped]
    from networkx.algorithms.flow import boykov_kolmogorov  # type: ignore[import-untyped]

    plain = networkx.minimum_cut
    networkx.minimum_cut = functools.partial(plain, flow_func=boykov_kolmogorov)
    try:
        yield
    finally:
        networkx.minimum_cut = plain


def as_fakes(inputs: Sequence[Any]) -> list[Any]:
    """Return inputs with fakes for tensors, those that AOTAutograd makes of them, to compile a graph once more.

    In the context of the compilation, which knows the sizes that are symbols as long as the tensors are there.
    """
    mode = detect_fake_mode(inputs)
    if mode is None:
        return list(inputs)
    return [to_fake_tensor(x, mode) if isinstance(x, torch.Tensor) and not is_fake(x) else x for x in inputs]


def first_call_is_fake() -> bool:
    """Whether what is compiled now will be called on fake tensors first.

    DDP's optimizer does so with each part of a graph, to know the strides of its results.
    """
    context = TracingContext.try_get()
    return context is not None and context.fakify_first_call


def ddp_goes_on() -> bool:
    """In a forward: whether it is one of DistributedDataParallel under `no_sync`, of a step that others complete."""
    module = DistributedDataParallel._active_ddp_module
    return module is not None and not module.require_backward_grad_sync


def ddp_joins() -> bool:
    """In a forward: whether it is one of DistributedDataParallel whose ranks may come to their end one by one."""
    module = DistributedDataParallel._active_ddp_module
    return module is not None and module._join_config.enable


@functools.cache
def before_eager_optimizers(callback: Callable[[torch.optim.Optimizer], None]) -> None:
    """From now on, call this before each step of any optimizer that runs op by op; once, however often this is said.

    Not within what Dynamo traces: it calls hooks in a loop, and if one broke its graph, it would have all of an
    optimizer's step run op by op.
    """

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            callback(optimizer)

    register_optimizer_step_pre_hook(hook)


@dataclass(frozen=True)
class PipelineCall:
    """A call that `torch.distributed.pipelining` makes: of a stage's module, or of the loss behind the last one.

    microbatch: None where the stage only finds out the shapes of what it returns. Its input is memory that nothing has
    been written to then, and the gradient of its result is 1.
    """

    stage: Any
    microbatch: int | None

    @property
    def has_rank_of_its_own(self) -> bool:
        """Whether the pipeline is over all ranks, so that no other rank has this stage."""
        return dist.get_world_size(self.stage.group) == dist.get_world_size()


def pipeline_call() -> PipelineCall | None:
    """In a forward: the call of a pipeline's that it is in, or None."""
    if "torch.distributed.pipelining" not in sys.modules:
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
    """{id of the code that makes such calls: the names in it of the stage, and of the microbatch or ""}.

    By id: what Dynamo makes to resume a function may have constants that have no hash, and so has its code none.
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
    """The module of a pipeline's stage; anything else as it is."""
    if "torch.distributed.pipelining" not in sys.modules:
        return stage
    with required_names():
        from torch.distributed.pipelining.stage import _PipelineStageBase

    return stage.submod if isinstance(stage, _PipelineStageBase) else stage


__all__ = [
    "CACHEABLE",
    "COMPOSITE",
    "EXACT_INPUTS",
    "FORCE_STRIDE_ORDER",
    "MODE_CHANGES",
    "MODULE_CALL",
    "RUNS_BACKWARD",
    "TAKES_LISTS_OF_PASSES",
    "BaseSchedulerNode",
    "CheckpointFunction",
    "CodeGen",
    "CompileContext",
    "ConcatKernel",
    "ConstantSource",
    "CustomGraphPass",
    "CustomOpDef",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "FixedTritonConfig",
    "ForeachKernelSchedulerNode",
    "FusedSchedulerNode",
    "GraphLowering",
    "GraphTransformObserver",
    "HigherOrderOperator",
    "InductorChoices",
    "InductorError",
    "Loss",
    "MemoryDep",
    "MutationLayoutSHOULDREMOVE",
    "NopKernelSchedulerNode",
    "OpOverload",
    "OpOverloadPacket",
    "PipelineCall",
    "Pointwise",
    "RestartAnalysis",
    "SchedulerNode",
    "SkipFrame",
    "Store",
    "TensorBox",
    "TorchDispatchMode",
    "TorchDynamoException",
    "TracingContext",
    "TritonOverrides",
    "Virtualized",
    "_CheckpointFrame",
    "all_compilations",
    "all_reduce",
    "aot_autograd",
    "around_compilations",
    "as_fakes",
    "before_eager_optimizers",
    "cache_dir",
    "callback_handler",
    "cancel_compilations",
    "compilations",
    "compile_fx",
    "compile_fx_inner",
    "compiled_scope",
    "context_for_later",
    "context_of",
    "counters",
    "cpp_compiler",
    "current_graph_task_id",
    "cuts_fast",
    "ddp_goes_on",
    "ddp_joins",
    "detect_fake_mode",
    "device_interface",
    "disabled_by",
    "disabled_functions",
    "dynamo_config",
    "dynamo_is_on",
    "enable_python_dispatcher",
    "ensure_device_guard",
    "first_call_is_fake",
    "flattened",
    "frames_op_by_op",
    "functorch_config",
    "gathered_parameters",
    "get_hash_for_files",
    "graph_break_reasons",
    "hint_of",
    "inductor_compile_fx",
    "inductor_config",
    "inductor_debug",
    "inductor_lowering",
    "inductor_ops",
    "inductor_post_grad",
    "is_alias_of",
    "is_of_fsdp",
    "kernel_keys",
    "kernel_nodes",
    "linear",
    "list_mode_options",
    "make_boxed_func",
    "make_wrapper_subclass",
    "micro_pipelines",
    "min_cut_partition",
    "module_of_stage",
    "onednn_multiplies",
    "only_run_what_is_compiled",
    "optimizers_ranges_ignored",
    "pipeline_call",
    "pytree",
    "queue_callback",
    "ranks_of",
    "running_modules",
    "select_decomp_table",
    "set_grad_enabled",
    "skip_code",
    "skips_for_good",
    "store_of",
    "timeout_of",
    "top_saved_tensors_hooks",
    "torch_triton",
    "trace_structured",
    "tracing",
    "triton_combo_kernel",
    "triton_helpers",
    "unset_fake_temporarily",
    "why_compiled_again",
]
