"""`Gemm`: the verdict on one matmul, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import sympy

from fp8pass.base.names import bytes_of
from fp8pass.graph.prediction import Prediction
from fp8pass.graph.sizes import Size, VaryingSize
from fp8pass.recipes import Kind
from fp8pass.roofline import Intervals, Seconds

Status = Literal["rewritten", "declined"]


@dataclass
class SavedTensor:
    """A tensor that the backward of elementwise ops and norms reads, and how it is saved: see the option `save_fp8`.

    name: of the module that computes or normalizes it. shape, dtype: as computed. scaling: the recipe of its scales; ""
    if it stays as it is. bytes: how much less is saved. rule, reason: why it stays as it is.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    source: str
    scaling: str = ""
    status: Literal["in FP8", "as it is"] = "as it is"
    bytes: int = 0
    rule: str = ""
    reason: str = ""

    def __str__(self) -> str:
        how = f"{self.scaling}, {self.bytes / 1e6:.1f} MB less" if self.scaling else f"as it is: {self.reason}"
        where = f" ({self.source})" if self.source else ""
        return f"  {self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]{where} {how}"


@dataclass
class Gemm:
    """One matmul of a compiled graph, of [M, K] by [K, N], repeated `batches` times.

    name: the module or parameter that it belongs to; "" for none. M, K, N, batches: ints, or sympy expressions of sizes
    that vary from call to call, by torch's symbols for them: `Report.sizes` says what these stand for.
    dtypes: (first operand, second operand, output), as the kernel reads and writes them. scaling: the recipe's name;
    "user" for quantize-dequantize that the user wrote; "" if declined. reason: why it is declined; "" if rewritten.
    """

    kind: Kind
    name: str
    M: Size
    K: Size
    N: Size
    dtypes: tuple[str, str, str]
    source: str
    batches: Size = 1
    scaling: str = ""
    status: Status = "declined"
    rule: str = ""
    """The condition that failed, in a few words; reports count by it."""
    reason: str = ""
    near_miss: bool = False
    """True if declined although an operand is dequantized from FP8, and for one reason only, as far as was checked."""
    quantized: bool = False
    """True if declined although both operands are dequantized from FP8."""
    note: str = ""
    """The op that was expected in the kernel of a rewritten matmul and stays outside, with the reason."""
    fast_accum: bool = False
    """True if its kernel may accumulate in less than float32."""
    recomputed: bool = False
    """True if the backward computes this forward matmul once more, as activation checkpointing does."""
    choice: int | None = None
    """Index of its call in `Annotation.choices`; None if it does not come from a call of the annotated graph."""
    predicted_speedup: float | sympy.Expr | None = None
    """A prediction for the matmuls of that call together, with all quantization; None on CPU without a target."""
    predicted_seconds: tuple[Seconds, Seconds] | None = None
    """The two times of which that is the quotient: of the call in high precision, and in FP8."""
    predicted_ends: tuple[float, float] | None = None
    """`predicted_speedup` at the smallest and the largest sizes that this compilation serves; None if none varies."""
    pays_from: Intervals | None = None
    """The intervals of `pays_of` in which that speed-up reaches `min_speedup` (1 if that is 0); None if not known."""
    pays_of: str = "M"
    """The subject of `pays_from`: "M", the rows of the call's input, or an expression of sizes that vary."""
    sizes: tuple[VaryingSize, ...] = ()
    """The symbols in its sizes, and what they stand for."""

    @property
    def flops(self) -> Size:
        """2*M*K*N over all batches, twice that if it is recomputed; an expression if a size varies."""
        of_one: Size = self.batches * self.M * self.K * self.N
        return (4 if self.recomputed else 2) * of_one

    @property
    def bytes(self) -> Size:
        """The bytes of both operands and of the result over all batches; an expression if a size varies."""
        elements = self.M * self.K, self.K * self.N, self.M * self.N
        return self.batches * sum(size * bytes_of(dtype) for size, dtype in zip(elements, self.dtypes, strict=True))

    def in_call(self, expression: Size) -> int:
        """Return the value of an expression at the sizes of the call that was compiled; 0 if these depend on data."""
        if not isinstance(expression, sympy.Basic):
            return expression
        value = expression.subs({symbol: size.example for size in self.sizes for symbol in _named(expression, size)})
        return int(value) if value.is_number else 0

    def predicted(self, prediction: Prediction | None) -> Gemm:
        """Take over what is predicted for its call; return itself."""
        if prediction is not None:
            self.predicted_speedup, self.predicted_seconds = prediction.speedup, prediction.seconds
            self.predicted_ends, self.pays_from, self.pays_of = prediction.ends, prediction.pays, prediction.of
        return self


def _named(expression: sympy.Basic, size: VaryingSize) -> list[sympy.Basic]:
    # by name: `VaryingSize` outlives the compilation, and has the symbol as text
    return [symbol for symbol in expression.free_symbols if str(symbol) == size.symbol]
