"""The recipe's choices become quantize-dequantize in the graph, around each matmul that it takes.

before   y: bf16[B, S, N] = linear(x: bf16[B, S, K], w: bf16[N, K], b)
after    x_: bf16[B, S, K] = qdq_operand(x)          amax, quantize, dequantize; the gradient passes through
         w_: bf16[N, K]    = qdq_operand(w)
         y_: bf16[B, S, N] = qdq_gradient(linear(x_, w_))    identity; quantizes the gradient
         y                 = y_ + b                  the bias's gradient comes from the unquantized one
changes  the numbers, to those of FP8: from here on the graph, run eagerly, is the reference of what is compiled

This is the one pass that runs on Dynamo's graph, in torch functions: there the matmuls still have module names, and
forward and backward are one thing. A tensor that feeds several matmuls is quantized once. With delayed scaling the
graph gets the state tensors as extra inputs behind all others, and begins with the roll of the last step. A graph that
reads no parameter and no buffer has no instance to keep state for, and is scaled dynamically.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import hardware, ops, scaling
from fp8pass._torch import ConstantSource
from fp8pass.config import Config
from fp8pass.graph import source_of
from fp8pass.names import Names
from fp8pass.passes.inline import inline
from fp8pass.passes.patterns import dtype_name
from fp8pass.passes.spellings import EINSUM, Sizes, Spelling, argument, mutates, sizes_of, spelling_of
from fp8pass.recipes import DelayedScaling, DynamicScaling, Role
from fp8pass.rewrite import MAX_BATCHES, LeftOut, Reject
from fp8pass.slots import SlotTable

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Choice:
    """What the recipe made of one matmul call. scaling: the recipe's name, "" if it was not annotated, for `reason`.

    wanted: the recipe and filter took it, and it could not be done: an error under `strict`.
    """

    name: str
    source: str
    scaling: str = ""
    reason: str = ""
    rule: str = ""
    wanted: bool = False


@dataclass
class Annotation:
    """An annotated copy of Dynamo's graph. owned: positions of the inputs that its state goes by; table: its slots."""

    module: fx.GraphModule
    choices: list[Choice]
    owned: list[int]
    table: SlotTable | None = None

    def bootstrapped(self) -> Annotation:
        """A copy in which a slot without history is scaled by the tensor's own amax."""
        module = _copy(self.module)
        for node in module.graph.nodes:
            if node.target in (ops.qdq_operand, ops.qdq_gradient) and isinstance(node.args[1], ops.Delayed):
                node.update_arg(1, replace(node.args[1], bootstrap=True))
        module.recompile()
        return replace(self, module=module)

    def run(self, *args: Any) -> Any:
        """The graph, eagerly."""
        return fx.Interpreter(self.module).run(*args)


# ---------------------------------------------------------------------------------------------------------------------
# Check: only refuses.


def check(node: fx.Node, spelling: Spelling, name: str, config: Config, training: bool) -> None:
    """Raise LeftOut if the recipe or the filter does not want this matmul, Reject if it can't be had."""
    operands = argument(node, spelling.a), argument(node, spelling.b)
    if not all(isinstance(o, fx.Node) and isinstance(o.meta.get("example_value"), Tensor) for o in operands):
        raise Reject("form", f"{spelling.name} is called in a form that is not understood: {node.format_node()}")
    a, b = (o.meta["example_value"] for o in operands)
    _check_operands(a, b)
    if spelling is EINSUM and len(node.args) != 3:
        raise Reject("form", f"einsum of {len(node.args) - 1} operands; write it as products of two")
    if node.kwargs.get("out") is not None:
        raise Reject("out=", f"{spelling.name} writes into out=; assign its result instead")
    if not isinstance(argument(node, spelling.bias), fx.Node | None):
        raise Reject("form", f"{spelling.name} adds a number, not a tensor: {node.format_node()}")
    sizes = sizes_of(spelling, node, a, b)
    _check_sizes(sizes)
    m, k, n = (_hint(s) for s in (sizes.m, sizes.k, sizes.n))
    if reason := config.leaves_out(name, m, k, n):
        raise LeftOut("filter", reason)
    target = hardware.target_of(a.device, config.target)
    if reason := hardware.why_no_fp8(a.device, target):
        raise Reject("device", reason)
    if target is not None and config.min_speedup > 0:
        gain = hardware.predicted_speedup(m, k, n, a.element_size(), training, target)
        if gain < config.min_speedup:
            raise LeftOut(
                "min_speedup",
                f"predicted speed-up on {target.name} is {gain:.2f}, below min_speedup={config.min_speedup:g}: "
                f"[{m}, {k}] by [{k}, {n}] is too small to pay for its quantization",
            )


