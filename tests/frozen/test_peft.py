"""Test peft's adapters on weights that are frozen in FP8. peft is not installed with the tests: it was 0.21.2."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8pass
from fp8pass.frozen.weight import FrozenWeight
from tests.helpers.harness import BF16, compiled, without_caches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what imports of peft and of its quantizers warn of
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")

pytestmark = [pytest.mark.compiled, pytest.mark.filterwarnings("ignore")]


def adapted(dtype: torch.dtype = BF16) -> Any:
    """Return a small Llama with LoRA on all linear layers, whose adapters change its results."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config).to(dtype), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def text() -> Tensor:
    return torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(1))


def test_training_saving_and_merging(tmp_path: Path) -> None:
    model, x = adapted(torch.float32), text()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with without_caches():
        run, losses = compiled(model, frozen="fp8", strict=True), []
        for _ in range(4):
            loss = run(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    assert losses[-1] < losses[0]
    frozen = [n for n, p in model.named_parameters() if isinstance(p, FrozenWeight)]
    assert len(frozen) == 14 + 1 and all("base_layer" in name or "lm_head" in name for name in frozen)
    model.save_pretrained(tmp_path)
    assert {f.name for f in tmp_path.glob("adapter_*")} == {"adapter_config.json", "adapter_model.safetensors"}

    expected = model(input_ids=x).logits
    fp8pass.unfreeze(model)
    assert torch.equal(model(input_ids=x).logits, expected)
    again = peft.PeftModel.from_pretrained(model.unload(), tmp_path)
    torch.testing.assert_close(again(input_ids=x).logits, expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=x).logits, expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_close_to_those_of_the_dequantized_weights() -> None:
    models, grads = [adapted(), adapted()], []
    for model in models:
        fp8pass.freeze(model)
    fp8pass.unfreeze(models[1])
    with without_caches():
        for model, run in zip(models, (compiled(models[0]), models[1]), strict=True):
            run(input_ids=text(), labels=text()).loss.backward()
            grads.append({n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 2 * 14
    for name, grad in grads[0].items():
        assert torch.cosine_similarity(grad.flatten(), grads[1][name].flatten(), 0) > 0.98, name
