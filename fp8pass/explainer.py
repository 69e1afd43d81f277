"""`fp8pass.explain`: what becomes of every matmul, without training anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8pass._torch import dynamo_config
from fp8pass.backend import explain_only
from fp8pass.config import Config, make_config
from fp8pass.report import Report, collect


def explain(
    function: Callable[..., Any] | nn.Module,
    *args: Any,
    backward: bool = True,
    config: Config | None = None,
    **kwargs: Any,
) -> Report:
    """The verdict on every matmul of `function(*args, **kwargs)`: see `fp8pass.report.Gemm`.

    Traces forward and, with `backward`, backward for the given inputs, as `torch.compile(..., backend="fp8pass")` does,
    and runs only the forward, in high precision: no gradients, no FP8 state. Random state and buffers are as before.
    Raises Fp8Error under `Config(strict=True)`.
    """
    function = getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
    compiled = torch.compile(function, backend=explain_only(config or make_config()))
    buffers = {n: b.clone() for n, b in function.named_buffers()} if isinstance(function, nn.Module) else {}
    recompiles = dynamo_config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16)
    try:
        with collect() as report, recompiles, torch.random.fork_rng(), torch.set_grad_enabled(backward):
            compiled(*args, **kwargs)
    finally:
        with torch.no_grad():
            for name, saved in buffers.items():
                function.get_buffer(name).copy_(saved)  # type: ignore[union-attr]
    if not report.graphs:
        report.notes.append(
            "Dynamo compiled nothing: the function has no tensor operations, or compilation is disabled."
        )
    return report
