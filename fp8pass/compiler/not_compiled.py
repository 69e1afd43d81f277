"""Find matmuls that run outside of compiled graphs, each with its source line and why it is not compiled.

Dynamo never calls a backend for code that it skips, so no pass sees that code. `Outside` is a dispatch mode that sees
its ops as they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

from fp8pass import hardware
from fp8pass.base._torch import (
    RUNS_BACKWARD,
    FSDPModule,
    OpOverload,
    TorchDispatchMode,
    all_compilations,
    compilations,
    current_graph_task_id,
    disabled_by,
    dynamo_config,
    graph_break_reasons,
    kernel_keys,
    pytree,
)
from fp8pass.base.errors import Fp8Error, warn_once
from fp8pass.base.module_tensors import named_tensors
from fp8pass.base.names import (
    PACKAGE,
    TORCH,
    is_users_file,
    location_of,
    module_path,
    short,
    source_of,
    without_wrappers,
)
from fp8pass.compiler.eager_matmuls import RunProduct, is_recurrent, products_of
from fp8pass.graph.prediction import needed
from fp8pass.graph.refusal import MAX_BATCHES, LeftOut, Reject
from fp8pass.graph.sizes import expression
from fp8pass.graph.verdict import Gemm
from fp8pass.graph.wanted import HIGH_PRECISION, MatmulSizes, check_sizes, recipe_of
from fp8pass.options.config import Config
from fp8pass.options.machine import on_machine
from fp8pass.quant.grouped import FALLBACK, FALLBACK_BACKWARD
from fp8pass.recipes import Kind, Schedule
from fp8pass.report.report import last_line, reason_of
from fp8pass.roofline import predicted_speedup

LIMITS = {
    "outside": {
        "outside": (
            "it ran outside of any graph: in a function that Dynamo gave up (a graph break within `try`, a loop or a "
            "checkpointed region; `nn.LSTM`), at a module with full backward hooks, under `torch.compiler.disable`, "
            "or in one of torch's own modules that is called where graphs break (`nn.Sequential` under FSDP2)",
            "follow the reason's advice; move slow code and graph breaks into a separate function, without matmuls in"
            " it",
        ),
        "custom op": (
            "it is in a custom op, which compilers can't see into",
            "write the op as matmuls, or as `torch._grouped_mm` in bfloat16",
        ),
        "recurrent": (
            "it is in the kernel, or a time step, of an `nn.LSTM`, `nn.GRU` or `nn.RNN`; in a graph too, with "
            "`torch._dynamo.config.allow_rnn`",
            "a loop over `nn.LSTMCell`, `nn.GRUCell` or `nn.RNNCell`, which run in FP8. It is not an error under "
            "`strict`",
        ),
        "update": ("it is in an optimizer's step", "nothing: the matmuls of an optimizer stay in high precision"),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

OUTSIDE = ("outside", "custom op")
"""The rules of matmuls that the recipe selects, but that run outside the code that fp8pass compiles."""

RUNS_GRAPHS = tuple(
    str(Path(folder, file))
    for folder, file in (
        (PACKAGE, "graph/annotation.py"),
        (PACKAGE, "backend.py"),
        (PACKAGE, "inspect/explain_backend.py"),
        (PACKAGE, "compiler/eager.py"),
        (PACKAGE, "compiler/graph_compiler.py"),
        (PACKAGE, "compiler/update_compiler.py"),
        (PACKAGE, "compiler/compiled_graph.py"),
        (PACKAGE, "weights/update_graph.py"),
        (TORCH, "_functorch/_aot_autograd"),
        (TORCH, "_dynamo/convert_frame.py"),
    )
)
"""Files whose functions run compiled graphs, or compile them."""
_OF_MODE = (str(Path(TORCH, "_compile.py")), str(Path(TORCH, "_dynamo/eval_frame.py")), str(Path(TORCH, "_ops.py")))
"""Files whose frames are between an op's caller and `__torch_dispatch__`."""
_OF_TORCH = ("aten", "prims", "prim", "profiler", "inductor", "fp8pass", "c10d", "_c10d_functional", "fsdp")
"""Namespaces of ops whose kernels are not searched for matmuls; ops of other namespaces count as custom ops."""


