"""Fuse a matmul with the ops after it: one kernel whose epilogue quantizes the result, and takes its amax.

before   y: bf16[M, N]     = _scaled_mm(a, b, s_a, s_b, bias)
         h: bf16[M, N]     = gelu(y)                                any elementwise ops, on other tensors too
         h_q: f8[M, N]     = quantize(h, scale);  h_t: f8[N, M] = clone(permute(h_q))
         amax: bf16[]      = amax(amax(abs(h), -1))
         g: bf16[N]        = sum(h, 0)                              the gradient of a bias, where there is one
after    h_q, h_t, tiles: bf16[T], sums: f32[R, N] = kernel(a, b, s_a, s_b, bias, scale)
         amax              = amax(tiles);  g = sum(sums, 0)
changes  nothing: the kernel computes what Inductor's would

The kernel also writes y, or one later tensor, if something else reads it; and it quantizes tensors that are computed
from what it reads anyway, as the backward of an activation reads the tensor from which its forward is recomputed.

Only on GPUs, and only if the scale does not depend on y, as delayed scaling makes it.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fp8pass import hardware
from fp8pass._torch import call_of_kernel, triton_kernel_wrapper_functional
from fp8pass.fused.choice import why_apart
from fp8pass.fused.epilogue import CannotFuse, written
from fp8pass.fused.source import Matmul, Output, Plan, kernel_of
from fp8pass.fused.tiles import ANY, choose
from fp8pass.graph.builder import Builder, is_tensor, val
from fp8pass.graph.pass_base import Context
from fp8pass.hardware import target_of
from fp8pass.node_meta import GEMM
from fp8pass.passes.common.patterns import (
    CASTS,
    RESHAPES,
    as_node,
    aten,
    dtype_name,
    dtype_of,
    first,
    is_elementwise,
    move_before,
    prims,
    reach,
)
from fp8pass.passes.common.tiles import is_amax, of_amax, readers_nearby
from fp8pass.passes.common.tiles import match as transposed
from fp8pass.quant.kernel_ops import QUANTIZE

log = logging.getLogger(__name__)
_CONSTANTS = {aten.full.default, aten.scalar_tensor.default}


@dataclass
class Match:
    """A matmul, and the nodes after it that go into its kernel.

    nodes: the elementwise ops, in the graph's order, with those of other quantized tensors that read the same inputs.
    inputs: the tensors that these read, by `_fitting`.
    """

    product: fx.Node
    nodes: list[fx.Node]
    quantizes: list[fx.Node]
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The transposed copies, each with the quantize that it copies."""
    amaxes: list[fx.Node] = field(default_factory=list)
    sums: list[fx.Node] = field(default_factory=list)
    kept: fx.Node | None = None
    """The product, or a later tensor, if something else reads it."""

    @property
    def replaced(self) -> set[fx.Node]:
        """The nodes that the kernel's outputs replace."""
        return {*self.quantizes, *self.copies, *self.amaxes, *self.sums}

    def is_read(self, node: fx.Node) -> bool:
        """Return whether a node outside of the kernel is still needed when the kernel's outputs replace others."""
        if node is self.product or node in self.nodes or node in self.replaced:
            return False
        return not node.users or any(map(self.is_read, node.users))

    @property
    def inputs(self) -> list[fx.Node]:
        """The tensors that the epilogue reads."""
        inside = {self.product, *self.nodes}
        return list(dict.fromkeys(i for n in self.nodes for i in n.all_input_nodes if i not in inside))


def match(product: fx.Node) -> Match | None:
    """Return what can go into the kernel of `product`, a `_scaled_mm`; None if no quantize can."""
    if product.target is not aten._scaled_mm.default or val(product).device.type != "cuda":
        return None
    if not all(isinstance(size, int) for a in (product, *product.args[:2]) for size in val(as_node(a)).shape):
        return None
    after = _elementwise_after(product)
    quantizes = [n for n in after if n.target is QUANTIZE]
    if not quantizes:
        return None
    m = Match(product, [], quantizes)
    m.amaxes = [n for x in after for n in readers_nearby(x) if is_amax(n) and of_amax(n) is x]
    m.sums = [n for x in after for n in x.users if _is_column_sum(n, product)]
    ends = [*quantizes, *map(of_amax, m.amaxes), *map(first, m.sums)]
    _add(m, reach(ends, lambda n: (i for i in n.all_input_nodes if i in after)))
    _add_what_inputs_are_computed_from(m)
    _add_companions(m)
    m.copies = {t.copy: t.x_q for n in product.graph.nodes if (t := transposed(n)) and t.x_q in m.quantizes}
    m.kept = _kept(m)
    return m


