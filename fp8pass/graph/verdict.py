"""`Gemm`: the verdict on one matmul, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8pass.recipes import Kind

Status = Literal["rewritten", "declined"]


@dataclass
class Saved:
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

    name: the module or parameter that it belongs to; "" for none. M, K, N: ints, or text if they are symbolic.
    dtypes: (first operand, second operand, output), as the kernel reads and writes them. scaling: the recipe's name;
    "user" for quantize-dequantize that the user wrote; "" if declined. reason: why it is declined; "" if rewritten.
    """

    kind: Kind
    name: str
    M: int | str
    K: int | str
    N: int | str
    dtypes: tuple[str, str, str]
    source: str
    batches: int | str = 1
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
    predicted_speedup: float | None = None
    """A prediction for the matmuls of that call together, with all quantization; None on CPU without a target."""

    @property
    def flops(self) -> int:
        """2*M*K*N over all batches, twice that if it is recomputed; 0 if a size is symbolic."""
        sizes = (self.batches, self.M, self.K, self.N)
        product = 4 if self.recomputed else 2
        for size in sizes:
            product *= size if isinstance(size, int) else 0
        return product
