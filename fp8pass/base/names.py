"""Names of modules, matmuls and slots: module paths from Dynamo's sources, slot names, source lines, short dtypes."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from fp8pass.base._torch import MODULE_CALL, is_of_fsdp


class Names:
    """The names in one Dynamo graph, from its placeholders.

    owned: the inputs that tell instances apart, {placeholder: path}: the parameters, or the buffers if there are no
    parameters. Paths are relative to the graph's root ("layers.0.up.weight"). If there are several roots, paths begin
    with the root's name, without the prefix that all roots' names share.
    roots: the roots' names in the graph's function: "model", or "args.0" in a function of `*args`.
    """

    def __init__(self, placeholders: Sequence[fx.Node]) -> None:
        sources = {p: source_name(p) for p in placeholders}
        parameters = [p for p in placeholders if isinstance(p.meta.get("example_value"), torch.nn.Parameter)]
        owned = parameters or [p for p in placeholders if "._buffers[" in sources[p]]
        paths = {p: _root_and_path(sources[p]) for p in owned}
        self.roots = {root for root, _ in paths.values()}
        self._above = _shared([root.split(".") for root in self.roots])
        self.owned = {p: self._join(*path) for p, path in paths.items()}
        self._taken: Counter[str] = Counter()
        self._stands_for: dict[fx.Node, fx.Node] = {}
        self._merged: dict[fx.Node, tuple[str, int]] = {}
        self._parts: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._views: set[fx.Node] = set()

    def alias(self, inner: fx.Node, outer: fx.Node) -> None:
        """Record that `inner`, an input of a subgraph, is passed `outer` of the graph that calls it."""
        self._stands_for[inner] = self._stands_for.get(outer, outer)  # `outer` may be an input of a subgraph, too

    def view(self, view: fx.Node, parameter: fx.Node) -> None:
        """Record that `view`, a matrix, is another form of a parameter, after which it is named too."""
        if self.is_owned(parameter):
            self.alias(view, parameter)
            self._views.add(view)

    def merge(self, cat: fx.Node, parameters: Sequence[fx.Node]) -> None:
        """Record that `cat` concatenates several of `owned`, and name it by `merged_name`."""
        names = [self.of(p, "", [p]) for p in parameters]
        self._merged[cat] = merged_name([name for name, _ in names]), names[0][1]
        self._parts[cat] = tuple(self._stands_for.get(p, p) for p in parameters)

    def is_gathered(self, node: fx.Node) -> bool:
        """Return whether the node is, or is bound to, a parameter that FSDP gathers before each use and frees after."""
        placeholder = self._stands_for.get(node, node)
        return placeholder in self.owned and is_of_fsdp(getattr(placeholder, "_dynamo_source", None))

    def is_owned(self, node: fx.Node) -> bool:
        """Return whether the node is one of `owned`, or is bound to one."""
        return self._stands_for.get(node, node) in self.owned

    def parts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the inputs in `owned` that a weight consists of: several if it is merged; () for any other node.

        A view of a parameter, in which a convolution's weight is a matrix, is another node.
        """
        if node in self._views:
            return ()
        itself = self._stands_for.get(node, node)
        return self._parts.get(node, (itself,) if itself in self.owned else ())

    def of(self, node: fx.Node, op: str, operands: Sequence[object]) -> tuple[str, int]:
        """Return the name of a matmul, and the index in `owned` of its parameter; -1 if it has none.

        The name is the path of the parameter, or merged parameters, that an operand is, without ".weight". In a
        `Linear` it is the layer's path, since a tied weight may have another path (a head's is the embedding's), unless
        that path leads through a function, such as one with which a hook has replaced a forward. A matmul without
        parameters is named by the module's path and the op.
        """
        for operand in operands:
            if isinstance(operand, fx.Node) and operand in self._merged:
                return self._merged[operand]
            if isinstance(operand, fx.Node) and self.is_owned(operand):
                parameter = self._stands_for.get(operand, operand)
                name = self._module(node, torch.nn.Linear) or self.owned[parameter].removesuffix(".weight")
                return name, list(self.owned).index(parameter)
        path = self._module(node)
        return f"{path}.{op}" if path else op, -1

    def module_of(self, node: fx.Node) -> str:
        """Return the path of the innermost module that the node is in; "" if that is the root."""
        return self._module(node)

    def _module(self, node: fx.Node, kind: type = torch.nn.Module) -> str:
        """Return the path of the innermost module that the node is in; "" if that is the root, or not of `kind`."""
        # the stack is a dict, outermost module first
        source, module = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1]
        if kind is torch.nn.Module:
            return self._join(*_root_and_path(source))
        is_kind = isinstance(module, type) and issubclass(module, kind)
        through_function = any(step.startswith("__") for step in path_of(source))
        return self._join(*_root_and_path(source)) if is_kind and not through_function else ""

    def slot(self, name: str, role: str) -> str:
        """Return the name of a new slot: name and role, numbered from the second use of the module in the graph on."""
        slot = f"{name}.{role}"
        self._taken[slot] += 1
        uses = self._taken[slot]
        return slot if uses == 1 else f"{slot}_{uses - 1}"

    def relative(self, root: str) -> str:
        """Return the prefix in this graph of the names that belong to a root; "" if it is the only root."""
        return root.removeprefix(self._above) if len(self.roots) > 1 else ""

    def _join(self, root: str, path: str) -> str:
        return ".".join(part for part in (self.relative(root), path) if part)