def _add(m: Match, nodes: Iterable[fx.Node]) -> None:
    m.nodes = sorted({*m.nodes, *nodes} - {m.product})


def _add_what_inputs_are_computed_from(m: Match) -> None:
    """Compute inputs in the kernel that cost no further reads there: constants, and functions of one other tensor."""
    known = set[fx.Node]()
    while True:
        found = {n: _computed_from(n, m.product) for n in m.inputs}
        known |= {leaf for n, (chain, leaves) in found.items() if len(leaves) <= 1 for leaf in leaves}
        taken = [n for n, (chain, leaves) in found.items() if chain and (len(leaves) <= 1 or leaves <= known)]
        if not taken:
            return
        _add(m, (n for x in taken for n in found[x][0]))


def _computed_from(node: fx.Node, product: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the elementwise ops that compute `node`, itself among them, and the matrices that they read.

    No ops, and the node itself, if it is not computed elementwise.
    """
    if node.target in _CONSTANTS:
        return {node}, set()

    def goes_on(n: fx.Node) -> bool:
        return n.op == "call_function" and _fits(n, product)

    if not goes_on(node):
        return set(), {node} if _is_matrix(node, product) else set()
    met = reach([node], lambda n: n.all_input_nodes, goes_on)
    chain = {n for n in met if goes_on(n) or n.target in _CONSTANTS}
    return chain, {n for n in met if n not in chain and val(n).numel() == val(product).numel()}


def _add_companions(m: Match) -> None:
    """Add quantized tensors that are computed from what the kernel reads anyway."""
    matrices = {n for n in m.inputs if _is_matrix(n, m.product)}
    for node in m.product.graph.nodes if matrices else ():
        if node.target is not QUANTIZE or node in m.quantizes or not _fits(node, m.product):
            continue
        chain, leaves = _computed_from(node, m.product)
        amaxes = [n for x in chain for n in readers_nearby(x) if is_amax(n) and of_amax(n) is x]
        later = reach([m.product, *m.replaced], lambda n: n.users)
        before = reach([m.product, *m.inputs, *chain], lambda n: n.all_input_nodes)
        apart = not any(n in later for n in chain) and not any(u in before for n in (node, *amaxes) for u in n.users)
        if leaves and leaves <= matrices and apart:
            m.quantizes.append(node)
            m.amaxes += amaxes
            _add(m, chain)


def _kept(m: Match) -> fx.Node | None:
    """Return the tensor that the kernel must write in high precision, because something else reads it; None if none.

    If several are read, it is the product, from which Inductor computes the others again.
    """
    inside = {m.product, *m.nodes}
    of_product = reach([m.product], lambda n: (u for u in n.users if u in inside))
    left = {n for n in of_product if n not in m.quantizes and any(map(m.is_read, n.users))}
    # a cast to float32 costs nothing where it is read
    left = {first(n) if n.target in CASTS and first(n) in inside else n for n in left}
    if len(left) == 1 and (node := next(iter(left))) and val(node).element_size() == 2:
        return node
    return m.product if left else None


def _elementwise_after(product: fx.Node) -> dict[fx.Node, None]:
    """Return `product` and the elementwise ops that are computed from it and from tensors that do not depend on it."""
    inside, outside = {product: None}, set[fx.Node]()
    node = product.next
    while node.op != "root":
        read = node.all_input_nodes
        if any(n in outside for n in read) or (any(n in inside for n in read) and not _fits(node, product)):
            outside.add(node)
        elif any(n in inside for n in read):
            inside[node] = None
        node = node.next
    return inside


def _fits(node: fx.Node, product: fx.Node) -> bool:
    """Return whether `node` is elementwise in the elements of the product, and reads what can be read tile by tile."""
    if not is_elementwise(node) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    if node.target in RESHAPES:
        return _is_matrix(node, product) and _is_matrix(first(node), product)
    moves = not (node.target in CASTS or torch.Tag.pointwise in getattr(node.target, "tags", ()))
    if moves or not _is_matrix(node, product):
        return False
    leading = val(node).shape[:-1]
    return all(_as_matrix(i, product, leading) is not None for i in node.all_input_nodes)


def _is_matrix(node: fx.Node, product: fx.Node) -> bool:
    """Return whether `node` is the product's matrix [M, N], with M as one dimension or as several."""
    if not is_tensor(node):
        return False
    value, (m, n) = val(node), val(product).shape
    return value.shape[-1:] == (n,) and value.numel() == m * n and value.is_contiguous()


def _as_matrix(node: fx.Node, product: fx.Node, leading: torch.Size) -> torch.Tensor | None:
    """Return a tensor, which broadcasts to [*leading, N], as a view that broadcasts to [M, N]; None if it can't."""
    if not is_tensor(node) or val(node).device != val(product).device:
        return None
    value, (m, n) = val(node), val(product).shape
    if value.numel() == 1:
        return value.reshape(())
    if value.shape[-1] not in (1, n):
        return None
    if all(size == 1 for size in value.shape[:-1]):
        return value.reshape(1, n)
    if value.shape[:-1] != leading:
        return None
    try:
        return value.view(m, value.shape[-1])
    except RuntimeError:  # its rows are not at equal distances
        return None


def _is_column_sum(node: fx.Node, product: fx.Node) -> bool:
    """Return whether `node` sums a tensor over all rows, in float32 or less."""
    if node.target is not aten.sum.dim_IntList or len(node.args) < 2 or val(node).dtype == torch.float64:
        return False
    x = val(first(node))
    dims = sorted(d % x.dim() for d in node.args[1] or ())  # type: ignore[union-attr]
    return dims == list(range(x.dim() - 1)) and val(node).numel() == val(product).shape[1]


@dataclass(frozen=True)
class Gpu:
    """What a kernel is made for. shared_memory: bytes for one block."""

    multiprocessors: int
    shared_memory: int
    tma: bool


def gpu_of(device: torch.device) -> Gpu:
    """Return what the device has."""
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, found.shared_memory_per_block_optin, found.major >= 9)


