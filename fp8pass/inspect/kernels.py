"""List the kernels of generated code with their work, bytes and predicted times: the rows of `fp8pass inspect`.

Reads Inductor's scheduler after it has generated code: see `fake_cuda.py`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import (
    BaseSchedulerNode,
    ForeachKernelSchedulerNode,
    MemoryDep,
    NopKernelSchedulerNode,
    Virtualized,
    hint_of,
    kernel_called,
)
from fp8pass.base.names import module_path
from fp8pass.base.node_meta import MADE_BY
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import is_tensor, named_arguments
from fp8pass.graph.sizes import expression
from fp8pass.hardware import Target
from fp8pass.inspect.fake_cuda import Generated, Launch
from fp8pass.inspect.inspector import Kernel
from fp8pass.passes.kernels.combo_kernels import SMALL_KERNEL_BYTES
from fp8pass.passes.kernels.fused_plan import Plan
from fp8pass.passes.kernels.matmul_source import NAME
from fp8pass.passes.kernels.requantize_kernel import NAME as REQUANTIZE
from fp8pass.passes.kernels.tiles_source import NAME as TILES
from fp8pass.passes.kernels.tiles_source import KernelOp, TilesPlan
from fp8pass.passes.kernels.when_to_fuse import epilogue_seconds
from fp8pass.roofline import gemm_seconds, memory_seconds

ATTENTION_SHARE = 0.35
"""The share of the BF16 peak that FlashAttention-2 reaches on an H100: abstract of the FlashAttention-3 paper."""
CUDNN_SHARES = 0.51, 0.38
"""The shares that cuDNN's forward and backward reached on an H200, as torch calls it there: bench/kernel_times.py."""

aten = torch.ops.aten


def kernel_rows(generated: Generated, graph: str, target: Target) -> list[Kernel]:
    """Return all kernels of one graph, in the order in which they run."""
    with Virtualized.set_graph_handler(generated.lowering):
        nodes = [n for n in generated.lowering.scheduler.nodes if not isinstance(n, NopKernelSchedulerNode)]
        order = {node: i for i, node in enumerate(generated.module.graph.nodes)}
        return [row for node in nodes for row in _rows(node, generated.launches, graph, order, target)]


def modules_of(generated: Generated, buffer: str) -> str:
    """Return the paths of the modules that a buffer of the generated code belongs to; "" if there is no such buffer."""
    made: Any = generated.lowering.name_to_buffer.get(buffer)
    return "" if made is None else _modules(sorted(made.get_origins()))


def _rows(
    node: BaseSchedulerNode, launches: Sequence[Launch], graph: str, order: dict[fx.Node, int], target: Target
) -> Iterator[Kernel]:
    read, written = _bytes(node)
    origins = _origins(node, order)
    of_node = [launch for launch in launches if launch.node is node]
    if node.is_extern():
        # an ATen call of our own kernels is listed by its plan, not by Inductor's count of bytes: see `_extern`
        if origin := _extern_op(node, origins):
            row = _extern(origin, graph, read, written, target)
            yield replace(row, name=of_node[0].name) if of_node else row  # a fused matmul is launched
        return
    if not of_node:  # no launch is recorded for this node alone
        return
    scratch = sum(launch.scratch for launch in of_node)
    first = Kernel(
        graph, "triton", of_node[0].name, _what(node, order), _modules(origins), read, written, scratch,
        memory_seconds(target, read + written + scratch, _share(node)),
    )  # fmt: skip
    yield first
    for launch in of_node[1:]:  # the scheduler counts their bytes with the first launch
        op = launch.name.startswith("aten.")
        what = f"{launch.name.removeprefix('aten.')} of partial results" if op else f"{first.what}, continued"
        yield replace(
            first, kind="extern" if op else "triton", name=launch.name, what=what, bytes_read=0, bytes_written=0,
            scratch=launch.scratch, seconds=memory_seconds(target, launch.scratch),
        )  # fmt: skip


def _parts(node: BaseSchedulerNode) -> Sequence[BaseSchedulerNode]:
    """Return the kernels of a group that `combo_kernels.py` merged into one launch; [node] for any other kernel."""
    return node.snodes if isinstance(node, ForeachKernelSchedulerNode) else [node]