def _shared(roots: Sequence[Sequence[str]]) -> str:
    """Return the prefix that all roots' names share: "args." for "args.0" and "args.1"."""
    steps = zip(*roots, strict=False)
    return "".join(f"{names[0]}." for names in itertools.takewhile(lambda names: len(set(names)) == 1, steps))


def merged_name(names: Sequence[str]) -> str:
    """Return "attn.q+k+v" for "attn.q", "attn.k" and "attn.v"; full names joined by "+" if their parents differ."""
    parents, ends = zip(*((parent, last) for parent, _, last in (name.rpartition(".") for name in names)), strict=True)
    return "+".join((names[0], *ends[1:])) if len(set(parents)) == 1 else "+".join(names)


def parts_of(slot: str) -> list[str]:
    """Return ["attn.q.weight", "attn.k.weight", "attn.v.weight"] for "attn.q+k+v.weight"; [slot] if not merged."""
    stem, _, role = slot.rpartition(".")
    first, *rest = stem.split("+")
    parent = first.rpartition(".")[0]
    return [f"{name}.{role}" for name in (first, *(n if "." in n or not parent else f"{parent}.{n}" for n in rest))]


_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\[([^\]]+)\]|\.(\w+)")
_DICT = re.compile(r"\.__dict__\['(_modules|_parameters|_buffers)'\]")
_CALLED = re.compile(rf"(\.__dict__\['{MODULE_CALL}'\]|\.{MODULE_CALL})\.args\[1\]")
"""The end of the source of a module whose call `module_calls.py` catches: an argument of what is called instead."""
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""The names that `checkpoint_wrapper` and `torch.compile` add to paths. fp8pass's names leave them out."""

MATMULS = frozenset(
    ("_grouped_mm", "addbmm", "addmm", "baddbmm", "bmm", "einsum", "inner", "linear", "matmul", "mm", "tensordot")
)
"""The names, within their modules, of matmuls without parameters: the functions called, see `matmul_calls.py`."""

PACKAGE = str(pathlib.Path(__file__).parent.parent)
TORCH = str(pathlib.Path(torch.__file__).parent)
"""The folders of fp8pass and of torch: files in them are not the user's code."""
_CALLS = str(pathlib.Path(PACKAGE, "compiler", "module_calls.py"))
"""The file whose functions Dynamo traces where a training step calls a module."""

