"""Replacements for Inductor's heuristics that do not know FP8: how kernels are cut into programs and tiles.

Inductor asks its `InductorChoices` about the current node. The answers for nodes that our passes made, and for kernels
that hold them, are here; for all others Inductor's heuristics decide, or those that the user has set.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from fp8pass.base._torch import (
    FixedTritonConfig,
    ForeachKernelSchedulerNode,
    FusedSchedulerNode,
    InductorChoices,
    NonOwningLayout,
    TritonOverrides,
    Virtualized,
    compile_fx_inner,
    inductor_config,
    inductor_simd,
    is_deterministic,
)
from fp8pass.base.errors import faults_of
from fp8pass.base.node_meta import ONE_STAGE, TILED, WITH_AMAX
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.passes.kernels.combo_kernels import combining, sums_of_mixed
from fp8pass.passes.kernels.kernel_candidates import CandidateTile, TileCandidates, fitting, write_candidates
from fp8pass.quant.kernel_ops import WRITE

_TILES: dict[str, tuple[CandidateTile, ...]] = {
    "columns": (CandidateTile(64, 64, 8), CandidateTile(64, 32, 8, stages=2)),
    "rows": (CandidateTile(32, 128, 16), CandidateTile(64, 256, 32)),
}
"""Tiles that a kernel is timed with, by the dimension that is reduced; X is the other one. The first is the default.

Chosen by the code that Triton 3.9 generates for sm_90, and by the times that `inspect` predicts from it; which is
fastest, and for which kernel, was not measured. Tiles of 64 by 64 have lines of 64 bytes in either orientation, and
others at least a sector of 32 bytes. No tile spills on sm_89, sm_90, sm_100 or sm_120, but for 8 bytes of the second
one by rows on sm_100. Registers per thread, warps that an SM holds, and instructions per element in the loop that
stores FP8:

    X    R0   warps stages  weight       norm         AdamW with copies
    64   64   8     1       64  32  20                160   8  80
    64   32   8     1       47  40  22                 89  16  80
    64   32   8     2       32  64  35                 92  16  77
    32   128  8     1                    74  24  18
    32   128  16    1                    50  32  21
    64   256  32    1                    64  32  18

