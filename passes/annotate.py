"""The recipe's choices become quantize-dequantize in the graph, around each matmul that it takes.

before   y: bf16[B, S, N] = linear(x: bf16[B, S, K], w: bf16[N, K], b)
after    x_: bf16[B, S, K] = qdq_operand(x)          amax, quantize, dequantize; the gradient passes through
         w_: bf16[N, K]    = qdq_operand(w)
         y_: bf16[B, S, N] = qdq_gradient(linear(x_, w_))    identity; quantizes the gradient
         y                 = y_ + b                  the bias's gradient comes from the unquantized one
changes  the numbers, to those of FP8: from here on the graph, run eagerly, is the reference of what is compiled

This is the one pass that runs on Dynamo's graph, in torch functions: there the matmuls still have module names, and
forward and backward are one thing. A tensor that feeds several matmuls is quantized once. With delayed scaling the
graph gets the state tensors as extra inputs behind all others, and begins with the roll of the last step.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fp8pass.passes.inline import inline
from torch import Tensor, fx

from fp8pass import hardware, ops, scaling
from fp8pass._torch import ConstantSource
from fp8pass.config import Config
from fp8pass.graph import source_of
from fp8pass.ops import SlotTensors
from fp8pass.recipes import DelayedScaling, DynamicScaling, Role
from fp8pass.rewrite import MAX_BATCHES, Reject
from fp8pass.state import SlotTable

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Choice:
    """What the recipe made of one matmul call: `reason` is "" if it was annotated."""

    name: str
    source: str
    reason: str = ""


@dataclass
class Annotation:
    """An annotated copy of Dynamo's graph. `table`: its slots; None if it needs no state."""

    module: fx.GraphModule
    choices: list[Choice]
    table: SlotTable | None
    training: bool
    parameter_inputs: list[int] = field(default_factory=list)

    def run(self, *args: Any, bootstrap: bool = False) -> Any:
        """The graph, eagerly. `bootstrap`: a slot without history is scaled by the tensor's own amax."""
        return _Eager(self.module, bootstrap).run(*args)


class _Eager(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, bootstrap: bool) -> None:
        super().__init__(module)
        self.bootstrap = bootstrap

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (ops.qdq_operand, ops.qdq_gradient) and isinstance(args[1], ops.Delayed) and self.bootstrap:
            args = (args[0], _with(args[1], bootstrap=True), *args[2:])
        return super().call_function(target, args, kwargs)


def _with(quantizer: ops.Delayed, **changes: Any) -> ops.Delayed:
    return ops.Delayed(**{**quantizer.__dict__, **changes})


# ---------------------------------------------------------------------------------------------------------------------
# Pattern: the torch spellings of a matmul, and where their operands are.


@dataclass(frozen=True)
class Spelling:
    """Positions and keyword names of the two operands; of a third that is added, and the product without it."""

    name: str
    a: tuple[int, str] = (0, "input")
    b: tuple[int, str] = (1, "other")
    bias: tuple[int, str] | None = None
    product: Callable[..., Any] | None = None


_LINEAR = Spelling("linear", b=(1, "weight"), bias=(2, "bias"), product=F.linear)
_MATMUL = Spelling("matmul")
_MM = Spelling("mm", b=(1, "mat2"))
_BMM = Spelling("bmm", b=(1, "mat2"))
_ADDMM = Spelling("addmm", a=(1, "mat1"), b=(2, "mat2"), bias=(0, "input"), product=torch.mm)
_BADDBMM = Spelling("baddbmm", a=(1, "batch1"), b=(2, "batch2"), bias=(0, "input"), product=torch.bmm)
_EINSUM = Spelling("einsum", a=(1, ""), b=(2, ""))
_TENSORDOT = Spelling("tensordot", a=(0, "a"), b=(1, "b"))

_aten = torch.ops.aten
_FUNCTIONS: dict[Any, Spelling] = {
    F.linear: _LINEAR,
    torch._C._nn.linear: _LINEAR,  # what F.linear is on some versions
    _aten.linear.default: _LINEAR,  # from the inline pass
    torch.matmul: _MATMUL,
    torch.linalg.matmul: _MATMUL,
    operator.matmul: _MATMUL,
    _aten.matmul.default: _MATMUL,
    torch.mm: _MM,
    torch.bmm: _BMM,
    _aten.bmm.default: _BMM,
    torch.addmm: _ADDMM,
    torch.baddbmm: _BADDBMM,
    _aten.baddbmm.default: _BADDBMM,
    torch.einsum: _EINSUM,
    torch.tensordot: _TENSORDOT,
}
_METHODS = {"matmul": _MATMUL, "__matmul__": _MATMUL, "mm": _MM, "bmm": _BMM, "addmm": _ADDMM, "baddbmm": _BADDBMM}