@dataclass(frozen=True)
class _Line:
    """A line that ran.

    name, first_line: of its function. disables: the function that the frame runs without Dynamo, and the reason that
    the user gave; None if the frame does not disable Dynamo.
    """

    file: str
    line: int
    name: str
    first_line: int
    disables: tuple[Any, str] | None = None

    @property
    def is_users(self) -> bool:
        """True if the file belongs to neither torch nor fp8pass."""
        return is_users_file(self.file)

    def __str__(self) -> str:
        return location_of(self.file, self.line)


@dataclass
class _CallStack:
    """The call stack of an op: its lines and modules, innermost first.

    node: the node that the op runs for, if it runs in a graph. in_function: True if it ran in the forward of an
    `autograd.Function` whose inputs need gradients; grad mode is off there. Reentrant checkpoints and custom ops are
    such functions too.
    """

    lines: list[_Line] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    in_graph: bool = False
    node: fx.Node | None = None
    in_optimizer: bool = False
    in_function: bool = False

    @property
    def users_lines(self) -> list[_Line]:
        """The lines in the user's code."""
        return [line for line in self.lines if line.is_users]


@dataclass
class _CustomOp:
    """A custom op that is running, and its input tensors."""

    name: str
    tensors: list[Tensor]


@dataclass
class _Found:
    """A matmul that ran.

    needs_gradients, by_columns: one bool for each of its two factors. in_kernel: True if it ran in the kernel of a
    recurrent layer. times: number of its runs; more than 1 only in a recurrent layer, one for each time step.
    """

    gemm: Gemm
    product_dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    device: torch.device
    by_columns: tuple[bool, bool]
    needs_gradients: tuple[bool, bool]
    stack: _CallStack
    op: str
    is_recurrent: bool
    in_kernel: bool
    custom_op: str = ""
    times: int = 1

    def repeat(self, needs_gradients: tuple[bool, bool]) -> None:
        """Count one more run. A factor needs a gradient if it does in any run: the first state, zeros, needs none."""
        self.times += 1
        self.needs_gradients = tuple(map(max, self.needs_gradients, needs_gradients))  # type: ignore[assignment]


