"""Random programs around one matmul, which say whether it must be rewritten.

A program is built backwards from the shape of an operand: each step is an op and the shape that it starts from. Programs
can also be run in float64 throughout, which is what the rewritten graph is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.harness import BF16, E4M3, E5M2, F16, F32

Shape = tuple[int, ...]
Op = Callable[..., Tensor]


@dataclass
class Program:
    """A program around one matmul, and whether the matmul must be rewritten.

    function: called as function(wide, *inputs), where `wide` maps each high-precision dtype to the one to compute in.
    text: the steps, to read. bad: steps that must keep the matmul from being rewritten. unclear: it may or may not be
    rewritten. loose: some types are narrower than float32.
    """

    function: Callable[..., Any]
    inputs: list[Tensor]
    text: list[str]
    bad: list[str]
    unclear: bool
    loose: bool

    def run(self, *inputs: Tensor) -> Any:
        return self.function(lambda dtype: dtype, *inputs)

    def exactly(self) -> Any:
        return self.function(lambda _: torch.float64, *self.inputs)

    def __repr__(self) -> str:
        return " | ".join(self.text)


@dataclass
class _Inputs:
    draw: Callable[..., Any]
    tensors: list[Tensor] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def add(self, tensor: Tensor) -> Callable[[list[Tensor]], Tensor]:
        self.tensors.append(tensor)
        position = len(self.tensors) - 1
        return lambda inputs: inputs[position]

    def fp8(self, shape: Shape, dtype: torch.dtype) -> Callable[[list[Tensor]], Tensor]:
        return self.add(torch.randn(shape, generator=self.generator).to(dtype))

    def wide(self, shape: Shape, dtype: torch.dtype) -> Callable[[list[Tensor]], Tensor]:
        return self.add(torch.randn(shape, generator=self.generator).to(dtype))


SCALES = [0.5, 0.25, 2.0, -1.5, 1 / 3]


def _wide(x: Any, wide: Any) -> Any:
    """Convert a high-precision input to `wide` of its dtype; FP8 and other inputs stay."""
    return x.to(wide(x.dtype)) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize > 1 else x


class _Operand:
    """One operand, from its shape back to its FP8 tensor."""

    def __init__(
        self, draw: Callable[..., Any], inputs: _Inputs, shape: Shape, dtype: torch.dtype, q: torch.dtype
    ) -> None:
        self.draw, self.inputs, self.dtype, self.q = draw, inputs, dtype, q
        self.text: list[str] = []
        self.bad: list[str] = []
        self.rows = False
        self.steps: list[Callable[[Tensor, Any, list[Tensor]], Tensor]] = []
        for _ in range(draw(st.integers(0, 5))):
            shape = self._step(shape)
        self.shape = shape
        self.leaf = inputs.fp8(shape, q)
        self.first = draw(st.sampled_from([dtype, dtype, F32]))

    def __call__(self, wide: Any, inputs: list[Tensor]) -> Tensor:
        x = self.leaf(inputs).to(wide(self.first))
        for step in reversed(self.steps):
            x = step(x, wide, inputs)
        return x.to(wide(self.dtype))

    def _add(self, text: str, step: Callable[[Tensor, Any, list[Tensor]], Tensor]) -> None:
        self.text.insert(0, text)
        self.steps.append(step)

    def _step(self, shape: Shape) -> Shape:
        kinds = [
            "scale",
            "scale",
            "rows",
            "cast",
            "neg",
            "transpose",
            "reshape",
            "slice",
            "select",
            "pad",
            "where",
            "cat",
            "expand",
            "copy",
            "flip",
            "index",
            "bad",
        ]
        return getattr(self, "_" + self.draw(st.sampled_from(kinds)))(shape)  # type: ignore[no-any-return]

    def _dim(self, shape: Shape) -> int:
        return self.draw(st.integers(0, len(shape) - 1))  # type: ignore[no-any-return]

    def _scale(self, shape: Shape) -> Shape:
        value, divide = self.draw(st.sampled_from(SCALES)), self.draw(st.booleans())
        form = self.draw(st.sampled_from(["number", "0-dim", "[1]", "ones", "expanded"]))
        name = "div" if divide else "mul"
        if form == "number":
            self._add(f"{name} {value}", lambda x, wide, inputs: x / value if divide else x * value)
            return shape
        sizes: Shape = {"0-dim": (), "[1]": (1,), "ones": (1,) * len(shape), "expanded": ()}[form]
        dtype = self.draw(st.sampled_from([F32, BF16]))
        scale = self.inputs.add(torch.full(sizes, value, dtype=dtype))

        def step(x: Tensor, wide: Any, inputs: list[Tensor]) -> Tensor:
            s = _wide(scale(inputs), wide)
            s = s.expand(x.shape) if form == "expanded" else s
            return x / s if divide else x * s

        self._add(f"{name} {form} {dtype}", step)
        return shape

    def _rows(self, shape: Shape) -> Shape:
        """A scale that differs along some dimensions, which the matmul may sum over."""
        varies = [self.draw(st.booleans()) for _ in shape]
        sizes = tuple(n if v else 1 for n, v in zip(shape, varies, strict=True))
        scale = self.inputs.add(torch.rand(sizes, generator=self.inputs.generator) + 0.5)
        divide = self.draw(st.booleans())
        self.rows = True

        def step(x: Tensor, wide: Any, inputs: list[Tensor]) -> Tensor:
            s = _wide(scale(inputs), wide)
            return x / s if divide else x * s

        self._add(f"{'div' if divide else 'mul'} {sizes}", step)
        return shape

    def _cast(self, shape: Shape) -> Shape:
        dtype = self.draw(st.sampled_from([F32, BF16, F16]))
        self._add(f"to {dtype}", lambda x, wide, inputs: x.to(wide(dtype)))
        return shape

    def _neg(self, shape: Shape) -> Shape:
        self._add("neg", lambda x, wide, inputs: -x)
        return shape

    def _copy(self, shape: Shape) -> Shape:
        self._add("clone", lambda x, wide, inputs: x.clone(memory_format=torch.contiguous_format))
        return shape

    def _transpose(self, shape: Shape) -> Shape:
        if len(shape) < 2:
            return shape
        order = self.draw(st.permutations(range(len(shape))))
        source: list[int] = [0] * len(shape)
        for i, dim in enumerate(order):
            source[dim] = shape[i]
        self._add(f"permute {order}", lambda x, wide, inputs: x.permute(order))
        return tuple(source)

    def _reshape(self, shape: Shape) -> Shape:
        dim = self._dim(shape)
        way = self.draw(st.sampled_from(["flatten", "split", "unit"]))
        if way == "flatten" and len(shape) > 1:
            dim = min(dim, len(shape) - 2)
            source = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
        elif way == "split" and shape[dim] % 2 == 0 and len(shape) < 5:
            source = (*shape[:dim], 2, shape[dim] // 2, *shape[dim + 1 :])
        else:
            source = (*shape[:dim], 1, *shape[dim:])
        self._add(f"reshape {source} to {shape}", lambda x, wide, inputs: x.reshape(shape))
        return source

    def _slice(self, shape: Shape) -> Shape:
        dim, before, after = self._dim(shape), self.draw(st.integers(0, 3)), self.draw(st.integers(0, 3))
        stride = self.draw(st.sampled_from([1, 1, 2]))
        size = shape[dim]
        self._add(
            f"slice {dim}",
            lambda x, wide, inputs: x.narrow(dim, before, size * stride)[
                (slice(None),) * dim + (slice(None, None, stride),)
            ],
        )
        return (*shape[:dim], before + size * stride + after, *shape[dim + 1 :])

    def _select(self, shape: Shape) -> Shape:
        if len(shape) > 4:
            return shape
        dim = self.draw(st.integers(0, len(shape)))
        self._add(f"select {dim}", lambda x, wide, inputs: x.select(dim, 1))
        return (*shape[:dim], 3, *shape[dim:])

    def _pad(self, shape: Shape) -> Shape:
        dim = self._dim(shape)
        before, after = self.draw(st.integers(-2, 2)), self.draw(st.integers(-2, 2))
        size = shape[dim] - before - after
        if size < 1 or size + min(before, 0) < 1 or size + min(before, 0) + min(after, 0) < 1:
            return shape
        padding = [0, 0] * (len(shape) - 1 - dim) + [before, after]
        self._add(f"pad {padding}", lambda x, wide, inputs: F.pad(x, padding))
        return (*shape[:dim], size, *shape[dim + 1 :])

    def _where(self, shape: Shape) -> Shape:
        other_way = self.draw(st.booleans())
        sizes = tuple(self.draw(st.sampled_from([size, 1])) for size in shape)
        mask = self.inputs.add(torch.rand(sizes, generator=self.inputs.generator) < 0.7)

        def step(x: Tensor, wide: Any, inputs: list[Tensor]) -> Tensor:
            return torch.where(mask(inputs), 0.0, x) if other_way else torch.where(mask(inputs), x, 0.0)

        self._add("where", step)
        return shape

    def _cat(self, shape: Shape) -> Shape:
        dim = self._dim(shape)
        if shape[dim] < 2:
            return shape
        rest = self.draw(st.integers(1, shape[dim] - 1))
        other = (*shape[:dim], rest, *shape[dim + 1 :])
        what = self.draw(st.sampled_from(["zeros", "itself", "negated"]))

        def step(x: Tensor, wide: Any, inputs: list[Tensor]) -> Tensor:
            if what == "zeros":
                return torch.cat([x, torch.zeros(other, dtype=x.dtype)], dim)
            part = x.narrow(dim, 0, 1).expand(other)
            return torch.cat([x, part if what == "itself" else -part], dim)

        self._add(f"cat {what}", step)
        return (*shape[:dim], shape[dim] - rest, *shape[dim + 1 :])

    def _expand(self, shape: Shape) -> Shape:
        dim = self._dim(shape)
        self._add(f"expand {dim}", lambda x, wide, inputs: x.expand(shape))
        return (*shape[:dim], 1, *shape[dim + 1 :])

    def _flip(self, shape: Shape) -> Shape:
        dim = self._dim(shape)
        self._add(f"flip {dim}", lambda x, wide, inputs: x.flip(dim))
        return shape

    def _index(self, shape: Shape) -> Shape:
        index = self.inputs.add(torch.randint(0, 5, (shape[0],), generator=self.inputs.generator))
        self._add("index", lambda x, wide, inputs: x[index(inputs)])
        return (5, *shape[1:])

    def _bad(self, shape: Shape) -> Shape:
        if self.draw(st.integers(0, 3)):  # seldom
            return shape
        steps: dict[str, Callable[[Tensor], Tensor]] = {
            "relu": lambda x: x.relu(),
            "add 1": lambda x: x + 1,
            "square": lambda x: x * x,
            "rows": lambda x: x * torch.arange(1, x.shape[-1] + 1, dtype=x.dtype),
            "where 1": lambda x: torch.where(x > 0, x, 1.0),
            "pad 1": lambda x: F.pad(x, (0, 1), value=1.0)[..., :-1] if x.shape[-1] > 1 else x.abs(),
            "cumsum": lambda x: x.cumsum(0),
            "cat of two scales": lambda x: torch.cat([x, x * 3])[: x.shape[0]] if x.shape[0] > 1 else x.abs(),
        }
        name = self.draw(st.sampled_from(sorted(steps)))
        if (name == "rows" and shape[-1] == 1) or (name == "square" and all(size == 1 for size in shape)):
            return shape  # a single number is a scale, which may be folded
        if name == "rows":  # in the second operand they may scale columns of the product, which can be folded
            self.rows = True
        else:
            self.bad.append(name)
        self._add(name, lambda x, wide, inputs: steps[name](x))
        return shape


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """Draw a program: a matmul, its operands, and an epilogue."""
    inputs = _Inputs(draw)
    size = st.sampled_from([1, 2, 3, 7, 8, 16, 17, 32, 48])
    batch, m, k, n = draw(st.sampled_from([1, 2, 3, 16, 17])), draw(size), draw(size), draw(size)
    kind = draw(st.sampled_from(["mm", "mm", "linear", "bmm", "flattened", "shared a", "addmm", "einsum"]))
    dtype = draw(st.sampled_from([F32, F32, BF16, F16]))
    q_a, q_b = draw(st.sampled_from([(E4M3, E4M3), (E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]))
    shapes: dict[str, tuple[Shape, Shape]] = {
        "mm": ((m, k), (k, n)),
        "addmm": ((m, k), (k, n)),
        "linear": ((m, k), (n, k)),
        "bmm": ((batch, m, k), (batch, k, n)),
        "flattened": ((batch, m, k), (k, n)),
        "shared a": ((m, k), (batch, k, n)),
        "einsum": ((m, batch, k), (n, k, batch)),
    }
    a = _Operand(draw, inputs, shapes[kind][0], dtype, q_a)
    b = _Operand(draw, inputs, shapes[kind][1], dtype, q_b)
    c = inputs.wide(draw(st.sampled_from([(n,), (m, n), (1, n)])), dtype)
    product: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "mm": lambda a, b, c: a @ b,
        "addmm": lambda a, b, c: torch.addmm(c, a, b),
        "linear": lambda a, b, c: F.linear(a, b),
        "bmm": lambda a, b, c: torch.bmm(a, b),
        "flattened": lambda a, b, c: a @ b,
        "shared a": lambda a, b, c: torch.einsum("mk,bkn->bmn", a, b),
        "einsum": lambda a, b, c: torch.einsum("mbk,nkb->bmn", a, b),
    }
    after = _Epilogue(draw, inputs, (m, n), dtype)

    def function(wide: Any, *tensors: Tensor) -> Any:
        values = list(tensors)
        y = product[kind](a(wide, values), b(wide, values), _wide(c(values), wide))
        return after(y, wide, values)

    bad = [*a.bad, *b.bad]
    if q_a is q_b is E5M2:
        bad.append("e5m2 twice")
    unclear = kind in ("bmm", "einsum") and batch > 16  # an operand may be the same matrix for the whole batch
    unclear |= a.rows or b.rows  # the scales may differ along the dimension of the sum
    text = [
        f"{q_a} {a.shape}: {', '.join(a.text)}",
        f"{q_b} {b.shape}: {', '.join(b.text)}",
        f"{kind} {dtype} B{batch} M{m} K{k} N{n}",
        ", ".join(after.text),
    ]
    loose = (
        dtype is not F32 or any("to torch" in t and "float32" not in t for o in (a, b) for t in o.text) or after.loose
    )
    return Program(function, inputs.tensors, text, bad, unclear, loose)


class _Epilogue:
    """The ops after the matmul. They may be any ops, because each must be computed correctly."""

    def __init__(self, draw: Callable[..., Any], inputs: _Inputs, sizes: tuple[int, int], dtype: torch.dtype) -> None:
        self.text: list[str] = []
        self.steps: list[Callable[[Any, Any, list[Tensor]], Any]] = []
        self.loose = False
        m, n = sizes
        for _ in range(draw(st.integers(0, 4))):
            name = draw(
                st.sampled_from(
                    [
                        "scale",
                        "divide",
                        "tensor scale",
                        "negative scale",
                        "bias",
                        "wide bias",
                        "matrix",
                        "column",
                        "relu",
                        "gelu",
                        "flat",
                        "bfloat16",
                        "float32",
                        "clamp",
                        "transpose",
                        "double",
                        "square",
                        "clone",
                    ]
                )
            )
            self._step(name, inputs, m, n, dtype)
        end = draw(st.sampled_from(["", "", "quantize", "quantize badly", "amax", "twice", "own scale"]))
        if end:
            self._step(end, inputs, m, n, dtype)

    def __call__(self, y: Tensor, wide: Any, inputs: list[Tensor]) -> Any:
        for step in self.steps:
            y = step(y, wide, inputs)
        return y

    def _step(self, name: str, inputs: _Inputs, m: int, n: int, dtype: torch.dtype) -> None:
        scale = inputs.add(torch.tensor(0.75))
        vector, column = inputs.wide((n,), dtype), inputs.wide((m, 1), dtype)
        matrix = inputs.wide((m, n), dtype)

        def plus(y: Tensor, other: Tensor) -> Tensor:
            return y + other if _broadcasts(y, other) else y

        steps: dict[str, Callable[[Any, Any, list[Tensor]], Any]] = {
            "scale": lambda y, wide, i: y * 3,
            "divide": lambda y, wide, i: y / 7,
            "tensor scale": lambda y, wide, i: y * _wide(scale(i), wide),
            "negative scale": lambda y, wide, i: y * -_wide(scale(i), wide),
            "bias": lambda y, wide, i: plus(y, _wide(vector(i), wide)),
            "wide bias": lambda y, wide, i: plus(y, _wide(vector(i), wide).to(wide(F32))),
            "matrix": lambda y, wide, i: plus(y, _wide(matrix(i), wide)),
            "column": lambda y, wide, i: plus(y, _wide(column(i), wide)),
            "relu": lambda y, wide, i: y.relu(),
            "gelu": lambda y, wide, i: F.gelu(y, approximate="tanh"),
            "flat": lambda y, wide, i: y.reshape(1, -1, y.shape[-1]),
            "bfloat16": lambda y, wide, i: y.to(wide(BF16)),
            "float32": lambda y, wide, i: y.to(wide(F32)),
            "double": lambda y, wide, i: y + y,
            "square": lambda y, wide, i: y * y / 8,
            "clone": lambda y, wide, i: y.clone(),
            "clamp": lambda y, wide, i: y.clamp(-1, 2),
            "transpose": lambda y, wide, i: y.transpose(-1, -2),
            "quantize": lambda y, wide, i: _quantize(y * _wide(scale(i), wide), 448.0, wide),
            "quantize badly": lambda y, wide, i: _quantize(y, 440.0, wide),
            "amax": lambda y, wide, i: (y * 2, y.abs().amax()),
            "twice": lambda y, wide, i: (y * 3, y * 2),
            "own scale": lambda y, wide, i: y * (1 / (1 + y.abs().amax())),
        }
        self.loose |= name in ("bfloat16", "quantize", "quantize badly")
        self.text.append(name)
        self.steps.append(steps[name])


def _broadcasts(y: Tensor, other: Tensor) -> bool:
    """Return whether `other` can be added without changing the shape."""
    if other.dim() > y.dim():
        return False
    return all(o in (1, s) for o, s in zip(reversed(other.shape), reversed(y.shape), strict=False))


def _quantize(y: Tensor, limit: float, wide: Any) -> Tensor:
    clamped = y.clamp(-limit, limit)
    return clamped if wide(F32) is torch.float64 else clamped.to(E4M3)
