"""Select the layers that are written in FP8, with their recipes; say why the others are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fp8pass.base._torch import gathered_parameters
from fp8pass.base.errors import Fp8Error
from fp8pass.base.names import parts_of, without_wrappers
from fp8pass.frozen.weight import FrozenWeight
from fp8pass.fsdp import Fp8Shard
from fp8pass.options.config import Config
from fp8pass.quant.sharded import part_of
from fp8pass.recipes import (
    BLOCK,
    BlockwiseScaling,
    DelayedScaling,
    DynamicScaling,
    Recipe,
    RowwiseScaling,
    Schedule,
    StaticScaling,
    matches,
)
from fp8pass.states.model_state import state
from fp8pass.weights.weight_uses import use_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
OF_FROZEN = {"tensor": DynamicScaling(), "row": RowwiseScaling(), "block": BlockwiseScaling()}
"""The recipe of a frozen weight's scales."""
EXPORTED = (DelayedScaling, DynamicScaling, StaticScaling, RowwiseScaling, BlockwiseScaling)


@dataclass(frozen=True)
class ExportedLayer:
    """A linear layer to write in FP8. weight: the parameter [N, K], as the model holds it.

    together: the parameters that one scale is computed from, concatenated along dim 0; the weight is one of them.
    paths: of all layers that share the weight, whose slot has the name of one of them.
    """

    weight: Tensor
    recipe: Recipe
    together: tuple[Tensor, ...]
    paths: tuple[str, ...]


@dataclass
class Selection:
    """The layers by path: those to write in FP8, and why the others are not.

    lost: the paths of those in `kept` that ran in FP8, or may have.
    """

    layers: dict[str, ExportedLayer] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Verdict:
    """How training quantized a weight. recipe: None for high precision, for which `reason` says why."""

    recipe: Recipe | None
    reason: str = ""
    together: tuple[Tensor, ...] = ()


def select(module: nn.Module, recipe: Any, leave_out: Sequence[str], heads: Sequence[nn.Module]) -> Selection:
    """Select the layers of a model. recipe: None for the verdicts of graphs that have run; see `export_fp8`.

    leave_out: patterns of paths. heads: layers to leave out because servers do not load them in FP8.

    Raises:
        Fp8Error: If `recipe` is None and fp8pass has not seen the model run.
        ValueError: If a pattern matches no layer, or `recipe` is not valid.
    """
    selection, sharing = Selection(), _sharing(module)
    verdict_of = _verdicts(module, recipe)
    for path, layer in _matrices(module):
        if not _is_linear(layer):
            selection.kept[path] = f"it is a {type(layer).__name__}, and the formats hold only nn.Linear"
            selection.lost += [path] if not isinstance(layer, CONVOLUTIONS) or _is_matmul(layer) else []
            continue
        verdict = verdict_of(path, layer)
        if verdict is None or verdict.recipe is None:
            selection.kept[path] = "no graph has called it" if verdict is None else verdict.reason
        elif any(matches(path, pattern) for pattern in leave_out):
            selection.kept[path] = "leave_out names it"
        elif reason := _why_not(layer, verdict.recipe, heads, sharing[id(layer.weight)]):
            selection.kept[path] = reason
            selection.lost.append(path)
        else:
            weight: Any = layer.weight
            paths = (path, *(name for name, _ in sharing[id(weight)]))
            selection.layers[path] = ExportedLayer(weight, verdict.recipe, verdict.together or (weight,), paths)
    _check_patterns(leave_out, [*selection.layers, *selection.kept])
    return selection


