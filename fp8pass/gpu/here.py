"""Find out about the GPU that is there, once for each: how fast it is, which kernels it has; agree with other ranks.

published   the figures of its kind: see `target.py`
measured    those, changed by what three timed kernels reach here, in whole steps: see `speeds.py`
tried       which kernels work here, where the tables are not sure: see `tried.py`
agreed      what the first rank of a group has found, for all of them

A rank never waits for another one. The first rank that comes writes what it has found to the store of the process
group, at once and only if nothing is there; all others read it. So it does not matter which ranks come, and when: in
the midst of a compilation, or not at all, because a rank has nothing to compile.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from fp8pass.base._torch import store_of, unset_fake_temporarily
from fp8pass.base.errors import first_line, warn_once
from fp8pass.gpu import kept, kernel_kinds, machine_file, speeds, tried
from fp8pass.gpu.speeds import Speeds
from fp8pass.gpu.target import Target, published
from fp8pass.gpu.tried import Tried

log = logging.getLogger(__name__)

HOW = ("measured", "published")
"""Where figures of a GPU that is there come from, unless the option `machine` names a file."""
SECONDS = 0.45
"""The time that measuring takes, once for each kind of GPU and versions."""
_WAITS = tried.SECONDS + 5
"""Seconds that a process waits for another one on this machine that measures or tries; then the tables answer."""


@dataclass
class Known:
    """Holds what this process has found out about one GPU. used: the target of the latest compilation."""

    speeds: Speeds | None = None
    tried: list[Tried] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    used: Target | None = None


_known: dict[int, Known] = {}
_targets: dict[tuple[Any, ...], Target] = {}
_loaded: Target | None = None
"""The target of a state that was loaded: what is compiled after that is for this one."""


def published_here(device: torch.device) -> Target:
    """Return the published figures of the GPU, see `target.published`."""
    return published(torch.cuda.get_device_properties(device))


def target_here(device: torch.device, machine: str, ranks: Sequence[int], kinds: Iterable[str]) -> Target:
    """Return the target of a GPU that is there, the same at each call with the same arguments.

    machine: the option. ranks: those that have to agree; () if there are no others. kinds: the scales that the recipe
    asks for, see `kernel_kinds.KINDS`. Measures and tries nothing while a CUDA graph is captured.
    """
    key = device, machine, tuple(ranks), tuple(sorted(kinds))
    if key not in _targets:
        # CUDA forbids to synchronize while a graph is captured, as timing does; not kept, so that a later call measures
        if torch.cuda.is_current_stream_capturing():
            return published_here(device)
        with unset_fake_temporarily():  # Dynamo compiles under a fake mode, and real kernels are timed
            # kept for each key, so that what is compiled later is decided by the same figures
            _targets[key] = _agreed(_found_here(device, machine, key[-1]), ranks, _question(machine, key[-1]))
    known(device).used = _targets[key]
    return _targets[key]


def _found_here(device: torch.device, machine: str, kinds: Sequence[str]) -> Target:
    """Return the target that this rank finds, before it asks others."""
    base = published_here(device)
    if machine not in HOW:
        return _of_file(machine, base)
    if machine == "published" or not base.has_fp8:
        return base
    if _loaded is not None and _loaded.capability == base.capability:
        # its speeds alone: other versions of torch, or of CUDA, may have other kernels
        return with_kernels(replace(_loaded, **dict.fromkeys(kernel_kinds.KINDS)), kinds, device)  # type: ignore[arg-type]
    measured = measure(device)
    return with_kernels(base if measured is None else speeds.with_speeds(base, measured), kinds, device)


def _of_file(path: str, base: Target) -> Target:
    target = machine_file.load_machine(path)
    if target.capability != base.capability:
        raise ValueError(
            f"machine={path!r} describes {target.name}, {target.sm}, and this GPU is {base.name}, {base.sm}: write "
            "its file with `fp8pass machine`"
        )
    return target


def known(device: torch.device) -> Known:
    """Return what this process knows of a GPU by now."""
    return _known.setdefault(_index(device), Known())


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# ---------------------------------------------------------------------------------------------------------------------
# Speeds


def measure(device: torch.device) -> Speeds | None:
    """Return the speeds of a GPU, measured now or kept since; None with a warning where that fails."""
    known_gpu = known(device)
    if known_gpu.speeds is None:
        answer = _once(device, "speeds", lambda: asdict(speeds.measure(device, SECONDS)), known_gpu)
        known_gpu.speeds = None if answer is None else Speeds(**answer)
    return known_gpu.speeds


def _once(device: torch.device, what: str, find_out: Any, known_gpu: Known) -> Any:
    """Return what the file of this kind of GPU keeps under a name; where there is nothing, find out and keep it.

    Returns None, with a warning and a note in `known_gpu`, where that fails.
    """
    file = kept.file_of(torch.cuda.get_device_properties(device))
    if what in (answers := kept.read(file)):
        return answers[what]
    with kept.alone(file, _WAITS) as may_run:
        if what in (answers := kept.read(file)):  # another process was first
            return answers[what]
        if not may_run:
            return _stand_in(known_gpu, what, f"another process did not end in {_WAITS:.0f} s")
        try:
            answer = find_out()
        except (RuntimeError, OSError) as error:  # torch's errors, out of memory among them; no child can start
            return _stand_in(known_gpu, what, first_line(error))
        kept.write(file, {**answers, what: answer, "date": datetime.date.today().isoformat()})
    return answer


def written(device: torch.device, seconds: float) -> Target:
    """Measure a GPU for longer, and without rounding; try its kernels: the target for the file of this machine.

    Raises RuntimeError where the GPU can't be measured, for example for lack of memory.
    """
    gpu = torch.cuda.get_device_properties(device)
    base = replace(
        published(gpu), multiprocessors=gpu.multi_processor_count, shared_memory=gpu.shared_memory_per_multiprocessor,
        cache=gpu.L2_cache_size, memory=gpu.total_memory,
    )  # fmt: skip
    return with_kernels(
        speeds.with_speeds(base, speeds.measure(device, seconds), rounded=False), kernel_kinds.KINDS, device
    )


def _stand_in(known_gpu: Known, what: str, why: str) -> None:
    known_gpu.notes.append(f"{what}: {why}; published figures are used")
    warn_once(f"fp8pass: {known_gpu.notes[-1]}. Set FP8PASS_MACHINE to published, or to the path of a machine's file")


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


def with_kernels(target: Target, kinds: Iterable[str], device: torch.device) -> Target:
    """Return a target with the answers of trials, for the kinds asked for of which its tables are not sure."""
    asked = [kind for kind in kernel_kinds.unsure(target) if kind in kinds]
    if not asked:
        return target
    results = try_kinds(device, asked)
    answers: dict[str, Any] = {kind: tried.works(kind, results) for kind in asked}
    return replace(target, **answers)


def try_kinds(device: torch.device, kinds: Sequence[str]) -> list[Tried]:
    """Return the answers of trials of these kinds of scales, made now or kept since; [] of those that failed."""
    known_gpu, end = known(device), time.monotonic() + tried.SECONDS
    for kind in kinds:
        if any(t.kind == kind for t in known_gpu.tried):
            continue
        answers = _once(device, kind, functools.partial(_answers, kind, device, end), known_gpu)
        known_gpu.tried += [Tried(*answer) for answer in answers or ()]
    return known_gpu.tried


def _answers(kind: str, device: torch.device, end: float) -> list[list[Any]]:
    """Try one kind of scales until a time; return the answers as lists.

    Raises RuntimeError if they say nothing of the kernel.
    """
    results = tried.try_kinds([kind], str(device), max(1.0, end - time.monotonic()))
    if tried.works(kind, results) is None:
        raise RuntimeError(next((t.result for t in results if t.result), "nothing was tried"))
    return [list(asdict(t).values()) for t in results]


# ---------------------------------------------------------------------------------------------------------------------
# Ranks, and states


def _question(machine: str, kinds: Sequence[str]) -> str:
    """Return what ranks must have in common to share an answer: how it is found, and for which kinds of scales."""
    how = machine if machine in HOW else "a file"
    state = hashlib.sha256(machine_file.to_json(_loaded).encode()).hexdigest()[:8] if _loaded is not None else ""
    return "/".join((how, state, *kinds))


def _agreed(here: Target, ranks: Sequence[int], question: str) -> Target:
    """Return the target of the first of these ranks that asked this. here: this rank's target."""
    if len(ranks) < 2:
        return here
    key = f"{'-'.join(map(str, ranks))}/{question}"
    try:
        store = store_of(dist.group.WORLD, "fp8pass/target")  # type: ignore[arg-type]
        # sets the value only if the key has none, and returns the value that the key has then: the first rank's
        text = store.compare_set(key, "", machine_file.to_json(here)).decode()
    except RuntimeError as error:  # of c10d: its server is gone, or the store does not implement it
        warn_once(
            f"fp8pass: the store of torch.distributed fails, so each rank decides by its own GPU: {first_line(error)}"
        )
        return here
    chosen = machine_file.from_json(text, "another rank's target")
    if chosen.capability == here.capability:
        return chosen
    warn_once(
        f"fp8pass: a rank has a {chosen.name}, {chosen.sm}, and this one a {here.name}, {here.sm}: the speeds of the "
        "first decide for all ranks what runs in FP8, and each rank uses the kernels that it has"
    )
    return replace(chosen, **{name: getattr(here, name) for name in ("capability", *kernel_kinds.KINDS)})


def in_use(device: torch.device) -> Target | None:
    """Return the target that the latest compilation on a GPU was for; None before the first one, and on CPUs."""
    return known(device).used if device.type == "cuda" else None


def load(target: Target) -> None:
    """Use the target of a saved state for all that is compiled from now on, on GPUs of its compute capability."""
    global _loaded
    _loaded = target
    for known_gpu in _known.values():
        if known_gpu.used is not None and known_gpu.used != target and known_gpu.used.capability == target.capability:
            log.warning(
                "the loaded FP8 state was saved by a run that decided for %s, and this process has already compiled "
                "for %s, so other matmuls may be in FP8: load the state before the first call",
                machine_file.to_json(target), machine_file.to_json(known_gpu.used),
            )  # fmt: skip
    _targets.clear()  # they are found anew, by the loaded figures
