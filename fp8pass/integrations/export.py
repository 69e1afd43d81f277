"""`fp8pass.export_fp8`: write a trained model to a folder that vLLM, SGLang and transformers load."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fp8pass.base.errors import Fp8Error
from fp8pass.base.fields import several
from fp8pass.base.module_tensors import unwrapped
from fp8pass.frozen.weight import FrozenWeight
from fp8pass.integrations import export_hub
from fp8pass.integrations.export_files import bytes_of, check_free, complete_or_absent, write_json, write_tensors
from fp8pass.integrations.export_formats import config_compressed, config_in_blocks, is_in_blocks, scales_of
from fp8pass.integrations.export_selection import ExportedLayer, Selection, select
from fp8pass.integrations.export_weights import Fp8Matrix, Scales, quantized
from fp8pass.integrations.export_whole import Ranks
from fp8pass.states.model_state import state

log = logging.getLogger(__name__)

PATTERNS = several("patterns of paths of layers, such as ['lm_head', 'layers.0.*']")


@dataclass(frozen=True)
class Exported:
    """The result of `fp8pass.export_fp8`.

    directory: where. layers: the paths of the layers in FP8, each with its recipe's name. kept: why others are not.
    """

    directory: Path
    layers: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        recipes = " and ".join(dict.fromkeys(self.layers.values()))
        lines = [f"{len(self.layers)} of {len(self.layers) + len(self.kept)} layers in FP8 ({recipes})"]
        return "\n".join([*lines, *(f"{path} stays in high precision: {why}" for path, why in self.kept.items())])


def export_fp8(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    recipe: Any = None,
    leave_out: Sequence[str] | str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    strict: bool = False,
) -> Exported:
    """Write a model with its weights in FP8: safetensors and config.json, which vLLM, SGLang and transformers load.

    The FP8 weights are those that the next training forward would multiply, bit for bit. Weights of recipe "blockwise"
    are written as `quant_method: fp8` with 128x128 blocks, those of "delayed", "dynamic", "static" and "rowwise" in the
    format of compressed-tensors. Everything else keeps its dtype. If the model is sharded, all ranks must call this
    function; rank 0 writes.

    Args:
        model: A module that fp8pass has run, compiled or not. For a model of transformers, its config and
            generation_config are written too.
        directory: Where to write. It appears when everything is written, or not at all.
        recipe: A recipe, for a model that fp8pass has not run in this process. None: each layer as it was trained.
        leave_out: Patterns of paths of layers that stay in high precision. None: the output head of a model of
            transformers, which vLLM and SGLang do not load in FP8; () leaves out nothing.
        max_shard_size: The largest size of a file, in bytes or as a text such as "5GB".
        overwrite: Whether to replace a directory that exists.
        strict: Whether to raise an error if a layer that ran in FP8 can't be written in FP8; otherwise it stays in
            high precision, with a warning in the log.

    Returns:
        An `Exported`: the layers in FP8, and why the others are not.

    Raises:
        FileExistsError: If the directory exists, without `overwrite`.
        Fp8Error: If no layer can be exported, or under `strict` if one can't; if weights hold NaN; if delayed scales
            are missing; if adapters are not merged; or if files can't be written.
        TypeError: If `model` is not a module.
        ValueError: If `recipe`, `leave_out` or `max_shard_size` is not valid.
    """
    module = unwrapped(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"export_fp8() takes a module or a compiled module, not {type(module).__name__}")
    limit, directory, ranks = bytes_of(max_shard_size), Path(directory), Ranks(module)
    patterns = () if leave_out is None else PATTERNS.take("leave_out", leave_out)
    export_hub.check_adapters(module)
    selection = select(module, recipe, patterns, export_hub.heads_of(module) if leave_out is None else ())
    _tell(selection, strict)
    recipes = {path: layer.recipe for path, layer in selection.layers.items()}
    in_blocks = is_in_blocks(recipes)
    ranks.on_writer(lambda: check_free(directory, overwrite))  # before the gathering, which takes long
    scales = Scales(state(module).state_dict())
    by_name, by_id = ranks.gathered(module)

    def write() -> None:
        tensors, places = _tensors(module, selection, by_name, by_id, scales, in_blocks)
        kept = [place for path in selection.kept for place in places[path]]
        if in_blocks:
            quantization = config_in_blocks(kept)
        else:
            named = {place: recipe for path, recipe in recipes.items() for place in places[path]}
            quantization = config_compressed(named, kept)
        with complete_or_absent(directory) as folder:
            write_tensors(tensors, folder, limit)
            _write_configs(module, quantization, folder)

    ranks.on_writer(write)
    return Exported(directory, {path: recipe.name for path, recipe in recipes.items()}, selection.kept)


def _tell(selection: Selection, strict: bool) -> None:
    """Log the layers that stay in high precision. Raises Fp8Error if none is left, or under `strict` for some."""
    for path, why in selection.kept.items():
        log.log(
            logging.WARNING if path in selection.lost else logging.INFO,
            "%s is exported in high precision: %s",
            path,
            why,
        )
    reasons = [f"{path}: {selection.kept[path]}" for path in selection.lost]
    if strict and reasons:
        raise Fp8Error(
            f"strict: {len(reasons)} layers can't be exported in FP8: {'; '.join(reasons[:5])}. Leave them out of FP8 "
            "when you train, with filter=, or drop strict"
        )
    if not selection.layers:
        told = "; ".join(f"{path}: {why}" for path, why in list(selection.kept.items())[:5])
        raise Fp8Error(f"no layer can be exported in FP8: {told or 'the model has no matrices'}")


def _tensors(
    module: nn.Module,
    selection: Selection,
    by_name: Mapping[str, Tensor],
    by_id: Mapping[int, Tensor],
    scales: Scales,
    in_blocks: bool,
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return the tensors to write by their names in files; and the names of modules in files, by their paths."""
    matrices = {path: _quantized(layer, by_id, scales) for path, layer in selection.layers.items()}
    plain = {name: x.dequantized() if isinstance(x, FrozenWeight) else x for name, x in by_name.items()}
    tensors = {**plain, **{f"{path}.weight": matrix.x_q for path, matrix in matrices.items()}}
    stored = export_hub.as_stored(module, tensors) if export_hub.is_pretrained(module) else _apart(tensors)
    places = _places(module, [*matrices, *selection.kept], by_name)
    for path, matrix in matrices.items():
        place, *more_places = places[path]
        # the same object, for `as_stored` may have split, joined or converted it
        if more_places or stored.get(f"{place}.weight") is not matrix.x_q:
            raise Fp8Error(
                f"transformers stores the weight of {path} in another form than the model has it, under "
                f"{', '.join(places[path])}: leave it out with leave_out="
            )
        stored.update({f"{place}.{name}": x for name, x in scales_of(matrix, in_blocks).items()})
    return stored, places


