"""Compile a part of a graph by Inductor, and time it on the GPU, to choose between two implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass.base._torch import (
    CustomGraphPass,
    TracingContext,
    benchmarker,
    detect_fake_mode,
    inductor_config,
    tracing,
    unset_fake_temporarily,
)
from fp8pass.compiler.heuristics import with_choices


def autotunes() -> bool:
    """Return whether Inductor times alternatives of matmuls on the GPU, as `mode="max-autotune"` lets it."""
    return bool(inductor_config.max_autotune or inductor_config.max_autotune_gemm)


def seconds(module: fx.GraphModule, kernel_passes: CustomGraphPass) -> float:
    """Return the seconds that a graph takes on the GPU, compiled with `kernel_passes`, on random inputs.

    Raises whatever Inductor, Triton or CUDA raise, for example for lack of memory.
    """
    with unset_fake_temporarily():
        inputs = [_random_like(n.meta["val"]) for n in module.graph.find_nodes(op="placeholder")]
    run = compiled(module, kernel_passes)
    with unset_fake_temporarily():
        # a new list for each call, which empties it
        return 1e-3 * float(benchmarker.benchmark_gpu(lambda: run(list(inputs))))


def compiled(module: fx.GraphModule, kernel_passes: CustomGraphPass) -> Callable[[list[Tensor]], Any]:
    """Compile a graph of ATen ops, whose inputs have `meta["val"]`. The result takes a list of inputs, and empties it.

    kernel_passes: run on the graph instead of those that Inductor is set to.
    """
    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    passes = {"post_grad_custom_pre_pass": kernel_passes, "post_grad_custom_post_pass": None}
    # a separate context: Inductor writes the strides of the outputs to that of the graph which it is compiling
    with inductor_config.patch(passes), tracing(TracingContext(detect_fake_mode(inputs))):
        run: Callable[[list[Tensor]], Any] = with_choices(module, inputs)
    return run


def _random_like(x: Tensor) -> Tensor:
    """Return a tensor with the shape, strides, dtype and device of a fake one."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.copy_(torch.randn(x.shape, device=x.device).to(x.dtype))
