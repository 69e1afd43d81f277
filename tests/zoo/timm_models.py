"""The zoo's models of timm: names, toy sizes, and inputs."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Made = tuple[str, str, Callable[[], tuple[Any, Mapping[str, Any], Mapping[str, Any]]]]
"""A name, a kind, and a function that returns the model, its inputs, and its inputs of a second size."""

IMAGE, CLASSES = 64, 16
"""Height and width of images in pixels, for models without another size; and the number of classes."""
SMALL = 0.01
"""Parameters without a larger element are initialized again."""
_ViT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
_STAGES: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depths": (1, 2), "num_heads": (2, 4), "window_size": 4}
_STAGES["drop_path_rate"] = 0.0
_FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1), "embed_dims": (32, 32, 64, 64), "num_heads": (1, 2, 2, 4)}
_CONVS: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (16, 32, 48, 64)}
_LEVIT: dict[str, Any] = {"img_size": 128, "embed_dim": (32, 48, 64), "depth": (1, 1, 1), "num_heads": (2, 3, 4)}
_COAT: dict[str, Any] = {"img_size": 64, "embed_dims": (64,) * 4, "serial_depths": (1, 1, 1, 1)}
_MIXER: dict[str, Any] = {
    "class": "mlp_mixer:MlpMixer", "img_size": 32, "embed_dim": 64, "num_blocks": 2, "patch_size": 8
}  # fmt: skip
_META: dict[str, Any] = {"class": "metaformer:MetaFormer", **_CONVS}
_WIDTHS = (16, 32, 48, 64)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_tiny_patch16_224": ("ViT", _ViT),
    "vit_base_patch16_siglip_gap_224": ("ViT", _ViT),
    "vit_base_patch16_xp_224": ("ViT", _ViT),
    "vit_relpos_small_patch16_224": ("ViT", _ViT),
    "vit_srelpos_small_patch16_224": ("ViT", _ViT),
    "deit_tiny_distilled_patch16_224": ("ViT", _ViT),
    "deit3_small_patch16_224": ("ViT", _ViT),
    "beitv2_base_patch16_224": ("ViT", _ViT),
    "eva02_tiny_patch14_224": ("ViT", _ViT),
    "vit_small_patch16_dinov3": ("ViT", _ViT),
    "naflexvit_base_patch16_gap": ("ViT", _ViT),
    "samvit_base_patch16": ("ViT", {**_ViT, "window_size": 2, "global_attn_indexes": (1,), "neck_chans": 32}),
    "gemma4_vit_167m": (
        "ViT",
        {**_ViT, "img_size": 48, "head_dim": 16, "intermediate_size": 128, "position_embedding_size": 64},
    ),
    "cait_xxs24_224": ("ViT", _ViT),
    "xcit_nano_12_p8_224": ("ViT", _ViT),
    "tnt_s_patch16_224": (
        "ViT",
        {"img_size": 32, "patch_size": 8, "embed_dim": 64, "inner_dim": 32, "depth": 2, "num_heads_outer": 4},
    ),
    "convit_tiny": ("ViT", {**_ViT, "embed_dim": 16, "local_up_to_layer": 1}),
    "crossvit_9_240": (
        "ViT",
        {"img_size": 32, "img_scale": (1.0, 1.0), "patch_size": (8, 16), "embed_dim": (32, 64),
         "depth": ((1, 2, 1),) * 2, "num_heads": (2, 4)},
    ),
    "volo_d1_224": (
        "ViT",
        {"class": "volo:VOLO", "img_size": 32, "layers": (1, 1, 1, 1), "embed_dims": (64,) * 4, "num_heads": (4,) * 4,
         "stem_hidden_dim": 16},
    ),
    "swin_tiny_patch4_window7_224": ("windows", _STAGES),
    "swinv2_tiny_window8_256": ("windows", _STAGES),
    "swinv2_cr_tiny_224": ("windows", _STAGES),
    "nest_tiny": (
        "windows",
        {"class": "nest:Nest", "img_size": 32, "embed_dims": (32, 32, 64), "num_heads": (2, 2, 4), "depths": (1, 1, 1),
         "patch_size": 2, "drop_path_rate": 0.0},
    ),
    "gcvit_xxtiny": (
        "windows",
        {"class": "gcvit:GlobalContextVit", "img_size": 64, "embed_dim": 16, "depths": (1, 1, 1, 1),
         "num_heads": (1, 2, 4, 8)},
    ),
    "davit_tiny": ("windows", {**_FOUR, "window_size": 2}),
    "hiera_tiny_224": (
        "windows",
        {"img_size": 64, "embed_dim": 32, "stages": (1, 1, 1), "q_pool": 2, "mask_unit_size": (4, 4),
         "mask_unit_attn": (True, True, False)},
    ),
    "hieradet_small": (
        "windows",
        {"embed_dim": 32, "stages": (1, 1, 2), "q_pool": 2, "window_spec": (4, 2, 2), "global_att_blocks": (3,)},
    ),
    "pvt_v2_b0": ("pyramid", _FOUR),
    "pvt_v2_b2_li": ("pyramid", _FOUR),
    "twins_svt_small": ("pyramid", {**_FOUR, "img_size": 64, "depths": (2, 2, 1, 1), "wss": (4, 4, 2, 2)}),
    "twins_pcpvt_small": ("pyramid", {**_FOUR, "img_size": 64}),
    "mvitv2_tiny": (
        "pyramid",
        {"class": "mvitv2:MultiScaleVit", "img_size": (64, 64),
         "cfg": {"class": "mvitv2:MultiScaleVitCfg", "depths": (1, 1, 1), "embed_dim": 32}},
    ),
    "focalnet_tiny_srf": (
        "pyramid", {"class": "focalnet:FocalNet", "embed_dim": 32, "depths": (1, 1, 1, 1), "drop_path_rate": 0.0}
    ),
    "mixer_s16_224": ("MLP", _MIXER),
    "gmixer_12_224": (
        "MLP", {**_MIXER, "mlp_ratio": (1.0, 4.0), "mlp_layer": "mlp_mixer:GluMlp", "act_layer": "mlp_mixer:nn.SiLU"}
    ),
    "gmlp_ti16_224": (
        "MLP",
        {**_MIXER, "mlp_ratio": 6, "block_layer": "mlp_mixer:SpatialGatingBlock", "mlp_layer": "mlp_mixer:GatedMlp"},
    ),
    "resmlp_12_224": (
        "MLP", {**_MIXER, "mlp_ratio": 4, "block_layer": "mlp_mixer:ResBlock", "norm_layer": "mlp_mixer:Affine"}
    ),
    "levit_128s": ("hybrid", _LEVIT),
    "levit_conv_128s": ("hybrid", _LEVIT),
    "coat_lite_tiny": ("hybrid", _COAT),
    "coat_tiny": ("hybrid", {**_COAT, "parallel_depth": 1}),
    "visformer_tiny": (
        "hybrid", {"img_size": 64, "init_channels": 16, "embed_dim": 64, "depth": (1, 1, 1), "num_heads": 2}
    ),
    "efficientformer_l1": ("hybrid", {"img_size": 224, "depths": (1, 1, 1, 2), "embed_dims": _WIDTHS, "num_vit": 1}),
    "efficientformerv2_s0": ("hybrid", {"img_size": 64, "depths": (1, 1, 2, 2), "embed_dims": _WIDTHS, "num_vit": 1}),
    "mobilevit_xxs": ("hybrid", {}),
    "maxvit_rmlp_pico_rw_256": ("hybrid", {"img_size": 64, "embed_dim": (64, 64), "depths": (1, 1), "stem_width": 16}),
    "fastvit_sa12": ("hybrid", {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 64, 128)}),
    "edgenext_xx_small": ("hybrid", {"dims": _WIDTHS, "depths": (1, 2, 2, 2), "heads": (4, 4, 4, 4)}),
    "swiftformer_xs": ("hybrid", {"layers": (1, 1, 1, 1), "embed_dims": _WIDTHS}),
    "tiny_vit_5m_224": ("hybrid", {**_FOUR, "window_sizes": (4, 4, 4, 2)}),
    "efficientvit_b0": ("hybrid", {"pixels": 128, "depths": (1, 1, 1, 1, 1), "head_widths": (64, 64)}),
    "efficientvit_m0": (
        "hybrid", {"img_size": 128, "embed_dim": (32, 48, 64), "num_heads": (2, 3, 4), "depth": (1, 1, 1)},
    ),
    "nextvit_small": ("hybrid", {"depths": (1, 1, 5, 1), "stem_chs": (16, 16, 16), "drop_path_rate": 0.0}),
    "shvit_s1": (
        "hybrid", {"pixels": 128, "embed_dim": (32, 48, 64), "partial_dim": (16, 16, 16), "depth": (1, 1, 1)},
    ),
    "vitamin_small_224": ("hybrid", {"img_size": 64, "depth": 1}),
    "pit_ti_224": (
        "hybrid",
        {"img_size": 32, "patch_size": 8, "stride": 4, "base_dims": (16, 16, 16), "depth": (1, 1, 1),
         "heads": (2, 4, 4)},
    ),
    "halonet26t": ("hybrid", {"width_factor": 0.125, "self_attn_kwargs": {"block_size": 2, "halo_size": 1}}),
    "lambda_resnet26t": ("hybrid", {"img_size": 64, "width_factor": 0.125}),
    "efficientvim_m1": ("hybrid", {"pixels": 128, "embed_dim": (32, 48, 64), "depths": (1, 1, 1)}),
    "convnext_tiny": ("ConvNet", _CONVS),
    "convnextv2_tiny": ("ConvNet", _CONVS),
    "inception_next_tiny": ("ConvNet", _CONVS),
    "mambaout_femto": ("ConvNet", _CONVS),
    "poolformer_s12": (
        "ConvNet",
        {**_META, "downsample_norm": None, "mlp_act": "metaformer:nn.GELU", "mlp_bias": True,
         "norm_layers": "metaformer:GroupNorm1", "layer_scale_init_values": 1e-5, "res_scale_init_values": None,
         "use_mlp_head": False},
    ),
    "caformer_s18": (
        "ConvNet",
        {**_META, "dims": (32, 32, 64, 64),
         "token_mixers": ["metaformer:SepConv"] * 2 + ["metaformer:Attention"] * 2,
         "norm_layers": ["metaformer:LayerNorm2dNoBias"] * 2 + ["metaformer:LayerNormNoBias"] * 2},
    ),
    "repvit_m0_9": ("ConvNet", {"embed_dim": (16, 32), "depth": (1, 1)}),
    "resnet18": ("ConvNet", {"layers": (1, 1, 1, 1), "channels": _WIDTHS}),
    "starnet_s1": ("ConvNet", {"base_dim": 16, "depths": (1, 1, 1, 1)}),
}  # fmt: skip
"""{name in timm: (kind, fields that make it small)}. A text with a colon names an object of `timm.models`.

