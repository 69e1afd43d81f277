"""Decide whether a matmul and the ops after it run as one kernel, by what was measured on the GPU.

The matmul itself takes as long in Triton as in cuBLASLt (bench/results/fused_matmuls_h100.txt), so the question is
whether the epilogue takes longer than a kernel of its own. It moves fewer bytes, but the warps that compute it wait
with the next product, and what each thread holds of the tile limits how much it can have in flight.
"""

from __future__ import annotations

from itertools import pairwise

from fp8pass.fused.plan import Plan
from fp8pass.hardware import Target
from fp8pass.roofline import memory_seconds

MEASURED = {"h100": ((0, 0.0), (2, 0.65e-12), (4, 2.6e-12), (8, 5.0e-12), (9, 8.6e-12))}
"""{GPU: (bytes that an epilogue reads and writes per element of the product, its seconds per element)}.

From bench/results/fused_matmuls_h100.txt, as the time of the fused kernel less that of cuBLASLt's: ReLU squared in FP8
in both orientations 0.075 ms for 1.17e8 elements; GELU, and the product in bfloat16, 0.307 ms; the gradients of gate
and up from 4 bytes to 4 bytes 0.586 ms, and with the transposed hidden tensor 1.008 ms.
"""


def why_apart(how: str, plan: Plan, target: Target | None, pretended: bool) -> str:
    """Return the reason why two kernels are better than one; "" if the matmul is to be fused.

    how: "auto", "off" or "always". pretended: the GPU is not there; where nothing is measured, the roofline decides.
    """
    if how == "always":
        return ""
    if how == "off" or target is None:
        return "epilogues='off'"
    fused, measured = epilogue_seconds(plan, target), target.name in MEASURED
    if not measured and not pretended:
        return f"no time of such an epilogue was measured on {target.name}; epilogues='always' fuses it"
    apart = seconds_apart(plan, target)
    if fused < apart:
        return ""
    source = "as measured" if measured else "as predicted"
    return f"the epilogue would take {1e6 * fused:.0f} us {source}, and a kernel of its own {1e6 * apart:.0f} us"


def epilogue_seconds(plan: Plan, target: Target) -> float:
    """Return the time that the epilogue adds to the product: measured for such bytes per element, else predicted."""
    moved, elements = plan.bytes_per_element, plan.matmul.m * plan.matmul.n
    points = MEASURED.get(target.name)
    if points is None:
        return memory_seconds(target, moved * elements) - target.launch
    return elements * _between(points, moved)


def _between(points: tuple[tuple[int, float], ...], x: float) -> float:
    """Interpolate between points, and go on from the last one as between the last two."""
    pairs = list(pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def seconds_apart(plan: Plan, target: Target) -> float:
    """Predict the time of the kernel that Inductor would run after the matmul."""
    transposes = any(o.kind == "columns" for o in plan.outputs)
    return memory_seconds(target, plan.bytes_apart, transposes)
