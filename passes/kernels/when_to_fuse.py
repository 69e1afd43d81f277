"""Decide whether a matmul and the ops after it run as one kernel, by what was measured on the GPU.

The matmul itself takes as long in Triton as in cuBLASLt (bench/results/fused_matmuls_h100.txt), so the question is
whether the epilogue takes longer than a separate kernel. It moves fewer bytes, but the tensor cores are idle while all
warps compute it: it costs its instructions, while a separate kernel computes as its next loads arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8pass import hardware
from fp8pass.hardware import Target
from fp8pass.passes.kernels.fused_plan import Plan
from fp8pass.passes.kernels.triton_epilogue import calls_functions
from fp8pass.roofline import memory_seconds

MEASURED = dict.fromkeys(("h100", "h200"), 0.66e-12)
"""{GPU: seconds per element that an epilogue takes which only computes one FP8 tensor and its amax, by arithmetic}.

Of ReLU squared in FP8 in both orientations: bench/results/fused_matmuls_h100.txt, where the fused kernel takes 0.075,
0.022 and 0.057 ms longer than cuBLASLt for 1.17e8, 3.4e7 and 1.01e8 elements. An H200 is the same chip: the same
arithmetic, registers and clocks, with faster memory, so that a separate kernel takes less time. All generated kernels
that an H200 has measured do more, and lose: docs/fused-matmuls.md.
"""


LEAST_ELEMENTS, LEAST_K = 8192 * 4096, 768
"""The smallest product, and the shortest sum, that were measured. Where a GPU computes few tiles, other kernels win."""


@dataclass(frozen=True)
class Decide:
    """Decides whether matmuls are fused. how: "auto", "off" or "always". target: the GPU; None if it is not known."""

    how: str
    target: Target | None

    def may_fuse(self, times: bool = False) -> bool:
        """Return whether a matmul may be fused; if not, no kernel is generated. times: True if `auto` will time it."""
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
        if self.target.name in MEASURED and (more := what_costs_more(plan)):
            return f"it {more}, and no such kernel was faster than separate ones; epilogues='always' fuses it"
        fused, apart = epilogue_seconds(plan, self.target), seconds_apart(plan, self.target)
        if fused < apart:
            return ""
        source = "as measured" if self.target.name in MEASURED else "as predicted"
        return f"the epilogue would take {1e6 * fused:.0f} us {source}, and a separate kernel {1e6 * apart:.0f} us"


def is_pretended() -> bool:
    """Return whether the graph is compiled for a GPU that is not there."""
    return hardware.pretended_device is not None


def what_costs_more(plan: Plan) -> str:
    """Return what the epilogue does besides computing one FP8 tensor and its amax, by arithmetic; "" if nothing."""
    written = [o for o in plan.outputs if o.kind in ("rows", "columns")]
    wide = [o.dtype for o in written if o.dtype.itemsize > 1]
    if plan.matmul.products > 1:
        return "combines two products"
    if any(r.row and r.column for r in plan.epilogue.reads):
        return "reads another matrix"
    if wide:
        return f"writes {'float32' if wide[0] == torch.float32 else '16 bits'} per element too"
    if len({o.results for o in written}) > 1 or any(o.kind == "sums" for o in plan.outputs):
        return "writes more than one tensor"
    return "computes exp, erf, tanh or the like" if calls_functions(plan.epilogue) else ""


def epilogue_seconds(plan: Plan, target: Target) -> float:
    """Return the time that the epilogue adds to the product: as measured for such epilogues, otherwise predicted."""
    elements = plan.matmul.m * plan.matmul.n
    per_element = MEASURED.get(target.name)
    if per_element is None:
        return float(memory_seconds(target, plan.bytes_per_element * elements) - target.launch)
    return elements * per_element


def seconds_apart(plan: Plan, target: Target) -> float:
    """Predict the time of the kernel that would run after the matmul: see `quantize_kernels.py`."""
    return float(memory_seconds(target, plan.bytes_apart, "tiles_share"))
