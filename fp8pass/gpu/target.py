"""`Target`: the figures of a GPU, of data sheets or measured; and those of the GPUs that are known by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Target:
    """One kind of device. Peaks are without sparsity, in operations per second; bandwidth in bytes per second.

    FP8's peak is that with float32 accumulation: GeForce GPUs accumulate in float16 at twice the rate, which training
    does not use. The shares and times say what kernels reach, for `roofline.py`: shares of a peak from 0 to 1, and
    times in seconds. Their defaults are from published measurements, the same for all devices; those of the H200 and
    the H100 are fitted to an H200 (`bench/kernel_times.py`), and the file of a measured machine replaces them
    (`machine_file.py`). What is None is that of the nearest GPU in `TARGETS`: see `sizes`.
    """

    name: str
    capability: tuple[int, int]
    bf16_peak: float
    fp8_peak: float
    bandwidth: float
    mxfp8_peak: float | None = None
    """The peak of MXFP8 in operations per second, where that is another one than FP8's."""
    # These two are fitted: bench/roofline.py prints the measurements, and docs/roofline.md has them.
    gemm_share: float = 0.64
    """The share of the arithmetic peak that a large matmul reaches, where the next two are None."""
    bf16_share: float | None = None
    """That share in BF16, and in other high precision."""
    fp8_share: float | None = None
    """That share in FP8 with one scale for each tensor, with fast accumulation."""
    # Before sm_100, whose tensor cores accumulate in float32. Fast accumulation is 1.1 to 1.2 times as fast:
    # https://github.com/pytorch/ao/issues/2377.
    slow_accum_share: float = 1 / 1.15
    """Speed of FP8 matmuls without fast accumulation, relative to those with it."""
    gemm_start: float = 4e-6
    """Fixed time of a matmul in seconds: launch, first loads, last stores, idle multiprocessors."""
    # 2.2 of 2.4 TB/s in large Triton kernels on an H100: torchao/testing/training/roofline_utils.py.
    memory_share: float = 0.92
    """The share of the bandwidth that a kernel reaches which reads and writes in order."""
    # A tiled transpose on a GH200: https://github.com/pytorch/pytorch/pull/194310. Inductor's cast with transposed copy
    # reached 1.4 of 2.4 TB/s in 2024 (0.58): https://github.com/pytorch/pytorch/issues/133242.
    transposed_share: float = 0.75
    """The share of the bandwidth that a kernel reaches which writes a transposed copy."""
    tiles_share: float = 0.75
    """The share that a kernel reaches which quantizes tile by tile, with one scale: see `tiles_source.py`."""
    rows_share: float = 0.92
    """The share of the bandwidth that a kernel reaches which reduces rows: norms, and amaxes."""
    # A Triton kernel that moves one element, on an H100: torchao/testing/training/roofline_utils.py.
    launch: float = 2e-6
    """Shortest time of any other kernel, in seconds."""
    multiprocessors: int | None = None
    shared_memory: int | None = None
    """Bytes of shared memory of one multiprocessor."""
    cache: int | None = None
    """Bytes of the L2 cache."""
    memory: int | None = None
    """Bytes of the GPU's memory."""
    clock: float | None = None
    """The highest clock of the multiprocessors in Hz."""
    rowwise: bool | None = None
    """Whether `_scaled_mm` takes a scale for each row there; None for what the table in `kernels.py` says."""
    blockwise: bool | None = None
    """Whether it takes scales for blocks of 1x128 and 128x128; None as above."""
    mxfp8: bool | None = None
    """Whether it takes e8m0 scales for blocks of 1x32; None as above."""

    @property
    def has_fp8(self) -> bool:
        """True if the device has FP8 tensor cores, which `_scaled_mm` needs: sm_89 (Ada) and later."""
        return self.capability >= (8, 9)

    def times(self, bf16: float, fp8: float, bandwidth: float) -> Target:
        """Return the target with its peaks, and its bandwidth, so many times as large."""
        return replace(
            self, bf16_peak=self.bf16_peak * bf16, fp8_peak=self.fp8_peak * fp8, bandwidth=self.bandwidth * bandwidth,
            mxfp8_peak=None if self.mxfp8_peak is None else self.mxfp8_peak * fp8,
        )  # fmt: skip

    @property
    def sm(self) -> str:
        """The architecture's name, as "sm_90"."""
        return "sm_{}{}".format(*self.capability)

    @property
    def bf16_rate(self) -> float:
        """The operations per second that a large BF16 matmul reaches."""
        return self.bf16_peak * (self.bf16_share or self.gemm_share)

    @property
    def fp8_rate(self) -> float:
        """The same in FP8 with one scale for each tensor, with fast accumulation."""
        return self.fp8_peak * (self.fp8_share or self.gemm_share)

    @property
    def mxfp8_rate(self) -> float:
        """The same with scales for blocks of 1x32, which `KERNEL_SHARE` of `roofline.py` slows down."""
        return self.fp8_rate * (self.mxfp8_peak or self.fp8_peak) / self.fp8_peak

    @property
    def copy_rate(self) -> float:
        """The bytes per second, read and written, that a large copy reaches."""
        return self.bandwidth * self.memory_share