class Outside(TorchDispatchMode):
    """A dispatch mode that records each matmul outside of compiled graphs, in this thread and in its backwards.

    roots: modules whose parameters name the matmuls that run outside of any module.
    """

    # torch raises NotImplementedError for a higher-order op, such as a checkpoint, under a mode without this.
    supports_higher_order_operators = True

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = _Names(roots)
        self._found: list[_Found] = []
        self._steps: dict[Any, _Found] = {}
        self._custom_op: _CustomOp | None = None
        self._begin: FrameType | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo compiles nothing under a mode that returns False."""
        return True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the matmuls that run in this context."""
        self._begin = sys._getframe(2)  # above this generator and contextlib's `__enter__`
        try:
            with all_compilations(), self:
                yield
                _remember()  # before `all_compilations` drops all but the last 64 records
        finally:
            self._begin = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and record its matmuls."""
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        is_below_autograd = torch.is_inference_mode_enabled() or self._custom_op is not None
        if is_below_autograd and func._can_decompose():
            with self:  # elsewhere autograd decomposes composite ops before they come here
                return func.decompose(*args, **kwargs)
        if func.namespace not in _OF_TORCH and self._custom_op is None:
            return self._run_custom(func, args, kwargs)
        result = func(*args, **kwargs)
        if products := products_of(func, args, result):
            # The verdicts of a graph include neither what kernels of recurrent layers multiply, nor what custom ops do.
            stack = self._stack_of_op(enters_graphs=is_recurrent(func) or self._hides_matmuls)
            for product in products if stack is not None else ():
                self._note(func, product, stack)  # type: ignore[arg-type]
        return result

    @property
    def _hides_matmuls(self) -> bool:
        """True if a custom op is running for whose matmuls graphs have no verdict."""
        return self._custom_op is not None and self._custom_op.name not in (FALLBACK, FALLBACK_BACKWARD)

    def _run_custom(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run a custom op's kernel under this mode, which sees the ops that the kernel calls."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        keys = kernel_keys(tensors)
        if keys is None:
            return func(*args, **kwargs)
        self._custom_op = _CustomOp(func._schema.name, tensors)
        try:
            with self:
                # The device's kernel at once: a plain call would come back to this mode, which is off while it runs
                # `func`.
                return func.redispatch(keys, *args, **kwargs)
        finally:
            self._custom_op = None

    def _stack_of_op(self, enters_graphs: bool) -> _CallStack | None:
        """Return where an op runs; None for ops of autograd's backward, and for ops in a graph or its compilation.

        enters_graphs: if True, also return the stack of an op in a graph.
        """
        stack, in_backward = _CallStack(), current_graph_task_id() != -1
        # The frame above `__torch_dispatch__`. torch runs the latter under `_disable_dynamo`; without those frames,
        # that does not look as if the user had disabled Dynamo.
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename in _OF_MODE:
            frame = frame.f_back
        # In a backward, frames outside of autograd's engine belong to the call of backward(), not to the op.
        while frame is not None and frame is not self._begin and not (in_backward and frame.f_code is RUNS_BACKWARD):
            if frame.f_code.co_filename.startswith(RUNS_GRAPHS):
                stack.in_graph = True
                if not enters_graphs:
                    return None
            _add(stack, frame)
            frame = frame.f_back
        if in_backward and (enters_graphs or not stack.users_lines):
            return None  # `gemms` derives the matmuls of the backward from the forward's
        return stack

    def _note(self, func: OpOverload, product: RunProduct, stack: _CallStack) -> None:
        op = func._schema.name.partition("::")[2]
        name = self._names.of(stack, op, product)
        # Where no kernel computes a whole recurrent layer, as of GRU on CPUs, each time step is a separate matmul.
        is_step = bool(stack.modules) and isinstance(stack.modules[0], nn.RNNBase)
        step = (id(stack.modules[0]), name, product.m, product.k, product.n) if is_step else None
        if step in self._steps:
            self._steps[step].repeat(self._need_gradients(product, stack))
            return
        source = source_of(stack.node) if stack.node is not None else next(map(str, stack.users_lines), "")
        m, k, n, batches = map(expression, (product.m, product.k, product.n, product.batches))
        a, b, out = map(short, product.dtypes)
        matmul = _Found(
            Gemm("output", name, m, k, n, (a, b, out), source, batches),
            product.dtypes,
            product.a.device,
            product.by_columns,
            self._need_gradients(product, stack),
            stack,
            op,
            is_recurrent(func) or is_step,
            is_recurrent(func),
            self._custom_op.name if self._custom_op is not None else "",
        )
        self._found.append(matmul)
        if step is not None:
            self._steps[step] = matmul

    def _need_gradients(self, product: RunProduct, stack: _CallStack) -> tuple[bool, bool]:
        """Return for each of the two factors whether the backward will compute its gradient."""
        if current_graph_task_id() != -1 or not (torch.is_grad_enabled() or stack.in_function):
            return False, False
        hidden = stack.in_function and not torch.is_grad_enabled()
        computed = hidden or product.a.requires_grad or product.b.requires_grad

        def needs(x: Tensor) -> bool:
            parameter = self._names.parameter_of(x)
            return x.requires_grad or (hidden if parameter is None else parameter.requires_grad)

        return (computed if product.computed else needs(product.a)), needs(product.b)

    def forget(self) -> None:
        """Release the modules: Dynamo's caches may keep a bound method of this object alive."""
        self._names = _Names(())
        self._found.clear()
        self._steps.clear()

    def path_of(self, x: Any) -> str:
        """Return the path of a parameter in the outermost running module that has it; "" for anything else."""
        return self._names.path_of(x) if isinstance(x, nn.Parameter) else ""

    def gemms(self, config: Config) -> list[Gemm]:
        """Return verdicts on the matmuls that ran and on those of their backwards, in the order of a joint graph."""
        config, reasons = self._decided(config), _Reasons()
        forward = [replace(f.gemm, batches=f.gemm.batches * f.times) for f in self._found]
        verdicts = [self._verdict(f, config, reasons) for f in self._found]
        gemms = [replace(g, rule=v.rule, reason=str(v)) for g, v in zip(forward, verdicts, strict=True)]
        for f, g in reversed(list(zip(self._found, list(gemms), strict=True))):
            gemms += _backward(f, g)
        return gemms

    def layers(self, model: nn.Module | None, config: Config) -> dict[nn.Module, nn.Module]:
        """Return {what could be compiled by itself: the outermost module} for matmuls that ran outside of graphs.

        Dynamo begins no graph in torch's own modules. Each is the largest around its matmul that has no module of the
        user's, which Dynamo compiles by itself. Left out are `model`, modules that FSDP manages, and what runs without
        Dynamo.
        """
        config, reasons, layers = self._decided(config), _Reasons(), dict[nn.Module, nn.Module]()
        for f in self._found:
            modules = f.stack.modules
            layer = next((m for m in reversed(modules) if m is not model and _is_of_torch(m)), None)
            is_disabled = any(line.disables for line in f.stack.lines)
            if layer is not None and not is_disabled and self._verdict(f, config, reasons).rule == "outside":
                layers[layer] = modules[-1]
        return layers

    def _decided(self, config: Config) -> Config:
        """Return the options by which it is decided: those of a schedule's last phase, on the GPU that is there."""
        if isinstance(config.recipe, Schedule):
            config = config.at_step(config.recipe.phases[-1][0])
        return on_machine(config, next((f.device for f in self._found if f.device.type == "cuda"), None))

    def _verdict(self, matmul: _Found, config: Config, reasons: _Reasons) -> Reject:
        try:
            _check_wanted(matmul, config)
        except Reject as declined:
            return declined
        if matmul.custom_op:
            what = (
                "multiplied within the custom op"
                if matmul.stack.in_graph
                else "multiplied outside of any graph, within"
            )
            return Reject("custom op", f"{what} {matmul.custom_op}, which no compiler looks into")
        outside = "" if matmul.stack.in_graph else f"outside of any graph: {reasons.of(matmul.stack)}"
        if matmul.is_recurrent:
            what = f"in the kernel {matmul.op}" if matmul.in_kernel else "a time step of a recurrent layer"
            why = f"{what}, which has no form in FP8: a loop over nn.LSTMCell, nn.GRUCell or nn.RNNCell runs in FP8"
            return LeftOut("recurrent", f"{why}; {outside}" if outside else why)
        return Reject("outside", outside + _advice_of_experts(matmul.stack))


