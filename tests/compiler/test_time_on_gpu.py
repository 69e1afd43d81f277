"""Parts of a graph, compiled alone: what would be timed on a GPU computes what the whole graph does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fp8pass.base import scaling
from fp8pass.compiler import time_on_gpu
from fp8pass.compiler.kernel_passes import KernelPasses
from fp8pass.options.config import Config
from fp8pass.passes.kernels.fold_quantizes import FoldQuantizes
from fp8pass.passes.kernels.fused_matmul import _alone, match
from tests.helpers.harness import BF16, E4M3, on_kernels, scale

pytestmark = pytest.mark.inductor

aten = torch.ops.aten


def layer(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    """Multiply what comes from elsewhere, and quantize a function of the product."""
    a, b = scaling.quantize(x * 2, s, E4M3), scaling.quantize(w, s, E4M3)
    h = F.silu(torch._scaled_mm(a, b.t(), s, s, None, None, BF16))
    h_q = scaling.quantize(h, s, E4M3)
    return h_q, h_q.t().contiguous(), scaling.amax(h), h.float().mean(-1)


class Alone(CustomGraphPass):
    """Compiles a matmul and what follows it alone, while Inductor compiles the whole graph; keeps the result."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, list[fx.Node], list[Any]]] = []

    def uuid(self) -> None:
        return None

    def __call__(self, graph: fx.Graph) -> None:
        on_kernels(graph.owning_module, FoldQuantizes())
        (matmul,) = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
        m = match(matmul)
        assert m is not None
        module = _alone(m)
        inputs = module.graph.find_nodes(op="placeholder")
        passes = KernelPasses(Config(recipe=None, epilogues="off"))
        self.made.append((time_on_gpu.compiled(module, passes), inputs, [o.kind for o in m.made]))


def test_a_part_is_compiled_while_the_whole_is() -> None:
    torch.manual_seed(0)
    x, w, s = torch.randn(64, 32, dtype=BF16), torch.randn(48, 32, dtype=BF16), scale(4.0)
    alone = Alone()
    with config.patch(post_grad_custom_pre_pass=alone, fx_graph_cache=False):
        h_q, h_t, amax, _ = torch.compile(layer, fullgraph=True)(x, w, s)
    ((run, inputs, kinds),) = alone.made
    a, b = scaling.quantize(x * 2, s, E4M3), scaling.quantize(w, s, E4M3)
    values = {(64, 32): a, (32, 48): b.t(), (): s}
    found = dict(zip(kinds, run([values[tuple(n.meta["val"].shape)] for n in inputs]), strict=False))
    assert kinds[:3] == ["amax", "rows", "columns"]
    assert torch.equal(found["amax"].float(), amax.float())
    for got, wanted in ((found["columns"], h_t), (found["columns"].t(), h_q)):
        # to the next value in FP8: on some CPUs the whole graph and the part compute the product in other ways
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.13, atol=0.002)


@pytest.mark.parametrize(
    ("setting", "times"), [({}, False), ({"max_autotune": True}, True), ({"max_autotune_gemm": True}, True)]
)
def test_alternatives_are_timed_where_inductor_times_its_own(setting: dict[str, bool], times: bool) -> None:
    with config.patch(max_autotune=False, max_autotune_gemm=False), config.patch(setting):
        assert time_on_gpu.autotunes() == times


def test_inputs_are_like_those_of_the_graph() -> None:
    like = torch.empty(16, 32, dtype=E4M3).t()
    made = time_on_gpu._random_like(like)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert made.float().std() > 0.5
