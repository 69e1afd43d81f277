"""Describe a fused matmul: the product, what its epilogue computes and writes, and the tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8pass.passes.kernels.triton_epilogue import TritonEpilogue


@dataclass(frozen=True)
class Tile:
    """The sizes of a tile, of its steps along the summed dimension, and Triton's warps and stages for it.

    parts: the epilogue takes the tile's columns in this many parts, one after the other, which needs fewer registers.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1

    @property
    def width(self) -> int:
        """The columns of one part."""
        return self.columns // self.parts


ANY = Tile(16, 16, 16, 4, 2)
"""A tile for plans whose tile is not chosen yet."""


@dataclass(frozen=True)
class Output:
    """A tensor that the kernel writes.

    kind: "rows", [M, N]; "columns", its transpose [N, M]; "amax", that of each tile; "amaxes of rows" and "amaxes of
    columns", by tile, [tiles across, M] and [tiles down, N]; "sums", the sums of columns in each tile,
    f32[tiles down, N]; "numbers", one for each block. results: the numbers of the epilogue's results, which stand side
    by side, as if N was that many times as large. is_product: these are the products, which the matmul alone would
    write. blocks: the number of the blocks whose scales the results are multiplied by. number: which of a block's
    numbers is written.
    """

    kind: str
    results: tuple[int, ...]
    dtype: torch.dtype
    is_product: bool = False
    blocks: int | None = None
    number: int = 0


@dataclass(frozen=True)
class Matmul:
    """The product of a: f8[M, K] and b: f8[K, products * N], whose columns are contiguous.

    products: 1; or 2, if b holds two matrices side by side, whose products the epilogue combines element by element.
    operands: the dtypes of a and b. strides: of a's rows and b's columns. scales: "tensorwise" or "rowwise". bias: its
    dtype; None if there is none. dtype: of the result. fast: sums stay in the tensor cores. symbolic: M is an argument
    of the kernel, which then writes nothing transposed and no sums; `m` is what M was when the graph was compiled.
    """

    m: int
    n: int
    k: int
    products: int
    operands: tuple[torch.dtype, torch.dtype]
    strides: tuple[int, int]
    scales: str
    bias: torch.dtype | None
    dtype: torch.dtype
    fast: bool
    symbolic: bool = False

    @property
    def rows(self) -> str:
        """M as the kernel writes it."""
        return "m" if self.symbolic else str(self.m)


@dataclass(frozen=True)
class Plan:
    """Everything that the source of a kernel depends on. capability: 90 for sm_90. programs: their number."""

    matmul: Matmul
    epilogue: TritonEpilogue
    outputs: tuple[Output, ...]
    tile: Tile
    capability: int
    programs: int

    @property
    def tma(self) -> bool:
        """True if the GPU has the Tensor Memory Accelerator, which moves whole blocks."""
        return self.capability >= 90

    @property
    def parameters(self) -> dict[str, torch.dtype]:
        """The names of the kernel's parameters that are tensors, in order, and their dtypes."""
        a, b = self.matmul.operands
        bias = {"bias": self.matmul.bias} if self.matmul.bias else {}
        inputs = {f"in{read.input}": read.dtype for read in self.epilogue.reads}
        outputs = {f"out{i}": output.dtype for i, output in enumerate(self.outputs)}
        return {"a": a, "b": b, "scale_a": torch.float32, "scale_b": torch.float32, **bias, **inputs, **outputs}

    @property
    def bytes_per_element(self) -> int:
        """Bytes that the epilogue reads and writes for each element of the product."""
        read = {r.input: r.dtype.itemsize for r in self.epilogue.reads if r.row and r.column}
        written = (o.dtype.itemsize * len(o.results) for o in self.outputs if o.kind in ("rows", "columns"))
        return sum(read.values()) + sum(written)

    @property
    def bytes_apart(self) -> int:
        """Bytes that one kernel after the matmul would read and write, with the product that it would read."""
        product = self.matmul.dtype.itemsize * self.matmul.products
        kept = product if any(o.is_product for o in self.outputs) else 0  # the matmul would write it
        return (product + self.bytes_per_element - kept) * self.matmul.m * self.matmul.n

    @property
    def extra_bytes(self) -> int:
        """Bytes that the fused kernel moves more than the matmul alone, which writes the product; fewer if negative."""
        product = self.matmul.dtype.itemsize * self.matmul.products
        return (self.bytes_per_element - product) * self.matmul.m * self.matmul.n

    def tiles(self) -> tuple[int, int]:
        """Return the numbers of tiles down and across."""
        return -(-self.matmul.m // self.tile.rows), -(-self.matmul.n // self.tile.columns)

    def shape(self, output: Output) -> list[int]:
        """Return the shape of an output, with what a symbolic M was when the graph was compiled.

        There is an amax for each tile; where M is symbolic, for each program.
        """
        m, n, (down, across) = self.matmul.m, self.matmul.n * len(output.results), self.tiles()
        takers = self.programs if self.matmul.symbolic else down * across
        partials = takers * self.tile.parts * len(output.results)
        return {"rows": [m, n], "columns": [n, m], "amax": [partials], "sums": [down, n]}[output.kind]
