"""Write a graph as executable Python: the text of a dump. The functions that it calls are in `replay.py`."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from fp8pass.base._torch import CodeGen, FakeTensor, hint_of, unset_fake_temporarily
from fp8pass.dump.replay import Quantized, Random, RngState, Transposed
from fp8pass.quant.ops import cached_operand, is_turned
from fp8pass.quant.wrapper_tensor import WrapperTensor
from fp8pass.recipes import Recipe
from fp8pass.states.scale_state import recipe_of

MAX_LITERAL_ELEMENTS = 16
"""The most elements of a tensor whose values are written down. Larger tensors are generated from a seed."""


@dataclasses.dataclass
class Origins:
    """Facts about the inputs of Dynamo's graph that the joint graph no longer has.

    names: of all inputs. about: `Random.about` of inputs that are positive. copies: inputs computed from other inputs.
    """

    names: list[str] = dataclasses.field(default_factory=list)
    about: dict[str, float] = dataclasses.field(default_factory=dict)
    copies: dict[str, Quantized | Transposed] = dataclasses.field(default_factory=dict)

    def learn(self, module: fx.GraphModule, examples: Sequence[Any]) -> None:
        """Record the inputs of Dynamo's graph, or of its annotated copy."""
        inputs = [(str(n.target), value) for n, value in _inputs(module.graph, examples)]
        self.names = [name for name, _ in inputs]
        for node in (n for n in module.graph.nodes if n.target is cached_operand):
            self._learn_copies(*node.args)
        self.about = {n: _about(x, n) for n, x in (*inputs, *_attributes(module)) if _is_plain(x)}

    def _learn_copies(self, weight: fx.Node, quantizer: Any, scales: fx.Node, first: fx.Node, *x_t: fx.Node) -> None:
        if weight.op == "placeholder":  # otherwise a concatenation of weights, which is not an input
            names, place = (str(weight.target), str(scales.target)), quantizer.place_in_copy_scales
            self.copies[str(first.target)] = Quantized(*names, place, quantizer.dtype, is_turned(quantizer))
        self.copies.update({str(x.target): Transposed(str(first.target)) for x in x_t})

    def copy(self, name: str, inputs: dict[str, str]) -> str:
        """Return the text of an input that is computed from others; "" if it is not, or if those are not inputs.

        inputs: {name in Dynamo's graph: name in this graph}.
        """
        copy = self.copies.get(name)
        if copy is None or not {copy.of, getattr(copy, "scales", copy.of)} <= set(inputs):
            return ""
        if isinstance(copy, Quantized):
            return f"replay.{dataclasses.replace(copy, of=inputs[copy.of], scales=inputs[copy.scales])!r}"
        return f"replay.{Transposed(inputs[copy.of])!r}"

    def name_of(self, node: fx.Node) -> str:
        """Return the name in Dynamo's graph of an input of AOTAutograd's graph; "" if it is not an input there."""
        origin: object = node.meta.get("desc")
        index = getattr(origin, "idx", None)
        if index is not None and index < len(self.names) and not hasattr(origin, "output"):
            return str(self.names[index])
        return str(getattr(origin, "target", ""))


def runnable(
    module: fx.GraphModule, origins: Origins, examples: Sequence[Any] = (), differentiable: bool = False
) -> str:
    """Return the graph as a Python file, without its first line.

    examples: values of its inputs, used where the graph has no metadata. differentiable: True if the file runs the
    backward too.
    """
    body = _code(module)
    values = list(_inputs(module.graph, examples))
    names = {origins.name_of(node) or str(node.target): str(node.target) for node, _ in values}
    inputs = [_input(node, value, origins, names, differentiable) for node, value in values]
    attributes = [f"    {name!r}: {_value(x, origins.about.get(name, 0))},\n" for name, x in _attributes(module)]
    return (
        "# Runs by itself; --help says how. fp8pass has to be installed.\n\n"
        f"{_imports(module, body)}\n\n\n{body}\n\n\n"
        f"GRAPH = {_NAME}\nINPUTS = {{\n{''.join(inputs)}}}\nATTRIBUTES = {{\n{''.join(attributes)}}}\n\n"
        'if __name__ == "__main__":\n    replay.main(GRAPH, INPUTS, ATTRIBUTES, __file__)\n'
    )