def _gpu(
    name: str, capability: tuple[int, int], bf16: float, fp8: float, bandwidth: float,
    multiprocessors: int, cache: int, memory: int, clock: float, **more: Any,
) -> Target:  # fmt: skip
    """Return a target. bf16, fp8: TFLOPS. bandwidth: GB/s. cache: MiB. memory: GiB. clock: MHz."""
    return Target(
        name, capability, bf16 * 1e12, fp8 * 1e12, bandwidth * 1e9,
        multiprocessors=multiprocessors, cache=cache << 20, memory=memory << 30, clock=clock * 1e6, **more,
    )  # fmt: skip


_HOPPER = {"bf16_share": 0.81, "fp8_share": 0.725, "slow_accum_share": 1.0}
MEASURED = (*_HOPPER, "transposed_share", "rows_share")
"""The fields that are fitted to an H200 for the H100 and the H200."""

# Of NVIDIA's data sheets and architecture papers, sparse figures halved; those that are published nowhere are from
# multiprocessors, clock and operations per cycle. Shares that are given are from published measurements of that GPU.
# Sources of each GPU: docs/gpus.md.
_GPUS = (
    _gpu("a100", (8, 0), 312, 312, 2039, 108, 40, 80, 1410),
    _gpu("l4", (8, 9), 121, 242, 300, 58, 48, 24, 2040),
    _gpu("l40s", (8, 9), 362, 733, 864, 142, 96, 48, 2520),
    # FP8's peak is that of accumulation in float32, which GeForce GPUs halve: what is slow elsewhere is in it already.
    _gpu(
        "rtx4090", (8, 9), 165.2, 330.3, 1008, 128, 72, 24, 2520,
        bf16_share=0.92, fp8_share=0.85, slow_accum_share=1.0,
    ),
    _gpu("h20", (9, 0), 148, 296, 4000, 78, 60, 96, 1980, bf16_share=0.86, fp8_share=0.86),
    _gpu("h100_pcie", (9, 0), 756, 1513, 2039, 114, 50, 80, 1755),
    # The chip of the H200 with slower memory: kernels that memory limits only in part reach more of its bandwidth. The
    # last two shares are the H200's, with the other bandwidth in the p-norm of kernel_time.py.
    _gpu("h100", (9, 0), 989, 1979, 3350, 132, 50, 80, 1980, **_HOPPER, transposed_share=0.56, rows_share=0.73),
    _gpu("h200", (9, 0), 989, 1979, 4800, 132, 60, 141, 1980, **_HOPPER, transposed_share=0.41, rows_share=0.57),
    _gpu("gh200", (9, 0), 989, 1979, 4000, 132, 60, 96, 1980, **_HOPPER),
    # The data sheet rounds the bandwidth to 7.7 or 8 TB/s; the driver says 7680 bits at 3996 MHz, twice a cycle:
    # https://github.com/pytorch/ao/pull/4002.
    _gpu("b200", (10, 0), 2250, 4500, 7672, 148, 126, 180, 1965),
    _gpu("gb200", (10, 0), 2500, 5000, 8000, 152, 126, 186, 2062),
    _gpu("b300", (10, 3), 2250, 4500, 7672, 148, 126, 268, 2032),
    _gpu("gb300", (10, 3), 2500, 5000, 8000, 152, 126, 268, 2070),
    # GeForce GPUs of this generation halve FP8 with float32 accumulation, but not MXFP8:
    # https://github.com/flashinfer-ai/flashinfer/issues/3628.
    _gpu(
        "rtx5090", (12, 0), 209.5, 419, 1792, 170, 96, 32, 2407,
        mxfp8_peak=838e12, bf16_share=0.93, fp8_share=0.93,
    ),
    _gpu("rtx_pro_6000", (12, 0), 503.8, 1007.6, 1792, 188, 128, 96, 2617, bf16_share=0.73, fp8_share=0.61),
    _gpu("gb10", (12, 1), 125, 250, 273, 48, 24, 121, 2418, bf16_share=0.74, fp8_share=0.75),
)  # fmt: skip
_ARCHITECTURES = {
    "sm_80": "a100", "sm_89": "l40s", "sm_90": "h100", "sm_100": "b200", "sm_103": "b300", "sm_120": "rtx5090",
    "sm_121": "gb10",
}  # fmt: skip
TARGETS = {target.name: target for target in _GPUS}
TARGETS |= {architecture: TARGETS[name] for architecture, name in _ARCHITECTURES.items()}
"""GPUs by their names, and one for each architecture."""


@dataclass(frozen=True)
class PartSizes:
    """Holds how many parts of each kind a GPU has, and their sizes.

    multiprocessors: number of them. threads, shared, programs: most threads, bytes of shared memory and blocks that one
    of them runs at once. memory, cache: bytes of the GPU's memory and of its L2 cache. clock: in Hz, the highest.
    registers, schedulers: of one multiprocessor.
    """

    multiprocessors: int
    threads: int
    shared: int
    programs: int
    memory: int
    cache: int
    clock: float
    registers: int = 65536
    schedulers: int = 4


