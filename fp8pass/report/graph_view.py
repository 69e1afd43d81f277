"""Convert graphs to the data that a page draws, with the generated kernels that their nodes run in.

Only names, shapes and edges of a graph are kept, and only within `draw`.
"""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, fx

from fp8pass.base._torch import (
    GraphLowering,
    Virtualized,
    functorch_config,
    inductor_config,
    kernel_nodes,
    make_boxed_func,
)
from fp8pass.base.names import module_path, short, source_of
from fp8pass.base.node_meta import GEMM, MADE_BY
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.graph.builder import multiplies, op_name
from fp8pass.graph.verdict import Gemm
from fp8pass.report.drawing import current, drawn, part_of
from fp8pass.report.report import DrawnOp, KernelCode, OpKind, Part, Picture

MOVEMENT = frozenset(
    (
        "alias", "as_strided", "clone", "contiguous", "convert_element_type", "detach", "diagonal", "empty",
        "expand", "full", "full_like", "getitem", "inductor_force_stride_order", "lift_fresh_copy", "permute",
        "reshape", "scalar_tensor", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
        "unbind", "unfold", "unsqueeze", "view",
    )
)  # fmt: skip
"""Ops that compute nothing: they rearrange, split or convert a tensor, or create a constant."""
_PARTS: tuple[Part, ...] = ("before", "forward", "backward")
_WIDE = 1 << 16
"""A tensor with at least this many elements is not a scale, an amax or a history."""


