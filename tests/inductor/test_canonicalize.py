"""FP8 quantize and dequantize ops of other libraries, in exported graphs that Inductor compiles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines torch.ops.quantized_decomposed
from torch import nn

from tests.helpers.canonicalize import Exported, TorchAO, export
from tests.helpers.harness import BF16, compiled, sqnr, verdicts


@pytest.mark.parametrize("chosen", [[0, 3, 4, 7], pytest.param(range(8), marks=pytest.mark.variant)], ids=len)
def test_compiled_by_inductor(chosen: Sequence[int]) -> None:
    """Compile modules with the ops in one graph. The variant compiles all of them."""
    overloads, dtypes, shapes = ("default", "tensor"), (torch.float32, BF16), ((1,), (1, 1))
    modules: list[nn.Module] = [Exported(o, dtype=dtype) for o in overloads for dtype in dtypes]
    modules += [TorchAO(general, shape, shape) for general in (False, True) for shape in shapes]
    modules = [modules[i] for i in chosen]
    x = torch.randn(32, 64)
    exported = [export(module, x) for module in modules]
    with verdicts() as report:
        run = compiled(lambda x: [e(x) for e in exported], recipe=None, strict=True, lowering="inductor")
        found = run(x)
    assert len(report.rewritten) == len(modules)
    for module, actual in zip(modules, found, strict=True):
        assert sqnr(module(x), actual) > (48 if getattr(module, "dtype", None) is BF16 else 110), module
