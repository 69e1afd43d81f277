"""Try on a GPU which FP8 matmuls `torch._scaled_mm` computes, and whether they are right: a script.

Run as `python trial.py DEVICE ANSWERS KIND...` in a process of its own, since an error of a kernel may make all later
calls of CUDA fail in its process. It needs torch alone. It appends two lines of JSON to the file ANSWERS for each case,
[kind, case, needed] before it, which says what ran if the process dies, and [kind, case, needed, result] after it;
result is "" where the case is right. needed: fp8pass emits such matmuls.

Operands are small whole numbers and scales powers of two, so that each product and sum is exact in any order, also in
the 14 bits of fast accumulation: the only error that is allowed is that of rounding to the output's dtype.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = 48, 512, 64
"""M, K, N: blocks of 1x128 and of 1x32 divide K, and kernels with 128x128 blocks take it."""
NOT_TRIED = "not tried"
"""How results begin that say nothing of a kernel."""
ODD = 41, 512, 64
"""Rows that no alignment asks for: kernels with a scale for the tensor or for each row take any number of them."""


@dataclass(frozen=True)
class Case:
    """One matmul to try.

    kind: its scales, "tensor", "rowwise", "blockwise" or "mxfp8". a, b: dtypes of the operands. layout: "TN", operands
    that lie along the sum; or others, "NN" and "NT", which only some GPUs take. square: the second operand has 128x128
    blocks.
    """

    kind: str
    a: torch.dtype = E4M3
    b: torch.dtype = E4M3
    out: torch.dtype = BF16
    bias: bool = False
    fast: bool = False
    sizes: tuple[int, int, int] = SIZES
    layout: str = "TN"
    square: bool = False

    @property
    def needed(self) -> bool:
        """True if fp8pass emits such matmuls."""
        return self.layout == "TN"

    def __str__(self) -> str:
        a, b, out = (
            str(dtype).removeprefix("torch.float8_").removeprefix("torch.") for dtype in (self.a, self.b, self.out)
        )
        m, k, n = self.sizes
        extras = [name for name in ("bias", "fast", "square") if getattr(self, name)]
        return " ".join([f"{a} x {b} -> {out}, [{m}, {k}] x [{k}, {n}] {self.layout}", *extras])


def cases(kind: str) -> Iterator[Case]:
    """Yield the cases of one kind of scales, those first that decide whether there is a kernel at all."""
    yield Case(kind)
    if kind == "tensor":
        for a, b in ((E4M3, E5M2), (E5M2, E4M3)):
            yield Case(kind, a, b)
        for out in (FP16, FP32, E4M3):
            yield Case(kind, out=out)
    if kind == "rowwise":
        yield Case(kind, E5M2, E4M3)
    if kind in ("tensor", "rowwise"):
        yield Case(kind, fast=True)
        yield Case(kind, bias=True)
        yield Case(kind, sizes=ODD)
    if kind == "blockwise":
        yield Case(kind, square=True)
    if kind in ("blockwise", "mxfp8"):
        yield Case(kind, out=FP32)
    for layout in ("NN", "NT"):
        yield Case(kind, layout=layout)


def tiles(codes: Tensor) -> Tensor:
    """Lay out e8m0 codes u8[R, C] as e8m0[R' * C'], cuBLASLt's layout of scales for 1x32 blocks.

    R' and C' are R and C padded to multiples of 128 and 4.
    The code of row r and block c is at ((r // 128) * C'/4 + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4.
    """
    rows, columns = codes.shape
    tall, wide = -(-rows // 128), -(-columns // 4)
    # cuBLASLt reads whole tiles of 128 by 4, and wants zeros where the matrix has no blocks
    padded = torch.nn.functional.pad(codes, (0, wide * 4 - columns, 0, tall * 128 - rows))
    return padded.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4).reshape(-1).view(E8M0)


def _powers(numbers: torch.Generator, *shape: int) -> Tensor:
    """Return powers of two from 1/4 to 4, in float32."""
    return torch.exp2(torch.randint(-2, 3, shape, generator=numbers).float())


def _scales(case: Case, rows: int, k: int, numbers: torch.Generator, square: bool) -> tuple[Tensor, Tensor]:
    """Return the scales of an operand [rows, k] with its sum along k: one for each element, and as stored by blocks."""
    if case.kind == "tensor":
        stored = _powers(numbers, 1, 1)
    elif case.kind == "rowwise":
        stored = _powers(numbers, rows, 1)
    else:
        width = 32 if case.kind == "mxfp8" else 128
        stored = _powers(numbers, -(-rows // 128) if square else rows, k // width)
    down, across = -(-rows // stored.shape[0]), k // stored.shape[1]
    return stored.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1), stored


def _passed(case: Case, scale: Tensor, second: bool) -> Tensor:
    """Return stored scales as `_scaled_mm` takes them."""
    if case.kind == "tensor":
        return scale.reshape(())
    if case.kind == "rowwise":
        return scale.t() if second else scale
    if case.kind == "mxfp8":
        return tiles((torch.log2(scale) + 127).to(torch.uint8))
    # 1x128: with M, or N, contiguous; 128x128: with K contiguous
    if case.square and second:
        return scale.t()
    return scale.t().contiguous() if second else scale.t().contiguous().t()


def run(case: Case, device: torch.device) -> str:
    """Compute a case on the device, and compare it with float64 on the CPU; return what is wrong, "" if nothing."""
    m, k, n = case.sizes
    numbers = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (rows, k), generator=numbers).float() for rows in (m, n))
    (each_a, scale_a), (each_b, scale_b) = (
        _scales(case, rows, k, numbers, square=case.square and second) for rows, second in ((m, False), (n, True))
    )
    bias = torch.randint(-8, 9, (n,), generator=numbers).to(BF16) if case.bias else None
    exact = (a * each_a).double() @ (b * each_b).double().t()
    exact = exact if bias is None else exact + bias.double()
    left, right = a.to(case.a).to(device), b.to(case.b).to(device).t()
    if case.layout[0] == "N":
        left = left.t().contiguous().t()
    if case.layout[1] == "T":
        right = right.contiguous()
    result = torch._scaled_mm(
        left, right, _passed(case, scale_a, False).to(device), _passed(case, scale_b, True).to(device),
        bias=None if bias is None else bias.to(device), out_dtype=case.out, use_fast_accum=case.fast,
    )  # fmt: skip
    return _compared(result.float().double().cpu(), exact, torch.finfo(case.out))


def _compared(got: Tensor, exact: Tensor, limits: torch.finfo) -> str:
    """Return what is wrong with a result, beyond the rounding of its dtype; "" if nothing."""
    wanted = exact.clamp(limits.min, limits.max)
    error = (got - wanted).abs()
    # `~(<=)` finds NaN, too; `eps` is twice the largest relative error of rounding to nearest
    wrong = ~(error <= wanted.abs() * limits.eps)
    if not wrong.any():
        return ""
    i = int(wrong.flatten().nonzero()[0])
    share = float(wrong.double().mean())
    return f"wrong in {share:.0%} of the elements: {float(got.flatten()[i]):g}, not {float(wanted.flatten()[i]):g}"


def main(device: str, answers: str, kinds: list[str], tries: Callable[[Case, torch.device], str] = run) -> None:
    """Try all cases of these kinds, and append the answers to a file."""
    _check_alive(torch.device(device))
    with open(answers, "a") as file:

        def tell(*what: Any) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()  # this process may die in the next case

        tell("began", torch.__version__)  # `tried.py` waits for the file, and skips this line
        for kind in kinds:
            for case in cases(kind):
                tell(kind, str(case), case.needed)
                result = _tried(case, torch.device(device), tries)
                _check_alive(torch.device(device))  # raises, and ends the process: the result would say less
                tell(kind, str(case), case.needed, result)


def _tried(case: Case, device: torch.device, tries: Callable[[Case, torch.device], str]) -> str:
    try:
        return tries(case, device)
    except torch.OutOfMemoryError:  # says nothing of the kernel
        return f"{NOT_TRIED}: out of memory"
    except (RuntimeError, ValueError) as error:  # TORCH_CHECK's and TORCH_CHECK_VALUE's, by which torch refuses a call
        return f"refused: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"


def _check_alive(device: torch.device) -> None:
    """Raise torch's error if nothing runs on the device any more in this process."""
    if device.type == "cuda":
        torch.ones(1, device=device).item()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