def _bytes(node: BaseSchedulerNode) -> tuple[int, int]:
    """Return (read, written), for a group the sums over its kernels: none reads what another of them writes."""
    read, written = zip(*map(_bytes_of_one, _parts(node)), strict=True)
    return sum(read), sum(written)


def _bytes_of_one(node: BaseSchedulerNode) -> tuple[int, int]:
    """Return (read, written), the terms of `get_read_write_buffers_sizes`, without reads of buffers that it writes.

    Inductor makes a kernel depend on the whole of an input that it writes into, even if it does not read it; such
    dependencies are not `MemoryDep`s and do not count as reads. It counts a buffer as written that has users in other
    kernels by then, also if code generation found that none of them reads it, and does not store it.
    """
    moved = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    outputs = {dep.name for dep in node.read_writes.writes} - Virtualized.graph.removed_buffers
    written = sum(size for name, size in moved.items() if name in outputs)
    read = {dep.name for dep in node.read_writes.reads if node.is_extern() or isinstance(dep, MemoryDep)}
    return sum(size for name, size in moved.items() if name in read - outputs), written


def _origins(node: BaseSchedulerNode, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Return the graph's nodes that a kernel computes, in the graph's order."""
    origins = {o for part in node.get_nodes() if part.node is not None for o in part.node.get_origins()}
    return sorted((o for o in origins if o in order), key=order.__getitem__)


# --- GEMMs, attention, other ops of ATen


def _extern_op(node: BaseSchedulerNode, origins: Sequence[fx.Node]) -> fx.Node | None:
    """Return the graph's node for a call of ATen; None for a MultiOutput, which only unpacks such a call's outputs."""
    if type(node.node).__name__ == "MultiOutput":
        return None
    origin = node.node.get_origin_node() if node.node is not None else None
    return origin or (origins[-1] if origins else None)


def _extern(op: fx.Node, graph: str, read: int, written: int, target: Target) -> Kernel:
    name = str(op.target).removesuffix(".default")
    if (plan := getattr(kernel_called(op), "plan", None)) is not None:  # other kernels are the user's
        return _fused(op, plan, graph, target)
    if (again := getattr(kernel_called(op), "requantize", None)) is not None:
        words = f"quantize {short(again.dtype)} x {1 + again.transposed} again if saturated"
        read = 5  # the scale and the flag: in a step that does not saturate, that is all
        return Kernel(graph, "triton", REQUANTIZE, words, _modules([op]), read, 0, 0, memory_seconds(target, read))
    if (tiles := getattr(kernel_called(op), "tiles", None)) is not None:
        return _in_tiles(op, tiles, graph, target)
    if (gemm := _gemm(op)) is not None:
        kind, what, seconds = "gemm", _in_symbols(op).text(), gemm.seconds(target)
        read = sum(_val(a).nbytes for a in op.all_input_nodes if is_tensor(a))  # the scheduler counts whole buffers
    else:
        kind, what, seconds = (
            "extern",
            _called(op) or name.removeprefix("aten."),
            memory_seconds(target, read + written),
        )
        if "scaled_dot_product" in name:
            share = CUDNN_SHARES["backward" in name] if target.capability == (9, 0) else ATTENTION_SHARE
            seconds = max(seconds, _attention_flops(op) / (target.bf16_peak * share))
    row = Kernel(graph, kind, name, what, _modules([op]), read, written, 0, seconds)
    return row if gemm is None else replace(row, **_in_symbols(op).formulas(target))


def _fused(op: fx.Node, plan: Plan, graph: str, target: Target) -> Kernel:
    """Return the row of a matmul whose kernel also computes the ops after it."""
    given, tensors, read, written = _given(op)
    a, b, m = tensors["a"], tensors["b"], plan.matmul
    gemm = _Gemm(1, m.m, m.k, b.shape[1], a.dtype, b.dtype, m.dtype, m.scales)
    epilogue = read + written - a.nbytes - b.nbytes - m.m * b.shape[1] * m.dtype.itemsize
    seconds = gemm.seconds(target) + epilogue_seconds(plan, target)
    in_symbols = replace(gemm, m=expression(given["a"].meta["val"].shape[0]))
    what = f"{in_symbols.text()}, its epilogue writes {', '.join(_made(plan))}"
    row = Kernel(graph, "gemm", NAME, what, _modules([given["out0"]]), read, written, 0, seconds, epilogue=epilogue)
    return replace(row, **in_symbols.formulas(target))


def _given(op: fx.Node) -> tuple[dict[str, Any], dict[str, Tensor], int, int]:
    """Return the arguments of a kernel of ours, the tensors among them, and the bytes that it reads and writes."""
    given: Any = op.kwargs["kwargs"]
    tensors = {name: _val(node) for name, node in given.items() if is_tensor(node)}
    written = sum(x.nbytes for name, x in tensors.items() if name.startswith("out"))
    return given, tensors, sum(x.nbytes for x in tensors.values()) - written, written


def _made(plan: Plan | TilesPlan) -> list[str]:
    """Return the matrices that a kernel writes, by dtype: "e4m3 x 2"."""
    made = Counter(short(o.dtype) for o in plan.outputs if o.kind in ("rows", "columns"))
    return [f"{dtype} x {n}" if n > 1 else dtype for dtype, n in made.items()]


def _in_tiles(op: fx.Node, plan: TilesPlan, graph: str, target: Target) -> Kernel:
    """Return the row of a kernel that quantizes tile by tile."""
    given, _, read, written = _given(op)
    takes_amax = any(o.kind.startswith("amax") for o in plan.outputs)
    words = [*dict.fromkeys(filter(None, map(_word, plan.ops))), *(["amax"] if takes_amax else [])]
    words += [f"quantize {made}" for made in _made(plan)]
    seconds = memory_seconds(target, read + written, "tiles_share")
    return Kernel(graph, "triton", TILES, ", ".join(words), _modules([given["out0"]]), read, written, 0, seconds)


@dataclass(frozen=True)
class _Gemm:
    """A matmul. batches, m, k, n: ints, or expressions of torch's symbols."""

    batches: Any
    m: Any
    k: Any
    n: Any
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    scaling: str

    def text(self) -> str:
        """Return the shapes, dtypes and scaling in words: "[8192, 4096] x [4096, 4096] e4m3 x e4m3 rowwise"."""
        times = "" if self.batches == 1 else f"{self.batches} x "
        kinds = f"{short(self.a)} x {short(self.b)}" if self.a.itemsize == 1 else short(self.a)
        return f"{times}[{self.m}, {self.k}] x [{self.k}, {self.n}] {kinds}{f' {self.scaling}' if self.scaling else ''}"

    def seconds(self, target: Target) -> Any:
        """Predict the time of all batches."""
        scaling = self.scaling or "tensorwise"
        return self.batches * gemm_seconds(target, self.m, self.k, self.n, self.a, self.out.itemsize, scaling)

    def formulas(self, target: Target) -> dict[str, Any]:
        """Return the fields of a row that are expressions; {} if no size varies."""
        elements = self.m * self.k, self.k * self.n, self.m * self.n
        moved = self.batches * sum(x * d.itemsize for x, d in zip(elements, (self.a, self.b, self.out), strict=True))
        if isinstance(moved, int):
            return {}
        return {"bytes_formula": str(moved), "seconds_formula": str(self.seconds(target))}


# Matmuls: the position of the first matrix among their arguments; the second matrix comes next.
_MATRICES = {
    "mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0, "_scaled_grouped_mm": 0,
    "_scaled_mm": 0, "_scaled_addmm": 1, "_scaled_addmm_": 1, "added_gradient": 0,
}  # fmt: skip


def _gemm(op: fx.Node, size: Callable[[Any], Any] = hint_of) -> _Gemm | None:
    """Return a call's matmul; None if it is none. size: what to make of a size."""
    name = getattr(op.target, "__name__", "").partition(".")[0]
    first = _MATRICES.get(name)
    if first is None or getattr(op.target, "namespace", "") not in ("aten", "fp8pass"):
        return None
    a, b = (_val(op.args[i]) for i in (first, first + 1))
    scaling = "rowwise" if "grouped" in name and "scaled" in name else "tensorwise" if a.itemsize == 1 else ""
    if name == "_scaled_mm":
        scaling = _scaling(_val(op.args[2]), a)
    of_a, of_b = (tuple(map(size, op.args[i].meta["val"].shape)) for i in (first, first + 1))  # type: ignore[union-attr]
    batches = of_a[0] if a.dim() == 3 else 1
    m, k = of_a[-2:]
    if "grouped" in name and a.dim() == 2:  # average group: a share of the rows, or of the summed dimension
        batches = len(_val(op.args[4 if scaling else 2]))
        m, k = (-(-m // batches), k) if b.dim() == 3 else (m, -(-k // batches))
    return _Gemm(batches, m, k, of_b[-1], a.dtype, b.dtype, op.meta["val"].dtype, scaling)


def _in_symbols(op: fx.Node) -> _Gemm:
    gemm = _gemm(op, expression)
    assert gemm is not None
    return gemm


def _scaling(scale: Tensor, a: Tensor) -> str:
    """Return the recipe whose scales have this layout: "tensorwise", "rowwise", "blockwise" or "mxfp8"."""
    if scale.numel() == 1:
        return "tensorwise"
    if scale.dtype == torch.float8_e8m0fnu:
        return "mxfp8"
    return "rowwise" if scale.numel() == a.shape[0] else "blockwise"


def _val(node: Any) -> Tensor:
    """Return the value of a node, with the hints of symbolic sizes, which are the sizes of the inputs given."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    if all(isinstance(size, int) for size in value.shape):
        return value
    sizes, strides = (tuple(map(hint_of, values)) for values in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _attention_flops(op: fx.Node) -> float:
    """Count the FLOPs of all GEMMs in attention: two in forward, five in backward; half of that if it is causal."""
    given = named_arguments(op)
    q, k, v = (_val(given[name]) for name in ("query", "key", "value"))
    one = 2 * math.prod(q.shape[:-1]) * k.shape[-2]
    forward, backward = one * (q.shape[-1] + v.shape[-1]), one * (3 * q.shape[-1] + 2 * v.shape[-1])
    # Backward: S = Q K.T, dQ = dS K and dK = dS.T Q have the query's head dim, dP = dO V.T and dV = P.T dO the value's.
    return (backward if "backward" in str(op.target) else forward) * (0.5 if given.get("is_causal") else 1)


# --- words


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype in tables: "bf16", "e4m3"."""
    names = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
    return names.get(dtype) or str(dtype).removeprefix("torch.float8_").removeprefix("torch.").removesuffix("fn")


_QUIET = {
    "Linear", "_qdq_operand", "_scaled_mm", "_to_copy", "_unsafe_view", "abs", "addmm", "alias", "amax", "as_strided",
    "baddbmm", "bfloat16", "bitwise_and", "bmm", "cat", "chunk", "clamp", "clamp_max", "clamp_min", "clone",
    "constant_pad_nd", "contiguous", "convert_element_type", "copy_", "detach", "empty", "eq", "expand", "fill",
    "flatten", "float", "full", "full_like", "getitem", "gt", "inductor_force_stride_order", "linear", "lt", "matmul",
    "max", "maximum", "mm", "ne", "new_zeros", "permute", "produce_trampoline_autograd_apply", "qdq_gradient",
    "qdq_no_grad", "qdq_operand", "reciprocal", "repeat_interleave", "reshape", "scalar_tensor", "select",
    "select_gradients", "slice", "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "t", "to",
    "trampoline_autograd_apply", "transpose", "triton_kernel_wrapper_mutation", "type_as", "unbind", "unflatten",
    "unsqueeze", "view", "view_as", "where", "zeros_like",
}  # fmt: skip
"""Data movement, conversions and the parts of quantizing: `_what` does not name these but "copy", "quantize", ..."""
_CONSTANTS = {aten.full.default, aten.scalar_tensor.default}


def _what(node: BaseSchedulerNode, order: dict[fx.Node, int]) -> str:
    """Describe a kernel in a few words; for a group, the words of its kernels, with counts."""
    counts = Counter(word for part in _parts(node) for word in _words(part, _origins(part, order)))
    return ", ".join(f"{word} x {n}" if n > 1 else word for word, n in counts.items())


def _words(node: BaseSchedulerNode, origins: Sequence[fx.Node]) -> list[str]:
    """Return the user's functions that a kernel computes, its updates of scale state, and the FP8 that it writes."""
    computed = [o for o in origins if o.target not in _CONSTANTS]
    read, written = _bytes(node)
    if read <= SMALL_KERNEL_BYTES and any(o.meta.get(MADE_BY) == LAST_STAGE for o in computed):
        ends = any(part.is_reduction() for part in node.get_nodes())
        return ["last stage of amax, scales, records"] if ends else ["scales"]
    words = list(dict.fromkeys(filter(None, map(_word, computed))))
    reductions = {_reduction(part) for part in node.get_nodes() if part.is_reduction()}
    if "max" in reductions and BEGIN_STEP not in words:
        words.append("last stage of amax" if max(read, written) <= SMALL_KERNEL_BYTES and written < 16 else "amax")
    made = _fp8_made(node)
    if (reductions or not made) and any(o.target is aten.reciprocal.default and not _word(o) for o in computed):
        words.append("scales")
    words += made
    return words or ["scales" if written <= 16 else "copy"]


def _share(node: BaseSchedulerNode) -> str:
    """Return the share of the bandwidth, as `memory_seconds` takes it: of two tensors in FP8, one is transposed."""
    moved = node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
    outputs = {dep.name for dep in node.read_writes.writes}
    fp8 = [name for name in moved if name in outputs and Virtualized.graph.get_dtype(name) in FP8_DTYPES]
    reduces = any(part.is_reduction() for part in node.get_nodes())
    return "transposed_share" if len(fp8) > 1 else "rows_share" if reduces else "memory_share"


def _reduction(node: BaseSchedulerNode) -> str:
    """Return the kind of a reduction: "max", "sum", ..."""
    return str(getattr(getattr(node.node, "data", None), "reduction_type", ""))


def _fp8_made(node: BaseSchedulerNode) -> list[str]:
    """Return the FP8 writes of a kernel: such as "quantize e4m3 x 2" where it also writes a transposed copy.

    "copy e4m3" if all that the kernel reads is one byte per element.
    """
    moved = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    types = {name: Virtualized.graph.get_dtype(name) for name in moved}
    outputs = {dep.name for dep in node.read_writes.writes}
    verb = "copy" if all(types[name].itemsize == 1 for name in moved if name not in outputs) else "quantize"
    made = [types[name] for name in moved if name in outputs]
    return [f"{verb} {short(d)}" + (f" x {n}" if n > 1 else "") for d in FP8_DTYPES if (n := made.count(d))]


LAST_STAGE = "batch_amaxes"
"""The pass whose kernels do the last stage of amax reductions, and compute and record the scales."""
BEGIN_STEP = "begin step"
_STATE = {"begin_step": BEGIN_STEP, "scales_or_one": BEGIN_STEP}
"""Functions of delayed scaling's state, and the words for them."""


def _word(origin: fx.Node | KernelOp) -> str:
    called = "records" if origin.meta.get(MADE_BY) == "batch_records" else _called(origin)
    return _STATE.get(called, called)


_NAME = re.compile(r"<(?:built-in )?(?:function|method|class) '?([\w.]+)")
_NUMBER = re.compile(r"_\d+$")


def _called(origin: fx.Node | KernelOp) -> str:
    """Return the name of the user's function that a node comes from; "" for nodes of fp8pass and names in `_QUIET`."""
    if origin.meta.get(MADE_BY):
        return ""
    # AOTAutograd gives a node of the backward the metadata of the forward's node that it belongs to, as fwd_*.
    backward = origin.meta.get("partitioner_tag") == "is_backward"
    stack, history = origin.meta.get("fwd_source_fn_stack"), origin.meta.get("from_node")
    if backward and stack:
        name = _NUMBER.sub("", stack[-1][0])  # Dynamo numbers calls: "gelu_1"
    elif history and (match := _NAME.match(str(history[0].target))):  # of Dynamo's graph
        name = match[1].rpartition(".")[2]
    else:
        name = str(origin.meta.get("original_aten") or origin.target).removeprefix("aten.").partition(".")[0]
    name = name.removesuffix("_backward")
    return "" if name in _QUIET else f"{name} backward" if backward else name


def _modules(origins: Sequence[fx.Node]) -> str:
    """Return the paths of the modules that the nodes come from: three, and "..." for more."""
    paths: dict[str, None] = {}
    for origin in origins:
        stack = origin.meta.get("nn_module_stack") or origin.meta.get("fwd_nn_module_stack") or {}
        if stack and (path := module_path(list(stack.values())[-1][0])):
            paths[path] = None
    return ", ".join(list(paths)[:3]) + (", ..." if len(paths) > 3 else "")
