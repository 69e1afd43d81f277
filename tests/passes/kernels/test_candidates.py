"""Kernels with several configurations, which Inductor's own autotuner times: here among made-up times."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fp8pass.base._torch import FixedTritonConfig, Virtualized, inductor_config
from fp8pass.compiler.heuristics import _ELEMENTS_OF_A_ROW, _MORE_TILES, _TILES, _of_whole_rows, _tiles
from fp8pass.passes.kernels.kernel_candidates import LOOP, CandidateTile, TileCandidates, fitting, with_candidates
from tests.helpers.pretend_gpu import pretend

pytestmark = pytest.mark.gpu_code

TILES = (CandidateTile(64, 64, 8), CandidateTile(64, 32, 8), CandidateTile(64, 32, 4, stages=2))

KERNEL = """\
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties

@triton_heuristics.fixed_config(
    config={'XBLOCK': 64, 'R0_BLOCK': 64},
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'in_out_ptr1': '*fp32', 'xnumel': 'i32', 'r0_numel': 'i32', 'XBLOCK': 'constexpr', 'R0_BLOCK': 'constexpr'}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32), 'constants': {}, 'configs': [{}]},
    inductor_meta={'grid_type': 'Grid1D', 'kernel_name': 'kernel', 'mutated_arg_names': ['in_out_ptr1'], 'optimize_mem': False, 'autotune_local_cache': True, 'backend_hash': 'any'}
)
@triton.jit
def kernel(in_ptr0, in_out_ptr1, xnumel, r0_numel, XBLOCK : tl.constexpr, R0_BLOCK : tl.constexpr):
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tl.store(in_out_ptr1 + r0_offset, tl.load(in_ptr0 + r0_offset))
"""


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("kernel", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a kernel that has three configurations."""
    file = tmp_path / "kernel.py"
    file.write_text(with_candidates(KERNEL, TileCandidates(TILES)))
    return file


def _blocks(tuner: Any) -> list[tuple[int, int, int, int]]:
    return [(c.kwargs["XBLOCK"], c.kwargs["R0_BLOCK"], c.num_warps, c.kwargs["NUM_STAGES"]) for c in tuner.configs]


def test_the_fastest_is_chosen_and_kept_on_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = _load(file)
    assert _blocks(tuner) == [(64, 64, 8, 1), (64, 32, 8, 1), (64, 32, 4, 2)]
    extra = {"n_regs": 32, "n_spills": 0, "shared": 0, "cache_hash": "any", "store_cubin": False}
    tuner.launchers = [_Launcher(c, extra) for c in tuner.configs]
    times = dict(zip(tuner.launchers, (3.0, 1.0, 2.0), strict=True))
    monkeypatch.setattr(CachingAutotuner, "bench", lambda _, launcher, *args, **kwargs: times[launcher])
    best = tuner.launchers[1]
    tuner.autotune_to_one_config()
    assert tuner.launchers == [best]
    assert _blocks(_load(file)) == [(64, 32, 8, 1)]  # as a later process loads it


class _Launcher:
    """Stands in for a compiled kernel."""

    def __init__(self, config: Any, extra: dict[str, Any]) -> None:
        self.config = config
        vars(self).update(extra)


def test_what_a_kernel_writes_in_place_is_copied_to_time_it(file: Path) -> None:
    tuner, x, written = _load(file), torch.ones(4), torch.zeros(4)
    (x_copy, copy, *_), _ = tuner.clone_args(x, written, 4, 4)
    assert x_copy is x
    assert copy is not written and torch.equal(copy, written)


def test_nothing_is_loaded_ahead_of_a_store_to_the_same_tensor() -> None:
    again = KERNEL.replace("tl.load(in_ptr0", "tl.load(in_out_ptr1")
    code = with_candidates(again, TileCandidates(TILES))
    assert "'NUM_STAGES': 2" not in code and code.count("triton.Config(") == 3


def test_the_text_must_be_inductors() -> None:
    with pytest.raises(ValueError, match="0 times in a kernel that Inductor wrote"):
        with_candidates(KERNEL.replace("fixed_config", "other_config"), TileCandidates(TILES))