def spelling_of(node: fx.Node) -> Spelling | None:
    """How the node spells a matmul; None if it is something else."""
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def _argument(node: fx.Node, where: tuple[int, str] | None) -> Any:
    if where is None:
        return None
    index, keyword = where
    return node.args[index] if index < len(node.args) else node.kwargs.get(keyword)


@dataclass(frozen=True)
class Sizes:
    """`batches` products of [M, K] by [K, N]. Ints or SymInts."""

    batches: Any
    m: Any
    k: Any
    n: Any


def sizes_of(spelling: Spelling, node: fx.Node, a: Tensor, b: Tensor) -> Sizes:
    """The sizes of the 2-D products that the call comes down to."""
    if spelling is _EINSUM:
        return _einsum_sizes(str(node.args[0]), a, b)
    if spelling is _TENSORDOT:
        return _tensordot_sizes(_argument(node, (2, "dims")), a, b)
    if spelling is _LINEAR:
        return Sizes(1, math.prod(a.shape[:-1]), a.shape[-1], b.shape[0])
    *batch_a, m, k = a.shape
    *batch_b, _, n = b.shape
    if not batch_b:
        return Sizes(1, math.prod(batch_a) * m, k, n)
    if not batch_a:
        return Sizes(1, m, k, math.prod(batch_b) * n)
    batch = torch.broadcast_shapes(batch_a, batch_b)  # type: ignore[no-untyped-call]
    return Sizes(math.prod(batch), m, k, n)


def _einsum_sizes(equation: str, a: Tensor, b: Tensor) -> Sizes:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    if "..." in equation or not arrow or len(left) != a.dim() or len(right) != b.dim():
        raise Reject(f"einsum equation {equation!r} has an ellipsis or no output; write all its letters")
    size = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}

    def product(letters: set[str]) -> Any:
        return math.prod(size[c] for c in sorted(letters))

    both, out = set(left) & set(right), set(output)
    if not both - out:
        raise Reject(f"einsum {equation!r} contracts nothing")
    return Sizes(
        product(both & out), product((set(left) - both) & out), product(both - out), product(set(right) - both)
    )