def _matrices(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with a matrix, or a batch of matrices, that they may multiply by: all but embeddings."""
    for name, layer in module.named_modules():
        parameters = list(layer.parameters(recurse=False))
        if any(p.dim() >= 2 for p in parameters) and not isinstance(layer, nn.Embedding):
            yield without_wrappers(name), layer


def _is_linear(layer: nn.Module) -> bool:
    """Return whether a layer computes what `nn.Linear` does. `fully_shard` derives a class for each that it wraps."""
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def _is_matmul(layer: Any) -> bool:
    """Return whether a convolution may have run in FP8: its kernel is 1, or equals its stride, in one group."""
    cut = all(kernel in (1, stride) for kernel, stride in zip(layer.kernel_size, layer.stride, strict=True))
    return bool(cut and layer.groups == 1)


def _verdicts(module: nn.Module, recipe: Any) -> Any:
    """Return a function of path and layer that returns the `_Verdict`, or None if nothing is known of the layer."""
    if recipe is not None:
        config = Config(recipe=recipe)
        if isinstance(config.recipe, Schedule):
            raise ValueError("recipe is a Schedule: pass the recipe of the phase whose weights you export")
        return lambda path, layer: _by_recipe(config, path, layer)
    gathered = gathered_parameters(module)
    originals = {id(whole): sharded for sharded, whole in _pairs(module, gathered)}
    slots = {part for name in state(module).slots for part in parts_of(name)}

    def by_use(path: str, layer: nn.Module) -> _Verdict | None:
        weight: Any = layer.weight
        if (use := use_of(gathered.get(id(weight), weight))) is not None:
            parts = [part() for part in use.parts]
            together = tuple(originals.get(id(p), p) for p in parts if p is not None)
            return _as_it_is(weight, _Verdict(use.recipe, use.reason, together))
        return _Verdict(DelayedScaling()) if not any_use and f"{path}.weight" in slots else None

    any_use = any(use_of(gathered.get(id(p), p)) is not None for p in module.parameters())
    if not any_use and not slots:
        raise Fp8Error(
            f"fp8pass has not seen this {type(module).__name__} run, and does not know which layers were trained in "
            "FP8: export the model that was trained, in its process, or pass recipe="
        )
    if not any_use and (saved := state(module).recipe) != repr(DelayedScaling()):
        raise Fp8Error(f"the FP8 state was saved under {saved}: pass that as recipe=")
    return by_use


def _pairs(module: nn.Module, gathered: dict[int, nn.Parameter]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((p, gathered[id(p)]) for p in module.parameters() if id(p) in gathered)


def _by_recipe(config: Config, path: str, layer: nn.Module) -> _Verdict:
    recipe, reason = config.recipe_of(path)
    weight: Any = layer.weight
    slots = (f"{path}.input", f"{path}.weight")
    if isinstance(recipe, StaticScaling) and None in map(recipe.scale_of, slots):
        return _Verdict(None, "no scale was calibrated for it")
    if isinstance(recipe, BlockwiseScaling) and any(size % BLOCK for size in weight.shape):
        return _Verdict(None, f"its weight {list(weight.shape)} can't be cut into blocks of {BLOCK} x {BLOCK}")
    return _as_it_is(weight, _Verdict(recipe, reason))


def _as_it_is(weight: Any, verdict: _Verdict) -> _Verdict:
    """Return the verdict; for a weight that is in FP8 already, the recipe that has its scales, whatever was given.

    These are frozen weights, and those that FSDP gathers in FP8.
    """
    if verdict.recipe is not None and isinstance(weight, FrozenWeight):
        return _Verdict(OF_FROZEN[weight.scales])
    if verdict.recipe is not None and isinstance(part_of(weight), Fp8Shard):
        return _Verdict(DynamicScaling())
    return verdict


def _why_not(
    layer: nn.Module, recipe: Recipe, heads: Sequence[nn.Module], sharing: Sequence[tuple[str, nn.Module]]
) -> str:
    """Return why a layer that ran in FP8 is not written in FP8; "" if it is. sharing: the holders of its weight."""
    if any(layer is head for head in heads):
        return "it is the model's head, which vLLM and SGLang do not load in FP8"
    if not isinstance(recipe, EXPORTED):
        return f"recipe {recipe.name!r} has scales that neither format has a place for"
    not_linear = [f"{name} ({type(m).__name__})" for name, m in sharing if not _is_linear(m)]
    return f"it shares its weight with {', '.join(not_linear)}" if not_linear else ""


def _sharing(module: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Return the modules that hold each parameter, with their paths, by the parameter's id."""
    layers: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, layer in module.named_modules():
        for parameter in layer.parameters(recurse=False):
            layers[id(parameter)].append((without_wrappers(name), layer))
    return layers


def _check_patterns(patterns: Sequence[str], paths: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(path, pattern) for path in paths):
            raise ValueError(f"leave_out={pattern!r} matches no layer; there are {', '.join(paths[:8])}")
