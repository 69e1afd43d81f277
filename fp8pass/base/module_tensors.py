"""The tensors of a module, as compiled graphs are called with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fp8pass.base._torch import gathered_parameters, module_of_stage, modules_of, tensors_of


def unwrapped(module: Any) -> Any:
    """Return the module inside a compiled module, `DistributedDataParallel`, or the stage of a pipeline."""
    module = module_of_stage(module)
    # torch.compile(module) returns an OptimizedModule, which holds the module as `_orig_mod`
    module = getattr(module, "_orig_mod", module)
    return unwrapped(module.module) if isinstance(module, nn.parallel.DistributedDataParallel) else module


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, each under all of its names.

    For a parameter that FSDP has sharded, also yield the gathered parameter, which forwards are called with; it exists
    from the first forward on.
    """
    gathered = gathered_parameters(module)
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in itertools.chain(parameters, module.named_buffers(remove_duplicate=False)):
        yield name, tensor
        if (whole := gathered.get(id(tensor))) is not None:
            yield name, whole


def ids_of(module: nn.Module) -> set[int]:
    """Return the ids of all tensors that `named_tensors` yields."""
    tensors = itertools.chain.from_iterable(map(tensors_of, modules_of(module)))
    return {*map(id, tensors), *map(id, gathered_parameters(module).values())}
