"""Test `fp8pass.explain` on models as users have them: small GPT-2, Llama and ViT of transformers, with random weights.

Every matmul is accounted for: what an eager forward and backward calls is counted by a dispatch mode that knows nothing
of fp8pass.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8pass
from fp8pass.graph.verdict import Gemm
from fp8pass.report.report import Report

pytestmark = pytest.mark.compiled

aten = torch.ops.aten
FACTORS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
Shape = tuple[int, int, int, int]


class Counted(TorchDispatchMode):
    """Count matmuls by (batches, M, K, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[Shape] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORS:
            a, b = args[FACTORS[func]], args[FACTORS[func] + 1]
            *batch, m, k = a.shape
            self.shapes[(math.prod(batch), m, k, b.shape[-1])] += 1
        return func(*args, **(kwargs or {}))


def gpt2(depth: int = 1) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=depth, n_head=2, vocab_size=96, n_positions=32, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(96, (2, 16))}


def llama(depth: int = 1) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=80, num_hidden_layers=depth, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": torch.randint(96, (2, 16))}


def vit(depth: int = 1) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": 12}
    config = ViTConfig(hidden_size=32, num_hidden_layers=depth, num_attention_heads=2, intermediate_size=64, **sizes)
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def called(model: nn.Module, inputs: dict[str, Tensor]) -> Counter[Shape]:
    """Return the matmuls that an eager forward and backward calls."""
    with Counted() as counted:
        model(**inputs).logits.sum().backward()
    model.zero_grad()
    return counted.shapes


def sizes(gemm: Gemm) -> Shape:
    assert all(isinstance(size, int) for size in (gemm.batches, gemm.M, gemm.K, gemm.N))
    return gemm.batches, gemm.M, gemm.K, gemm.N  # type: ignore[return-value]


def either_way(shapes: Counter[Shape]) -> Counter[Shape]:
    """Count a matmul together with its transpose, N by K by M: eager autograd computes some gradients transposed."""
    found: Counter[Shape] = Counter()
    for (batches, m, k, n), count in shapes.items():
        found[(batches, min(m, n), k, max(m, n))] += count
    return found


Make = Callable[[int], tuple[nn.Module, dict[str, Tensor]]]


@functools.cache
def explained(make: Make, depth: int) -> tuple[nn.Module, Counter[Shape], Report]:
    """Return a model, the matmuls of its eager forward and backward, and the report; GPT-2's head is filtered."""
    model, inputs = make(depth)
    model.train()
    expected = called(model, inputs)
    options: dict[str, Any] = {"filter": ["lm_head"]} if make is gpt2 else {}
    return model, expected, fp8pass.explain(model, **inputs, config=fp8pass.Config(merge_siblings=False, **options))


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.variant)])
@pytest.mark.parametrize(("make", "layers"), [(gpt2, 4), (llama, 7), pytest.param(vit, 6, marks=pytest.mark.variant)])
def test_every_matmul_is_accounted_for(make: Make, layers: int, depth: int) -> None:
    model, expected, report = explained(make, depth)
    assert report.breaks == [] and report.recompiles == [] and report.graphs == 1
    assert either_way(Counter(map(sizes, report.gemms))) == either_way(expected)
    assert report.flops == sum(2 * math.prod(shape) * count for shape, count in expected.items())
    for g in report.declined:
        if g.name != "lm_head":  # attention, which torch decomposes because of its dropout
            assert g.rule == "attention" and g.name.endswith(".scaled_dot_product_attention")
    assert Counter(g.rule for g in report.declined)["filter"] == (3 if make is gpt2 else 0)
    of_layer = [g for g in report.rewritten if ".0." in g.name]
    assert Counter(g.kind for g in of_layer) == {"output": layers, "grad_input": layers, "grad_weight": layers}
    paths = {name for name, _ in model.named_modules()}
    assert {g.name for g in report.rewritten} <= paths
    assert all(g.source and g.source.split(":")[1].isdigit() for g in report.gemms)


def test_a_report_with_everything(tmp_path: Any) -> None:
    """The page of a real model also has the declined matmuls, with their reasons."""
    _, _, report = explained(gpt2, 1)
    # the head shares its weight with the embedding; the others are attention with dropout
    assert {g.name for g in report.declined} == {"lm_head", "transformer.h.0.attn.scaled_dot_product_attention"}
    text = report.to_html(tmp_path / "gpt2.html").read_text()
    assert "matches the filter's pattern" in text
    linked = {gemm for p in report.pictures for op in p.ops for gemm in op.gemms}
    assert linked >= set(range(len(report.gemms)))
