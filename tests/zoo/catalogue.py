"""The models of the zoo, by package and kind. Other projects define them; this file names them and makes them small."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.zoo import toys
from tests.zoo.diffusion import diffusion
from tests.zoo.loops import LOOPS, of_transformers
from tests.zoo.megatron_models import Layers
from tests.zoo.row import Sample, Subject
from tests.zoo.timm_models import vision
from tests.zoo.torch_models import MODULES, OPERATORS, Made, module, operator


@dataclass(frozen=True)
class Entry:
    """A model: its name, the package that defines it, its kind, and the function that makes it."""

    name: str
    package: str
    kind: str
    make: Callable[[], Subject]


Inputs = Callable[[int, Any], Mapping[str, Any]]
"""Makes inputs of a length for a configuration, or of a batch size if the length is fixed."""


def text(length: int, config: Any) -> dict[str, Tensor]:
    """Return tokens of this length."""
    return {"input_ids": torch.randint(3, 200, (2, length))}


def texts(batch: int, config: Any) -> dict[str, Tensor]:
    """Return tokens of a fixed length."""
    return {"input_ids": torch.randint(3, 200, (batch, 32))}


def pixels(batch: int, config: Any) -> dict[str, Tensor]:
    """Return images of the configuration's size."""
    size = getattr(getattr(config, "vision_config", config), "image_size", toys.IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": torch.randn(batch, 3, height, width)}


def captioned(batch: int, config: Any) -> dict[str, Tensor]:
    """Return images and texts."""
    return {**pixels(batch, config), "input_ids": torch.randint(3, 200, (batch, 16))}


def told_of_images(batch: int, config: Any) -> dict[str, Tensor]:
    """Return images, and texts that begin with a placeholder token for each patch of the image."""
    made = captioned(batch, config)
    places = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    tokens = torch.full((batch, places), config.image_token_id)
    return {**made, "input_ids": torch.cat([tokens, made["input_ids"]], dim=1)}


def video(batch: int, config: Any) -> dict[str, Tensor]:
    """Return videos of eight frames."""
    return {"pixel_values": torch.randn(batch, 8, 3, toys.IMAGE, toys.IMAGE)}


def wave(length: int, config: Any) -> dict[str, Tensor]:
    """Return waveforms of 100 samples per unit of length."""
    return {"input_values": torch.randn(2, 100 * length)}


def spectrum(batch: int, config: Any) -> dict[str, Tensor]:
    """Return mel features of 64 frames, as Whisper takes them, and the spoken tokens as labels."""
    return {"input_features": torch.randn(batch, 80, 64), "labels": torch.randint(3, 200, (batch, 16))}


@dataclass(frozen=True)
class Kind:
    """Architectures of transformers that take the same inputs. sizes: of inputs, for training and for evaluation."""

    name: str
    inputs: Inputs
    sizes: tuple[int, int]
    models: str


TRANSFORMERS = [
    Kind("decoder", text, (32, 48), """
        ApertusForCausalLM ArceeForCausalLM BioGptForCausalLM BitNetForCausalLM BloomForCausalLM CodeGenForCausalLM
        CohereForCausalLM Cohere2ForCausalLM CTRLLMHeadModel DiffLlamaForCausalLM DogeForCausalLM Emu3ForCausalLM
        Ernie4_5ForCausalLM Exaone4ForCausalLM FalconForCausalLM GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
        GlmForCausalLM Glm4ForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM
        GPTNeoXForCausalLM GraniteForCausalLM HeliumForCausalLM HunYuanDenseV1ForCausalLM LlamaForCausalLM
        MiniCPM3ForCausalLM MinistralForCausalLM MistralForCausalLM MptForCausalLM NanoChatForCausalLM
        NemotronForCausalLM OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OpenAIGPTLMHeadModel OPTForCausalLM
        PersimmonForCausalLM PhiForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM SeedOssForCausalLM
        SmolLM3ForCausalLM StableLmForCausalLM Starcoder2ForCausalLM VaultGemmaForCausalLM XGLMForCausalLM
        XLNetLMHeadModel"""),
    Kind("MoE", text, (32, 48), """
        AfmoeForCausalLM AriaTextForCausalLM Cohere2MoeForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM
        DeepseekV3ForCausalLM Dots1ForCausalLM Ernie4_5_MoeForCausalLM FlexOlmoForCausalLM Glm4MoeForCausalLM
        GptOssForCausalLM GraniteMoeForCausalLM HunYuanMoEV1ForCausalLM JetMoeForCausalLM LongcatFlashForCausalLM
        MiniMaxForCausalLM MixtralForCausalLM OlmoeForCausalLM PhimoeForCausalLM Qwen2MoeForCausalLM
        Qwen3MoeForCausalLM"""),
    Kind("state space", text, (16, 24), """
        BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM JambaForCausalLM
        KimiLinearForCausalLM Lfm2ForCausalLM MambaForCausalLM Mamba2ForCausalLM NemotronHForCausalLM
        OlmoHybridForCausalLM Qwen3NextForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM xLSTMForCausalLM
        ZambaForCausalLM Zamba2ForCausalLM"""),
    Kind("encoder", text, (32, 48), """
        AlbertForMaskedLM BertForMaskedLM BigBirdForMaskedLM CamembertForMaskedLM CanineModel ConvBertForMaskedLM
        DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM ErnieForMaskedLM
        EsmForMaskedLM EuroBertForMaskedLM FNetForMaskedLM FunnelForMaskedLM IBertForMaskedLM LongformerForMaskedLM
        MegatronBertForMaskedLM MobileBertForMaskedLM ModernBertForMaskedLM MPNetForMaskedLM
        MraForMaskedLM RemBertForMaskedLM RobertaForMaskedLM
        RoFormerForMaskedLM SqueezeBertForMaskedLM XLMRobertaForMaskedLM XmodForMaskedLM YosoForMaskedLM"""),
    Kind("encoder", texts, (2, 3), "NystromformerForMaskedLM"),
    Kind("encoder-decoder", text, (32, 48), """
        BartForConditionalGeneration BigBirdPegasusForConditionalGeneration BlenderbotForConditionalGeneration
        FSMTForConditionalGeneration LEDForConditionalGeneration LongT5ForConditionalGeneration
        M2M100ForConditionalGeneration MarianMTModel MBartForConditionalGeneration MT5ForConditionalGeneration
        MvpForConditionalGeneration NllbMoeForConditionalGeneration PegasusForConditionalGeneration
        PegasusXForConditionalGeneration PLBartForConditionalGeneration ProphetNetForConditionalGeneration
        SwitchTransformersForConditionalGeneration T5ForConditionalGeneration T5GemmaForConditionalGeneration
        UMT5ForConditionalGeneration"""),
    Kind("vision", pixels, (2, 3), """
        BeitForImageClassification ConvNextForImageClassification ConvNextV2ForImageClassification
        CvtForImageClassification DeiTForImageClassification Dinov2ForImageClassification
        DPTForSemanticSegmentation FocalNetForImageClassification HieraForImageClassification
        IJepaForImageClassification LevitForImageClassification MobileViTForImageClassification
        MobileViTV2ForImageClassification PoolFormerForImageClassification PvtForImageClassification
        PvtV2ForImageClassification SegformerForImageClassification SegformerForSemanticSegmentation
        SiglipForImageClassification SwiftFormerForImageClassification SwinForImageClassification
        Swin2SRForImageSuperResolution Swinv2ForImageClassification ViTForImageClassification
        ViTMAEForPreTraining ViTMSNForImageClassification YolosForObjectDetection
        SamVisionModel DINOv3ViTModel"""),
    Kind("video", video, (2, 3), """
        TimesformerForVideoClassification VideoMAEForVideoClassification VivitForVideoClassification"""),
    Kind("speech", wave, (32, 48), """
        Data2VecAudioForCTC HubertForCTC SEWForCTC SEWDForCTC UniSpeechForCTC UniSpeechSatForCTC Wav2Vec2ForCTC
        Wav2Vec2ConformerForCTC WavLMForCTC"""),
    Kind("speech", spectrum, (2, 3), """
        WhisperForConditionalGeneration"""),
    Kind("multimodal", told_of_images, (2, 3), "LlavaForConditionalGeneration"),
    Kind("multimodal", captioned, (2, 3), """
        AltCLIPModel BlipForConditionalGeneration BlipModel BridgeTowerModel ChineseCLIPModel CLIPModel CLIPSegModel
        GitForCausalLM GroupViTModel SiglipModel ViltModel FlavaModel"""),
]  # fmt: skip

_STAGES: dict[str, Any] = {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
_HEADS: dict[str, Any] = {"head_dim": 16}
_SOUND: dict[str, Any] = {"conv_dim": (32,) * 7, "apply_spec_augment": False, "num_conv_pos_embeddings": 16}
_WHISPER: dict[str, Any] = {"max_source_positions": 32, "pad_token_id": 0, "decoder_start_token_id": 1}
_BLOCKS: dict[str, Any] = {"block_size": 4, "num_random_blocks": 1}
_SEQ2SEQ: dict[str, Any] = {"decoder_start_token_id": 2, "pad_token_id": 0}
GIVEN: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": _LATENT,
    "VideoMAEForVideoClassification": {"num_frames": 8},
    "VivitForVideoClassification": {"num_frames": 8, "tubelet_size": [2, 8, 8]},
    "TimesformerForVideoClassification": {"num_frames": 8},
    "LlavaForConditionalGeneration": {
        "vision_config": {"model_type": "clip_vision_model"}, "text_config": {"model_type": "llama"}
    },
    "BigBirdForMaskedLM": _BLOCKS,
    "BigBirdPegasusForConditionalGeneration": _BLOCKS,
    "DbrxForCausalLM": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "ffn_act_fn": {"name": "silu"}, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "n_groups": 2},
    "OlmoHybridForCausalLM": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "RwkvForCausalLM": {"num_hidden_layers": 2},
    "ZambaForCausalLM": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "Zamba2ForCausalLM": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "GPTNeoForCausalLM": {"attention_types": [[["global"], 1]]},
    "HunYuanDenseV1ForCausalLM": _HEADS,
    "HunYuanMoEV1ForCausalLM": _HEADS,
    "MinistralForCausalLM": _HEADS,
    "MiniCPM3ForCausalLM": _LATENT,
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Ernie4_5_MoeForCausalLM": {"moe_k": 2},
    "FunnelForMaskedLM": {"block_sizes": [2, 2, 2], "num_decoder_layers": 1},
    "GroupViTModel": {"vision_config": {"depths": [1, 1, 1]}},
    "EsmForMaskedLM": {"vocab_size": toys.VOCABULARY, "pad_token_id": 1},
    "NystromformerForMaskedLM": {"segment_means_seq_len": 32, "num_landmarks": 8, "conv_kernel_size": 9},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "JambaForCausalLM": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "ConvBertForMaskedLM": {"conv_kernel_size": 9},
    "SwinForImageClassification": {**_STAGES, "window_size": 4},
    "Swinv2ForImageClassification": {**_STAGES, "window_size": 4},
    "Swin2SRForImageSuperResolution": {**_STAGES, "patch_size": 1, "window_size": 8, "upscale": 2},
    "FocalNetForImageClassification": {
        "embed_dim": 32, "depths": [1, 1], "hidden_sizes": [32, 64], "focal_levels": [2, 2], "focal_windows": [3, 3]
    },
    "HieraForImageClassification": {
        "image_size": [32, 32], "embed_dim": 32, "depths": [1, 1], "num_heads": [1, 2], "query_stride": [2, 2],
        "masked_unit_size": [4, 4], "patch_size": [7, 7], "num_query_pool": 1,
    },
    "LevitForImageClassification": {
        "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1], "patch_size": 16,
        "down_ops": [["Subsample", 16, 2, 4, 2, 2], ["Subsample", 16, 3, 4, 2, 2]],
    },
    "CvtForImageClassification": {
        "embed_dim": [32, 48, 64], "num_heads": [1, 1, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.0]
    },
    "ConvNextForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "ConvNextV2ForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "MobileViTForImageClassification": {
        "hidden_sizes": [32, 48, 64], "neck_hidden_sizes": [16, 16, 32, 32, 48, 48, 64], "patch_size": 2,
        "image_size": 64, "conv_kernel_size": 3,
    },
    "MobileViTV2ForImageClassification": {
        "width_multiplier": 0.25, "patch_size": 2, "image_size": 64, "conv_kernel_size": 3
    },
    "DPTForSemanticSegmentation": {
        "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 48, 64],
        "fusion_hidden_size": 32, "auxiliary_loss_weight": 0.0,
    },
    "PoolFormerForImageClassification": {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "patch_size": 7},
    "PvtForImageClassification": {
        "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 4],
    },
    "PvtV2ForImageClassification": {
        "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 4],
    },
    "SegformerForImageClassification": {
        "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 4],
        "decoder_hidden_size": 64,
    },
    "SegformerForSemanticSegmentation": {
        "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 4],
        "decoder_hidden_size": 64,
    },
    "SwiftFormerForImageClassification": {"embed_dims": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
    "WhisperForConditionalGeneration": _WHISPER,
    "Wav2Vec2ConformerForCTC": {**_SOUND, "vocab_size": 32},
    **dict.fromkeys(
        ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration",
         "LongT5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration"), _SEQ2SEQ,
    ),
    **dict.fromkeys(
        ("Data2VecAudioForCTC", "HubertForCTC", "UniSpeechForCTC", "UniSpeechSatForCTC",
         "Wav2Vec2ForCTC", "WavLMForCTC"), _SOUND,
    ),
}  # fmt: skip
"""{class of a model: fields of its configuration that need another value than their toy size}."""