def _check_operands(a: Tensor, b: Tensor) -> None:
    for operand in (a, b):
        if operand.dtype not in HIGH_PRECISION:
            types = f"{dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
            raise LeftOut("dtype", f"operands are {types}; FP8 replaces float32, bfloat16 and float16")
        if operand.dim() == 0:
            raise LeftOut("vector", "an operand is a scalar")
        if operand.dim() == 1:
            raise LeftOut("vector", f"an operand is a vector of {operand.shape[0]} elements")


def _check_sizes(s: Sizes) -> None:
    for letter, size in (("M", s.m), ("K", s.k), ("N", s.n)):
        if _hint(size) is None:
            raise Reject(
                "data-dependent size",
                f"{letter}={size} depends on data; mark the size or keep such matmuls out of the compiled region",
            )
        if isinstance(size, int) and size == 0:
            raise LeftOut("empty", f"{letter}=0: the matmul is empty")
        if isinstance(size, int) and size == 1:
            raise LeftOut("vector", f"{letter}=1: no matrix product, each operand element is used once")
    if not isinstance(s.batches, int) or s.batches > MAX_BATCHES:
        raise LeftOut(
            "batches",
            f"{s.batches} products of [{s.m}, {s.k}] by [{s.k}, {s.n}]: `_scaled_mm` has no batch dimension, and more "
            f"than {MAX_BATCHES} launches would cost more than FP8 gains",
        )


def _hint(size: Any) -> Any:
    """An example of a size, without a guard on it; None if there is none."""
    return size if isinstance(size, int) else size.node.hint


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
        node = max(sources, key=lambda n: n.meta["example_value"].dim()) if len(sources) > 1 else sources[0]


# ---------------------------------------------------------------------------------------------------------------------
# Rewrite: only builds.


def annotate(module: fx.GraphModule, config: Config) -> Annotation:
    """An annotated copy of Dynamo's graph `module`, which is being compiled: grad mode is that of its beginning."""
    return _Annotator(module, config).run()


@dataclass
class _Slot:
    """A quantizer that waits for its place in the state. anchor, place: see `SlotTable`."""

    name: str
    role: Role
    anchor: int
    place: str
    quantizer: ops.Delayed
    node: fx.Node