class: is called instead of timm's factory if that takes no sizes. pixels: the size of images for models that take any
size, but whose last batch norm needs more elements than images of the default size leave."""


def built(field: Any) -> Any:
    """Return the value of a field: look up texts with a colon, and call classes with their fields, also when nested."""
    if isinstance(field, str) and ":" in field:
        return pkgutil.resolve_name(f"timm.models.{field}")
    if isinstance(field, list):
        return [built(one) for one in field]
    if isinstance(field, dict):
        fields = {name: built(one) for name, one in field.items()}
        return fields.pop("class")(**fields) if "class" in fields else fields
    return field


def practised(model: torch.nn.Module) -> torch.nn.Module:
    """Initialize parameters that begin very small again with larger values, turn dropout off, and return the model.

    As long as heads, tokens and layer scales grow by half in each step, so does every gradient, and delayed scaling
    saturates too much to compare it. Dropout is off because compiled graphs draw different random numbers than eager.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" not in name and parameter.abs().max() < SMALL:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def of_timm(name: str) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """Return a model of timm, an input of two images, and an input of three."""
    import timm

    fields = {**MODELS[name][1], "num_classes": CLASSES}
    size = fields.pop("pixels", fields.get("img_size", IMAGE))
    model = built(fields) if "class" in fields else timm.create_model(name, **built(fields))
    height, width = size if isinstance(size, tuple) else (size, size)
    two, three = ({"x": torch.randn(batch, 3, height, width)} for batch in (2, 3))
    return practised(model).train(), two, three


def vision() -> Iterator[Made]:
    """Yield all models of timm."""
    for name, (kind, _) in MODELS.items():
        yield name, kind, functools.partial(of_timm, name)