def _advice_of_experts(stack: _CallStack) -> str:
    """Return how transformers multiplies experts in a graph, if a matmul ran in its loop over experts; "" if not."""
    in_loop = any(
        "Experts" in type(module).__name__
        and getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
        for module in stack.modules
    )
    if not in_loop:
        return ""
    return (
        ". It is in a loop over experts: model.set_experts_implementation('grouped_mm') of transformers multiplies all "
        "experts at once, in the graph"
    )


def _add(stack: _CallStack, frame: FrameType) -> None:
    """Record a frame of the stack that led to an op."""
    code = frame.f_code
    # fx.Interpreter.run_node(self, n) has the node in its local variable `n`.
    if code is fx.Interpreter.run_node.__code__ and stack.node is None:
        stack.node = frame.f_locals["n"]
    if code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])  # `self` of a method, `ctx` of an autograd.Function
        stack.in_optimizer |= isinstance(first, Optimizer)
        is_function = isinstance(first, FunctionCtx)
        stack.in_function |= is_function and any(first.needs_input_grad)  # type: ignore[union-attr]
        # consecutive frames of one module, as `_call_impl` and `forward`, count once
        if isinstance(first, nn.Module) and not (stack.modules and stack.modules[-1] is first):
            stack.modules.append(first)
    stack.lines.append(_Line(code.co_filename, frame.f_lineno, code.co_name, code.co_firstlineno, disabled_by(frame)))


def _check_wanted(matmul: _Found, config: Config) -> None:
    """Raise Reject for a matmul that would stay in high precision even if it were compiled."""
    gemm = matmul.gemm
    sizes = [x for x in (gemm.batches, gemm.M, gemm.K, gemm.N) if isinstance(x, int)]
    if matmul.stack.in_optimizer:
        raise LeftOut("update", "in an optimizer's step: what an optimizer computes stays in high precision")
    if config.recipe is None:
        raise LeftOut("recipe", "the recipe is None: what you quantize yourself runs in FP8, and only in a graph")
    if any(dtype not in HIGH_PRECISION for dtype in matmul.product_dtypes[:2]):
        types = " and ".join(gemm.dtypes[:2])
        raise LeftOut("dtype", f"operands are {types}; FP8 replaces float32, bfloat16 and float16")
    if len(sizes) < 4:
        return
    batches, m, k, n = sizes
    # Time steps run one after the other: the limit of a batch does not hold for their number.
    one_by_one = matmul.is_recurrent or matmul.times > 1
    check_sizes(MatmulSizes(1 if one_by_one else batches, m, k, n), MAX_BATCHES, "")
    recipe = recipe_of(gemm.name, config, m, k, n)
    if (target := hardware.target_of(matmul.device, config.target)) is None:
        return
    kinds = needed(*matmul.needs_gradients)
    gain = predicted_speedup(target, m, k, n, recipe, matmul.product_dtypes[2].itemsize, kinds)
    if gain is not None and gain < config.min_speedup:
        raise LeftOut(
            "min_speedup",
            f"predicted speed-up on {target.name} is {gain:.2f}, below min_speedup={config.min_speedup:g}, if it were "
            "compiled",
        )


