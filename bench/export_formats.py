"""Export a small Llama in every format, load each folder with the packages that are here, and print a table."""

from __future__ import annotations

import importlib.metadata
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import fp8pass

LAYER = "model.layers.0.mlp.up_proj"
HEADER = ("recipe", "`quant_method`", "scales of weights", "inputs", "transformers, dequantizing", "compressed-tensors")


def main() -> None:
    """Print the table, in Markdown."""
    rows = [row(recipe) for recipe in ("blockwise", "rowwise", "dynamic", "delayed", "static")]
    for cells in (HEADER, ["---"] * len(HEADER), *rows):
        print(f"| {' | '.join(cells)} |")


def row(recipe: str) -> list[str]:
    """Export with one recipe; return the cells of its row."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "out")
        config = export(recipe, folder)
        of = load_file(folder / "model.safetensors")
        method, groups = config["quant_method"], config.get("config_groups")
        inputs = groups["group_0"]["input_activations"] if groups else {"dynamic": True, "strategy": "1x128"}
        how = f"{'dynamic' if inputs['dynamic'] else '`input_scale`'}, by {inputs['strategy']}"
        name, scale = next((n, x) for n, x in of.items() if n.startswith(f"{LAYER}.weight_scale"))
        scales = f"`{name.rpartition('.')[2]}` {list(scale.shape)}"
        loaded = by_transformers(folder, of), by_compressed_tensors(folder, of)
        return [f"`{recipe}`", f"`{method}`", scales, how, *loaded]


def export(recipe: str, folder: Path) -> Any:
    """Write a model under a recipe; return its `quantization_config`. Delayed scaling trains for two steps before."""
    import json

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, tokens = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).bfloat16(), torch.arange(64).view(1, 64)
    chosen: Any = recipe
    if recipe == "delayed":
        run = torch.compile(model, backend="fp8pass", options={"lowering": "eager"})
        for _ in range(2):
            run(input_ids=tokens, labels=tokens).loss.backward()
        chosen = None
    if recipe == "static":
        with torch.no_grad():
            chosen = fp8pass.recipes.StaticScaling(fp8pass.calibrate(model, [{"input_ids": tokens}]))
    fp8pass.export_fp8(model, folder, recipe=chosen)
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def dequantized(of: dict[str, Tensor]) -> Tensor:
    """Return the layer's weight in bfloat16, computed from the files."""
    x_q = of[f"{LAYER}.weight"].float()
    if f"{LAYER}.weight_scale_inv" in of:
        return (x_q * of[f"{LAYER}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)).bfloat16()
    return (x_q * of[f"{LAYER}.weight_scale"]).bfloat16()


def by_transformers(folder: Path, of: dict[str, Tensor]) -> str:
    """Load with `from_pretrained`, which dequantizes; return what came of it."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    in_blocks = f"{LAYER}.weight_scale_inv" in of
    if not in_blocks and not version("compressed-tensors"):
        return "needs compressed-tensors"
    config = (FineGrainedFP8Config if in_blocks else CompressedTensorsConfig)(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    same = torch.equal(loaded.get_parameter(f"{LAYER}.weight"), dequantized(of))
    return f"{version('transformers')}: {'equal to the bit' if same else 'DIFFERS'}"


def by_compressed_tensors(folder: Path, of: dict[str, Tensor]) -> str:
    """Load with compressed-tensors, which keeps FP8 until the first forward; return what came of it."""
    if f"{LAYER}.weight_scale_inv" in of:
        return "another format"
    if not version("compressed-tensors"):
        return "not installed"
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layer = loaded.get_submodule(LAYER)
    names = [name for name in ("weight", "weight_scale", "input_scale") if f"{LAYER}.{name}" in of]
    same = all(torch.equal(getattr(layer, name).float(), of[f"{LAYER}.{name}"].float()) for name in names)
    return f"{version('compressed-tensors')}: {'equal to the bit' if same else 'DIFFERS'}"


def version(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
