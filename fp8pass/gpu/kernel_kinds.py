"""Say which FP8 matmul kernels a GPU has, by the scales that they take: tables, where no trial has answered.

A trial's answer, or that of a machine's file, is in the `Target`; see `tried.py`. The tables are from torch's source
(aten/src/ATen/native/cuda/ScaledBlas.cpp) and cuBLASLt's documentation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8pass.gpu.target import Target

KINDS = ("rowwise", "blockwise", "mxfp8")
"""The scales that some GPUs with FP8 take, besides one for the whole tensor, which all take."""


@dataclass(frozen=True)
class _KernelKind:
    """Where a kind of kernel exists.

    has: compute capabilities that have it for sure. unsure: those where a trial decides, and whether the table believes
    that they have it where there is none. All others lack it. cuda: the first version of CUDA with it. where: has, in
    words.
    """

    has: frozenset[tuple[int, int]]
    unsure: dict[tuple[int, int], bool]
    cuda: tuple[int, int]
    where: str

    def believed(self, capability: tuple[int, int]) -> bool:
        return capability in self.has or self.unsure.get(capability, False)


_TABLE = {
    # sm_89 has one too, but up to torch 2.11 it runs on the wrong stream (pytorch issue 177651)
    "rowwise": _KernelKind(
        frozenset({(9, 0), (10, 0)}),
        {(10, 3): True, (11, 0): True, (12, 0): True, (12, 1): True},
        (12, 0),
        "sm_90 and later",
    ),
    "blockwise": _KernelKind(frozenset({(9, 0)}), {}, (12, 9), "sm_90"),
    "mxfp8": _KernelKind(
        frozenset({(10, 0)}),
        {(10, 3): True, (11, 0): False, (12, 0): True, (12, 1): True},
        (12, 8),
        "sm_100, sm_103, sm_120",
    ),
}


def unsure(target: Target) -> tuple[str, ...]:
    """Return the kinds that a trial has to tell of on this GPU; () where tables, or earlier answers, know all."""
    return tuple(kind for kind in KINDS if getattr(target, kind) is None and target.capability in _TABLE[kind].unsure)


def where(kind: str) -> str:
    """Return where such kernels exist, in words."""
    table = _TABLE[kind]
    return f"{kind} kernels exist on {table.where} with CUDA {table.cuda[0]}.{table.cuda[1]} or later"


def why_not(kind: str, target: Target) -> str:
    """Return the reason why a GPU has no kernel with such scales; "" if it has one. kind: one of `KINDS`."""
    table, answer = _TABLE[kind], getattr(target, kind)
    if answer is not None:
        return "" if answer else f"{kind} kernels do not work on this {target.name}, as tried: see `fp8pass env`"
    if not table.believed(target.capability):
        return f"{where(kind)}, and {target.name} is {target.sm}"
    if torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) < table.cuda:
        return f"{where(kind)}, and this torch is built with CUDA {torch.version.cuda}"
    return ""