def _backward(matmul: _Found, gemm: Gemm) -> list[Gemm]:
    """Return the matmuls of its backward, as autograd computes them: transposed for a column-major factor."""
    m, k, n = gemm.M, gemm.K, gemm.N
    a, b, out = gemm.dtypes
    of_a, of_b = matmul.by_columns
    by_weight = ((n, m, k), (out, a, b)) if of_b else ((k, m, n), (a, out, b))  # grad.T @ a, or a.T @ grad
    by_input = ((k, n, m), (b, out, a)) if of_a else ((m, n, k), (out, b, a))  # b @ grad.T, or grad @ b.T
    needs_a, needs_b = matmul.needs_gradients
    backward: list[tuple[Kind, bool, Any]] = [("grad_weight", needs_b, by_weight), ("grad_input", needs_a, by_input)]
    return [
        replace(gemm, kind=kind, M=sizes[0], K=sizes[1], N=sizes[2], dtypes=dtypes)
        for kind, needed, (sizes, dtypes) in backward
        if needed
    ]


class _Names:
    """Names for matmuls outside of graphs, made by the same rules as those in graphs."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(roots)
        self._modules: dict[int, dict[int, str]] = {}
        self._parameters: dict[int, tuple[str, Tensor]] = {}
        self._by_storage: dict[int, tuple[str, Tensor]] = {}

    def of(self, stack: _CallStack, op: str, product: RunProduct) -> str:
        """Return the path of the matmul's layer or parameter; without one, the path of its module and the op."""
        root = stack.modules[-1] if stack.modules else None
        if root is not None:
            self._learn(root)
        paths = self._modules[id(root)] if root is not None else {}
        path = paths.get(id(stack.modules[0]), "") if stack.modules else ""
        if stack.modules and isinstance(stack.modules[0], nn.Linear) and path:
            return path
        for operand in (product.b, product.a):  # the second one first: in `x @ weight` it is the parameter
            if (named := self._of_parameter(operand)) is not None:
                return named[0].removesuffix(".weight")
        if stack.node is not None:
            modules = list((stack.node.meta.get("nn_module_stack") or {"": ("", None)}).values())
            path = module_path(modules[-1][0])
        return f"{path}.{op}" if path else op

    def path_of(self, x: Tensor) -> str:
        """Return the path of the parameter that a tensor is or views; "" if there is none."""
        named = self._of_parameter(x)
        return "" if named is None else named[0]

    def parameter_of(self, x: Tensor) -> Tensor | None:
        """Return the parameter that a tensor is or views; None if there is none."""
        named = self._of_parameter(x)
        return None if named is None else named[1]

    def _learn(self, root: nn.Module) -> None:
        if id(root) in self._modules:
            return
        self._modules[id(root)] = {id(m): without_wrappers(name) for name, m in root.named_modules()}
        for name, x in named_tensors(root):
            if isinstance(x, nn.Parameter):
                self._parameters.setdefault(id(x), (without_wrappers(name), x))
                if (storage := _storage(x)) is not None:
                    self._by_storage.setdefault(storage, (without_wrappers(name), x))

    def _of_parameter(self, x: Tensor) -> tuple[str, Tensor] | None:
        for root in self._roots:
            self._learn(root)
        base = x if x._base is None else x._base
        if (named := self._parameters.get(id(base))) is not None:
            return named
        storage = _storage(x)  # `_base` is None for views made where autograd does not track them
        return None if storage is None else self._by_storage.get(storage)


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether torch defines what a module and its submodules compute, and FSDP does not manage them."""
    parts = list(module.modules())
    files = [getattr(getattr(type(part).forward, "__code__", None), "co_filename", "") for part in parts]
    return all(file.startswith(TORCH) for file in files) and not any(isinstance(part, FSDPModule) for part in parts)


def _storage(x: Tensor) -> int | None:
    """Return the address of a plain tensor's storage; None for other tensors."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.device.type == "meta":
        return None
    return x.untyped_storage().data_ptr() or None  # 0 is the address of all empty storages