An RMS norm of 8192 by 4096 is predicted to take 50, 43 and 38 us with the last three on an H200; 8192 rows make 128
programs of the last one for 132 SMs, and fewer rows leave SMs idle, where the one before is faster. More warps, and
loads ahead, keep more bytes in flight; longer lines take fewer instructions. Each tile more costs compile time: all
kernels of a Llama layer take 1.14 times the CPU seconds that they took with one tile each, before most of them came
from the template.
"""
_MORE_TILES: dict[str, tuple[CandidateTile, ...]] = {
    "columns": (CandidateTile(64, 32, 8), CandidateTile(64, 64, 8, stages=2), CandidateTile(32, 64, 8, stages=3)),
    "rows": (CandidateTile(32, 128, 8), CandidateTile(16, 128, 8, stages=2), CandidateTile(32, 128, 8, stages=3)),
}
"""Tiles that `max-autotune` times, too. X = 16 makes 512 programs of 8192 rows instead of 256, and stores half a
sector across. On sm_89 and sm_120, some take more shared memory than there is; Inductor leaves these out."""


_LONG_ROWS = 1024, 16384
"""Inductor holds rows of at most the first size in registers by itself; more elements than the second one would spill.
"""
_ELEMENTS_OF_A_ROW = 32, 16
"""How many elements of a row a thread holds."""


class Fp8InductorChoices(InductorChoices):
    """Our `InductorChoices`, installed while a graph is lowered: see `with_choices`.

    others: the object that was installed before, which decides wherever we do not. The user may have set it, or
    registered some (torch 2.15), of which torch itself would prefer each to ours.
    """

    def __init__(self, others: InductorChoices) -> None:
        self._others = others
        for name in dir(others):
            if not name.startswith("__") and name not in vars(Fp8InductorChoices):
                setattr(self, name, getattr(others, name))  # hides the method of the base class

    def triton_kernel_kwargs(
        self, kernel_cls: Any, features: Any, groups: list[Any], kernel_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return Inductor's arguments, with our tiles for kernels that store FP8 in both orientations."""
        kernel_kwargs = self._others.triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        if kernel_kwargs.get("mix_order_reduction"):
            return kernel_kwargs  # one program reduces several rows, by a loop that has no size in our tiles
        with faults_of("choices"):
            # the kernel may have fused several nodes: the mark of any of them counts
            tiled = {origin.meta.get(TILED) for origin in _origins(features.scheduler_nodes())} - {None}
            # the tiles have a block of the reduced dimension, which only reductions have
            if features.is_reduction() and tiled:
                config = _tiles(features, "rows" if "rows" in tiled else "columns")
                # a persistent reduction would hold the whole reduced dimension in one block
                return {**kernel_kwargs, "fixed_config": config, "override_persistent_reduction": False}
            if _quantizes_long_rows(features):
                config = _of_whole_rows(features)
                return {**kernel_kwargs, "fixed_config": config, "override_persistent_reduction": True}
            return kernel_kwargs

    def should_use_persistent_reduction(  # type: ignore[override]  # there, it is a static method
        self, features: Any, cooperative_reduction: bool
    ) -> bool:
        """Return whether a program holds all that it reduces in registers: yes for the last stage of amaxes.

        A loop would give all kernels that share a launch with it blocks of one element. Inductor decides about others.
        """
        with faults_of("choices"):
            if inductor_config.triton.persistent_reductions and not cooperative_reduction and _is_last_stage(features):
                return True
        return bool(self._others.should_use_persistent_reduction(features, cooperative_reduction))

    # a static method or not, depending on the version of torch
    def reduction_split_factor(  # type: ignore[override]
        self, device: torch.device, reduction_numel_hint: Any, *sizes: Any, **how: Any
    ) -> Any:
        """Return 1, for one launch without a second stage, for marked reductions of at most MAX_PARTIALS elements."""
        if _is_one_stage(Virtualized.graph.current_node, reduction_numel_hint):
            return 1
        return self._others.reduction_split_factor(device, reduction_numel_hint, *sizes, **how)

    def can_fuse(  # type: ignore[override]
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Return whether two nodes may be fused: not in the following cases, otherwise as Inductor decides.

        Each orientation of a quantized tensor is fused with the kernel of its amax before anything else: the amax
        decides the order of loops, and cannot change the order of a pair that is fused already. Nothing is fused with
        the second half of a column sum that Inductor will remove: so the casts of all such sums can share a launch.
        Sums that Inductor would not write are fused only with their like: see `_misses_sums`. On CPUs, a node that
        writes into a tensor is not fused with one that reads it before the write, and is itself read elsewhere: in one
        nest of loops, Inductor looks for a read that does not exist.
        """
        if _stay_apart(scheduler, node1, node2):
            return False
        return bool(self._others.can_fuse(scheduler, node1, node2, shared_data_score))

    def can_fuse_horizontal(  # type: ignore[override]
        self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Return whether two nodes that read one tensor may be fused: as Inductor decides, but at any distance.

        In the update of several weights, the amax of a weight and the writes of its copies lie far apart. Inductor does
        not fuse such nodes, since results might be held for longer; what is written into an input is held in any case.
        """
        if self._others.can_fuse_horizontal(scheduler, node1, node2, shared_data_score):
            return True
        return shared_data_score >= _LEAST_SHARED and any(map(_writes_tiles, (node1, node2)))


_LEAST_SHARED = 4096
"""Bytes of the smallest matrix in tiles. Updates of different weights share less: scales and a learning rate."""


def _tiles(features: Any, along: str) -> FixedTritonConfig:
    """Return the tiles that a kernel is timed with; the first, fixed, for a sum that has to be deterministic."""
    tiles = _TILES[along]
    if _has_fixed_sums(features):
        return FixedTritonConfig(tiles[0].fixed)
    if inductor_config.max_autotune or inductor_config.max_autotune_pointwise:
        tiles += _MORE_TILES[along]
    x, r = map(Virtualized.graph.sizevars.optimization_hint, (features.numel, features.reduction_numel))
    return TileCandidates(fitting(tiles, x, r))


def _quantizes_long_rows(features: Any) -> bool:
    """Return whether a kernel quantizes each row after a reduction of it, and a program can hold a row in registers.

    Inductor holds shorter rows too. Longer ones it reads twice, and then computes twice what it quantizes.
    """
    r = features.reduction_numel
    if not features.is_reduction() or not r.is_Integer or not _LONG_ROWS[0] < r <= _LONG_ROWS[1]:
        return False
    if not all(map(_is_inner, (dep for n in features.reduction_nodes() for dep in n.read_writes.reads))):
        return False
    made = (origin.meta.get("val") for origin in _origins(features.scheduler_nodes()))
    return any(isinstance(value, torch.Tensor) and value.dtype in FP8_DTYPES for value in made)


def _is_inner(read: Any) -> bool:
    """Return whether neighbours in what a node reads are neighbours in its innermost loop, over what it reduces."""
    names: Sequence[Any] = getattr(read, "var_names", ())  # a whole buffer that it waits for has none
    return len(names) < 2 or read.index.coeff(names[-1]) == 1


def _of_whole_rows(features: Any) -> FixedTritonConfig:
    """Return the numbers of warps for one row that a kernel is timed with: fewer of them compute fewer scales."""
    r = 1 << (int(features.reduction_numel) - 1).bit_length()
    tiles = tuple(CandidateTile(1, r, min(max(r // 32 // each, 1), 32)) for each in _ELEMENTS_OF_A_ROW)
    return FixedTritonConfig(tiles[0].fixed) if _has_fixed_sums(features) else TileCandidates(tiles)


def _has_fixed_sums(features: Any) -> bool:
    """Return whether a kernel holds a sum that has to be deterministic."""
    return is_deterministic() and any(map(_is_sum, features.scheduler_nodes()))


def _is_sum(node: Any) -> bool:
    """Return whether a node's result depends on the order in which it reduces: for all but maxima and minima."""
    return node.is_reduction() and node.node.get_reduction_type() not in ("max", "min", "any")


MAX_PARTIALS = 1 << 16
"""Most amaxes that one program reduces: 128 KB, about what one SM reads from L2 in the time of a launch."""


@faults_of("choices")
def _is_one_stage(node: fx.Node | None, elements: Any) -> bool:
    return node is not None and (TILED in node.meta or ONE_STAGE in node.meta) and bool(elements <= MAX_PARTIALS)


def _is_last_stage(features: Any) -> bool:
    r = features.reduction_numel
    is_ours = any(ONE_STAGE in origin.meta for origin in _origins(features.scheduler_nodes()))
    return is_ours and r.is_Integer and bool(r <= _LAST_STAGE)


_LAST_STAGE = 256
"""Most numbers that the last stage of an amax reduces without a loop."""


@faults_of("choices")
def _stay_apart(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Return whether two nodes must not be fused, for one of the reasons in `Fp8InductorChoices.can_fuse`."""
    nodes = node1, node2
    if not any(n.is_reduction() for n in nodes) and any(map(_waits_for_amax, nodes)):
        return True
    if _completes_sum_of_mixed(scheduler, node1):
        return True
    if all(n.is_reduction() for n in nodes) and _misses_sums() and _would_be_lost(node1, node2):
        return True
    return bool(node1.is_cpu()) and (_only_waits(node1, node2) or _only_waits(node2, node1))


def _completes_sum_of_mixed(scheduler: Any, node: Any) -> bool:
    buffers = [b for read in node.read_writes.reads if (b := scheduler.name_to_buf.get(read.name)) is not None]
    return any(b.get_name() in sums_of_mixed(scheduler.name_to_fused_node[b.defining_op_name()]) for b in buffers)


@functools.cache
def _misses_sums() -> bool:
    """Return whether Inductor loses sums of columns that are parts of another tensor, as the gradients of chunks are.

    That is where it sums rows and columns in one kernel, in torch before 2.15: pytorch#193061.
    """
    return "NonOwningLayout" not in inspect.getsource(inductor_simd)


def _would_be_lost(node1: Any, node2: Any) -> bool:
    within = _are_within_others(node1), _are_within_others(node2)
    return any(within) and (within[0] != within[1] or node1.group != node2.group)


def _are_within_others(node: Any) -> bool:
    """Return whether results of a reduction, or of its last stage, are parts of a tensor that others write too."""
    results = [b for n in node.get_nodes() if n.is_reduction() for b in n.get_outputs()]
    results += [
        b for result in results for user in result.users if user.node.is_reduction() for b in user.node.get_outputs()
    ]
    return any(isinstance(b.node.get_output_spec(), NonOwningLayout) for b in results)


def _only_waits(node: Any, other: Any) -> bool:
    """Return whether `node` must run after `other` for a tensor that it does not read."""
    nodes = set(node.get_nodes())
    # weak: a dependency by which Inductor only orders a read before a mutation
    return any(user.is_weak and user.node in nodes for b in other.get_outputs() for user in b.users)


def _waits_for_amax(node: Any) -> bool:
    return any(WITH_AMAX in origin.meta for origin in _origins(node.get_nodes()))


def _writes_tiles(node: Any) -> bool:
    return any(origin.target is WRITE for origin in _origins(node.get_nodes()))


def _origins(nodes: Iterable[Any]) -> Iterable[fx.Node]:
    return (origin for node in nodes if node.node is not None for origin in node.node.get_origins())


ONE_AT_A_TIME = threading.RLock()
"""Lock that is held while a graph is changed: one backward may be compiled in several threads at once."""


def with_choices(
    module: fx.GraphModule, example_inputs: Any, *, chooses: bool = True, combines: bool = True, **kwargs: Any
) -> Any:
    """Run Inductor's `compile_fx_inner` within `choices`."""
    with ONE_AT_A_TIME, choices(chooses, combines):
        return compile_fx_inner(module, example_inputs, **kwargs)


@contextlib.contextmanager
def choices(chooses: bool = True, combines: bool = True) -> Iterator[None]:
    """Let Inductor use our choices, and combine kernels in our groups, within the context.

    chooses, combines: False for a part that has failed before.
    """
    _let_triton_compare()
    _let_random_numbers_be_those_of_their_element()
    write_candidates()
    _let_lists_keep_their_loops()
    token = _within.set(chooses)
    try:
        with (
            Virtualized.set_choices_handler(Fp8InductorChoices(Virtualized.choices))
            if chooses
            else contextlib.nullcontext(),
            combining() if combines else contextlib.nullcontext(),
        ):
            yield
    finally:
        _within.reset(token)


# the patches are for the whole process; this says where they have an effect, so that other graphs keep Inductor's code
_within: ContextVar[bool] = ContextVar("_within", default=False)


@functools.cache
def _let_triton_compare() -> None:
    """Patch Triton code generation, once: within `choices` it compares and selects instead of using `PropagateNan`.

    Torch from 2.14 on generates `PropagateNan`, which becomes `min.NaN` and `max.NaN`. With these, the assembler that
    Triton brings for sm_90 (ptxas 12.9) breaks float8 tensors that one kernel stores both by rows and transposed:
    triton-lang/triton#11111. The values are the same.
    """
    for name, sign in (("minimum", "<"), ("maximum", ">")):
        of_torch = getattr(TritonOverrides, name)
        if "PropagateNan" in of_torch("a", "b"):  # by what it generates: versions differ
            setattr(TritonOverrides, name, staticmethod(functools.partial(_selected, of_torch, sign)))


@functools.cache
def _let_random_numbers_be_those_of_their_element() -> None:
    """Patch Triton code generation of torch 2.13 and 2.14, once: within `choices` it draws numbers by `tl.rand`.

    Kernels with one dimension would draw four at a time, from another stream, and for offsets that they take to be
    neighbours: a backward in a kernel with two dimensions then drops other elements, and a mask of a transposed tensor
    repeats itself (pytorch#198333). Torch 2.15 has a setting for it, which is off.
    """
    of_torch = getattr(TritonOverrides, "_can_use_4x_random", None)
    if of_torch is not None and not hasattr(inductor_config, "use_rand4x"):
        setattr(TritonOverrides, of_torch.__name__, staticmethod(lambda: not _within.get() and of_torch()))


@functools.cache
def _let_lists_keep_their_loops() -> None:
    """Patch Inductor of torch 2.11, once: it fails where it tries to reorder the loops of a list of foreach ops.

    It asserts that each node of the list is a single op, but such nodes are fused with others. Later versions answer
    that they reorder nothing, and so does the patch.
    """
    if "assert isinstance(snode, SchedulerNode)" in inspect.getsource(FusedSchedulerNode.reorder_loops_by_dep_pair):
        ForeachKernelSchedulerNode.reorder_loops_by_dep_pair = lambda *_: False  # type: ignore[method-assign]


def _selected(of_torch: Callable[[Any, Any], str], sign: str, a: Any, b: Any) -> str:
    # `a != a` selects a NaN of `a`; with a NaN in `b` both comparisons are false, which selects it too
    return f"tl.where(({a} {sign} {b}) | ({a} != {a}), {a}, {b})" if _within.get() else of_torch(a, b)