class Drawing:
    """Collects pictures. kernels: True if Inductor generates code, so that pictures name the kernel of each node."""

    def __init__(self, kernels: bool) -> None:
        self.kernels = kernels
        self.pictures: list[Picture] = []
        self._graph = -1
        self._numbers: dict[tuple[int, str], int] = {}
        """{(number of a graph of Dynamo, name of a function in it): number of its pictures}."""
        self._titles: dict[int, str] = {}
        self._number = -1
        self._state: Container[int] = ()
        self._verdicts: dict[str, Sequence[Gemm]] = {}
        self._of_number: dict[int, list[Sequence[Gemm]]] = {}
        self._named: list[tuple[_MatmulKey, DrawnOp, Sequence[Gemm]]] = []
        self._unnamed: list[tuple[_MatmulKey, DrawnOp, Part]] = []

    def begin(self) -> None:
        """Begin the next graph of Dynamo."""
        self._graph += 1

    def turn_to(self, name: str, title: str = "", state: Container[int] = ()) -> None:
        """Begin, or continue, the pictures of a function of the current graph, or of the whole graph with `name` "".

        state: the positions of those inputs that are state.
        """
        self._number = self._numbers.setdefault((self._graph, name), len(self._numbers))
        self._titles[self._number] = title
        self._state, self._verdicts = state, {}

    def functions(self) -> dict[str, str]:
        """Return the titles of the functions of the current graph, by name."""
        return {name: self._titles[i] for (graph, name), i in self._numbers.items() if graph == self._graph and name}

    @contextmanager
    def tentative(self, keeps: Callable[[BaseException], bool]) -> Iterator[None]:
        """Discard the drawings of this context if it raises an error for which `keeps` returns False."""
        before = {name: copy.copy(value) for name, value in vars(self).items()}
        before["_of_number"] = {number: [*gemms] for number, gemms in self._of_number.items()}
        try:
            yield
        except BaseException as error:
            if not keeps(error):
                vars(self).update(before)
            raise

    def verdicts(self, gemms: Mapping[str, Sequence[Gemm]]) -> None:
        """Record the verdicts of the current joint graph by names of nodes: one for each layer that it stands for."""
        self._verdicts |= gemms
        self._of_number.setdefault(self._number, []).extend(gemms.values())

    def add(self, graph: fx.Graph, part: Part) -> Picture:
        """Draw a graph."""
        picture = Picture(self._number, part, _ops(graph, self._state), title=self._titles[self._number])
        for op, node in zip(picture.ops, graph.nodes, strict=True):
            if op.kind != "gemm":
                continue
            gemms = self._verdicts.get(node.meta.get(GEMM, "")) if part != "before" else None
            if gemms:
                self._named.append((_MatmulKey(self._number, op.module, op.source, _sizes_of(gemms[0])), op, gemms))
            else:
                self._unnamed.append((_MatmulKey(self._number, op.module, op.source, _sizes(node)), op, part))
        self.pictures.append(picture)
        return picture

    def generated(self, graph: fx.Graph, part: Part, code: str) -> None:
        """Draw a graph for which Inductor has generated code."""
        picture = self.add(graph, part)
        runs_in: dict[str, list[int]] = {}
        # Inductor writes this comment before each kernel's call.
        for kernel in dict.fromkeys(re.findall(r"# \[Provenance debug handles\] (\S+)", code)):
            for name in kernel_nodes(kernel):
                runs_in.setdefault(name, []).append(len(picture.kernels))
            picture.kernels.append(KernelCode(kernel.rpartition(":")[0], kernel_code(code, kernel)))
        _set_kernels(picture, runs_in)

    def finish(self, gemms: Sequence[Gemm]) -> list[Picture]:
        """Set each matmul's position in `gemms`, and return the pictures."""
        position = {id(g): i for i, g in enumerate(gemms)}
        for _, op, read_gemms in self._named:
            op.gemms = _positions(read_gemms, position)
        self._find_replaced(position)
        self._find_users()
        return sorted(self.pictures, key=lambda p: (p.number, _PARTS.index(p.part)))

    def replace_verdicts(self, new: Sequence[Gemm], old: Sequence[Gemm]) -> None:
        """Replace verdicts that were found while drawing by those that another compilation has found before."""
        left: dict[Hashable, list[Gemm]] = {}
        for gemm in old:
            left.setdefault((gemm.kind, gemm.choice, gemm.source, _sizes_of(gemm)), []).append(gemm)
        same = {id(g): left[key].pop(0) for g in new if left.get(key := (g.kind, g.choice, g.source, _sizes_of(g)))}

        def known_as(gemms: Sequence[Gemm]) -> list[Gemm]:
            return [same.get(id(gemm), gemm) for gemm in gemms]

        self._named = [(place, op, known_as(gemms)) for place, op, gemms in self._named]
        self._of_number = {number: [*map(known_as, all_of)] for number, all_of in self._of_number.items()}

    def _find_replaced(self, position: Mapping[int, int]) -> None:
        """Match ops with which Inductor replaced a matmul (addmm) to a missing verdict of equal graph, line, sizes."""
        named = {id(graph[0]) for _, _, graph in self._named}
        for place, op, part in self._unnamed:
            of_number = self._of_number.get(place.number, ())
            missing = (graph for graph in of_number if id(graph[0]) not in named and id(graph[0]) in position)
            same = next(
                (graph for graph in missing if (graph[0].source, _sizes_of(graph[0])) == (place.source, place.sizes)),
                None,
            )
            if part != "before" and same is not None:
                op.gemms = _positions(same, position)
                named.add(id(same[0]))
                self._named.append((place, op, same))

    def _find_users(self) -> None:
        """Match the user's matmuls to verdicts, in order, by module, line and sizes. Merged matmuls have no match."""
        became: dict[_MatmulKey, list[list[int]]] = {}
        for place, op, _ in self._named:
            same = became.setdefault(place, [])
            if op.gemms and op.gemms not in same:  # a matmul with batches becomes several ops
                same.append(op.gemms)
        for place, op, part in self._unnamed:
            if part == "before" and became.get(place):
                op.gemms = became[place].pop(0)


def _positions(gemms: Sequence[Gemm], position: Mapping[int, int]) -> list[int]:
    return [position[id(gemm)] for gemm in gemms if id(gemm) in position]


class _MatmulKey(NamedTuple):
    """The key of a matmul: number of the pictures, module, line, and sizes (batches, M, K, N)."""

    number: int
    module: str
    source: str
    sizes: tuple[str, ...]


def _sizes_of(gemm: Gemm) -> tuple[str, ...]:
    return _padded(gemm.batches, gemm.M, gemm.K, gemm.N)


