"""Rewrite the cases of XLA's rules, and list what they compute."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fp8pass.graph.verdict import Gemm
from fp8pass.options.config import Config
from fp8pass.passes.joint.list_matmuls import ListMatmuls
from fp8pass.passes.joint.scaled_mm import ScaledMM
from tests.helpers.harness import capture, run
from tests.helpers.xla_rules import Case


def rewritten(case: Case) -> tuple[fx.GraphModule, list[Gemm], list[str]]:
    module = capture(case.function, *case.inputs, device=case.device, dynamic=case.dynamic)
    target = case.target or ("sm_90" if case.device == "cuda" else None)
    context = run(module, ListMatmuls(), ScaledMM(), config=Config(recipe=None, target=target))
    gemms = list(context.gemms.values())
    return module, gemms, [*context.notes, *(g.note for g in gemms if g.note)]


def results(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)
