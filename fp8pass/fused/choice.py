"""Decide whether a matmul and the ops after it run as one kernel, by what was measured on the GPU.

The matmul itself takes as long in Triton as in cuBLASLt (bench/results/fused_matmuls_h100.txt), so the question is
whether the epilogue takes longer than a kernel of its own. It moves fewer bytes, but the warps that compute it wait
with the next product, and what each thread holds of the tile limits how much it can have in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fp8pass import hardware
from fp8pass.fused.plan import Plan
from fp8pass.hardware import Target
from fp8pass.roofline import memory_seconds

MEASURED = {"h100": ((0, 0.0), (2, 0.65e-12), (4, 2.6e-12), (8, 5.0e-12), (9, 8.6e-12))}
"""{GPU: (bytes that an epilogue reads and writes per element of the product, its seconds per element)}.

From bench/results/fused_matmuls_h100.txt, as the time of the fused kernel less that of cuBLASLt's: ReLU squared in FP8
in both orientations 0.075 ms for 1.17e8 elements; GELU, and the product in bfloat16, 0.307 ms; the gradients of gate
and up from 4 bytes to 4 bytes 0.586 ms, and with the transposed hidden tensor 1.008 ms.
"""


LEAST_ELEMENTS, LEAST_K = 8192 * 4096, 768
"""The smallest product, and the shortest sum, that were measured. Where a GPU computes few tiles, other kernels win."""


@dataclass(frozen=True)
class Decide:
    """Decides whether matmuls are fused. how: "auto", "off" or "always". target: the GPU; None if it is not known."""

    how: str
    target: Target | None

    def may_fuse(self, times: bool = False) -> bool:
        """Return whether a matmul may be fused at all: so that nothing is generated in vain. times: `auto` times it."""
        if self.how == "auto":
            return self.target is not None and (times or self.target.name in MEASURED or is_pretended())
        return self.how == "always"

    @property
    def how_known(self) -> str:
        """A remark where `auto` decides by a prediction; "" elsewhere."""
        if self.how == "always" or self.target is None or self.target.name in MEASURED:
            return ""
        return f"; this is predicted: on a {self.target.name}, where nothing was measured, it needs epilogues='always'"

    def why_apart(self, plan: Plan) -> str:
        """Return the reason why two kernels are better than one; "" if the matmul is to be fused.

        Without the GPU, where nothing is measured, the roofline predicts.
        """
        if self.how == "always":
            return ""
        assert self.target is not None
        m = plan.matmul
        if m.m * m.n < LEAST_ELEMENTS or m.k < LEAST_K:
            return f"no product as small as [{m.m}, {m.k}] x [{m.k}, {m.n}] was measured; epilogues='always' fuses it"
        fused, apart = epilogue_seconds(plan, self.target), seconds_apart(plan, self.target)
        if fused < apart:
            return ""
        source = "as measured" if self.target.name in MEASURED else "as predicted"
        return f"the epilogue would take {1e6 * fused:.0f} us {source}, and a kernel of its own {1e6 * apart:.0f} us"


def is_pretended() -> bool:
    """Return whether the graph is compiled for a GPU that is not there."""
    return hardware.pretended_device is not None


def epilogue_seconds(plan: Plan, target: Target) -> float:
    """Return the time that the epilogue adds to the product: measured for such bytes per element, else predicted."""
    moved, elements = plan.bytes_per_element, plan.matmul.m * plan.matmul.n
    points = MEASURED.get(target.name)
    if points is None:
        return float(memory_seconds(target, moved * elements) - target.launch)
    return elements * _between(points, moved)


def _between(points: tuple[tuple[int, float], ...], x: float) -> float:
    """Interpolate between points, and go on from the last one as between the last two."""
    pairs = list(pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def seconds_apart(plan: Plan, target: Target) -> float:
    """Predict the time of the kernel that Inductor would run after the matmul."""
    transposes = any(o.kind == "columns" for o in plan.outputs)
    return float(memory_seconds(target, plan.bytes_apart, transposes, rows=not transposes))
