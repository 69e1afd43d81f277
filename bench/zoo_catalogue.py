"""The models of the zoo: what there is, by package and kind. Nothing is written here, only named and made small."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import zoo_toys
from torch import Tensor
from zoo_row import Sample


@dataclass(frozen=True)
class Entry:
    """A model: its name, the package that has it, its kind, and what makes it."""

    name: str
    package: str
    kind: str
    make: Callable[[], Sample]


Inputs = Callable[[int], Mapping[str, Any]]
"""What makes the inputs of a length, or of a batch size where the length is fixed."""


def text(length: int) -> dict[str, Tensor]:
    """Return tokens."""
    return {"input_ids": torch.randint(3, 200, (2, length))}


def translated(length: int) -> dict[str, Tensor]:
    """Return tokens, and those that the decoder has so far."""
    return {**text(length), "decoder_input_ids": torch.randint(3, 200, (2, length // 2))}


def pixels(batch: int) -> dict[str, Tensor]:
    """Return images."""
    return {"pixel_values": torch.randn(batch, 3, zoo_toys.IMAGE, zoo_toys.IMAGE)}


def captioned(batch: int) -> dict[str, Tensor]:
    """Return images and texts."""
    return {**pixels(batch), "input_ids": torch.randint(3, 200, (batch, 16))}


def video(batch: int) -> dict[str, Tensor]:
    """Return eight frames for each."""
    return {"pixel_values": torch.randn(batch, 8, 3, zoo_toys.IMAGE, zoo_toys.IMAGE)}


def wave(length: int) -> dict[str, Tensor]:
    """Return sound."""
    return {"input_values": torch.randn(2, 100 * length)}


def spectrum(batch: int) -> dict[str, Tensor]:
    """Return mel features of 64 frames, as Whisper wants them."""
    return {"input_features": torch.randn(batch, 80, 64)}


@dataclass(frozen=True)
class Kind:
    """Architectures of transformers that take the same inputs. sizes: for training, and for evaluation."""

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
    Kind("state space", text, (32, 48), """
        BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM JambaForCausalLM
        KimiLinearForCausalLM Lfm2ForCausalLM MambaForCausalLM Mamba2ForCausalLM NemotronHForCausalLM
        OlmoHybridForCausalLM Qwen3NextForCausalLM RecurrentGemmaForCausalLM RwkvForCausalLM xLSTMForCausalLM
        ZambaForCausalLM Zamba2ForCausalLM"""),
    Kind("encoder", text, (32, 48), """
        AlbertForMaskedLM BertForMaskedLM BigBirdForMaskedLM CamembertForMaskedLM CanineModel ConvBertForMaskedLM
        DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM ErnieForMaskedLM
        EsmForMaskedLM EuroBertForMaskedLM FNetForMaskedLM FunnelForMaskedLM IBertForMaskedLM LongformerForMaskedLM
        MegatronBertForMaskedLM MobileBertForMaskedLM ModernBertForMaskedLM MPNetForMaskedLM
        MraForMaskedLM NystromformerForMaskedLM PerceiverForMaskedLM RemBertForMaskedLM RobertaForMaskedLM
        RoFormerForMaskedLM SqueezeBertForMaskedLM XLMRobertaForMaskedLM XmodForMaskedLM YosoForMaskedLM"""),
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
        CvtForImageClassification DeiTForImageClassification DinatForImageClassification Dinov2ForImageClassification
        DPTForSemanticSegmentation FocalNetForImageClassification HieraForImageClassification
        IJepaForImageClassification LevitForImageClassification MobileViTForImageClassification
        MobileViTV2ForImageClassification PoolFormerForImageClassification PvtForImageClassification
        PvtV2ForImageClassification SegformerForImageClassification SegformerForSemanticSegmentation
        SiglipForImageClassification SwiftFormerForImageClassification SwinForImageClassification
        Swin2SRForImageSuperResolution Swinv2ForImageClassification ViTForImageClassification
        ViTMAEForPreTraining ViTMSNForImageClassification YolosForObjectDetection DetrForObjectDetection
        SamVisionModel DINOv3ViTModel"""),
    Kind("video", video, (2, 3), """
        TimesformerForVideoClassification VideoMAEForVideoClassification VivitForVideoClassification"""),
    Kind("speech", wave, (32, 48), """
        Data2VecAudioForCTC HubertForCTC SEWForCTC SEWDForCTC UniSpeechForCTC UniSpeechSatForCTC Wav2Vec2ForCTC
        Wav2Vec2ConformerForCTC WavLMForCTC"""),
    Kind("speech", spectrum, (2, 3), """
        WhisperForConditionalGeneration WhisperForAudioClassification"""),
    Kind("multimodal", captioned, (2, 3), """
        AltCLIPModel BlipForConditionalGeneration BlipModel BridgeTowerModel ChineseCLIPModel CLIPModel CLIPSegModel
        GitForCausalLM GroupViTModel SiglipModel Siglip2Model ViltModel FlavaModel XCLIPModel Kosmos2Model
        LlavaForConditionalGeneration PaliGemmaForConditionalGeneration Idefics3ForConditionalGeneration
        Qwen2VLForConditionalGeneration InternVLForConditionalGeneration MllamaForConditionalGeneration"""),
]  # fmt: skip

GIVEN: dict[str, dict[str, Any]] = {}
"""Fields of configurations that need another value than their toy size, by the model's class."""


def transformer(name: str, kind: Kind) -> Sample:
    """Return a model of transformers, with inputs of two sizes."""
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, name)
    model = model_class(zoo_toys.toy(model_class.config_class, **GIVEN.get(name, {}))).train()
    learns = "labels" in inspect.signature(model.forward).parameters and name.endswith(_OF_LANGUAGE)
    made = [dict(kind.inputs(size)) for size in kind.sizes]
    for of in made:
        of |= {"labels": of["input_ids"]} if learns and "input_ids" in of else {}
    return Sample(model, *made)


_OF_LANGUAGE = ("LM", "LMHeadModel", "ConditionalGeneration", "MTModel")


def _transformers() -> Iterator[Entry]:
    for kind in TRANSFORMERS:
        for name in kind.models.split():
            yield Entry(name, "transformers", kind.name, functools.partial(transformer, name, kind))


def catalogue() -> dict[str, Entry]:
    """Return all entries by name."""
    return {entry.name: entry for entry in _transformers()}
