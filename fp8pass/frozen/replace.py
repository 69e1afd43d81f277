"""`fp8pass.freeze` and `fp8pass.unfreeze`: keep the frozen weights of a model in FP8, and bring them back."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fp8pass.base._torch import FakeTensor
from fp8pass.base.fields import choose
from fp8pass.base.module_tensors import unwrapped
from fp8pass.base.scaling import HIGH_PRECISION
from fp8pass.frozen.weight import FrozenWeight, parameter
from fp8pass.fsdp import FILTER
from fp8pass.options.config import Config
from fp8pass.options.unmatched import check_models
from fp8pass.quant.wrapper_tensor import Scales
from fp8pass.recipes import BLOCK, matches

log = logging.getLogger(__name__)


def freeze(
    model: Any,
    scales: Scales = "tensor",
    filter: Sequence[str] | Callable[[str], bool] = (),  # noqa: A002
) -> list[str]:
    """Replace the weights of linear layers that require no gradient by FP8 ones: 1 byte per element, and scales.

    The weights in high precision are gone. Every op reads the dequantized weight; in a compiled model, the matmuls of
    output and grad_input read the FP8 one. Call it before the model is compiled; an optimizer that holds such weights
    keeps them in memory. Weights that other modules use, such as tied embeddings, stay as they are.

    Args:
        model: A module, compiled or not.
        scales: "tensor" for one scale per weight f[N, K], `448 / amax`; "row" for one per row, with which grad_input
            stays in high precision; "block" for one per 128 rows and columns, a power of two.
        filter: Name patterns of layers to leave out (`head`, `layers.0.*`); or a callable that takes a layer's name and
            returns True for layers to take.

    Returns:
        The names of the layers whose weights are in FP8 now.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If `scales` or `filter` is not valid, a pattern matches nothing, or no layer is frozen.
    """
    model = module_of(model, "freeze")
    choose("scales", scales, ("tensor", "row", "block"))
    filter = FILTER.take("filter", filter)  # noqa: A001
    if not callable(filter):
        check_models(Config(filter=filter), [model], {}, type(model).__name__)
    layers, frozen, kept = [], dict[Tensor, nn.Parameter](), dict[str, str]()
    for name, module in _linear_layers(model):
        takes = filter(name) if callable(filter) else not any(matches(name, pattern) for pattern in filter)
        if not takes or (why := _why_not(_holders(model, module.weight), module.weight, scales)):
            if takes:
                kept[name] = why
                log.info("freeze: the weight of %r stays in high precision: %s", name, why)
            continue
        if module.weight not in frozen:
            frozen[module.weight] = parameter(FrozenWeight.of(module.weight, scales))
        module.weight = frozen[module.weight]
        layers.append(name)
    if not layers and kept:
        name, why = next(iter(kept.items()))
        raise ValueError(f"freeze: {len(kept)} layers can't be frozen in FP8; the weight of {name!r}: {why}")
    if not layers:
        raise ValueError(
            "freeze: no linear layer has a weight that requires no gradient: call model.requires_grad_(False) before "
            "you add adapters"
        )
    return layers


def unfreeze(model: Any) -> list[str]:
    """Replace FP8 weights of `freeze` by their dequantized values, which still require no gradient.

    Call it before you merge adapters, train the weights, or save them for other programs.

    Args:
        model: A module, compiled or not.

    Returns:
        The names of the modules whose weights are in high precision now.

    Raises:
        TypeError: If `model` is not a module.
    """
    layers, plain = [], dict[Tensor, nn.Parameter]()
    for name, module in module_of(model, "unfreeze").named_modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, FrozenWeight):
                if weight not in plain:
                    plain[weight] = nn.Parameter(weight.dequantized(), requires_grad=False)
                setattr(module, key, plain[weight])
                layers.append(name)
    return layers


def module_of(model: Any, function: str) -> nn.Module:
    """Return the module without torch.compile's wrapper. Raises TypeError, which names the function."""
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}() takes a module or a compiled module, not {type(model).__name__}")
    return model


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers whose weights require no gradient."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            yield name, module


def _why_not(holders: Iterable[nn.Module], weight: Tensor, scales: Scales) -> str:
    """Return why a weight that these modules hold can't be kept in FP8; "" if it can."""
    if type(weight) not in (nn.Parameter, FakeTensor):
        return f"it is a {type(weight).__name__}"
    if weight.dtype not in HIGH_PRECISION or weight.is_meta:
        return f"it is {weight.dtype} on {weight.device}"
    if scales == "block" and (weight.shape[0] % BLOCK or weight.shape[1] % BLOCK):
        return f"{list(weight.shape)} has no whole blocks of {BLOCK}"
    if (other := next((m for m in holders if not isinstance(m, nn.Linear)), None)) is not None:
        return f"a {type(other).__name__} uses it too"
    return ""


def freeze_parameters(scales_of: Mapping[Tensor, Scales]) -> list[str]:
    """Replace parameters by FP8 weights in all modules that hold them; return what these are, for messages.

    Parameters that not only linear layers hold, or that can't be kept in FP8, stay as they are.
    """
    # the type, since a weak proxy answers for its object, and raises an error once that is gone
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    done = []
    for weight, scales in scales_of.items():
        holders = [m for m in modules if _holds(m, weight)]
        if not holders or _why_not(holders, weight, scales):
            continue
        frozen = parameter(FrozenWeight.of(weight, scales))
        for holder in holders:
            for key, value in holder._parameters.items():
                if value is weight:
                    holder._parameters[key] = frozen
        done.append(f"{type(holders[0]).__name__}{list(weight.shape)}")
    return done


def _holders(model: nn.Module, weight: Tensor) -> list[nn.Module]:
    return [m for m in model.modules() if _holds(m, weight)]


def _holds(module: nn.Module, weight: Tensor) -> bool:
    return any(parameter is weight for parameter in module._parameters.values())