def test_a_program_that_holds_a_row_is_timed_with_several_numbers_of_warps() -> None:
    config = TileCandidates([CandidateTile(1, 4096, 4), CandidateTile(1, 4096, 8)])
    code = with_candidates(
        KERNEL.replace(LOOP, "if True:").replace("'XBLOCK': 64, 'R0_BLOCK': 64", "'XBLOCK': 1, 'R0_BLOCK': 4096"),
        config,
    )
    assert re.findall(r"triton.Config\((.*?)\)", code) == [
        f"{{'XBLOCK': 1}}, num_warps={n}, num_stages=1" for n in (4, 8)
    ]
    assert "HeuristicType.PERSISTENT_REDUCTION" in code and "NUM_STAGES" not in code


def test_columns_are_not_held_as_rows_are() -> None:
    """A program would read one element of each sector."""
    assert pretend("candidates", "90", "long columns", "") == {}


@pytest.mark.parametrize(("r", "warps"), [(1500, [2, 4]), (4096, [4, 8]), (14336, [16, 32])])
def test_warps_of_a_row(r: int, warps: list[int]) -> None:
    features = _Features("max")
    features.reduction_numel = r
    chosen = _of_whole_rows(features)
    assert isinstance(chosen, TileCandidates) and [t.warps for t in chosen.tiles] == warps
    with inductor_config.patch(deterministic=True):
        assert isinstance(_of_whole_rows(features), TileCandidates)  # a maximum does not depend on the order
        features.types = ("sum", "max")
        assert not isinstance(_of_whole_rows(features), TileCandidates)


def test_tiles_are_not_larger_than_the_tensor() -> None:
    assert fitting(TILES, 8192, 4096) == list(TILES)
    assert fitting(TILES, 33, 20) == [TILES[1], TILES[2]]
    assert fitting(TILES, 32, 64) == [TILES[0]]  # none fits


class _Features:
    """Stands in for what Inductor knows about a kernel that reduces."""

    numel, reduction_numel = 8192, 4096

    def __init__(self, *types: str) -> None:
        self.types = types

    def scheduler_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(is_reduction=lambda: True, node=SimpleNamespace(get_reduction_type=lambda t=t: t))
            for t in self.types
        ]


@pytest.mark.parametrize("along", _TILES)
@pytest.mark.parametrize("by", ["torch", "inductor"])
def test_deterministic_sums_have_one_configuration(along: str, by: str) -> None:
    """A maximum does not depend on the order, so a kernel with an amax alone is timed all the same."""

    def tiles(*types: str) -> FixedTritonConfig:
        graph: Any = SimpleNamespace(sizevars=SimpleNamespace(optimization_hint=int))
        with Virtualized.set_graph_handler(graph):
            return _tiles(_Features(*types), along)

    torch.use_deterministic_algorithms(by == "torch")
    try:
        with inductor_config.patch(deterministic=by == "inductor"):
            fixed, amax = tiles("max", "sum"), tiles("max")
    finally:
        torch.use_deterministic_algorithms(False)
    assert not isinstance(fixed, TileCandidates) and fixed.config == _TILES[along][0].fixed
    assert isinstance(amax, TileCandidates) and amax.tiles == _TILES[along]
    several = tiles("max", "sum")
    assert isinstance(several, TileCandidates) and several.tiles == _TILES[along]
    with inductor_config.patch(max_autotune=True):
        more = tiles("sum")
    assert isinstance(more, TileCandidates) and more.tiles == _TILES[along] + _MORE_TILES[along]


ARCHITECTURES = [90, *(pytest.param(n, marks=pytest.mark.variant) for n in (89, 100, 120))]


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize(
    ("what", "configurations"),
    [
        ("norm", len(_TILES["rows"])),
        ("delayed", len(_TILES["columns"])),
        ("long rows", len(_ELEMENTS_OF_A_ROW)),
        pytest.param("step", len(_TILES["rows"]), marks=pytest.mark.variant),
    ],
)
def test_no_candidate_spills(capability: int, what: str, configurations: int) -> None:
    """Compile a norm, activations and, of a step, AdamW's update with FP8 copies, with all their tiles."""
    found = pretend("candidates", str(capability), what, "layer")
    assert max(len(spilled) for spilled in found.values()) == configurations
    # 32 warps have 64 registers per thread, and a norm's loop one value more with the code for sm_100
    allowed = 8 if (what, capability) == ("norm", 100) else 0
    assert all(n <= allowed for spilled in found.values() for n in spilled), found
