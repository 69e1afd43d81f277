"""What things are called: module paths from Dynamo's sources, and the names of slots."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from fp8pass._torch import is_of_fsdp


class Names:
    """The names in one graph of Dynamo's, given its placeholders.

    owned: the inputs that tell instances apart, {placeholder: path}: the parameters, or else the buffers. Paths are
    relative to the graph's root ("layers.0.up.weight"). If there are several roots, they begin with its name, without
    what all roots' names begin with.
    roots: what the graph's function calls the roots: "model", or "args.0" of a function of `*args`.
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

    def alias(self, inner: fx.Node, outer: fx.Node) -> None:
        """`inner`, an input of a graph within the graph, is given `outer`."""
        self._stands_for[inner] = self._stands_for.get(outer, outer)

    def merge(self, cat: fx.Node, parameters: Sequence[fx.Node]) -> None:
        """`cat` stands for several of `owned`, and is called as `merged_name` says."""
        names = [self.of(p, "", [p]) for p in parameters]
        self._merged[cat] = merged_name([name for name, _ in names]), names[0][1]
        self._parts[cat] = tuple(self._stands_for.get(p, p) for p in parameters)

    def is_gathered(self, node: fx.Node) -> bool:
        """Whether the node is, or stands for, a parameter that FSDP gathers before each use, and frees behind it."""
        placeholder = self._stands_for.get(node, node)
        return placeholder in self.owned and is_of_fsdp(getattr(placeholder, "_dynamo_source", None))

    def is_owned(self, node: fx.Node) -> bool:
        """Whether the node is one of `owned`, or stands for one."""
        return self._stands_for.get(node, node) in self.owned

    def parts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Those of `owned` that a weight consists of; none if it is anything else."""
        itself = self._stands_for.get(node, node)
        return self._parts.get(node, (itself,) if itself in self.owned else ())

    def of(self, node: fx.Node, op: str, operands: Sequence[object]) -> tuple[str, int]:
        """The name of a matmul, and which of `owned` it goes with, or -1.

        That is the path of the parameter, or parameters, that an operand is, without "weight"; of a linear layer its
        own, for its weight may be known by another name (a tied head's by the embedding's), unless that leads through
        a function, as one that hooks have put in the place of a forward. Else the module's path and the op.
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

    def _module(self, node: fx.Node, kind: type = torch.nn.Module) -> str:
        """The path of the innermost module that the node is in; "" if that is the root, or of another kind."""
        source, module = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())[-1]
        if kind is torch.nn.Module:
            return self._join(*_root_and_path(source))
        is_kind = isinstance(module, type) and issubclass(module, kind)
        through_function = any(step.startswith("__") for step in path_of(source))
        return self._join(*_root_and_path(source)) if is_kind and not through_function else ""

    def slot(self, name: str, role: str) -> str:
        """A new slot's name: the role, numbered from the second use of a module in the graph on."""
        slot = f"{name}.{role}"
        self._taken[slot] += 1
        uses = self._taken[slot]
        return slot if uses == 1 else f"{slot}_{uses - 1}"

    def relative(self, root: str) -> str:
        """Return what names of this graph begin with that belong to a root; "" if it is the only one."""
        return root.removeprefix(self._above) if len(self.roots) > 1 else ""

    def _join(self, root: str, path: str) -> str:
        return ".".join(part for part in (self.relative(root), path) if part)


def _shared(roots: Sequence[Sequence[str]]) -> str:
    """Return what all roots begin with: "args." of "args.0" and "args.1"."""
    steps = zip(*roots, strict=False)
    return "".join(f"{names[0]}." for names in itertools.takewhile(lambda names: len(set(names)) == 1, steps))


def merged_name(names: Sequence[str]) -> str:
    """ "attn.q+k+v" of "attn.q", "attn.k" and "attn.v"; in full where they have not all the same parent."""
    parents, own = zip(*((parent, last) for parent, _, last in (name.rpartition(".") for name in names)), strict=True)
    return "+".join((names[0], *own[1:])) if len(set(parents)) == 1 else "+".join(names)