def transformer(name: str, kind: Kind) -> Sample:
    """Return a model of transformers with inputs of two sizes."""
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, name)
    model = model_class(toys.toy(model_class.config_class, **GIVEN.get(name, {}))).train()
    learns = "labels" in inspect.signature(model.forward).parameters and name.endswith(_OF_LANGUAGE)
    made = [dict(kind.inputs(size, model.config)) for size in kind.sizes]
    for of in made:
        of |= {"labels": of["input_ids"]} if learns and "input_ids" in of else {}
    inputs, others = made
    return Sample(model, inputs, others, EXPERTS if toys.experts_in_bfloat16(model) else {})


EXPERTS = {"target": "h100", "min_speedup": 0.0}
"""Options with which a CPU computes experts as an H100 does, which has FP8 kernels for them."""

_OF_LANGUAGE = ("LM", "LMHeadModel", "ConditionalGeneration", "MTModel")


def _transformers() -> Iterator[Entry]:
    for kind in TRANSFORMERS:
        for name in kind.models.split():
            yield Entry(name, "transformers", kind.name, functools.partial(transformer, name, kind))


LORA: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"target_modules": "all-linear"},
    "GPT2LMHeadModel": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "BertForMaskedLM": {"target_modules": ["query", "value"], "modules_to_save": ["cls"]},
    "T5ForConditionalGeneration": {"target_modules": ["q", "v"]},
    "ViTForImageClassification": {"target_modules": "all-linear", "modules_to_save": ["classifier"]},
    "MixtralForCausalLM": {"target_modules": ["q_proj", "v_proj"]},
    "Qwen2ForCausalLM": {"target_modules": "all-linear", "use_dora": True},
    "GPTNeoXForCausalLM": {"target_modules": ["query_key_value"], "use_rslora": True},
}
"""{class of a model: options of its adapters}. The model's own weights are frozen."""


