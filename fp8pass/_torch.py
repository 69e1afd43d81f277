"""Every private torch name that fp8pass relies on, so that an upgrade of torch is a diff of this file.

Checked with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters, get_metrics_context
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_partition
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass, inductor_prims, list_mode_options
from torch._inductor import debug as inductor_debug
from torch._inductor import lowering as inductor_lowering
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import triton_combo_kernel
from torch._inductor.codegen.triton import FixedTritonConfig, TritonOverrides
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ConcatKernel, MutationLayoutSHOULDREMOVE, Pointwise, TensorBox
from torch._inductor.scheduler import ForeachKernelSchedulerNode, FusedSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V as Virtualized
from torch._inductor.virtualized import ops as inductor_ops
from torch._logging._internal import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

current_graph_task_id = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread; -1 outside of any."""

EXACT_INPUTS = "eager_input_vals"
"""Metadata of a node: the fake tensors (args, kwargs) whose strides Inductor gives its inputs."""

CACHEABLE = "unsafe_marked_cacheable_functions"
"""Setting of Inductor: {name of a function: hash}. AOTAutograd caches no graph that calls any other."""

MODE_CHANGES = frozenset(
    {torch._C._set_grad_enabled, _enter_autocast, _exit_autocast, _enter_inference_mode, _exit_inference_mode}
)
"""Calls in Dynamo's graph from which on others mean something else."""

is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]
"""Whether two tensors share storage."""

top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost hooks for saved tensors, (pack, unpack), or None."""

FORCE_STRIDE_ORDER = inductor_prims.force_stride_order
"""The op that makes Inductor lay a tensor out in the order of given strides; nothing if it does so anyway."""


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


__all__ = [
    "CACHEABLE",
    "EXACT_INPUTS",
    "FORCE_STRIDE_ORDER",
    "MODE_CHANGES",
    "TAKES_LISTS_OF_PASSES",
    "CheckpointFunction",
    "CodeGen",
    "CompileContext",
    "ConcatKernel",
    "ConstantSource",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "FixedTritonConfig",
    "ForeachKernelSchedulerNode",
    "FusedSchedulerNode",
    "GraphLowering",
    "InductorChoices",
    "MutationLayoutSHOULDREMOVE",
    "Pointwise",
    "SchedulerNode",
    "TensorBox",
    "TorchDispatchMode",
    "TorchDynamoException",
    "TracingContext",
    "TritonOverrides",
    "Virtualized",
    "_CheckpointFrame",
    "aot_autograd",
    "compile_fx",
    "compile_fx_inner",
    "counters",
    "current_graph_task_id",
    "detect_fake_mode",
    "dynamo_config",
    "enable_python_dispatcher",
    "functorch_config",
    "get_hash_for_files",
    "hint_of",
    "inductor_config",
    "inductor_lowering",
    "inductor_ops",
    "is_alias_of",
    "kernel_nodes",
    "list_mode_options",
    "make_boxed_func",
    "min_cut_partition",
    "pytree",
    "select_decomp_table",
    "top_saved_tensors_hooks",
    "trace_structured",
    "tracing",
    "triton_combo_kernel",
    "unset_fake_temporarily",
    "why_compiled_again",
]
