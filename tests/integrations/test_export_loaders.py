"""Test that transformers and compressed-tensors load what `fp8pass.export_fp8` writes, to the bit."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fp8pass
from tests.helpers.harness import compiled, without_caches

pytestmark = pytest.mark.compiled

with warnings.catch_warnings():  # of packages that transformers imports
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.modeling_utils")
LLAMA = transformers.LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2
)
MIXTRAL = transformers.MixtralConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=2,
)
BF16 = torch.bfloat16


def make(config: Any, dtype: torch.dtype = BF16) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def written(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def load(folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():  # that the folder's config goes before the one that is passed
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def dequantized(of: dict[str, Tensor], path: str, dtype: torch.dtype) -> Tensor:
    x_q = of[f"{path}.weight"].float()
    if (scale := of.get(f"{path}.weight_scale_inv")) is not None:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x_q * (of[f"{path}.weight_scale"] if scale is None else scale)).to(dtype)


def compressed_tensors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("compressed_tensors")


def check(model: Any, folder: Path, original: Any, layers: Any) -> None:
    """Check that all weights of a loaded model are those of the folder, or of the original."""
    of = written(folder)
    state = original.state_dict()
    for name, x in model.state_dict().items():
        path = name.removesuffix(".weight")
        expected = dequantized(of, path, x.dtype) if path in layers else state[name]
        assert torch.equal(x, expected), name


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_transformers_loads_blocks(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(LLAMA, dtype)
    done = fp8pass.export_fp8(model, tmp_path / "out", recipe="blockwise")
    assert len(done.layers) == 7 and list(done.kept) == ["lm_head"]
    loaded = load(tmp_path / "out", quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    assert loaded.dtype is dtype and type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
    check(loaded, tmp_path / "out", model, done.layers)
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()


def test_transformers_knows_which_modules_are_in_blocks(tmp_path: Path) -> None:
    """Its own function replaces modules for a GPU: those in FP8, and no others."""
    from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

    model = make(MIXTRAL)
    done = fp8pass.export_fp8(model, tmp_path / "out", recipe="blockwise")
    config = transformers.FineGrainedFP8Config(**quantization(tmp_path / "out"))
    replaced = replace_with_fp8_linear(make(MIXTRAL), config.modules_to_not_convert, config, pre_quantized=True)
    assert {n for n, m in replaced.named_modules() if isinstance(m, FP8Linear)} == set(done.layers)
    assert not any(type(m).__name__ == "FP8Experts" for m in replaced.modules())
    of = written(tmp_path / "out")
    for path in done.layers:
        layer = replaced.get_submodule(path)
        for name in ("weight", "weight_scale_inv"):
            expected = getattr(layer, name)
            assert of[f"{path}.{name}"].shape == expected.shape and of[f"{path}.{name}"].dtype is expected.dtype


@pytest.mark.parametrize("recipe", ["rowwise", "dynamic"])
def test_compressed_tensors_loads_scales_by_row_and_tensor(recipe: str, tmp_path: Path) -> None:
    compressed_tensors()
    model = make(LLAMA)
    done = fp8pass.export_fp8(model, tmp_path / "out", recipe=recipe)
    loaded = load(tmp_path / "out", quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    check(loaded, tmp_path / "out", model, done.layers)


@pytest.mark.variant
def test_compressed_tensors_computes_with_static_scales(tmp_path: Path) -> None:
    """Left as they are, compressed-tensors quantizes inputs by `input_scale`, and multiplies what fp8pass does."""
    compressed_tensors()
    model, tokens = make(LLAMA, torch.float32).eval(), torch.arange(32).view(1, 32)
    with without_caches(), torch.no_grad():
        scales = fp8pass.calibrate(model, [{"input_ids": tokens}])
        plain = model(tokens).logits
        scales = {name: x for name, x in scales.items() if name.startswith("model.")}
        run = compiled(model, recipe=fp8pass.recipes.StaticScaling(scales))
        ours = run(tokens).logits
        done = fp8pass.export_fp8(run, tmp_path / "out")
        assert len(done.layers) == 7
        theirs = load(tmp_path / "out")(tokens).logits
    assert float((ours - theirs).abs().max()) < 0.1 * float((ours - plain).abs().max())


def own_files(recipe: str, folder: Path) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and the config that compressed-tensors writes itself for a scheme like the recipe's."""
    compressors = importlib.import_module("compressed_tensors.compressors")
    scheme = importlib.import_module("compressed_tensors.quantization")
    model = make(LLAMA)
    preset = {"rowwise": "FP8_DYNAMIC", "static": "FP8"}[recipe]
    groups = {preset: ["Linear"]}
    scheme.apply_quantization_config(model, scheme.QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return written(folder), quantization(folder)


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("static", marks=pytest.mark.variant)])
def test_the_folder_is_as_compressed_tensors_writes_it(recipe: str, tmp_path: Path) -> None:
    compressed_tensors()
    model = make(LLAMA)
    with torch.no_grad():
        scales = fp8pass.calibrate(model, [{"input_ids": torch.arange(32).view(1, 32)}]) if recipe == "static" else {}
    chosen = fp8pass.recipes.StaticScaling(scales) if scales else recipe
    fp8pass.export_fp8(model, tmp_path / "ours", recipe=chosen)
    theirs, their_config = own_files(recipe, tmp_path / "theirs")
    ours, our_config = written(tmp_path / "ours"), quantization(tmp_path / "ours")
    assert {n: x.shape for n, x in ours.items()} == {n: x.shape for n, x in theirs.items()}
    for name, x in ours.items():
        # theirs are in the model's dtype, to which a scale would be rounded
        assert x.dtype is (torch.float32 if "_scale" in name else theirs[name].dtype), name
    their_config.pop("moe_sparsity_config")
    for of in (our_config, their_config):
        of["config_groups"]["group_0"]["input_activations"].pop("observer", None)  # how llm-compressor would calibrate
    assert our_config == their_config


def test_experts_stay_in_high_precision_under_the_names_of_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(MIXTRAL)
    done = fp8pass.export_fp8(model, tmp_path / "out", recipe="blockwise", max_shard_size="100KB")
    assert sorted(path.rpartition(".")[2] for path in done.layers) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    experts = "model.layers.0.mlp.experts"
    assert f"{experts} is exported in high precision: it is a MixtralExperts" in caplog.text
    stored = "model.layers.0.block_sparse_moe"
    kept = quantization(tmp_path / "out")["modules_to_not_convert"]
    assert {experts, f"{stored}.experts.1.w2", f"{stored}.gate", "lm_head"} <= set(kept)
    of = written(tmp_path / "out")
    assert of[f"{stored}.experts.1.w2.weight"].dtype is BF16
    check(load(tmp_path / "out"), tmp_path / "out", model, done.layers)


def test_a_head_that_is_tied(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
    model = make(config)
    done = fp8pass.export_fp8(model, tmp_path / "out", recipe="blockwise", leave_out=())
    assert done.kept == {"lm_head": "it shares its weight with model.embed_tokens (Embedding)"}
    assert "lm_head.weight" not in written(tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    check(loaded, tmp_path / "out", model, done.layers)


def test_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    model = make(LLAMA)
    model._hf_peft_config_loaded = True
    with pytest.raises(fp8pass.Fp8Error, match=r"has adapters beside its weights.*merge_and_unload"):
        fp8pass.export_fp8(model, tmp_path / "out", recipe="rowwise")
