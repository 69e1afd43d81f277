"""Describe the software and hardware that fp8pass runs on, for a bug report: the text that `fp8pass env` prints."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from fp8pass import hardware
from fp8pass.base import versions
from fp8pass.base._torch import cpp_compiler
from fp8pass.base.errors import first_line
from fp8pass.base.scaling import FP8_DTYPES
from fp8pass.gpu import here, kernel_kinds
from fp8pass.gpu.speeds import Speeds, expected
from fp8pass.gpu.target import Target
from fp8pass.gpu.tried import Tried
from fp8pass.options.config import make_config
from fp8pass.recipes import NAMED, BlockwiseScaling, MXFP8Scaling, Recipe, RowwiseScaling


def describe() -> str:
    """Return plain text with one fact per line and without paths of the machine."""
    target, rows = None, [*_software(), *_devices()]
    try:
        target = _target()
    except (ValueError, OSError) as error:  # a machine file that is wrong, or of another GPU
        path = os.environ.get("FP8PASS_MACHINE", "")
        rows.append(("figures", f"published, for {first_line(error).replace(path, 'a path')}"))
    rows += [*_speeds(target), *_recipes(target), *_variables()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in rows)


def _software() -> Iterator[tuple[str, str]]:
    yield "fp8pass", versions.__version__
    yield "torch", f"{torch.__version__}, git {str(torch.version.git_version)[:12]}, {_build()}"
    yield "tested with", f"torch {', '.join(versions.TESTED)}"
    yield "Triton", _triton()
    yield "Python", platform.python_version()
    yield "system", platform.platform()
    yield "C++ compiler", _compiler()


def _build() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "no CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _compiler() -> str:
    command = cpp_compiler()
    if not command:
        return "none: torch compiles nothing for CPUs; install g++, or set CXX"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def _devices() -> Iterator[tuple[str, str]]:
    gpus = Counter(map(_gpu, range(torch.cuda.device_count())))
    for gpu, number in gpus.items():
        yield "GPU", gpu if number == 1 else f"{number} x {gpu}"
    if not gpus:
        yield "GPU", "none"
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    yield "CPU", f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    yield from _cpu_multiplies()


def _gpu(index: int) -> str:
    gpu = torch.cuda.get_device_properties(index)
    return f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"


def _cpu_multiplies() -> Iterator[tuple[str, str]]:
    """Yield how torch multiplies BF16, FP16 and FP8 matrices on this CPU."""
    slow = hardware.reference_dtypes()
    for name, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
        yield f"  {name} matmuls", "by a reference routine: slow, train in float32" if dtype in slow else "natively"
    e4m3 = FP8_DTYPES[0]
    emulated = hardware.why_emulated(torch.device("cpu"), e4m3, e4m3)
    yield "  FP8 matmuls", f"in float32: {emulated}" if emulated else "by torch._scaled_mm"


def _target() -> Target | None:
    """Return the figures of the first GPU by which it is decided what runs in FP8; None without a GPU."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return here.target_here(torch.device("cuda", 0), make_config().machine, (), kernel_kinds.KINDS)


def _speeds(target: Target | None) -> Iterator[tuple[str, str]]:
    """Yield the figures of the first GPU, and what was measured and tried."""
    if target is None or not target.has_fp8:
        return
    device, machine = torch.device("cuda", 0), make_config().machine
    base, known_gpu = here.published_here(device), here.known(device)
    yield "figures", f"{'of a file' if machine not in here.HOW else machine}: {figures(target)}"
    yield "  published", figures(base)
    if known_gpu.speeds is not None:
        yield "  measured", rates(known_gpu.speeds)
    for kind in kernel_kinds.KINDS:
        yield f"  {kind} kernels", _answer(kind, target, known_gpu.tried)
    for tried in known_gpu.tried:
        if tried.result:
            yield f"    {tried.kind}", f"{tried.case}: {tried.result}{'' if tried.needed else ' (not needed)'}"
    for note in known_gpu.notes:
        yield "  not found out", note


def figures(target: Target) -> str:
    """Return the name of a GPU, and the speeds that large kernels reach on it, in words."""
    return f"{target.name}, {target.sm}, {rates(expected(target))}"


def rates(speeds: Speeds) -> str:
    """Return speeds in words."""
    return f"BF16 {speeds.bf16 / 1e12:.0f} and FP8 {speeds.fp8 / 1e12:.0f} TFLOPS, copies {speeds.copy / 1e12:.2f} TB/s"


def _answer(kind: str, target: Target, tried: Sequence[Tried]) -> str:
    cases = [t for t in tried if t.kind == kind]
    why = kernel_kinds.why_not(kind, target)
    if not cases:
        return f"by the tables: {why or 'there'}"
    right = sum(not t.result for t in cases)
    return f"tried: {'do not work' if why else 'work'}, {right} of {len(cases)} cases are right"


def _recipes(target: Target | None) -> Iterator[tuple[str, str]]:
    """Yield how each recipe runs on the first GPU, or on the CPU if there is no GPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    target = hardware.target_of(device, target)
    yield "recipes on", str(device)
    for name, recipe in NAMED.items():
        yield f"  {name}", _how(recipe(), device, target)


def _how(recipe: Recipe, device: torch.device, target: Target | None) -> str:
    if reason := hardware.why_no_fp8(device, target):
        return f"declined: {reason}"
    if isinstance(recipe, (BlockwiseScaling, MXFP8Scaling)):
        reason = hardware.why_no_block_kernel(recipe.name, device, target)
        return f"dequantized: {reason}" if reason else "native"
    if isinstance(recipe, RowwiseScaling) and not hardware.scales_rows(device, target):
        return "native, scales of rows applied after the matmul"
    return "native"


def _variables() -> Iterator[tuple[str, str]]:
    """Yield the environment variables that fp8pass reads. Paths are left out: they may contain a person's name."""
    for name, value in sorted(os.environ.items()):
        if name.startswith("FP8PASS_"):
            yield name, "a path" if os.sep in value else value