class _Annotator:
    def __init__(self, module: fx.GraphModule, config: Config) -> None:
        self.module = _copy(module)
        self.graph = self.module.graph
        self.config = config
        self.grad_enabled = torch.is_grad_enabled()
        self.placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.names = Names(self.placeholders)
        self.recipe = _recipe_for(config, bool(self.names.owned))
        self.slots: list[_Slot] = []
        self.choices: list[Choice] = []
        self.quantized: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.device: torch.device | None = None

    def run(self) -> Annotation:
        inline(self.module)
        transform = next(filter(None, map(_function_transform, self.graph.nodes)), "")
        for node in list(self.graph.nodes):
            if node.op == "get_attr":
                self._visit_region(getattr(self.module, str(node.target), None), node)
            else:
                self._visit(node, transform)
        table = self._lift_state() if self.slots else None
        self.graph.lint()
        self.module.recompile()
        owned = [i for i, p in enumerate(self.placeholders) if p in self.names.owned]
        return Annotation(self.module, self.choices, owned, table)

    def _visit(self, node: fx.Node, transform: str) -> None:
        if node.target is torch._C._set_grad_enabled:
            self.grad_enabled = bool(node.args[0])
        if mutates(node):
            self.quantized.clear()  # what was quantized before may not be what the name stands for now
        spelling = spelling_of(node)
        if spelling is None:
            return
        choice, anchor = self._choice(node, spelling)
        if any(_comes_from_fp8(n) for n in node.all_input_nodes):
            return  # quantized by the user: the detector's business
        try:
            check(node, spelling, choice.name, self.config, self.grad_enabled)
            if transform:
                raise Reject(
                    "torch.func", f"under torch.func ({transform}), which fp8pass does not enter; compile it by itself"
                )
            self._check_device(node, spelling)
        except Reject as reject:
            choice.rule, choice.reason = reject.rule, str(reject)
            choice.wanted = not isinstance(reject, LeftOut)
            return
        choice.scaling = self.recipe.name
        self._rewrite(node, spelling, choice, anchor)

    def _visit_region(self, region: Any, holder: fx.Node) -> None:
        """Matmuls in a graph of its own, of activation checkpointing or control flow: listed, not annotated."""
        if not isinstance(region, fx.GraphModule):
            return
        operators = ", ".join(sorted({str(user.target) for user in holder.users}))
        for node in region.graph.nodes:
            if node.op == "get_attr":
                self._visit_region(getattr(region, str(node.target), None), holder)
            elif spelling := spelling_of(node):
                choice, _ = self._choice(node, spelling)
                choice.wanted, choice.rule = True, "region"
                choice.reason = (
                    f"inside a region of {operators}, which fp8pass does not enter yet; compile its inside by itself"
                )

    def _choice(self, node: fx.Node, spelling: Spelling) -> tuple[Choice, int]:
        """A new entry of `choices`; AOTAutograd carries its index along to every node that comes of this one."""
        operands = argument(node, spelling.b), argument(node, spelling.a)
        name, anchor = self.names.of(node, spelling.name, operands)
        node.meta["custom"] = {**node.meta.get("custom", {}), "fp8pass": len(self.choices)}
        self.choices.append(Choice(name, source_of(node)))
        return self.choices[-1], anchor

    def _check_device(self, node: fx.Node, spelling: Spelling) -> None:
        device = argument(node, spelling.a).meta["example_value"].device
        self.device = self.device or device
        if device != self.device:
            raise Reject(
                "device", f"on {device}, while the state of this graph is on {self.device}; compile each part by itself"
            )

    def _rewrite(self, node: fx.Node, spelling: Spelling, choice: Choice, anchor: int) -> None:
        a, b, bias = (argument(node, where) for where in (spelling.a, spelling.b, spelling.bias))
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        new = _Slots(self, choice, anchor)
        with self.graph.inserting_before(node):
            # alpha belongs to an operand: behind the product it could come too late, float16 overflows
            first = a if alpha == 1 else self._call(torch.mul, (a, alpha), a)
            a_, b_ = new.operand(first, "input"), new.operand(b, "weight")
            if bias is None:
                y = self.graph.node_copy(node, lambda n: {a: a_, b: b_}.get(n, n))
            else:
                assert spelling.product is not None
                y = self._call(spelling.product, (a_, b_), node)
            if self.grad_enabled and node.meta["example_value"].requires_grad:
                y = new.quantize(ops.qdq_gradient, y, "grad_output")
            if bias is not None:
                y = self._call(_add_bias, (y, bias, node.meta["example_value"].dtype, beta), node)
        node.replace_all_uses_with(y)
        self.graph.erase_node(node)

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        new = self.graph.call_function(target, args)
        new.meta.update(like.meta)
        return new

    def _lift_state(self) -> SlotTable:
        """Give the graph its state inputs, and every quantizer its place in them."""
        assert isinstance(self.recipe, DelayedScaling) and self.device is not None
        self.slots.sort(key=lambda s: s.role == "grad_output")
        n_forward = sum(s.role != "grad_output" for s in self.slots)
        training = any(s.quantizer.record for s in self.slots)
        inputs = {name: self._state_input(name) for name in ops.INPUTS}
        scales = self._begin_step(self.recipe, inputs) if training else inputs["scale"]
        for i, slot in enumerate(self.slots):
            backward = i >= n_forward
            placed = replace(slot.quantizer, slot=i, index=i - n_forward if backward else i)
            amax = inputs["amax_backward_late" if backward else "amax_forward"]
            slot.node.args = (slot.node.args[0], placed, scales, amax)  # type: ignore[assignment]
        return SlotTable(
            names=tuple(s.name for s in self.slots),
            n_forward=n_forward,
            fp8_max=tuple(scaling.fp8_max(self.recipe.dtype(s.role)) for s in self.slots),
            recipe=self.recipe,
            device=self.device,
            owned=tuple(self.names.owned.values()),
            anchors=tuple(s.anchor for s in self.slots),
            places=tuple(s.place for s in self.slots),
            training=training,
        )

    def _state_input(self, name: str) -> fx.Node:
        last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(f"fp8pass_{name}")
        node._dynamo_source = ConstantSource(node.name)
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}  # a fixed address, for CUDA graphs
        return node

    def _begin_step(self, recipe: DelayedScaling, inputs: dict[str, fx.Node]) -> fx.Node:
        state = [inputs[name] for name in ops.SlotTensors._fields]
        with self.graph.inserting_after(inputs[ops.INPUTS[-1]]):
            return self.graph.call_function(ops.begin_step, (recipe, *state))  # type: ignore[arg-type]