def plan_of(m: Match, gpu: Gpu) -> tuple[Plan, list[fx.Node]]:
    """Return the kernel's plan, and the nodes that each of its outputs replaces. Raises CannotFuse."""
    found = list(_outputs(m))
    of_product = reach([m.product], lambda n: n.users)
    results = sorted({of for _, of, _, _ in found}, key=lambda n: (n in of_product, n))
    outputs = tuple(Output(kind, results.index(of), dtype, of is m.product) for kind, of, _, dtype in found)
    matmul, epilogue = _matmul(m.product), written(_module(m, results))
    plan = Plan(matmul, epilogue, outputs, ANY, gpu.tma, 0)
    moved = plan.bytes_per_element
    tile = choose(matmul.m, matmul.n, matmul.k, moved, gpu.shared_memory, gpu.tma)
    if tile is None:
        raise CannotFuse(f"no tile whose epilogue moves {moved} bytes per element fits into {gpu.shared_memory} bytes")
    plan = replace(plan, tile=tile)
    down, across = plan.tiles()
    return replace(plan, programs=min(gpu.multiprocessors, down * across)), [instead for _, _, instead, _ in found]


def _outputs(m: Match) -> Iterator[tuple[str, fx.Node, fx.Node, torch.dtype]]:
    """Yield the kind of each output of the kernel, the node that it is made of, the node it replaces, and its dtype."""
    for node in m.amaxes:
        yield "amax", of_amax(node), node, val(node).dtype
    for node in m.sums:
        yield "sums", first(node), node, torch.float32
    for node in m.quantizes:
        if any(map(m.is_read, node.users)):
            yield "rows", node, node, val(node).dtype
    for copy, node in m.copies.items():
        yield "columns", node, copy, val(node).dtype
    if m.kept is not None:
        yield "rows", m.kept, m.kept, val(m.kept).dtype


def _matmul(product: fx.Node) -> Matmul:
    a, b, scale_a = (val(as_node(x)) for x in product.args[:3])
    given = [*product.args, *[None] * 8][:8]
    scales = "tensorwise" if scale_a.numel() == 1 else "rowwise"
    strides = a.stride()[0], b.stride()[1]
    bias = given[4] is not None
    return Matmul(a.shape[0], b.shape[1], a.shape[1], strides, scales, bias, val(product).dtype, bool(given[7]))


