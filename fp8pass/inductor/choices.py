"""What Inductor decides by heuristics that do not know FP8: how kernels are cut into programs and tiles.

Inductor asks its `InductorChoices` about the node at hand; for nodes that our passes made, and kernels that hold them,
the answers are here. All others are Inductor's own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from fp8pass._torch import FixedTritonConfig, InductorChoices, TritonOverrides, Virtualized, compile_fx_inner
from fp8pass.errors import faults_of
from fp8pass.inductor.combo_kernels import combining, sums_of_mixed
from fp8pass.node_meta import ONE_STAGE, TILED, WITH_AMAX

_TILES = {
    "columns": {"XBLOCK": 64, "R0_BLOCK": 64, "num_warps": 8, "num_stages": 1},
    "rows": {"XBLOCK": 32, "R0_BLOCK": 128, "num_warps": 8, "num_stages": 1},
}
"""By what is reduced; X is what is not. A thread stores 16 bytes of FP8 at once, in either orientation.

Compared by the code that Triton 3.7 makes for sm_90; nothing was timed. All tiles below store whole sectors of 32 bytes
in either orientation and spill nothing, but for those with a note. Registers of a thread, in a kernel that quantizes a
weight, in a norm, and in the backward of SwiGLU, which stores five FP8 tensors:

    X    R0   warps  weight  norm  SwiGLU
    64   64   8          62    71     128  "columns": lines of 64 bytes either way
    64   64   4         127   139     230
    128  64   8         124   124     226
    64   128  8         127   122     220
    64   32   8          39            91  8 bytes at once
    32   64   4          56    69     128
    32   128  8          78    74          "rows": lines of 128 bytes along the rows, one sector across
    32   256  8         152   175
    16   256  8          63    98          half a sector across

Of the smaller ones 64 by 64 has the longest lines. Kernels by rows have a program for X rows, all of whose columns it
walks along: 8192 rows make 256 programs for 132 SMs, where 64 at once would make 128. Where the norm adds a residual,
that takes 80 registers and spills 8 bytes.
"""


class Choices(InductorChoices):
    """Installed while a graph is lowered: see `with_choices`."""

    def triton_kernel_kwargs(
        self, kernel_cls: Any, features: Any, groups: list[Any], kernel_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Tiles for kernels that store FP8 in both orientations."""
        with faults_of("choices"):
            tiled = {origin.meta.get(TILED) for origin in _origins(features.scheduler_nodes())} - {None}
            if features.is_reduction() and tiled:
                tile = FixedTritonConfig(_TILES["rows" if "rows" in tiled else "columns"])
                return {**kernel_kwargs, "fixed_config": tile, "override_persistent_reduction": False}
            return kernel_kwargs

    # static or not, by version of torch
    def reduction_split_factor(  # type: ignore[override]
        self, device: torch.device, reduction_numel_hint: Any, *sizes: Any, **how: Any
    ) -> Any:
        """No second stage for what has few enough elements, or was cut already, and is one launch without."""
        if _is_one_stage(Virtualized.graph.current_node, reduction_numel_hint):
            return 1
        return super().reduction_split_factor(device, reduction_numel_hint, *sizes, **how)

    def can_fuse(  # type: ignore[override]
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Each orientation of a tensor is fused with the kernel of its amax before anything else.

        The amax decides the order of loops, and can't change that of a pair. And nothing is fused with the second half
        of a sum that will be taken away: the casts of all such sums can share a launch. On CPUs, Inductor can't have in
        one nest of loops what writes into a tensor and what reads it before that, and is read elsewhere: it looks for a
        read that isn't there.
        """
        if _stay_apart(scheduler, node1, node2):
            return False
        return super().can_fuse(scheduler, node1, node2, shared_data_score)


MAX_PARTIALS = 1 << 16
"""So many amaxes one program may go through: 128 KB, about what one SM reads from L2 in the time of a launch."""


@faults_of("choices")
def _is_one_stage(node: fx.Node | None, elements: Any) -> bool:
    return node is not None and (TILED in node.meta or ONE_STAGE in node.meta) and bool(elements <= MAX_PARTIALS)


@faults_of("choices")
def _stay_apart(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Return whether they are not fused, for one of the reasons that `Choices.can_fuse` has."""
    nodes = node1, node2
    if not any(n.is_reduction() for n in nodes) and any(map(_waits_for_amax, nodes)):
        return True
    if _completes_sum_of_mixed(scheduler, node1):
        return True
    return bool(node1.is_cpu()) and (_only_waits(node1, node2) or _only_waits(node2, node1))


def _completes_sum_of_mixed(scheduler: Any, node: Any) -> bool:
    buffers = [b for read in node.read_writes.reads if (b := scheduler.name_to_buf.get(read.name)) is not None]
    return any(b.get_name() in sums_of_mixed(scheduler.name_to_fused_node[b.defining_op_name()]) for b in buffers)


def _only_waits(node: Any, other: Any) -> bool:
    """Return whether it runs behind the other for a tensor that it does not read."""
    nodes = set(node.get_nodes())
    return any(user.is_weak and user.node in nodes for b in other.get_outputs() for user in b.users)


def _waits_for_amax(node: Any) -> bool:
    return any(WITH_AMAX in origin.meta for origin in _origins(node.get_nodes()))


def _origins(nodes: Iterable[Any]) -> Iterable[fx.Node]:
    return (origin for node in nodes if node.node is not None for origin in node.node.get_origins())


ONE_AT_A_TIME = threading.RLock()
"""Held while a graph is changed: the backward of one may be compiled in several threads at once."""


def with_choices(
    module: fx.GraphModule, example_inputs: Any, *, chooses: bool = True, combines: bool = True, **kwargs: Any
) -> Any:
    """Inductor's `compile_fx_inner`, with our choices."""
    with ONE_AT_A_TIME, choices(chooses, combines):
        return compile_fx_inner(module, example_inputs, **kwargs)


@contextlib.contextmanager
def choices(chooses: bool = True, combines: bool = True) -> Iterator[None]:
    """A context in which Inductor has our choices, and combines kernels our way: each unless it has failed before."""
    _let_triton_compare()
    token = _comparing.set(chooses)
    try:
        with (
            Virtualized.set_choices_handler(Choices()) if chooses else contextlib.nullcontext(),
            combining() if combines else contextlib.nullcontext(),
        ):
            yield
    finally:
        _comparing.reset(token)


_comparing: ContextVar[bool] = ContextVar("_comparing", default=False)


@functools.cache
def _let_triton_compare() -> None:
    """Once: within `choices`, Triton code compares and selects where torch from 2.14 on says `PropagateNan`.

    That becomes `min.NaN` and `max.NaN`, beside which the assembler that Triton brings for sm_90 (ptxas 12.9) breaks
    float8 tensors that one kernel stores both by rows and transposed: triton-lang/triton#11111. Same numbers.
    """
    for name, sign in (("minimum", "<"), ("maximum", ">")):
        theirs = getattr(TritonOverrides, name)
        if "PropagateNan" in theirs("a", "b"):
            setattr(TritonOverrides, name, staticmethod(functools.partial(_selected, theirs, sign)))


def _selected(theirs: Callable[[Any, Any], str], sign: str, a: Any, b: Any) -> str:
    return f"tl.where(({a} {sign} {b}) | ({a} != {a}), {a}, {b})" if _comparing.get() else theirs(a, b)