@dataclass
class _Slots:
    """Quantizes the tensors of one matmul."""

    owner: _Annotator
    choice: Choice
    anchor: int

    def operand(self, x: fx.Node, role: Role) -> fx.Node:
        """`x` quantized and dequantized, once for all matmuls that read it."""
        key = (x, self.owner.grad_enabled)
        if key not in self.owner.quantized:
            self.owner.quantized[key] = self.quantize(ops.qdq_operand, x, role)
        return self.owner.quantized[key]

    def quantize(self, how: Callable[..., Any], x: fx.Node, role: Role) -> fx.Node:
        """A quantizer for `x`; with delayed scaling it also gets a slot."""
        owner, recipe = self.owner, self.owner.recipe
        if isinstance(recipe, DynamicScaling):
            return owner._call(how, (x, ops.Dynamic(recipe, recipe.dtype(role))), x)
        assert isinstance(recipe, DelayedScaling)
        record = owner.grad_enabled
        quantizer = ops.Delayed(recipe, recipe.dtype(role), slot=-1, index=-1, bootstrap=not record, record=record)
        node = owner._call(how, (x, quantizer), x)
        name = owner.names.slot(self.choice.name, role)
        place = "" if x in owner.names.owned else self.choice.source
        owner.slots.append(_Slot(name, role, self.anchor, place, quantizer, node))
        return node


def _recipe_for(config: Config, has_owner: bool) -> Any:
    recipe = config.recipe
    if isinstance(recipe, DelayedScaling) and not has_owner:
        return DynamicScaling(fp8_format=recipe.fp8_format)
    return recipe


def _function_transform(node: fx.Node) -> str:
    name = str(getattr(node.target, "__name__", ""))
    return name if node.op == "call_function" and name in _TRANSFORMS else ""


_TRANSFORMS = {"_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting", "_make_dual"}


def _add_bias(y: Tensor, bias: Tensor, dtype: torch.dtype, beta: float = 1) -> Tensor:
    """`beta * bias + y` in `dtype`, as linear, addmm and baddbmm mean it: beta 0 ignores even a NaN bias."""
    if beta == 0:
        bias = torch.where(torch.zeros_like(bias, dtype=torch.bool), bias, 0)
    bias = bias.to(dtype)
    return y + (bias if beta in (0, 1) else beta * bias)


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
