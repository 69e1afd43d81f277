"""Time FP8 matmuls whose kernel also quantizes, against cuBLASLt followed by another kernel, on one GPU of sm_90.

    python bench/fused_matmuls.py              takes a minute; bench/results/fused_matmuls_h100.txt is such a run

The kernels are written by hand: persistent, with TMA, and with an epilogue that writes FP8 in both orientations and one
amax per tile. They show what a generated kernel can gain, and where it loses: `plain` stores the product, `relu2` its
ReLU squared in FP8, `gelu` also its GELU in BF16; `gated` multiplies by gate and up, and `backward` makes the gradients
of both, and also the transposed hidden tensor. Each line is a configuration: BM, BN, BK, warps, stages, flattened loop.
Then for each epilogue milliseconds, registers, spills, bytes of shared memory, and whether the results are right: the
share of equal FP8 numbers, of both orientations, and whether the amax is equal.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
MLP = 8192, 14336, 4096
SHAPES = MLP, (8192, 4096, 14336), (32768, 3072, 768)
"""M, N, K: up and down of Llama-3-8B, and up of a model of width 768."""
CONFIGURATIONS = (128, 256, 128, 8, 3, True), (128, 128, 128, 8, 4, True), (256, 128, 128, 8, 3, True)
GATED = (128, 128, 128, 8, 3, True), (128, 128, 128, 8, 3, False), (128, 64, 128, 8, 4, False)


@triton.jit
def place(tile, rows, columns):
    """Return row and column of a tile: 8 rows first, so that tiles find operands of others in the L2 cache."""
    first = tile // (8 * columns) * 8
    size = min(rows - first, 8)
    within = tile % (8 * columns)
    return first + within % size, within // size


@triton.jit
def rounded(x):
    """Return x as it would be read back from BF16."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def quantized(x, limit: tl.constexpr, dtype: tl.constexpr):
    """Clamp x to the largest FP8 number, and convert it."""
    return tl.minimum(tl.maximum(x, -limit), limit).to(dtype)


@triton.jit
def one(a_ptr, b_ptr, hp_ptr, q_ptr, t_ptr, amax_ptr, s_ptr, scale_ptr, M, N, K,
        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr, PROGRAMS: tl.constexpr,
        KIND: tl.constexpr):  # fmt: skip
    """Multiply f8[M, K] by f8[N, K]. KIND 0: store BF16; 1: ReLU squared in FP8; 2: GELU in FP8 and BF16."""
    a_of = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b_of = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    hp_of = tl.make_tensor_descriptor(hp_ptr, [M, N], [N, 1], [BM, BN])
    q_of = tl.make_tensor_descriptor(q_ptr, [M, N], [N, 1], [BM, BN])
    t_of = tl.make_tensor_descriptor(t_ptr, [N, M], [M, 1], [BN, BM])
    rows, columns, s = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.load(s_ptr)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        i, j = place(tile, rows, columns)
        product = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            product = tl.dot(a_of.load([i * BM, k * BK]), b_of.load([j * BN, k * BK]).T, product)
        y = rounded(product * s)
        if KIND == 1:
            y = rounded(tl.maximum(y, 0.0) * tl.maximum(y, 0.0))
        if KIND == 2:
            y = rounded(0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476)))
        if KIND != 1:
            hp_of.store([i * BM, j * BN], y.to(tl.bfloat16))
        if KIND != 0:
            tl.store(amax_ptr + tile, tl.max(tl.abs(y)))
            q = quantized(y * tl.load(scale_ptr), 448.0, tl.float8e4nv)
            q_of.store([i * BM, j * BN], q)
            t_of.store([j * BN, i * BM], q.T)


@triton.jit
def gated(a_ptr, w_ptr, both_ptr, q_ptr, amax_ptr, s_ptr, scale_ptr, M, N, K,
          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr, PROGRAMS: tl.constexpr,
          SAVES: tl.constexpr):  # fmt: skip
    """Multiply f8[M, K] by gate and up f8[2 N, K]; store silu(gate) * up in FP8, and with SAVES both in BF16."""
    a_of = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    w_of = tl.make_tensor_descriptor(w_ptr, [2 * N, K], [K, 1], [BN, BK])
    both_of = tl.make_tensor_descriptor(both_ptr, [M, 2 * N], [2 * N, 1], [BM, BN])
    q_of = tl.make_tensor_descriptor(q_ptr, [M, N], [N, 1], [BM, BN])
    rows, columns, s = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.load(s_ptr)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        i, j = place(tile, rows, columns)
        gate, up = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_of.load([i * BM, k * BK])
            gate = tl.dot(a, w_of.load([j * BN, k * BK]).T, gate)
            up = tl.dot(a, w_of.load([N + j * BN, k * BK]).T, up)
        if SAVES:
            both_of.store([i * BM, j * BN], (gate * s).to(tl.bfloat16))
            both_of.store([i * BM, N + j * BN], (up * s).to(tl.bfloat16))
        g = rounded(gate * s)
        hidden = rounded(rounded(g * tl.sigmoid(g)) * rounded(up * s))
        tl.store(amax_ptr + tile, tl.max(tl.abs(hidden)))
        q_of.store([i * BM, j * BN], quantized(hidden * tl.load(scale_ptr), 448.0, tl.float8e4nv))