Path = tuple[str, ...]
"""The name of a graph's root, and the names that lead from it to a module or a tensor."""

# "L['args'][0]", "G['model']": Dynamo's sources of a local and of a global variable, with indices of tuples or lists.
_ROOT = re.compile(r"[A-Z]\['([^']+)'\]((?:\[\d+\])*)")


def path_of(source: str) -> Path:
    """Return ("model", "layers", "0", "up", "weight") for "L['model']._modules['layers']._modules['0']...".

    A module in a tuple or a list is a root: ("args.0", "up", "weight") for "L['args'][0]._modules['up']...", which is
    the source of `self` in a decorator's function of `*args`.
    """
    source = _CALLED.sub("", _DICT.sub(r".\1", source))
    head = _ROOT.match(source)
    root = ".".join((head[1], *re.findall(r"\d+", head[2]))) if head else ""
    rest = source[head.end() :] if head else source
    steps = (next(filter(None, step)).strip("'\"") for step in _STEP.findall(rest))
    return root, *(step for step in steps if step not in WRAPPERS)


def source_of_path(path: Path) -> str:
    """Return a source of which `path_of` returns this path."""
    root, *steps = path
    return "".join((f"L['{root}']" if root else "", *(f"['{step}']" for step in steps)))


def without_wrappers(path: str) -> str:
    """Return a path, in the form of `named_parameters`, without the names that wrappers add, see `WRAPPERS`."""
    return ".".join(step for step in path.split(".") if step not in WRAPPERS)


def _root_and_path(source: str) -> tuple[str, str]:
    root, *steps = path_of(source)
    return root, ".".join(steps)


def module_path(source: str) -> str:
    """Return a module's path relative to the graph's root. source: from the module's entry in `nn_module_stack`."""
    return _root_and_path(source)[1]


def source_name(placeholder: fx.Node) -> str:
    """Return Dynamo's source of an input, as Python: "L['self'].param_groups[0]['params'][0].grad"; "" if unknown."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a method or a property, by torch's version


def gradients_of(graph: fx.Graph) -> list[int]:
    """Return the positions of the inputs that are gradients of parameters."""
    inputs = graph.find_nodes(op="placeholder")
    return [i for i, n in enumerate(inputs) if source_name(n).endswith(".grad")]


_SHORT = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
}


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype in tables: "bf16" for torch.bfloat16."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


_TYPES = {name: dtype for dtype, name in _SHORT.items()}


def bytes_of(name: str) -> int:
    """Return the bytes of an element of a dtype that `short` has named."""
    dtype: torch.dtype = _TYPES.get(name) or getattr(torch, name)
    return dtype.itemsize


def source_of(node: fx.Node, outermost: bool = False) -> str:
    """Return the source line of a node, as "file.py:12"; "" if torch has not recorded it.

    outermost: the line in the compiled frame, rather than in the innermost function that it calls.
    """
    trace = node.meta.get("stack_trace") or ""
    frames = [line for line in trace.splitlines() if line.lstrip().startswith('File "')]
    # tracers other than Dynamo keep torch's own frames
    frames = [line for line in frames if f'"{TORCH}' not in line and _CALLS not in line] or frames
    if not frames:
        return ""
    frame = frames[0 if outermost else -1]  # outermost first, as in Python's tracebacks
    path, line = frame.split('"')[1], frame.split("line ")[1].split(",")[0]
    return location_of(path, int(line))


def location_of(file: str, line: int) -> str:
    """Return a source line as reports show it: "file.py:12"."""
    return f"{base_name(file)}:{line}"


def is_users_file(file: str) -> bool:
    """Return whether a file belongs to neither torch nor fp8pass, and is not generated code, as "<string>"."""
    return not file.startswith((TORCH, PACKAGE, "<"))


def base_name(path: str) -> str:
    """Return the last part of a path with "/" or, as on Windows, backslashes."""
    return path.replace(chr(92), "/").rsplit("/", 1)[-1]
