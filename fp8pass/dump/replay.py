"""Run a dumped graph: each file that `FP8PASS_DUMP` writes calls this module when it is executed.

    python 008.joint.scaled_mm.after.py [--seed 0] [--device cpu] [--inputs FILE.pt] [--against OTHER.py]

Inputs are generated from the seed and their names: inputs of the same name in two dumps have the same values.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass.base import scaling
from fp8pass.base._torch import pytree
from fp8pass.base.errors import Fp8Error

sys.modules.setdefault("fp8pass.scaling", scaling)  # of this name in older dumps, which import this module first

_on: list[torch.device] = []
"""The device of `--device`, which replaces the devices in the graph; empty if the option is not given."""


@dataclass(frozen=True)
class Random:
    """An input tensor of a dumped graph, with values generated from a seed. stride: in elements.

    about: 0 for normally distributed values; otherwise values are uniform between 0.5 and 1.5 times `about`. A floating
    point tensor with one element is uniform between 0.5 and 1.5 if `about` is 0. Integers are 0 or 1; an integer tensor
    with one element is 1.
    """

    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    device: str = "cpu"
    about: float = 0
    requires_grad: bool = False

    def make(self, seed: int) -> Tensor:
        """Generate the tensor, with the same values on every device."""
        generator = torch.Generator().manual_seed(seed)  # a CPU generator: those of GPUs give other numbers
        # `as_strided` needs as many elements as the strides reach, which is not the number of elements if there are
        # gaps.
        empty = 0 in self.shape
        span = 0 if empty else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        values = self._values(span, generator).to(device(self.device))
        return values.as_strided(tuple(self.shape), tuple(self.stride)).requires_grad_(self.requires_grad)

    def _values(self, count: int, generator: torch.Generator) -> Tensor:
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            low = int(count == 1 and self.dtype != torch.bool)
            return torch.randint(low, 2, (count,), generator=generator).to(self.dtype)
        if self.about or count == 1:
            return ((torch.rand(count, generator=generator) + 0.5) * (self.about or 1)).to(self.dtype)
        return torch.randn(count, generator=generator).to(self.dtype)


@dataclass(frozen=True)
class Quantized:
    """The FP8 copy of a weight: the input `of`, times the scale whose inverse is the input `scales` at `place`.

    Row-major; turned: its transpose, row-major.
    """

    of: str
    scales: str
    place: tuple[int, ...]
    dtype: torch.dtype
    turned: bool = False

    def make(self, inputs: Mapping[str, Any]) -> Tensor:
        """Compute the tensor from the other inputs, given by name."""
        x_q = scaling.quantize(inputs[self.of].detach(), 1 / inputs[self.scales][self.place], self.dtype)
        return x_q.t().contiguous() if self.turned else x_q


@dataclass(frozen=True)
class Transposed:
    """The transposed, row-major copy of the input `of`."""

    of: str

    def make(self, inputs: Mapping[str, Any]) -> Tensor:
        """Compute the tensor from the other inputs, given by name."""
        x: Tensor = inputs[self.of]
        return x.t().contiguous()


@dataclass(frozen=True)
class RngState:
    """The state of torch's random number generator of the CPU."""

    def make(self, seed: int) -> Tensor:
        """Return the state directly after seeding with `seed`."""
        return torch.Generator().manual_seed(seed).get_state()


class Missing(Fp8Error, NotImplementedError):
    """Raised if a dump calls a function that could not be written as text."""


def missing(what: str) -> Callable[..., Any]:
    """Return a function that raises Missing: it replaces a value that could not be written as text."""

    def fail(*_: Any, **__: Any) -> Any:
        raise Missing(f"this dump needs {what}, which can't be written as source: write code that makes it here")

    return fail


def device(type: str, index: int | None = None) -> torch.device:  # noqa: A002, as torch names it
    """Return the `torch.device`, or the one that `--device` names."""
    return _on[0] if _on else torch.device(type) if index is None else torch.device(type, index)