def _module(m: Match, results: list[fx.Node]) -> fx.GraphModule:
    """Return the epilogue as a graph of its own on matrices [M, N]; its first input is the product."""
    graph, product = fx.Graph(), m.product
    made = {product: graph.placeholder("product")}
    made[product].meta["val"] = val(product)
    for reader in m.nodes:
        for node in reader.all_input_nodes:
            if node not in made and node not in m.nodes:
                leading = val(first(reader) if reader.target in RESHAPES else reader).shape[:-1]
                made[node] = graph.placeholder(f"in{len(made)}")
                made[node].meta["val"] = _as_matrix(node, product, leading)
    for node in m.nodes:
        made[node] = made[first(node)] if node.target in RESHAPES else graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[n] for n in results))
    return fx.GraphModule({}, graph)


class FuseMatmuls:
    """Fuses the matmuls of one graph."""

    name = "fuse_matmuls"

    def run(self, graph: fx.Graph, context: Context) -> int:
        """Rewrite the matmuls whose result is quantized, and nothing prevents it; return their number."""
        applied = 0
        if context.config.epilogues == "off":
            return 0
        for product in [n for n in graph.nodes if n.target is aten._scaled_mm.default]:
            if (m := match(product)) is None:
                continue
            device = val(product).device
            try:
                plan, replaced = plan_of(m, gpu_of(device))
                check(plan, context, device)
            except CannotFuse as reason:
                log.debug("%s is not fused: %s", product.name, reason)
                continue
            _rewrite(context.builder(graph, self.name), m, plan, replaced)
            context.fused[product.meta.get(GEMM, "")] = _said(m, plan)
            applied += 1
        if applied:
            graph.eliminate_dead_code()
        return applied


def check(plan: Plan, context: Context, device: torch.device) -> None:
    """Raise CannotFuse if two kernels are better than one."""
    target = target_of(device, context.config.target)
    if reason := why_apart(context.config.epilogues, plan, target, hardware.pretended_device is not None):
        raise CannotFuse(reason)


def _said(m: Match, plan: Plan) -> str:
    """Return a sentence for the matmul's verdict."""
    kept = f" and writes {dtype_name(dtype_of(m.kept))} too" if m.kept is not None else ""
    dtypes = dict.fromkeys(dtype_name(dtype_of(q)).removeprefix("float8_") for q in m.quantizes)
    saved = (plan.bytes_apart - plan.extra_bytes) / 1e6
    return f"the kernel computes the ops after the product, quantizes to {', '.join(dtypes)}{kept}: {saved:.0f} MB less"


def _rewrite(build: Builder, m: Match, plan: Plan, replaced: list[fx.Node]) -> None:
    given = [a for a in m.product.args[:5] if isinstance(a, fx.Node)]
    at = min([m.product.next, *(user for node in replaced for user in node.users)])
    move_before(at, [*given, *m.inputs])
    operands = dict(zip(["a", "b", "scale_a", "scale_b", "bias"], given, strict=False))
    inputs = {f"in{i}": node for i, node in enumerate(m.inputs, 1)}
    device = val(m.product).device
    outputs = {
        f"out{i}": build.emit(at, aten.empty.memory_format, plan.shape(o), dtype=o.dtype, device=device)
        for i, o in enumerate(plan.outputs)
    }
    tensors = {**operands, **inputs, **outputs}
    call = call_of_kernel(kernel_of(plan), plan.programs, {p: tensors[p] for p in plan.parameters}, list(outputs))
    result = build.emit(at, triton_kernel_wrapper_functional, **call)
    for name, output, node in zip(outputs, plan.outputs, replaced, strict=True):
        made = build.emit(at, operator.getitem, result, name)
        node.replace_all_uses_with(_finished(build, at, output, node, made))


def _finished(build: Builder, at: fx.Node, output: Output, node: fx.Node, made: fx.Node) -> fx.Node:
    """Emit what is left to do after the kernel: the last stage of reductions, and shapes."""
    if output.kind == "amax":
        return build.emit(at, aten.amax.default, made)
    if output.kind == "sums":
        made = build.emit(at, aten.sum.dim_IntList, made, [0])
        if val(node).dtype != torch.float32:
            made = build.emit(at, prims.convert_element_type.default, made, val(node).dtype)
    shape = list(val(node).shape)
    return made if list(val(made).shape) == shape else build.emit(at, aten.reshape.default, made, shape)
