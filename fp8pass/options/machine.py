"""Decide for the GPU that is there: put what is found out about it into the options of a compilation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fp8pass.base._torch import FakeTensor, first_call_is_fake
from fp8pass.gpu import here, kernel_kinds
from fp8pass.options.config import Config
from fp8pass.recipes import Schedule


def gpu_of(inputs: Iterable[Any]) -> torch.device | None:
    """Return the GPU that a graph's inputs are on; None on CPUs, and for fake tensors, whose GPU need not be there.

    DDPOptimizer passes fake tensors of real ones.
    """
    fakes = () if first_call_is_fake() else (FakeTensor,)
    tensors = (x for x in inputs if isinstance(x, Tensor) and not isinstance(x, fakes))
    return next((x.device for x in tensors if x.device.type == "cuda"), None)


def on_machine(config: Config, device: torch.device | None) -> Config:
    """Return options whose target is the GPU that is there, as measured and agreed on: see `here.target_here`.

    device: that GPU; None if there is none, or it is only pretended. A target that the user named stays.
    """
    if config.target is not None or device is None or torch.version.hip is not None:
        return config
    return replace(config, target=here.target_here(device, config.machine, _ranks(config), _kinds(config)))


def _kinds(config: Config) -> set[str]:
    """Return the kinds of scales that the recipes ask for, whose kernels not every GPU has."""
    recipe = config.recipe
    phases = [config.at_step(step) for step, _ in recipe.phases] if isinstance(recipe, Schedule) else [config]
    return {recipe.name for phase in phases for recipe in phase.recipes} & set(kernel_kinds.KINDS)


def _ranks(config: Config) -> tuple[int, ...]:
    """Return the ranks of the configuration's group; () without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    group = config.amax_group
    if isinstance(group, DeviceMesh):  # its group might have to be made, by all ranks together
        return tuple(sorted(group.mesh.flatten().tolist()))
    return tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