def _sizes(matmul: fx.Node) -> tuple[str, ...]:
    """Return (batches, M, K, N) of a matmul node, padded."""
    first = 1 if _label(matmul) in ("addmm", "baddbmm") else 0
    a, b = (matmul.args[i].meta["val"].shape for i in (first, first + 1))  # type: ignore[union-attr]
    return _padded(a[0] if len(a) == 3 else 1, a[-2], a[-1], b[-1])


def _padded(batches: Any, *sizes: Any) -> tuple[str, ...]:
    """Return sizes as text, rounded up to multiples of 16 as in FP8, so that original and padded sizes are equal."""
    return str(batches), *(str(-(-size // 16) * 16) if isinstance(size, int) else str(size) for size in sizes)


@contextmanager
def draw(kernels: bool = False) -> Iterator[Drawing]:
    """Draw every graph that is compiled in this context; backwards are compiled at once, not at their first call.

    kernels: True to let Inductor generate the code of each graph without compiling it; the graphs run op by op.
    """
    drawing = Drawing(kernels)
    token = current.set(drawing)
    try:
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            yield drawing
    finally:
        current.reset(token)


# --- generated code


class _Generated(BaseException):
    """Raised when the code is generated. Not an Exception, because Inductor would handle that as its own failure."""


def generating(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's `inner_compile`; if kernels are drawn, a version that ends after generating code."""
    drawings = drawn()
    if drawings is None or not drawings.kernels:
        return inner_compile

    def take(code: str) -> None:
        module = Virtualized.graph.module
        assert isinstance(module, fx.GraphModule)
        graph = module.graph
        drawings.generated(graph, part_of(graph), code)
        raise _Generated

    def generate(module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        before = GraphLowering.save_output_code
        GraphLowering.save_output_code = take
        try:
            # A hit in the cache would generate nothing; level 2, "basic", is enough to know the nodes of each kernel.
            with inductor_config.patch({"fx_graph_cache": False, "trace.provenance_tracking_level": 2}):
                return inner_compile(module, example_inputs, **kwargs)
        except _Generated:
            return make_boxed_func(module.forward)
        finally:
            GraphLowering.save_output_code = before

    return generate


_FUSED = re.compile(r"(cpp|triton)_(?!tem)")
"""Names of generated fused kernels. Triton templates ("triton_tem...") are excluded: they are matmuls."""


def _set_kernels(picture: Picture, runs_in: Mapping[str, Sequence[int]]) -> None:
    """Set each op's kernel: the first that Inductor lists for it; for a matmul or attention, a call if there is one.

    Inductor may list a call under the movement op that lays out its result, and a fused kernel under a matmul.
    """
    kernels_of_ops = [list(runs_in.get(op.name, ())) for op in picture.ops]
    for i in reversed(range(len(picture.ops))):
        op = picture.ops[i]
        if op.kind == "movement":
            for source in op.inputs:
                kernels_of_ops[source] += kernels_of_ops[i]
    for op, kernels in zip(picture.ops, kernels_of_ops, strict=True):
        # A matmul or attention runs in ATen or a template; fused kernels listed for it compute what surrounds it.
        calls = [i for i in kernels if not _FUSED.match(picture.kernels[i].name)]
        if op.kind in ("gemm", "attention"):
            op.kernel = next(iter(calls or kernels), None)
        elif op.kind != "input":
            op.kernel = next(iter(kernels), None)


def kernel_code(code: str, kernel: str) -> str:
    """Return a kernel's definition in generated code, or the line of an ATen call; "" if there is none.

    kernel: "name:number", as in Inductor's comments.
    """
    name = re.escape(kernel.rpartition(":")[0])
    definition = rf"(?:^#[^\n]*\n)*^{name} = async_compile\.\w+\(.*?'''(?:, [^\n]*)?\)$"
    if match := re.search(definition, code, re.MULTILINE | re.DOTALL):
        return match[0]
    call = rf"(?:^ *#[^\n]*\n)*^ *# \[Provenance debug handles\] {re.escape(kernel)}\n[^\n]*"
    match = re.search(call, code, re.MULTILINE)
    return textwrap.dedent(match[0]) if match else ""


# --- nodes


def _ops(graph: fx.Graph, state: Container[int]) -> list[DrawnOp]:
    position = {node: i for i, node in enumerate(graph.nodes)}
    kinds: dict[fx.Node, OpKind] = {}
    for node in graph.nodes:
        kinds[node] = _kind(node, kinds, state)
    ops = [
        DrawnOp(
            name=node.name,
            label=_label(node),
            kind=kinds[node],
            module=_module(node),
            source=source_of(node),
            shape=_shape(node.meta.get("val")),
            made_by=node.meta.get(MADE_BY, ""),
            inputs=[position[x] for x in node.all_input_nodes],
        )
        for node in graph.nodes
    ]
    _place(ops)
    return ops


def _place(ops: Sequence[DrawnOp]) -> None:
    """Give each op that a pass inserted without a module that of an op that reads it, otherwise that of an input."""
    for op in reversed(ops):
        for i in op.inputs:
            if ops[i].made_by and not ops[i].module:
                ops[i].module = op.module
    for op in ops:
        if op.made_by and not op.module:
            op.module = next((ops[i].module for i in op.inputs if ops[i].module), "")


def _kind(node: fx.Node, kinds: Mapping[fx.Node, OpKind], state: Container[int]) -> OpKind:
    if node.op == "placeholder":
        return "state" if _position(node) in state else "input"
    if node.op == "output":
        return "output"
    name = _label(node)
    if multiplies(node):
        return "gemm"
    if "scaled_dot_product" in name or name == "flex_attention":
        return "attention"
    if name == "amax" or (name == "abs" and all(_label(user) == "amax" for user in node.users)):
        return "amax"
    if _makes_fp8(node):
        return "quantize"
    if name in MOVEMENT:
        return "movement"
    read = {kinds[x] for x in _sources(node)}
    if read == {"movement"}:
        return "movement"  # computed from constants only
    if _is_small(node) and read & {"state", "amax"} and read <= {"state", "amax", "movement"}:
        return "state"
    return "compute"


def _position(placeholder: fx.Node) -> int:
    """Return the index among the joint graph's inputs, from AOTAutograd's names; -1 for tensors saved for backward."""
    if match := re.fullmatch(r"primals_(\d+)", placeholder.name):  # of a graph with a backward, from 1
        return int(match[1]) - 1
    # Without a backward, they count from 0.
    match = re.fullmatch(r"arg(\d+)_1", placeholder.name)
    return int(match[1]) if match else -1


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs of a node, each followed back through movement ops."""
    for source in node.all_input_nodes:
        while _label(source) in MOVEMENT and source.all_input_nodes:
            source = source.all_input_nodes[0]
        yield source


def _makes_fp8(node: fx.Node) -> bool:
    """Return whether a node's result is FP8 and its first input is not, even before padding and movement ops."""
    if not any(x.dtype in FP8_DTYPES for x in _tensors(node)) or not node.all_input_nodes:
        return False
    source = node
    while source is node or (_label(source) in (*MOVEMENT, "constant_pad_nd") and source.all_input_nodes):
        source = source.all_input_nodes[0]
        if any(x.dtype in FP8_DTYPES for x in _tensors(source)):
            return False
    return True


def _is_small(node: fx.Node) -> bool:
    """Return whether a node can be a scale, an amax or a history, or a write into one."""
    return all(isinstance(x.numel(), int) and x.numel() < _WIDE for x in _tensors(node))


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [x for x in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(x, Tensor)]


def _label(node: fx.Node) -> str:
    """Return a node's op without namespace and overload; for an input, its name."""
    if node.op != "call_function":
        return node.name if node.op in ("placeholder", "get_attr") else node.op
    return op_name(node)


def _module(node: fx.Node) -> str:
    """Return the path of a node's innermost module, "" if none; a backward node has its forward node's module."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return module_path(list(stack.values())[-1][0]) if stack else ""


def _shape(value: Any) -> str:
    """Return a tensor's dtype and shape, as "bf16[8192, 4096]"; for several tensors, those of the first."""
    if isinstance(value, (list, tuple)):
        return f"{_shape(value[0])}, ..." if value else ""
    if not isinstance(value, Tensor):
        return "" if value is None else str(value)
    return f"{short(value.dtype)}[{', '.join(map(str, value.shape))}]"
