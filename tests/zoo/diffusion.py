"""The zoo's models of diffusers: names, toy sizes, and inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Made = tuple[str, str, Callable[[], tuple[Any, Mapping[str, Any], Mapping[str, Any]]]]
"""A name, a kind, and a function that returns the model, its inputs, and its inputs of a second size."""


def latent(*shape: int) -> Callable[[int], Tensor]:
    """Return a function that returns random numbers [batch, *shape] for a batch size."""
    return lambda batch: torch.randn(batch, *shape)


def time(batch: int) -> Tensor:
    """Return diffusion timesteps i64[batch]."""
    return torch.randint(0, 8, (batch,))


_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16}
_BLOCKS: dict[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 1, "sample_size": 16}
_CROSS_DOWN, _CROSS_UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
_PROMPT = latent(8, 32)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": (
        "UNet",
        {**_BLOCKS, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 16,
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": latent(3, 16, 16), "timestep": time},
    ),
    "UNet2DConditionModel": (
        "UNet",
        {**_BLOCKS, "down_block_types": _CROSS_DOWN, "up_block_types": _CROSS_UP, "cross_attention_dim": 32,
         "attention_head_dim": 4},
        {"sample": latent(4, 16, 16), "timestep": time, "encoder_hidden_states": _PROMPT},
    ),
    "UNet3DConditionModel": (
        "UNet",
        {**_BLOCKS, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "cross_attention_dim": 32,
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "attention_head_dim": 16},
        {"sample": latent(4, 4, 16, 16), "timestep": time, "encoder_hidden_states": _PROMPT},
    ),
    "Transformer2DModel": (
        "transformer",
        {**_HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
        {"hidden_states": latent(32, 8, 8), "encoder_hidden_states": _PROMPT},
    ),
    "DiTTransformer2DModel": (
        "DiT",
        {**_HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 1, "sample_size": 8, "patch_size": 2},
        {"hidden_states": latent(4, 8, 8), "timestep": time, "class_labels": time},
    ),
    "PixArtTransformer2DModel": (
        "DiT",
        {**_HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 1, "sample_size": 8, "patch_size": 2,
         "cross_attention_dim": 64, "caption_channels": 32, "use_additional_conditions": False},
        {"hidden_states": latent(4, 8, 8), "timestep": time, "encoder_hidden_states": _PROMPT,
         "added_cond_kwargs": lambda batch: {"resolution": None, "aspect_ratio": None}},
    ),
    "FluxTransformer2DModel": (
        "DiT",
        {**_HEADS, "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
         "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        {"hidden_states": latent(16, 16), "encoder_hidden_states": _PROMPT, "pooled_projections": latent(32),
         "img_ids": lambda batch: torch.rand(16, 3), "txt_ids": lambda batch: torch.rand(8, 3),
         "timestep": lambda batch: torch.rand(batch)},
    ),
    "SD3Transformer2DModel": (
        "DiT",
        {**_HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 1, "joint_attention_dim": 32,
         "caption_projection_dim": 64, "pooled_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 16},
        {"hidden_states": latent(4, 8, 8), "encoder_hidden_states": _PROMPT, "pooled_projections": latent(32),
         "timestep": time},
    ),
    "AuraFlowTransformer2DModel": (
        "DiT",
        {**_HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
         "num_single_dit_layers": 1, "caption_projection_dim": 64, "joint_attention_dim": 32, "out_channels": 4,
         "pos_embed_max_size": 64},
        {"hidden_states": latent(4, 8, 8), "encoder_hidden_states": _PROMPT, "timestep": time},
    ),
    "SanaTransformer2DModel": (
        "DiT",
        {**_HEADS, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1,
         "num_cross_attention_heads": 4, "cross_attention_head_dim": 16, "cross_attention_dim": 64,
         "caption_channels": 32, "sample_size": 8},
        {"hidden_states": latent(4, 8, 8), "encoder_hidden_states": _PROMPT, "timestep": time},
    ),
    "LTXVideoTransformer3DModel": (
        "video",
        {**_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 64, "num_layers": 1,
         "caption_channels": 32},
        {"hidden_states": latent(32, 4), "encoder_hidden_states": _PROMPT, "timestep": time,
         "encoder_attention_mask": lambda batch: torch.ones(batch, 8), "num_frames": lambda batch: 2,
         "height": lambda batch: 4, "width": lambda batch: 4},
    ),
    "CogVideoXTransformer3DModel": (
        "video",
        {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32, "num_layers": 1,
         "sample_width": 8, "sample_height": 8, "sample_frames": 5, "patch_size": 2,
         "temporal_compression_ratio": 4, "max_text_seq_length": 8},
        {"hidden_states": latent(2, 4, 8, 8), "encoder_hidden_states": _PROMPT, "timestep": time},
    ),
    "WanTransformer3DModel": (
        "video",
        {**_HEADS, "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 64,
         "ffn_dim": 64, "num_layers": 1, "cross_attn_norm": True, "rope_max_seq_len": 32},
        {"hidden_states": latent(4, 2, 8, 8), "encoder_hidden_states": _PROMPT, "timestep": time},
    ),
    "PriorTransformer": (
        "transformer",
        {**_HEADS, "num_layers": 1, "embedding_dim": 32, "num_embeddings": 7, "additional_embeddings": 4},
        {"hidden_states": latent(32), "timestep": time, "proj_embedding": latent(32),
         "encoder_hidden_states": latent(7, 32)},
    ),
    "AutoencoderKL": (
        "VAE",
        {**_BLOCKS, "norm_num_groups": 8, "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": latent(3, 16, 16)},
    ),
    "VQModel": (
        "VAE",
        {**_BLOCKS, "norm_num_groups": 8, "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
         "up_block_types": ("AttnUpDecoderBlock2D", "UpDecoderBlock2D"), "num_vq_embeddings": 32},
        {"sample": latent(3, 16, 16)},
    ),
}  # fmt: skip
"""{class of diffusers: (kind, configuration, {argument: a function that returns it for a batch size})}."""


def of_diffusers(name: str) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """Return a model of diffusers, inputs with batch size 2, and inputs with batch size 3."""
    import diffusers

    _, fields, called = MODELS[name]
    model = getattr(diffusers, name)(**fields).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # compiled graphs draw different random numbers than eager
    two, three = ({argument: of(batch) for argument, of in called.items()} for batch in (2, 3))
    return model, two, three


def diffusion() -> Iterator[Made]:
    """Yield all models of diffusers."""
    for name, (kind, _, _) in MODELS.items():
        yield name, kind, functools.partial(of_diffusers, name)