# {capability: most threads, KiB of shared memory, blocks}, of one multiprocessor: the table of technical specifications
# in the CUDA programming guide. A block may have 1 KiB less, which CUDA keeps for itself.
_MULTIPROCESSORS = {
    (8, 0): (2048, 164, 32),
    (8, 6): (1536, 100, 16),
    (8, 7): (1536, 164, 16),
    (8, 9): (1536, 100, 24),
    (9, 0): (2048, 228, 32),
    (10, 0): (2048, 228, 32),
    (11, 0): (1536, 228, 24),
    (12, 0): (1536, 100, 24),
}


def nearest(capability: tuple[int, int], geforce: bool = False) -> Target:
    """Return the GPU that stands for a compute capability: of the highest known one that is not above it.

    geforce: True for GeForce GPUs, which multiply at half the rate of others of their kind.
    """
    by_capability = {TARGETS[name].capability: TARGETS[name] for name in _ARCHITECTURES.values()}
    target = by_capability[max((c for c in by_capability if c <= capability), default=(8, 0))]
    of_kind = {(8, 9): ("l40s", "rtx4090"), (12, 0): ("rtx_pro_6000", "rtx5090")}.get(target.capability)
    return target if of_kind is None else TARGETS[of_kind[geforce]]


def sizes(target: Target) -> PartSizes:
    """Return the sizes of a GPU; where it does not say one, that of the nearest GPU, by its compute capability."""
    near = nearest(target.capability)
    threads, shared, programs = _MULTIPROCESSORS[
        max(c for c in _MULTIPROCESSORS if c <= max(target.capability, (8, 0)))
    ]
    given = {name: getattr(target, name) or getattr(near, name) for name in ("multiprocessors", "memory", "cache")}
    return PartSizes(
        threads=threads, shared=target.shared_memory or shared << 10, programs=programs,
        clock=target.clock or near.clock or 0.0, **given,
    )  # fmt: skip


def as_published(target: Target) -> Target:
    """Return a target with the defaults for all that is fitted to an H200: what others measured, in older versions."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(Target)}
    return replace(target, **{name: defaults[name] for name in MEASURED})


# What torch.cuda.get_device_name says, after "NVIDIA ".
_LABELS = {
    "A100.*80GB.*": "a100",
    "L4": "l4",
    "L40S": "l40s",
    "GeForce RTX 4090": "rtx4090",
    "H20(-3e)?": "h20",
    "H100 PCIe": "h100_pcie",
    "H100( 80GB HBM3)?": "h100",
    "H200( NVL)?": "h200",
    "GH200.*": "gh200",
    "B200.*": "b200",
    "GB200.*": "gb200",
    "B300.*": "b300",
    "GB300.*": "gb300",
    "GeForce RTX 5090": "rtx5090",
    "RTX PRO 6000 Blackwell.*": "rtx_pro_6000",
    "GB10": "gb10",
}


def named(label: str) -> Target | None:
    """Return the target of a GPU by the name that torch gives it, "NVIDIA H200"; None if it is not known."""
    label = label.removeprefix("NVIDIA ").partition(" MIG ")[0]
    return next((TARGETS[name] for pattern, name in _LABELS.items() if re.fullmatch(pattern, label)), None)


def published(properties: Any) -> Target:
    """Return the published figures of a GPU, from `torch.cuda.get_device_properties`.

    If its name is not known, they are those of the nearest one of its kind, for its number of multiprocessors, its
    clock and its memory.
    """
    capability, target = (properties.major, properties.minor), named(properties.name)
    if target is not None and target.capability == capability:
        return _part(target, properties)
    return _scaled(nearest(capability, "GeForce" in properties.name), properties)


def _part(whole: Target, properties: Any) -> Target:
    """Return the figures of a slice (MIG) of a GPU, or those of the whole GPU."""
    assert whole.multiprocessors is not None and whole.memory is not None
    share = properties.multi_processor_count / whole.multiprocessors
    if share > 0.9:
        return whole
    memory = min(1.0, properties.total_memory / whole.memory)
    part = whole.times(bf16=share, fp8=share, bandwidth=memory)
    return replace(part, multiprocessors=properties.multi_processor_count, memory=properties.total_memory)


def _scaled(near: Target, properties: Any) -> Target:
    """Return the figures of a GPU that is like `near`, but for its size. Clocks of properties are in kHz."""
    clock = 1e3 * getattr(properties, "clock_rate", 0) or near.clock or 0.0  # not in all versions of torch
    # 2: memory transfers data at both edges of its clock. 0 if torch does not tell: then it stays that of `near`
    bandwidth = 2e3 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8
    assert near.multiprocessors is not None and near.clock is not None
    times = properties.multi_processor_count * clock / (near.multiprocessors * near.clock)
    scaled = as_published(near).times(bf16=times, fp8=times, bandwidth=bandwidth / near.bandwidth or 1.0)
    return replace(
        scaled, name=properties.name, capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count, cache=properties.L2_cache_size,
        memory=properties.total_memory, clock=clock, shared_memory=properties.shared_memory_per_multiprocessor,
    )  # fmt: skip