@triton.jit
def backward(a_ptr, w_ptr, both_ptr, d_ptr, dt_ptr, ht_ptr, amax_ptr, s_ptr, scale_ptr, M, N, K,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr, PROGRAMS: tl.constexpr,
             HIDDEN: tl.constexpr):  # fmt: skip
    """Multiply e5m2[M, K] by e4m3[N, K], for the gradient of silu(gate) * up, from gate and up bf16[M, 2 N].

    Stores the gradients of both in e5m2 in both orientations, and with HIDDEN the transposed product in e4m3.
    """
    a_of = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    w_of = tl.make_tensor_descriptor(w_ptr, [N, K], [K, 1], [BN, BK])
    both_of = tl.make_tensor_descriptor(both_ptr, [M, 2 * N], [2 * N, 1], [BM, BN])
    d_of = tl.make_tensor_descriptor(d_ptr, [M, 2 * N], [2 * N, 1], [BM, BN])
    dt_of = tl.make_tensor_descriptor(dt_ptr, [2 * N, M], [M, 1], [BN, BM])
    ht_of = tl.make_tensor_descriptor(ht_ptr, [N, M], [M, 1], [BN, BM])
    rows, columns, s, scale = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.load(s_ptr), tl.load(scale_ptr)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=FLAT):
        i, j = place(tile, rows, columns)
        product = tl.zeros((BM, BN), tl.float32)
        for k in range(tl.cdiv(K, BK)):
            product = tl.dot(a_of.load([i * BM, k * BK]), w_of.load([j * BN, k * BK]).T, product)
        of_hidden = rounded(product * s)
        gate = both_of.load([i * BM, j * BN]).to(tl.float32)
        up = both_of.load([i * BM, N + j * BN]).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = rounded(gate * sigmoid)
        if HIDDEN:
            ht_of.store([j * BN, i * BM], quantized(rounded(silu * up) * scale, 448.0, tl.float8e4nv).T)
        of_up = rounded(of_hidden * silu)
        q = quantized(of_up * scale, 57344.0, tl.float8e5)
        d_of.store([i * BM, N + j * BN], q)
        dt_of.store([N + j * BN, i * BM], q.T)
        of_gate = rounded(rounded(of_hidden * up) * (sigmoid * (1.0 + gate * (1.0 - sigmoid))))
        q = quantized(of_gate * scale, 57344.0, tl.float8e5)
        d_of.store([i * BM, j * BN], q)
        dt_of.store([j * BN, i * BM], q.T)
        tl.store(amax_ptr + tile, tl.maximum(tl.max(tl.abs(of_up)), tl.max(tl.abs(of_gate))))


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median of 12 calls, each after a flush of the caches."""
    flush, marks = torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), []
    for i in range(15):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        marks += [(start, end)] if i > 2 else []
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def equal(a: Tensor, b: Tensor) -> str:
    """Return the share of elements with equal bits."""
    return f"{(a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).float().mean().item():.4f}"


def line(name: str, launch: Callable[[], Any], right: Callable[[], str]) -> str:
    """Run and time a kernel; return what the module's docstring says of it, or the error of its compilation."""
    try:
        kernel = launch()
        said = right()
        return (
            f"{name} {milliseconds(launch):.3f} (r{kernel.n_regs} s{kernel.n_spills} sh{kernel.metadata.shared}) {said}"
        )
    except TritonError as error:
        return f"{name} {type(error).__name__}: {str(error)[:60]}"


