"""Warn of models in bfloat16 or float16 on CPUs where torch multiplies these dtypes by a reference routine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from fp8pass import hardware
from fp8pass.base.errors import warn_once
from fp8pass.passes.common.matmul_calls import signature_of
from fp8pass.passes.common.patterns import dtype_name

_NEEDED = {torch.bfloat16: "AVX-512 BF16 or AMX", torch.float16: "AVX-512 FP16"}


def warn_of_slow_matmuls(module: fx.GraphModule) -> None:
    """Warn if Dynamo's graph multiplies on the CPU in a dtype that is slow there.

    Warns once per process, since the message depends only on the CPU. The graph is checked before any pass, because
    passes do not run if torch's caches already hold their result. So a model that runs all matmuls in FP8 gets the
    warning too: its matmuls are slow where they are not compiled.
    """
    slow = hardware.reference_dtypes()
    if hardware.pretended_device is not None or not set(slow) & set(_dtypes_multiplied(module)):
        return
    names, needed = " and ".join(map(dtype_name, slow)), ", ".join(f"{_NEEDED[d]} for {dtype_name(d)}" for d in slow)
    warn_once(
        f"fp8pass: on this CPU torch multiplies {names} by a reference routine, up to 100 times slower than float32. "
        f"Matmuls in FP8 are not affected. For the others, use float32 to develop here, or a CPU that has {needed}"
    )


def _dtypes_multiplied(module: fx.GraphModule) -> Iterator[torch.dtype]:
    """Yield the dtype of each matmul on the CPU in the graph and its regions."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    for node in (n for graph in graphs for n in graph.nodes if signature_of(n)):
        product = node.meta.get("example_value")
        if isinstance(product, Tensor) and product.device.type == "cpu":
            yield product.dtype
