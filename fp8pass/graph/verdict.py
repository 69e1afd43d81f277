"""`Gemm`: the verdict on one matmul, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8pass.recipes import Kind

Status = Literal["rewritten", "declined"]


@dataclass
class Gemm:
    """One matmul of a compiled graph: `kind` of a [M, K] by a [K, N] product, repeated `batches` times.

    name: the module or parameter it belongs to, "" if none. M, K, N are ints, or text where they are symbolic.
    dtypes: (first operand, second operand, output), as the kernel sees them. scaling: the recipe's name, "user" for
    quantize-dequantize that the user wrote, "" if declined. reason: "" if rewritten.
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
    """The condition that failed, in a few words: what reasons are counted by."""
    reason: str = ""
    near_miss: bool = False
    """Declined although an operand comes from FP8, and for one reason only, as far as was looked."""
    quantized: bool = False
    """Declined although both operands come from FP8."""
    note: str = ""
    """Rewritten, and what was expected in its kernel and stayed outside, with the reason."""
    fast_accum: bool = False
    """Whether its kernel may add up in less than float32."""
    recomputed: bool = False
    """Says whether the backward computes this forward matmul once more, as activation checkpointing does."""
    choice: int | None = None
    """Which call of the annotated graph it comes from."""
    predicted_speedup: float | None = None
    """Of that call's matmuls together, with all quantization, on the target; a prediction. None on CPU without one."""

    @property
    def flops(self) -> int:
        """2*M*K*N over all batches, twice that if it is recomputed; 0 where a size is symbolic."""
        sizes = (self.batches, self.M, self.K, self.N)
        product = 4 if self.recomputed else 2
        for size in sizes:
            product *= size if isinstance(size, int) else 0
        return product