def fp8(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    """Return random FP8 numbers."""
    return torch.randn(rows, columns, device="cuda").clamp(-4, 4).to(dtype)


class Setting:
    """Tensors that all kernels of one shape share."""

    def __init__(self, m: int, n: int) -> None:
        self.amax = torch.zeros(1 << 16, device="cuda")
        self.s, self.one, self.scale = (torch.tensor(x, device="cuda") for x in (0.02, 1.0, 20.0))
        self.programs = torch.cuda.get_device_properties(0).multi_processor_count
        self.q, self.t = (torch.empty(shape, device="cuda", dtype=E4M3) for shape in ((m, n), (n, m)))

    def cublas(self, a: Tensor, b: Tensor, fast: bool = True) -> Tensor:
        """Return the product of a and b.t() in BF16."""
        return torch._scaled_mm(a, b.t(), self.s, self.one, out_dtype=BF16, use_fast_accum=fast)

    def options(self, configuration: tuple[Any, ...]) -> dict[str, Any]:
        """Return a configuration as named arguments of a kernel."""
        names = "BM", "BN", "BK", "num_warps", "num_stages", "FLAT"
        return {**dict(zip(names, configuration, strict=True)), "PROGRAMS": self.programs}


def single(m: int, n: int, k: int) -> None:
    """Print the table of matmuls with one product."""
    of, a, b = Setting(m, n), fp8(m, k), fp8(n, k)
    hp, reference = torch.empty(m, n, device="cuda", dtype=BF16), of.cublas(a, b)

    def after(y: Tensor, kind: int) -> tuple[Tensor, Tensor, Tensor]:
        y = F.relu(y).square() if kind == 1 else F.gelu(y)
        q = (y.float() * of.scale).clamp(-448, 448).to(E4M3)
        return q, q.t().contiguous(), y.abs().amax().float()

    fused, times = torch.compile(after, dynamic=False), [milliseconds(lambda: of.cublas(a, b))]
    times += [milliseconds(lambda kind=kind: fused(reference, kind)) for kind in (1, 2)]  # type: ignore[misc]
    product, relu2, gelu = (f"{time:.3f}" for time in times)
    print(f"{m}x{n}x{k}: cuBLASLt {product} ms, Inductor's kernel after it: relu2 {relu2} ms, gelu {gelu} ms")
    for configuration in CONFIGURATIONS:
        lines = []
        for kind, name in enumerate(("plain", "relu2", "gelu")):

            def launch(kind: int = kind, chosen: tuple[Any, ...] = configuration) -> Any:
                arguments = a, b, hp, of.q, of.t, of.amax, of.s, of.scale, m, n, k
                return one[(of.programs,)](*arguments, KIND=kind, **of.options(chosen))

            def right(kind: int = kind) -> str:
                if kind == 0:
                    return f"err {(hp.float() - reference.float()).abs().max().item():.3g}"
                q, t, amax = after(reference, kind)
                return f"eq {equal(of.q, q)} {equal(of.t, t)} {of.amax.max().item() == amax.item()}"

            of.amax.zero_()
            lines.append(line(name, launch, right))
        print("  ", configuration, " | ".join(lines), flush=True)


def of_gated(m: int, n: int, k: int) -> None:
    """Print the table of gated activations, forward and backward."""
    of, x, w, dy, down = Setting(m, n), fp8(m, k), fp8(2 * n, k), fp8(m, k, E5M2), fp8(n, k)
    d, dt = (torch.empty(shape, device="cuda", dtype=E5M2) for shape in ((m, 2 * n), (2 * n, m)))
    saved, reference = torch.empty(m, 2 * n, device="cuda", dtype=BF16), of.cublas(x, w)
    times = milliseconds(lambda: of.cublas(x, w)), milliseconds(lambda: of.cublas(dy, down, fast=False))
    print(f"{m}x{n}x{k}: cuBLASLt, gate and up {times[0]:.3f} ms, gradient of hidden {times[1]:.3f} ms")
    gate, up = reference[:, :n].float(), reference[:, n:].float()
    silu = F.silu(gate).to(BF16).float()
    hidden, of_hidden = (silu * up).to(BF16).float(), of.cublas(dy, down).float()
    slope = torch.sigmoid(gate) * (1 + gate * (1 - torch.sigmoid(gate)))
    wanted = torch.cat([(of_hidden * up).to(BF16).float() * slope, of_hidden * silu], 1).to(BF16).float()
    q, grad = ((y * of.scale).clamp(-limit, limit) for y, limit in ((hidden, 448), (wanted, 57344)))
    for configuration in GATED:
        lines, options = [], of.options(configuration)
        for name, saves in (("gated, saved", True), ("gated", False)):
            arguments: tuple[Any, ...] = x, w, saved, of.q, of.amax, of.s, of.scale, m, n, k
            launch = lambda saves=saves, arguments=arguments, options=options: gated[(of.programs,)](  # noqa: E731
                *arguments, SAVES=saves, **options
            )
            lines.append(line(name, launch, lambda: f"eq {equal(of.q, q.to(E4M3))}"))
        saved.copy_(reference)
        for name, with_hidden in (("backward, hidden", True), ("backward", False)):
            arguments = dy, down, saved, d, dt, of.t, of.amax, of.s, of.scale, m, n, k
            launch = lambda hidden=with_hidden, arguments=arguments, options=options: backward[(of.programs,)](  # noqa: E731
                *arguments, HIDDEN=hidden, **options
            )
            lines.append(line(name, launch, lambda: f"eq {equal(d, grad.to(E5M2))} {equal(dt, grad.t().to(E5M2))}"))
        print("  ", configuration, " | ".join(lines), flush=True)


def main() -> None:
    """Print all tables."""
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device="cuda"))
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for shape in SHAPES:
        single(*shape)
    of_gated(*MLP)


if __name__ == "__main__":
    main()