def _tensordot_sizes(dims: Any, a: Tensor, b: Tensor) -> Sizes:
    dims = 2 if dims is None else dims
    contracted = list(range(a.dim() - dims, a.dim())) if isinstance(dims, int) else list(dims[0])
    k = math.prod(a.shape[d] for d in contracted)
    return Sizes(1, a.numel() // k if k else 0, k, b.numel() // k if k else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


def check(node: fx.Node, spelling: Spelling, name: str, config: Config, training: bool) -> None:
    """Raise Reject unless the recipe takes this matmul."""
    operands = _argument(node, spelling.a), _argument(node, spelling.b)
    if not all(isinstance(o, fx.Node) and isinstance(o.meta.get("example_value"), Tensor) for o in operands):
        raise Reject(f"{spelling.name} is called in a form that is not understood: {node.format_node()}")
    if spelling is _EINSUM and len(node.args) != 3:
        raise Reject(f"einsum of {len(node.args) - 1} operands; only products of two are quantized")
    if node.kwargs.get("out") is not None:
        raise Reject(f"{spelling.name} writes into out=")
    a, b = (o.meta["example_value"] for o in operands)
    _check_operands(a, b)
    sizes = sizes_of(spelling, node, a, b)
    _check_sizes(sizes)
    m, k, n = (_hint(s) for s in (sizes.m, sizes.k, sizes.n))
    if reason := config.leaves_out(name, m, k, n):
        raise Reject(reason)
    target = hardware.target_of(a.device, config.target)
    if target is not None and config.min_speedup > 0:
        gain = hardware.predicted_speedup(m, k, n, a.element_size(), training, target)
        if gain < config.min_speedup:
            raise Reject(
                f"predicted speed-up on {target.name} is {gain:.2f}, below min_speedup={config.min_speedup:g}: "
                f"[{m}, {k}] by [{k}, {n}] is too small to pay for its quantization"
            )


def _check_operands(a: Tensor, b: Tensor) -> None:
    for operand in (a, b):
        if operand.dtype not in HIGH_PRECISION:
            raise Reject(f"operands are {_short(a)} and {_short(b)}; FP8 replaces float32, bfloat16 and float16")
        if operand.dim() < 2:
            raise Reject(
                f"an operand is a vector of {operand.shape[0]} elements" if operand.dim() else "a scalar operand"
            )


def _check_sizes(s: Sizes) -> None:
    for letter, size in (("M", s.m), ("K", s.k), ("N", s.n)):
        if isinstance(size, int) and size == 0:
            raise Reject(f"{letter}=0: the matmul is empty")
        if isinstance(size, int) and size == 1:
            raise Reject(f"{letter}=1: no matrix product, each operand element is used once")
    if not isinstance(s.batches, int) or s.batches > MAX_BATCHES:
        raise Reject(
            f"{s.batches} products of [{s.m}, {s.k}] by [{s.k}, {s.n}]: `_scaled_mm` has no batch dimension, and more "
            f"than {MAX_BATCHES} launches would cost more than FP8 gains"
        )


def _short(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


_ELEMENTWISE_OR_VIEW = re.compile(
    r"^(to|type|float|bfloat16|half|mul|div|truediv|multiply|divide|view|reshape|t|transpose|permute|contiguous|clone|"
    r"unsqueeze|squeeze|expand|flatten|T|mT|getattr)$"
)


def _comes_from_fp8(node: fx.Node) -> bool:
    """Whether the user dequantized this operand: casts, scales and views lead from an FP8 tensor to it."""
    while True:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and value.dtype in (*scaling.FP8_DTYPES, *scaling.FNUZ_DTYPES):
            return True
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        sources = [a for a in node.all_input_nodes if isinstance(a.meta.get("example_value"), Tensor)]
        if node.op not in ("call_function", "call_method") or not sources or not _ELEMENTWISE_OR_VIEW.match(str(name)):
            return False
        node = max(sources, key=lambda n: n.meta["example_value"].numel()) if len(sources) > 1 else sources[0]


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


def annotate(module: fx.GraphModule, config: Config, training: bool) -> Annotation:
    """An annotated copy of Dynamo's graph `module`; `training`: whether gradients are enabled where it begins."""
    return _Annotator(module, config, training).run()


class _Annotator:
    def __init__(self, module: fx.GraphModule, config: Config, training: bool) -> None:
        self.module = _copy(module)
        self.graph = self.module.graph
        self.config = config
        self.training = self.grad_enabled = training
        self.placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.names = _Names(self.placeholders)
        self.slots: list[tuple[str, Role, ops.Delayed, fx.Node]] = []
        self.choices: list[Choice] = []
        self.quantized: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.device: torch.device | None = None

    def run(self) -> Annotation:
        inline(self.module)
        for node in list(self.graph.nodes):
            if node.op == "get_attr":
                self._visit_region(getattr(self.module, str(node.target), None), node)
            else:
                self._visit(node)
        table = self._lift_state() if self.slots else None
        self.graph.lint()
        self.module.recompile()
        parameters = [i for i, p in enumerate(self.placeholders) if self.names.parameter(p)]
        return Annotation(self.module, self.choices, table, self.training, parameters)

    def _visit(self, node: fx.Node) -> None:
        if node.target is torch._C._set_grad_enabled:
            self.grad_enabled = bool(node.args[0])
            return
        if _mutates(node):
            self.quantized.clear()  # what was quantized before may not be what the name stands for now
        spelling = spelling_of(node)
        if spelling is None:
            return
        name = self.names.of(node, spelling)
        choice = self._choice(node, name)
        if any(_comes_from_fp8(n) for n in node.all_input_nodes):
            return  # quantized by the user: the detector's business
        try:
            check(node, spelling, name, self.config, self.grad_enabled)
            self._check_device(node, spelling)
        except Reject as reject:
            choice.reason = str(reject)
            return
        self._rewrite(node, spelling, name)

    def _visit_region(self, region: Any, holder: fx.Node) -> None:
        """Matmuls in a graph of its own, of activation checkpointing or control flow: listed, not annotated."""
        if not isinstance(region, fx.GraphModule):
            return
        operators = sorted({str(user.target) for user in holder.users})
        for node in region.graph.nodes:
            if node.op == "get_attr":
                self._visit_region(getattr(region, str(node.target), None), holder)
            elif spelling := spelling_of(node):
                choice = self._choice(node, self.names.of(node, spelling))
                choice.reason = f"inside a region of {', '.join(operators)}, which the recipe does not enter"

    def _choice(self, node: fx.Node, name: str) -> Choice:
        """A new entry of `choices`; AOTAutograd carries its index along to every node that comes of this one."""
        node.meta["custom"] = {**node.meta.get("custom", {}), "fp8pass": len(self.choices)}
        self.choices.append(Choice(name, source_of(node)))
        return self.choices[-1]

    def _check_device(self, node: fx.Node, spelling: Spelling) -> None:
        device = _argument(node, spelling.a).meta["example_value"].device
        self.device = self.device or device
        if device != self.device:
            raise Reject(f"on {device}, while the state of this graph is on {self.device}; compile each part by itself")

    def _rewrite(self, node: fx.Node, spelling: Spelling, name: str) -> None:
        a, b, bias = (_argument(node, where) for where in (spelling.a, spelling.b, spelling.bias))
        with self.graph.inserting_before(node):
            quantized = {a: self._operand(a, name, "input"), b: self._operand(b, name, "weight")}
            if bias is None:
                y = self.graph.node_copy(node, lambda n: quantized.get(n, n))
            else:
                assert spelling.product is not None
                y = self._call(spelling.product, (quantized[a], quantized[b]), node)
            if self.grad_enabled and node.meta["example_value"].requires_grad:
                y = self._quantize(ops.qdq_gradient, y, name, "grad_output")
            if bias is not None:
                scale: dict[str, Any] = {k: node.kwargs[k] for k in ("beta", "alpha") if k in node.kwargs}
                y = self._call(_add_bias, (y, bias, node.meta["example_value"].dtype), node, scale)
        node.replace_all_uses_with(y)
        self.graph.erase_node(node)

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        new.meta.update(like.meta)
        return new

    def _operand(self, x: fx.Node, name: str, role: Role) -> fx.Node:
        if x.op == "call_function" and x.target is ops.qdq_operand:
            return x
        key = (x, self.grad_enabled)
        if key not in self.quantized:
            self.quantized[key] = self._quantize(ops.qdq_operand, x, name, role)
        return self.quantized[key]

    def _quantize(self, how: Callable[..., Any], x: fx.Node, name: str, role: Role) -> fx.Node:
        recipe = self.config.recipe
        if isinstance(recipe, DynamicScaling):
            return self._call(how, (x, ops.Dynamic(recipe, recipe.dtype(role))), x)
        assert isinstance(recipe, DelayedScaling)
        record = self.grad_enabled
        quantizer = ops.Delayed(recipe, recipe.dtype(role), slot=-1, index=-1, bootstrap=not record, record=record)
        node = self._call(how, (x, quantizer), x)
        self.slots.append((self.names.slot(name, role), role, quantizer, node))
        return node

    def _lift_state(self) -> SlotTable:
        """Give the graph its state inputs, and every quantizer its place in them."""
        recipe = self.config.recipe
        assert isinstance(recipe, DelayedScaling) and self.device is not None
        self.slots.sort(key=lambda s: s[1] == "grad_output")
        names = tuple(dict.fromkeys(name for name, *_ in self.slots))
        roles = {name: role for name, role, *_ in self.slots}
        n_forward = sum(role != "grad_output" for role in roles.values())
        limits = tuple(scaling.fp8_max(recipe.dtype(roles[name])) for name in names)
        inputs = {field: self._state_input(field) for field in SlotTensors._fields}
        scales, step = inputs["scale"], inputs["step"]
        if any(q.record for _, _, q, _ in self.slots):
            scales, step = self._begin_step(recipe, list(inputs.values()))
        for name, role, quantizer, node in self.slots:
            slot, backward = names.index(name), role == "grad_output"
            side = "backward" if backward else "forward"
            placed = _with(quantizer, slot=slot, index=slot - n_forward if backward else slot)
            node.args = (node.args[0], placed, scales, step, inputs[f"amax_{side}"], inputs[f"stamp_{side}"])  # type: ignore[assignment]
        parameters = tuple(p for n in self.placeholders if (p := self.names.parameter(n)))
        return SlotTable(names, n_forward, limits, recipe, self.device, parameters)

    def _state_input(self, name: str) -> fx.Node:
        last = [n for n in self.graph.nodes if n.op == "placeholder"]
        with self.graph.inserting_after(last[-1]) if last else self.graph.inserting_before():
            node = self.graph.placeholder(f"fp8pass_{name}")
        node._dynamo_source = ConstantSource(node.name)
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}  # a fixed address, for CUDA graphs
        return node

    def _begin_step(self, recipe: DelayedScaling, inputs: list[fx.Node]) -> list[fx.Node]:
        with self.graph.inserting_after(inputs[-1]):
            begun = self.graph.call_function(ops.begin_step, (recipe, *inputs))  # type: ignore[arg-type]
        with self.graph.inserting_after(begun):
            step = self.graph.call_function(operator.getitem, (begun, 1))
            scales = self.graph.call_function(operator.getitem, (begun, 0))
        return [scales, step]


def _add_bias(y: Tensor, bias: Tensor, dtype: torch.dtype, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * bias + alpha * y` in `dtype`, as linear, addmm and baddbmm mean it: beta 0 ignores even a NaN bias."""
    y = y if alpha == 1 else alpha * y
    if beta == 0:
        return y
    bias = bias.to(dtype)
    return y + (bias if beta == 1 else beta * bias)


def _mutates(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return (
        node.kwargs.get("out") is not None
        or node.kwargs.get("inplace") is True
        or node.target is operator.setitem
        or (name.endswith("_") and not name.endswith("__"))
        or (getattr(node.target, "__module__", "") == "_operator" and name in _IN_PLACE_OPERATORS)
    )


_IN_PLACE_OPERATORS = {n for n in dir(operator) if n.startswith("i") and hasattr(operator, f"__{n}__")} - {
    "index",
    "inv",
    "invert",
}


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """A copy to edit: Dynamo goes on using its own graph's placeholders. Carries over what AOTAutograd reads of it."""
    graph = fx.Graph()
    twin: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, twin))
    for old, new in twin.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = dict(module._param_name_to_source)  # type: ignore[arg-type, assignment]
    return copy


class _Names:
    """Module paths of matmuls, and slot names made of them."""

    def __init__(self, placeholders: list[fx.Node]) -> None:
        self._paths = {p: _path(name) for p in placeholders if (name := _source_name(p))}
        roots = {root for p, (root, _) in self._paths.items() if _is_parameter(p)}
        self._keep_root = len(roots) > 1
        self._taken: Counter[str] = Counter()

    def parameter(self, placeholder: fx.Node) -> str:
        """The path of a parameter input, "layers.0.up.weight"; "" for other inputs."""
        known = _is_parameter(placeholder) and placeholder in self._paths
        return self._join(*self._paths[placeholder]) if known else ""

    def of(self, node: fx.Node, spelling: Spelling) -> str:
        """The parameter's path without "weight" where an operand is one, else the module's path and the op's name."""
        for where in (spelling.b, spelling.a):
            operand = _argument(node, where)
            if isinstance(operand, fx.Node) and (path := self.parameter(operand)):
                return path.removesuffix(".weight")
        stack = node.meta.get("nn_module_stack") or {}
        path = self._join(*_path(list(stack.values())[-1][0])) if stack else ""
        return f"{path}.{spelling.name}" if path else spelling.name

    def slot(self, name: str, role: Role) -> str:
        """A new slot's name: the role, numbered from the second use of a module in the graph on."""
        slot = f"{name}.{role}"
        self._taken[slot] += 1
        uses = self._taken[slot]
        return slot if uses == 1 else f"{slot}_{uses - 1}"

    def _join(self, root: str, path: str) -> str:
        return ".".join(part for part in (root if self._keep_root else "", path) if part)


def _is_parameter(placeholder: fx.Node) -> bool:
    return isinstance(placeholder.meta.get("example_value"), torch.nn.Parameter)


_PARTS = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\[([^\]]+)\]|\.([A-Za-z_]\w*)")


def _path(source: str) -> tuple[str, str]:
    """("model", "layers.0.up.weight") of "L['model']._modules['layers']._modules['0']..." """
    head = re.match(r"[A-Z]\['([^']+)'\]", source)
    root, rest = (head[1], source[head.end() :]) if head else ("", source)
    return root, ".".join(next(filter(None, m)).strip("'\"") for m in _PARTS.findall(rest))


def _source_name(placeholder: fx.Node) -> str:
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)