_OWN_MODULES = ", and Dynamo starts no graph in torch's own modules, such as Sequential: call them in a module of yours"


class _Reasons:
    """The reasons that Dynamo gives for not compiling code that ran."""

    def of(self, stack: _CallStack) -> str:
        """Return the reason for the op of a stack: the first that is found on its lines, from the op outwards."""
        if dynamo_config.disable:
            return "compilation is switched off, by TORCHDYNAMO_DISABLE or torch._dynamo.config.disable"
        for i, line in enumerate(stack.lines):
            if line.disables is not None and (said := self._disabled(*line.disables, stack.lines[i + 1 :])):
                return said
            if (failed := _given_up.get((line.file, line.first_line, line.name))) is not None:
                return f"Dynamo can't compile {line.name} ({location_of(line.file, line.first_line)}): {failed}"
            if broken := self._break_at(line):
                inside = "" if any(x.is_users for x in stack.lines[: i + 1]) else _OWN_MODULES
                return f"the graph breaks at {broken}{inside}"
        return "Dynamo compiled none of the functions that called it, and does not say why"

    def _disabled(self, function: Any, why: str, around: Sequence[_Line]) -> str:
        """Return why a function runs without Dynamo; "" for a checkpoint whose caller's line has no graph break."""
        # torch disables Dynamo in its checkpoint function, which Dynamo does capture unless the graph breaks inside.
        if function.__module__ == "torch.utils.checkpoint":
            caller = next((line for line in around if line.is_users), None)
            broken = "" if caller is None else self._break_at(caller)
            return f"in the checkpointed region at {caller}, where the graph breaks at {broken}" if broken else ""
        name = getattr(function, "__qualname__", type(function).__name__)
        return f"{name} is under torch.compiler.disable" + (f": {why}" if why else "")

    def _break_at(self, line: _Line) -> str:
        """Return the location and reason of the graph break that a line causes; "" if it causes none."""
        for why in graph_break_reasons:
            # of the frame that Dynamo compiled, not of inlined functions
            at = why.user_stack[0] if why.user_stack else None
            if at is not None and (at.filename, at.lineno) == (line.file, line.line):
                return f"{last_line(why.user_stack)}: {reason_of(why).rstrip('.')}"
        return ""


_given_up: dict[tuple[str, int, str], str] = {}
"""{(file, first line, name) of a function: why Dynamo could not compile it}. Dynamo tries each function only once."""


def _remember() -> None:
    wrappers = str(Path(TORCH, "_dynamo"))  # Dynamo's wrappers share code: a failure of one says nothing of others
    for c in compilations():
        if c.fail_reason and not c.has_guarded_code and not str(c.co_filename).startswith(wrappers):
            _given_up[str(c.co_filename), int(c.co_firstlineno or 0), str(c.co_name)] = _first_line(c.fail_reason)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")


def missed(gemms: Sequence[Gemm]) -> list[Gemm]:
    """Return the matmuls that would run in FP8 if they were compiled."""
    return [g for g in gemms if g.rule in OUTSIDE]


def raise_if_missed(gemms: Sequence[Gemm]) -> None:
    """Raise Fp8Error if any of the matmuls would run in FP8 if it were compiled."""
    for g in missed(gemms):
        where = f" at {g.source}" if g.source else ""
        raise Fp8Error(
            f"strict: {g.kind} of {g.name or 'a matmul'}{where}, [{g.M}, {g.K}] by [{g.K}, {g.N}], does not run in "
            f"FP8: {g.reason}. Leave it out with filter=, or drop strict."
        )


def warn_of(gemms: list[Gemm], where: str, strict: bool) -> list[Gemm]:
    """Warn of a step's matmuls outside of graphs that would run in FP8 if compiled, and return `gemms` unchanged.

    where: the step and its line, for the message. Under `strict`, raises Fp8Error instead.
    """
    if strict:
        raise_if_missed(gemms)
    if outside := missed(gemms):
        names = list(dict.fromkeys(g.name for g in outside))
        more = ", ..." if len(names) > 3 else ""
        warn_once(
            f"fp8pass: {len(outside)} matmuls of {where} ran in high precision, outside of what is compiled "
            f"({', '.join(names[:3])}{more}): {outside[0].reason}. The step's `report` lists all of them"
        )
    return gemms