def _places(module: nn.Module, paths: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of modules in files, by their paths: several for experts, which files have apart."""
    places = {}
    for path in paths:
        of_layer = {name: x for name, x in tensors.items() if name.rpartition(".")[0] == path}
        names = export_hub.names_as_stored(module, of_layer) if export_hub.is_pretrained(module) else list(of_layer)
        of_modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
        # readers that put experts into one module look for its path
        places[path] = list(of_modules) if len(of_modules) == 1 else [path, *of_modules]
    return places


def _quantized(layer: ExportedLayer, by_id: Mapping[int, Tensor], scales: Scales) -> Fp8Matrix:
    which = next(i for i, weight in enumerate(layer.together) if weight is layer.weight)
    return quantized(layer.paths, [by_id[id(weight)] for weight in layer.together], which, layer.recipe, scales)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with copies of those that several names share, for files can't share them."""
    seen: set[int] = set()
    copies = {}
    for name, x in tensors.items():
        copies[name] = x.clone() if id(x) in seen else x
        seen.add(id(x))
    return copies


def _write_configs(module: nn.Module, quantization: dict[str, Any], folder: Path) -> None:
    if export_hub.is_pretrained(module):
        export_hub.write_configs(module, quantization, folder)
    else:
        content = {"architectures": [type(module).__name__], "quantization_config": quantization}
        write_json(content, folder / "config.json")
