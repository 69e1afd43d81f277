"""Make toy configurations of transformers' architectures: small sizes, random weights, and no downloads.

`SIZES` has a toy size for each name of a field, which replaces the default of every configuration class with such a
field, also of configurations within a configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

VOCABULARY = 256
IMAGE = 32
SIZES: dict[int, str] = {
    0: "first_k_dense_replace num_dense_layers moe_layer_start_index",
    1: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers num_mtp_layers depth vision_layers text_layers conv_layers num_hidden_groups "
    "encoder_num_hidden_layers decoder_num_hidden_layers num_nextn_predict_layers "
    "num_global_layers num_local_layers num_mlp_layers",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_top_k n_group num_experts_per_token top_k "
    "n_shared_experts num_key_value_heads_per_layer linear_num_key_heads topk_group",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts mamba_n_heads linear_num_value_heads mamba_num_heads moe_num_experts "
    "num_attention_heads_per_layer conv_kernel_size num_codebooks_",
    8: "patch_size encoder_stride",
    16: "head_dim attention_head_size d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim mamba_d_state mamba_d_head "
    "mamba_head_dim state_size ssm_state_size linear_key_head_dim linear_value_head_dim kv_channels time_step_rank "
    "rotary_dim mamba_dt_rank key_value_dim attention_head_dim mamba_d_ssm_ axial_pos_embds_dim_ num_mel_bins_",
    IMAGE: "image_size q_lora_rank kv_lora_rank moe_intermediate_size shared_expert_intermediate_size "
    "expert_intermediate_size index_head_dim sliding_window attention_window_size local_attention",
    64: "hidden_size d_model n_embd dim emb_dim embed_dim hidden_dim embedding_size projection_dim model_dim "
    "word_embed_proj_dim encoder_hidden_size decoder_hidden_size lru_width text_hidden_size vision_hidden_size "
    "attention_hidden_size hidden_size_per_layer_input_ d_embed embed_size width",
    128: "intermediate_size d_ff d_ffn ffn_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim n_inner "
    "ffn_intermediate_size mlp_dim max_position_embeddings n_positions n_ctx max_source_positions max_seq_len "
    "max_target_positions mamba_intermediate_size encoder_intermediate_size mlp_hidden_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size max_length max_sequence_length mamba_d_ssm shared_mlp_dim "
    "intermediate_size_mlp decoder_intermediate_size",
    VOCABULARY: "vocab_size src_vocab_size tgt_vocab_size audio_vocab_size vocab_size_per_layer_input_",
}
"""{size: names of the fields that get it}."""
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}


def toy(config_class: Any, **given: Any) -> Any:
    """Return a configuration of toy size. given: fields that need other values than those of `SIZES`."""
    return config_class(**toy_fields(config_class, given))


def toy_fields(config_class: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a toy configuration that differ from the class's defaults."""
    fields: dict[str, Any] = {}
    known = _fields_of(config_class)
    tokens = iter(range(VOCABULARY - 1, 0, -1))  # different tokens, since an image's token must not occur in texts
    for name, default in known.items():
        if name in SIZE_OF and (default is None or isinstance(default, int)) and (default is not None or _needs(name)):
            fields[name] = SIZE_OF[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int) and default >= VOCABULARY:
            fields[name] = next(tokens)
        elif isinstance(default, float) and ("dropout" in name or "drop_path" in name or name.endswith(_DROPS)):
            fields[name] = 0.0
    fields |= {"use_cache": False} if "use_cache" in known else {}
    for name, part in getattr(config_class, "sub_configs", {}).items():
        of_part = given.get(name, {})
        if hasattr(part, "sub_configs") and part.__name__ != "AutoConfig":
            fields[name] = toy_fields(part, of_part)
        elif "model_type" in of_part:
            from transformers import CONFIG_MAPPING

            kind = of_part["model_type"]
            fields[name] = {"model_type": kind, **toy_fields(CONFIG_MAPPING[kind], of_part)}
    return fields | {name: value for name, value in given.items() if name not in fields or not isinstance(value, dict)}


_DROPS = ("pdrop", "layerdrop", "drop_rate", "mask_time_prob", "mask_feature_prob")


def experts_in_bfloat16(model: nn.Module) -> bool:
    """Convert experts to bfloat16, for which GPUs have FP8 kernels; return whether the model has any.

    It converts only experts with several implementations in transformers, which cast their inputs.
    """
    experts = [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]
    for module in experts:
        module.to(torch.bfloat16)
    return bool(experts)


def _needs(name: str) -> bool:
    return name in ("head_dim_",)


def _fields_of(config_class: Any) -> dict[str, Any]:
    """Return {field: default} of a configuration class, under the names that `__init__` takes and their aliases."""
    parameters = inspect.signature(config_class.__init__).parameters.values()
    names = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {config_class.attribute_map.get(name, name): default for name, default in names.items()} | names