def adapted(name: str, kind: Kind) -> Sample:
    """Return a model of transformers whose weights are frozen, with adapters of peft."""
    import peft

    sample = transformer(name, kind)
    chosen = peft.LoraConfig(r=16, init_lora_weights=False, **LORA[name])  # else B is 0, and so is A's gradient
    return replace(sample, model=peft.get_peft_model(sample.model, chosen).train())


def _peft() -> Iterator[Entry]:
    kinds = {name: kind for kind in TRANSFORMERS for name in kind.models.split()}
    for name in LORA:
        yield Entry(f"LoRA-{name}", "peft", "LoRA", functools.partial(adapted, name, kinds[name]))


def _megatron() -> Iterator[Entry]:
    def sample() -> Sample:
        return Sample(Layers(), text(16, None), text(24, None))

    yield Entry("ParallelLayers", "megatron-core", "autograd Function", sample)


def _torch() -> Iterator[Entry]:
    def sample(make: Callable[[str], Made], name: str) -> Sample:
        model, inputs = make(name)
        return Sample(model, inputs, inputs)

    for name in MODULES.split():
        yield Entry(f"nn.{name}", "torch", "module_db", functools.partial(sample, module, name))
    for name in OPERATORS.split():
        yield Entry(f"op.{name}", "torch", "op_db", functools.partial(sample, operator, name))


def _loops() -> Iterator[Entry]:
    for name, (model, optimizers, options) in LOOPS.items():
        make = functools.partial(of_transformers, model, optimizers, **options)
        yield Entry(name, "transformers", "loop", make)


def _made() -> Iterator[Entry]:
    def sample(make: Callable[[], Any]) -> Sample:
        return Sample(*make())

    for package, models in ("diffusers", diffusion()), ("timm", vision()):
        for name, kind, make in models:
            yield Entry(name, package, kind, functools.partial(sample, make))


def catalogue() -> dict[str, Entry]:
    """Return all entries by name."""
    return {entry.name: entry for entry in (*_transformers(), *_made(), *_peft(), *_megatron(), *_loops(), *_torch())}
