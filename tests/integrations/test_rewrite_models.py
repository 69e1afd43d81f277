"""Test `fp8pass.rewrite` on models of others: a Llama of transformers, to the bit, and the samples of `torch.export`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._export.db.case import SupportLevel
from torch._export.db.examples import all_examples
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import fp8pass
from fp8pass.base._torch import pytree, select_decomp_table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the import warns of
    from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.compiled, pytest.mark.variant, pytest.mark.filterwarnings("ignore")]


def next_byte(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_llama_trains_as_under_torch_compile() -> None:
    """Exported, then traced with its backward, in the ops that AOTAutograd traces."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=112,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    batches = [torch.randint(100, (2, 32)) for _ in range(3)]
    exported = torch.export.export(model, (batches[0],), strict=False).module()
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def step(parameters: dict[str, Tensor], ids: Tensor) -> Any:
        loss = next_byte(functional_call(exported, parameters, (ids,)).logits, ids)
        return loss, torch.autograd.grad(loss, list(parameters.values()))

    traced = make_fx(step, decomposition_table=select_decomp_table())(parameters, batches[0])
    graph, state, report = fp8pass.rewrite(traced, (parameters, batches[0]))
    assert len(report.rewritten) == len(report.gemms) == 45
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="fp8pass", options={"lowering": "eager"})
    for ids in batches:
        _, gradients = state.run(graph, parameters, ids)
        next_byte(compiled(input_ids=ids, use_cache=False).logits, ids).backward()
        for gradient, (name, p) in zip(gradients, other.named_parameters(), strict=True):
            assert torch.equal(gradient, p.grad), name
            p.grad = None
    ours, theirs = state.state_dict(), fp8pass.state(other).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def exported(name: str) -> Any:
    """Return a sample's program, and what it is called with."""
    case = all_examples()[name]
    args, kwargs = case.example_args, case.example_kwargs
    program = torch.export.export(case.model, args, kwargs, dynamic_shapes=case.dynamic_shapes, strict=False)
    return program, args, kwargs


SAMPLES = [name for name, case in all_examples().items() if case.support_level is SupportLevel.SUPPORTED]


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_samples_of_torch_export(name: str) -> None:
    program, args, kwargs = exported(name)
    expected = program.module()(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    inputs = (*args, *([kwargs] if kwargs else []))
    graph, state, report = fp8pass.rewrite(program.module(), inputs, {"recipe": "dynamic"})
    assert {gemm.status for gemm in report.gemms} <= {"rewritten"}
    results = state.run(graph, *copy.deepcopy(inputs))
    pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True)
    for ours, theirs in pairs:
        if isinstance(ours, Tensor) and "dropout" not in name:
            torch.testing.assert_close(ours, theirs.detach(), rtol=0.1, atol=0.1)