_NAME = "Graph"
_CHECKPOINT = re.compile(r"torch\.ops\.higher_order\.(?=tag_activation_checkpoint\()")
# Python's repr of a function, as fx writes one among a call's arguments; not within a string.
_FUNCTION = re.compile(
    r"(?<!['\"])<(?:function|bound method|built-in \w+) ([\w.<>]+?)(?: of .*?)?(?: at 0x[0-9a-f]+)?>"
)
# `Recipe.__repr__` writes a function as its name in quotes.
_ALGORITHM = re.compile(r"(?<=compute_algo=)'(?!max'|most_recent')([^']*)'")
_SCALES = "StaticScaling({...})"


def _code(module: fx.GraphModule) -> str:
    graph, codegen = module.graph, module.graph._codegen
    graph.set_codegen(CodeGen())  # the codegen of a joint graph takes its inputs as two lists
    try:
        text = module.print_readable(print_output=False, include_stride=True, include_device=True, expanded_def=True)
    finally:
        graph.set_codegen(codegen)
    text = re.sub(r"\A\s*class [^(]+\(", f"class {_NAME}(", text)
    text = _CHECKPOINT.sub("replay.", text)
    return "\n".join(_with_stand_ins(line) for line in text.rstrip().splitlines())


def _with_stand_ins(line: str) -> str:
    """Replace functions that have no text in a line of code by `replay.missing(name)`, which fails when called."""
    if line.lstrip().startswith("#"):
        return line
    line = line.replace(_SCALES, "StaticScaling({})")  # the scales are an input of the graph
    for pattern in _FUNCTION, _ALGORITHM:
        line = pattern.sub(lambda m: f"replay.missing({m[1]!r})", line)
    return line


def _graphs(module: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, fx.GraphModule))


def _imports(module: fx.GraphModule, body: str) -> str:
    """Return the import lines for the names that the code uses."""
    lines = {"import torch", "from fp8pass.dump import replay"}
    for _, part in _graphs(module):
        for name, value in part.graph.python_code("self").globals.items():
            if re.search(rf"\b{re.escape(name)}\b", body):
                lines.add(_import(name, value))
        for node in part.graph.nodes:
            # An op gets a recipe as a string, the key under which `scale_state` of this process knows it.
            keys = {a: r for a in node.args if isinstance(a, str) and isinstance(r := recipe_of(a), Recipe)}
            for kind in _types_in((node.args, node.kwargs, keys)):
                lines.add(_import(kind.__name__, kind))
            for key, recipe in keys.items():
                lines |= {
                    "from fp8pass.states import scale_state",
                    f"scale_state.remember({key!r}, {_with_stand_ins(repr(recipe))})",
                }
    return "\n".join(
        # Imports come first, because other lines use what they import.
        sorted(filter(None, lines), key=lambda line: ("import" not in line, line.startswith("from"), line))
    )


def _types_in(x: Any) -> Iterator[type]:
    """Yield the types of dataclasses in a node's arguments (quantizers, recipes): the text of the node names them."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        yield type(x)
        for field in dataclasses.fields(x):
            yield from _types_in(getattr(x, field.name))
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from _types_in(value)
    elif isinstance(x, dict):
        yield from _types_in(list(x.values()))


def _import(name: str, value: Any) -> str:
    """Return the line that defines a global of a graph's code."""
    if name == "torch":
        return ""
    if value is torch.device:  # which obeys --device
        return "from fp8pass.dump.replay import device"
    if isinstance(value, float):  # fx's globals `inf` and `nan`
        return f"{name} = float({str(value)!r})"
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    if value is type(None):
        return f"{name} = type(None)"
    module, what = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    # A name with a dot is a method or local to a function: no import finds it.
    if module not in (None, "__main__") and "." not in what and _is_at(module, what, value):
        return f"from {module} import {what}" + (f" as {name}" if what != name else "")
    return f"{name} = replay.missing({name!r})"


