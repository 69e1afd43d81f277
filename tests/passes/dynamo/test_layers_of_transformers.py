"""Test layers of transformers' models: compiled once, they give the bits that they give when each is compiled alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.report.report import collect
from tests.helpers.harness import train

pytestmark = pytest.mark.compiled

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
LANGUAGE: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "vocab_size": 128}
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "bos_token_id": 0}
T5: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 128}
MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "llama": ("layers", lambda: transformers.LlamaModel(transformers.LlamaConfig(**LANGUAGE))),
    "gpt2": ("h", lambda: transformers.GPT2Model(transformers.GPT2Config(**GPT2, eos_token_id=0))),
    "vit": ("layers", lambda: transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=32, patch_size=8))),
    "mixtral": (
        "layers",
        lambda: transformers.MixtralModel(transformers.MixtralConfig(**LANGUAGE, num_local_experts=4)),
    ),
    "t5": ("block", lambda: transformers.T5Model(transformers.T5Config(**T5)).encoder),
}
"""The path of the layers, and the model, which makes the masks and positions that its layers get."""


class Stack(nn.Module):
    """The layers of a model, one after the other, each with the arguments that the model gave it."""

    def __init__(self, layers: nn.ModuleList, arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__()
        self.layers = layers
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        for layer, ((_, *args), kwargs) in zip(self.layers, self.arguments, strict=True):
            result = layer(x, *args, **kwargs)
            x = result if isinstance(result, Tensor) else result[0]
        return x


def stack_of(name: str) -> tuple[Stack, Tensor]:
    """Return the layers of a model, with the arguments of a real call, and the input of the first one."""
    torch.manual_seed(0)
    path, make = MODELS[name]
    model = make().eval()  # without dropout
    layers: Any = model.get_submodule(path)
    arguments: list[Any] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: arguments.append((args, kwargs)), with_kwargs=True)
        for layer in layers
    ]
    with torch.no_grad():
        if name == "vit":
            model(torch.randn(2, 3, 32, 32))
        else:
            model(torch.randint(0, 128, (2, 32)), use_cache=False)
    for handle in handles:
        handle.remove()
    return Stack(layers, arguments), arguments[0][0][0]


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.variant) for name in MODELS if name != "llama")]
)
def test_numbers_and_slots_are_those_of_compilation_block_by_block(name: str) -> None:
    stack, x = stack_of(name)
    inputs = [x * scale for scale in (1.0, 1.5, 0.5)]
    found = []
    for by_block in (False, True):
        torch._dynamo.reset()
        model = copy.deepcopy(stack)
        options: dict[str, Any] = {"lowering": "eager", "min_speedup": 0, "on_fault": "raise"}
        for layer in model.layers if by_block else ():
            layer.compile(backend="fp8pass", options=options)
        run = model if by_block else torch.compile(model, backend="fp8pass", options=options)
        with collect() as report:
            numbers = list(train(model, run, inputs))
        found.append((numbers, fp8pass.state(model).state_dict()))
        assert report.rewritten
        assert by_block or any("equal layers" in note for note in report.notes)
    torch.testing.assert_close(*found, rtol=0, atol=0)
