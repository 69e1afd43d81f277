"""Give a folder what transformers expects: names of tensors, tied weights, config.json, generation_config.json."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fp8pass.base.errors import Fp8Error


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, which is imported already if it is."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def heads_of(module: nn.Module) -> list[nn.Module]:
    """Return the layer that turns hidden states into logits, if the model has one."""
    model: Any = module
    head = model.get_output_embeddings() if is_pretrained(module) else None
    return [] if head is None else [head]


def check_adapters(module: nn.Module) -> None:
    """Raise Fp8Error for a model with adapters that are not merged."""
    if hasattr(module, "merge_and_unload") or getattr(module, "_hf_peft_config_loaded", False):
        raise Fp8Error(
            f"{type(module).__name__} has adapters beside its weights, which servers would not add: merge them, "
            "model = model.merge_and_unload(), and export the result with recipe="
        )


def as_stored(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` writes, by their names in files: without tied ones, experts apart."""
    revert, without_tied = _of_transformers()
    ignored = set(module._keys_to_ignore_on_save or ())
    saved = {name: x for name, x in tensors.items() if name not in ignored}
    stored: dict[str, Tensor] = revert(module, without_tied(saved, module))
    return stored


def names_as_stored(module: Any, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names in files of some of a model's tensors."""
    revert, _ = _of_transformers()
    return list(revert(module, {name: x.to("meta") for name, x in tensors.items()}))


def _of_transformers() -> tuple[Any, Any]:
    """Return the two functions that `save_pretrained` prepares tensors with."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError as error:
        raise Fp8Error(f"{error}: exporting models of transformers is tested with transformers 5.24") from error
    return revert_weight_conversion, remove_tied_weights_from_state_dict


def write_configs(module: Any, quantization: dict[str, Any], folder: Path) -> None:
    """Write config.json with `quantization_config`, and generation_config.json if the model generates text."""
    config = copy.deepcopy(module.config)
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__.removeprefix("FSDP")]  # `fully_shard` derives such a class
    config.update({"quantization_config": quantization})
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