def _is_at(module: Any, name: str, value: Any) -> bool:
    """Return whether a module has the value under this name; a function may say a module that has another one."""
    try:
        return getattr(importlib.import_module(module), name, None) is value
    except ImportError:
        return False


def _inputs(graph: fx.Graph, examples: Sequence[Any]) -> Iterator[tuple[fx.Node, Any]]:
    for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        # AOTAutograd writes "val", Dynamo "example_value".
        value = node.meta.get("val", node.meta.get("example_value"))
        yield node, examples[i] if value is None and i < len(examples) else value


def _input(node: fx.Node, value: Any, origins: Origins, names: dict[str, str], differentiable: bool) -> str:
    origin = origins.name_of(node)
    comment = f"  # {origin}" if origin else ""
    name = origin or str(node.target)
    text = origins.copy(name, names) or _value(value, origins.about.get(name, 0), differentiable)
    return f"    {str(node.target)!r}: {text},{comment}\n"


def _value(value: Any, about: float, differentiable: bool = False) -> str:
    """Return the text that creates an input or an attribute."""
    if _is_plain(value):
        return _known(value) or _random(value, about, differentiable and value.requires_grad)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return repr(hint_of(value))
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    return f"replay.missing({f'an input of type {type(value).__name__}'!r})"


def _known(x: Tensor) -> str:
    """Return the text of a small real tensor with its values; "" for any other tensor."""
    if (
        not _is_real(x)
        or x.requires_grad
        or x.is_complex()
        or x.numel() > MAX_LITERAL_ELEMENTS
        or not x.is_contiguous()
    ):
        return ""
    with unset_fake_temporarily():
        # On CPUs torch has no `isfinite` for FP8; float64 holds every value of the smaller types.
        values = x.detach().cpu()
        values = values.double() if x.dtype.is_floating_point else values
        if not values.isfinite().all():
            return ""
        return f'torch.tensor({values.tolist()!r}, dtype={x.dtype}, device="{x.device}")'


def _random(x: Tensor, about: float, requires_grad: bool) -> str:
    shape, stride = ([hint_of(n) for n in numbers] for numbers in (x.shape, x.stride()))
    if x.dtype == torch.uint8 and shape == list(torch.get_rng_state().shape):
        # `set_rng_state` raises an error for any bytes that are not a state.
        return f"replay.{RngState()!r}"
    options = f", about={about:g}" if about else ""
    options += ", requires_grad=True" if requires_grad else ""
    return f'replay.{Random.__name__}({shape}, {stride}, {x.dtype}, "{x.device}"{options})'


_POSITIVE = re.compile(r"scale|_sq|square|running_var|step")
"""Parts of the names of tensors whose values are positive."""
_AMAX = 512
"""Larger than the results of matmuls of normal numbers, yet small enough for FP8 to tell such numbers apart."""


def _about(x: Tensor, name: str) -> float:
    """Return `Random.about` of a tensor: from its values if it is real, from its name if it is fake."""
    if not x.dtype.is_floating_point:
        return 0
    if _is_real(x):
        with unset_fake_temporarily():
            return float(x.numel() > 0 and bool((x.detach().float() >= 0).all()))
    return _AMAX if "amax" in name else float(bool(_POSITIVE.search(name)))


def _is_plain(x: Any) -> TypeGuard[Tensor]:
    """Return whether `x` is a tensor of this process alone, with its values; a DTensor has shards on other ranks."""
    return isinstance(x, Tensor) and not isinstance(x, (DTensor, WrapperTensor))


def _is_real(x: Tensor) -> bool:
    return not isinstance(x, FakeTensor) and x.layout == torch.strided


def _attributes(module: fx.GraphModule) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that graphs read by get_attr, except graphs: the path from `module`, and the value."""
    seen: set[str] = set()
    for path, part in _graphs(module):
        for node in part.graph.nodes:
            name = f"{path}.{node.target}" if path else str(node.target)
            if node.op != "get_attr" or name in seen:
                continue
            seen.add(name)
            value: Any = part
            for step in str(node.target).split("."):
                value = getattr(value, step, None)
            if not isinstance(value, fx.GraphModule):
                yield name, value