def tag_activation_checkpoint(body: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """Call the body directly: torch's op of this name takes a GraphModule only. The results are the same."""
    return body(*args)


def main(graph: type[nn.Module], inputs: Mapping[str, Any], attributes: Mapping[str, Any], file: str) -> None:
    """Run the graph and print a line for each output, each gradient, and each input that it wrote into.

    Raises SystemExit if the graph's device is not available and `--device` names no other.
    """
    parser = argparse.ArgumentParser(description="Run a dumped graph on inputs made of a seed.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="run on this device, not on the one that the graph was compiled for")
    parser.add_argument("--inputs", metavar="FILE.pt", help="what torch.save made of {name of an input: tensor}")
    parser.add_argument("--against", metavar="OTHER.py", help="another dump: print how far each value is from its")
    options = parser.parse_args()
    _choose_device(options.device, [*inputs.values(), *attributes.values()])
    given = torch.load(options.inputs, weights_only=True) if options.inputs else {}
    if unknown := set(given) - set(inputs):
        raise SystemExit(f"--inputs has {sorted(unknown)}, and the graph takes {sorted(inputs)}")
    results = run(graph, {**inputs, **given}, attributes, options.seed)
    other_results = None
    if options.against:
        other = runpy.run_path(options.against)  # not named "__main__": it does not run its `main`
        other_results = run(other["GRAPH"], {**other["INPUTS"], **given}, other["ATTRIBUTES"], options.seed)
    _print(f"{Path(file).name}: {len(inputs)} inputs of seed {options.seed}")
    width = max(map(len, results), default=0)
    for name, value in results.items():
        _print(
            f"{name:{width}}  {summary(value)}"
            + ("" if other_results is None else f"  {distance(value, other_results.get(name))}")
        )


def _print(line: str) -> None:
    print(line)  # noqa: T201


def _choose_device(name: str | None, values: Sequence[Any]) -> None:
    if name is not None:
        _on[:] = [torch.device(name)]
        return
    for wanted in sorted({v.device for v in values if isinstance(v, Random)}):
        if reason := _why_not(wanted):
            raise SystemExit(
                f"this graph was compiled for {wanted}, which is not here ({reason}). --device cpu runs it on the CPU, "
                "where sums are added up in another order"
            )


def _why_not(wanted: str) -> str:
    try:
        torch.empty(0, device=wanted)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def run(
    graph: type[nn.Module], inputs: Mapping[str, Any], attributes: Mapping[str, Any], seed: int = 0
) -> dict[str, Any]:
    """Run a dumped graph, and return by name its outputs, the gradients of its inputs, and the inputs it wrote into."""
    module = _build(graph)
    # crc32, because Python's hash of a string differs between processes.
    made = {name: _made(value, seed + zlib.crc32(name.encode())) for name, value in {**inputs, **attributes}.items()}
    for kind in (Quantized, Transposed):  # in this order: a transposed copy is made of the FP8 copy
        made.update({name: value.make(made) for name, value in made.items() if isinstance(value, kind)})
    for name in attributes:
        _place(module, name.split("."), made[name])
    versions = {name: x._version for name, x in made.items() if isinstance(x, Tensor)}
    torch.manual_seed(seed)  # for random ops in the graph, such as dropout
    with torch.set_grad_enabled(any(isinstance(made[name], Tensor) and made[name].requires_grad for name in inputs)):
        results = module(*(made[name] for name in inputs))
        outputs = [x for x in pytree.tree_leaves(results) if x is not None]
        _backward(outputs, seed)
    by_name = {f"output {i}": x.detach() if isinstance(x, Tensor) else x for i, x in enumerate(outputs)}
    for name, x in made.items():
        if isinstance(x, Tensor) and x.grad is not None:
            by_name[f"gradient of {name}"] = x.grad
        if name in versions and x._version != versions[name]:
            by_name[f"written into {name}"] = x.detach()
    return by_name


def _backward(outputs: Sequence[Any], seed: int) -> None:
    differentiable = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    if differentiable:
        tangents = [
            Random(x.shape, x.stride(), x.dtype, str(x.device)).make(seed + i) for i, x in enumerate(differentiable)
        ]
        torch.autograd.backward(differentiable, tangents)


def _build(graph: type[nn.Module]) -> nn.Module:
    """Instantiate a graph class. Its nested classes are the bodies of branches, loops and checkpointed regions."""
    module = graph()
    for name, body in vars(graph).items():
        if isinstance(body, type) and issubclass(body, nn.Module):
            # setattr would put it among the submodules, and the class's attribute of this name would be found first.
            module.__dict__[name] = _build(body)
    return module


def _place(module: nn.Module, path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(getattr(module, part, None), nn.Module):
            setattr(module, part, nn.Module())
        module = getattr(module, part)
    module.__dict__[path[-1]] = value


def _made(value: Any, seed: int) -> Any:
    if isinstance(value, (Random, RngState)):
        return value.make(seed)
    if isinstance(value, Tensor):  # a copy, because graphs write into their inputs
        return value.detach().clone().to(_on[0] if _on else value.device)
    return value


def summary(value: Any) -> str:
    """Return a line with dtype, shape, sum, norm and largest absolute value of a result; its repr if not a tensor."""
    if not isinstance(value, Tensor):
        return repr(value)
    what = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    x = _float64(value)
    finite = x[x.isfinite()]
    if not finite.numel():
        return f"{what:24} nothing finite"
    rest = f", {x.numel() - finite.numel()} not finite" if finite.numel() < x.numel() else ""
    return f"{what:24} sum {finite.sum():.9g}, norm {finite.norm():.9g}, max {finite.abs().max():.9g}{rest}"


def distance(value: Any, other: Any) -> str:
    """Return "equal", how two results differ in kind, or norm(value - other) / norm(other)."""
    if other is None and value is not None:
        return "not in the other"
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return "equal" if value == other else f"differs: {summary(other)}"
    if value.shape != other.shape or value.dtype != other.dtype:
        return f"differs: {summary(other)}"
    a, b = _float64(value), _float64(other)
    if bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return "equal"
    return f"relative distance {(a - b).norm() / b.norm():.2e}"


def _float64(x: Tensor) -> Tensor:
    return x.detach().cpu().reshape(-1).double()