def parts_of(slot: str) -> list[str]:
    """ "attn.q.weight", "attn.k.weight" and "attn.v.weight" of "attn.q+k+v.weight"; itself for any other slot."""
    stem, _, role = slot.rpartition(".")
    first, *others = stem.split("+")
    parent = first.rpartition(".")[0]
    return [f"{name}.{role}" for name in (first, *(n if "." in n or not parent else f"{parent}.{n}" for n in others))]


_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]|\[([^\]]+)\]|\.(\w+)")
_DICT = re.compile(r"\.__dict__\['(_modules|_parameters|_buffers)'\]")
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""What `checkpoint_wrapper` and `torch.compile` put into paths. A name does not tell of them."""

MATMULS = frozenset(
    ("_grouped_mm", "addbmm", "addmm", "baddbmm", "bmm", "einsum", "inner", "linear", "matmul", "mm", "tensordot")
)
"""What matmuls without parameters are called within their modules: by their spelling, see `matmul_calls.py`."""

PACKAGE = str(pathlib.Path(__file__).parent)
"""The folder of fp8pass: what lies in it is not the user's code."""

Path = tuple[str, ...]
"""The name of a graph's root, and the names that lead from it to a module or a tensor."""

_ROOT = re.compile(r"[A-Z]\['([^']+)'\]((?:\[\d+\])*)")


def path_of(source: str) -> Path:
    """Return ("model", "layers", "0", "up", "weight") for "L['model']._modules['layers']._modules['0']..."

    A module in a tuple or a list is a root: ("args.0", "up", "weight") for "L['args'][0]._modules['up']...", as
    `self` is in a decorator's function of `*args`.
    """
    source = _DICT.sub(r".\1", source)
    head = _ROOT.match(source)
    root = ".".join((head[1], *re.findall(r"\d+", head[2]))) if head else ""
    rest = source[head.end() :] if head else source
    steps = (next(filter(None, step)).strip("'\"") for step in _STEP.findall(rest))
    return root, *(step for step in steps if step not in WRAPPERS)


def source_of_path(path: Path) -> str:
    """Return a source that `path_of` reads as this path."""
    root, *steps = path
    return "".join((f"L['{root}']" if root else "", *(f"['{step}']" for step in steps)))


def without_wrappers(path: str) -> str:
    """Return the path, as a module's `named_parameters` has it, without what wrappers put into it."""
    return ".".join(step for step in path.split(".") if step not in WRAPPERS)


def _root_and_path(source: str) -> tuple[str, str]:
    root, *steps = path_of(source)
    return root, ".".join(steps)


def module_path(source: str) -> str:
    """The path of a module, relative to the graph's root, of its entry in `nn_module_stack`."""
    return _root_and_path(source)[1]


def source_name(placeholder: fx.Node) -> str:
    """Where Dynamo has an input from, as Python: "L['self'].param_groups[0]['params'][0].grad"; "" if unknown."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


_SHORT = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
}


def short(dtype: torch.dtype) -> str:
    """The name of a dtype as tables show it: "bf16" for torch.bfloat16."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def source_of(node: fx.Node, outermost: bool = False) -> str:
    """The line that a node comes from, as "file.py:12"; "" where torch does not know. outermost: of the frame that was
    compiled, rather than of what that calls."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line for line in trace.splitlines() if line.lstrip().startswith('File "')]
    if not frames:
        return ""
    frame = frames[0 if outermost else -1]
    path, line = frame.split('"')[1], frame.split("line ")[1].split(",")[0]
    return f"{base_name(path)}:{line}"


def base_name(path: str) -> str:
    """The last part of a path, of whatever system."""
    return path.replace(chr(92), "/").rsplit("/", 1)[-1]
