"""Predict, or on a GPU measure, how fast a diffusion model trains in FP8: FLUX at batch 1, with LoRA and in full.

    python bench/diffusion.py                               predicts for several GPUs, and prints a table
    python bench/diffusion.py --targets h100 --options '{"recipe": "rowwise"}'     other GPUs, and options of fp8pass
    python bench/diffusion.py --device cuda                 measures on this GPU

It needs diffusers and peft. The model is diffusers' FluxTransformer2DModel with the widths of FLUX.1-dev, one block of
two streams and two blocks of one stream (the model has 19 and 38), random BF16 weights, 512 tokens of text, and the
number of image tokens that the table names: 1024 are an image of 512 x 512 pixels, 4096 one of 1024 x 1024. LoRA is of
rank 16 on query, key, value and output; all other weights are frozen. A step is forward and backward.

A figure is the time of a step of BF16 under Inductor over that of fp8pass: `min_speedup` is there so that it is never
below 1. The share is the part of the FLOPs of matmuls that runs in FP8.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from typing import Any

import torch
from h200 import seconds
from torch import nn

from fp8pass.inspect.inspector import inspect
from fp8pass.report.report import collect

TARGETS = ("rtx4090", "rtx5090", "h100", "b200")
TEXT, WIDTH = 512, 4096
"""The tokens of text, and their width: that of T5-XXL."""
TAKES_LORA = ["to_q", "to_k", "to_v", "to_out.0"]


class Positional(nn.Module):
    """Calls a FLUX transformer with the position of its tokens, for which `inspect` has no inputs."""

    def __init__(self, flux: nn.Module, image: int) -> None:
        super().__init__()
        self.flux = flux
        self.register_buffer("image_ids", torch.zeros(image, 3), persistent=False)
        self.register_buffer("text_ids", torch.zeros(TEXT, 3), persistent=False)

    def forward(self, image: Any, text: Any, pooled: Any, time: Any) -> Any:
        """Return the predicted flow, [1, tokens, 64]."""
        return self.flux(
            hidden_states=image, encoder_hidden_states=text, pooled_projections=pooled, timestep=time,
            guidance=time, img_ids=self.image_ids, txt_ids=self.text_ids, return_dict=False,
        )[0]  # fmt: skip


def flux(tokens: int, rank: int = 0) -> tuple[Any, ...]:
    """Return the model, with LoRA if a rank is given, and inputs of an image with that many tokens."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=2, guidance_embeds=True)
        if rank:
            from peft import LoraConfig

            model.requires_grad_(False)
            # random weights: those that are 0 before the first update would have no scale
            config = LoraConfig(r=rank, lora_alpha=rank, target_modules=TAKES_LORA, init_lora_weights=False)
            model.add_adapter(config)
        inputs = torch.randn(1, tokens, 64), torch.randn(1, TEXT, WIDTH), torch.randn(1, 768), torch.rand(1)
    finally:
        torch.set_default_dtype(torch.float32)
    return Positional(model, tokens), *inputs


lora_1024, lora_2048, lora_4096 = (partial(flux, tokens, 16) for tokens in (1024, 2048, 4096))
full_1024, full_4096 = (partial(flux, tokens) for tokens in (1024, 4096))
MODELS = ("lora_1024", "lora_2048", "lora_4096", "full_1024", "full_4096")


def predicted(name: str, target: str, options: dict[str, Any]) -> str:
    """Return a cell: the predicted speed."""
    recipe = options.get("recipe", "delayed")
    ours, bf16 = inspect(f"bench.diffusion:{name}", target, recipe, options=options).runs
    return f"{bf16.seconds / ours.seconds:.2f}"


def measured(name: str, options: dict[str, Any]) -> tuple[str, str]:
    """Return the measured speed of this GPU, BF16 and fp8pass in turns, and the share of FLOPs in FP8."""
    device = torch.device("cuda")
    steps = []
    with collect() as report:
        for backend in ("inductor", "fp8pass"):
            model, *inputs = globals()[name]()
            compiled = torch.compile(model.to(device), backend=backend, options=options if backend == "fp8pass" else {})
            steps.append(partial(step, compiled, [x.to(device) for x in inputs]))
            for _ in range(4):
                steps[-1]()
    bf16, ours = (statistics.median(times[3:]) for times in seconds(device, steps, 23))
    return f"{bf16 / ours:.2f}", f"{report.fp8_share:.0%}"


def step(model: Any, inputs: list[Any]) -> None:
    """Run forward and backward."""
    model(*inputs).float().square().mean().backward()
    model.zero_grad()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument(
        "--options", type=json.loads, default={}, help='of fp8pass, as JSON; "delayed" without a recipe'
    )
    parser.add_argument("--device", choices=("cuda",))
    given = parser.parse_args()
    heads = ("measured", "FP8") if given.device else tuple(given.targets)
    print(f"| model | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for name in given.models:
        row = measured(name, given.options) if given.device else [predicted(name, t, given.options) for t in heads]
        print(f"| {name.replace('_', ', ')} tokens | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
