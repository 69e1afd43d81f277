"""`fp8pass inspect`: the kernels, bytes and predicted times of a training step on a GPU, without that GPU.

A child process (`process.py`), which pretends that the machine has the GPU, does the compiling. All times are
predictions of `roofline.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8pass.base.errors import Fp8Error
from fp8pass.base.fields import choose
from fp8pass.hardware import TARGETS
from fp8pass.inspect.kernel_time import Code, Work
from fp8pass.options.config import make_config

OPTIMIZERS = ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
PEERS = ("torchao:tensorwise", "torchao:rowwise", "torchao:rowwise_with_gw_hp")


@dataclass(frozen=True)
class Compiled:
    """A Triton kernel as machine code, in the one of Inductor's configurations that is predicted to be the fastest.

    loads, stores: widths in bits of one thread's global memory accesses, widest first. registers: per thread. spilled:
    bytes of local memory per thread. configurations: how many Inductor would try. code: what a prediction needs; None
    if the grid is not known. shared: bytes of shared memory per block.
    """

    loads: tuple[int, ...]
    stores: tuple[int, ...]
    registers: int
    spilled: int
    configurations: int
    code: Code | None = None
    shared: int = 0


@dataclass(frozen=True)
class Kernel:
    """One kernel of a training step, or one call of ATen.

    graph: "forward", "backward" or "update", numbered from the second graph of a kind on. kind: "triton", "gemm", or
    "extern" for another op of ATen. name: of the Triton kernel or the op. what: the computation in words. modules:
    paths of the model's modules that it belongs to. bytes_read, bytes_written: as Inductor's scheduler counts them,
    each tensor once. scratch: bytes of partial results written for the next kernel or read from the one before, not
    included in the other two. seconds: predicted. epilogue: bytes that a fused matmul moves more than the matmul alone
    would, or fewer if it is negative; included in the bytes too. bytes_formula, seconds_formula: of a matmul with a
    size that varies, its bytes and predicted seconds as expressions of torch's symbols, in Python; the numbers are
    those of the inputs given. pays_from: of a matmul, the rows M of its layer's input from which on the layer pays in
    FP8, in words: "1,184", or "never".
    """

    graph: str
    kind: str
    name: str
    what: str
    modules: str
    bytes_read: int
    bytes_written: int
    scratch: int
    seconds: float
    compiled: Compiled | None = None
    epilogue: int = 0
    bytes_formula: str = ""
    seconds_formula: str = ""
    pays_from: str = ""

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written, without scratch."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Held:
    """A tensor that compiled code has allocated, and holds when the step needs the most memory.

    graph, modules: what made it, as in `Kernel`. dtype: such as "bf16" or "e4m3". shape: as a kernel writes it.
    bytes: of its memory, which views share.
    """

    graph: str
    modules: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class InspectedRun:
    """The kernels and the memory of one way to train the model.

    bytes_saved: what the forward saves for the backward, without parameters and inputs. peak_bytes: the most memory
    that compiled code holds at once, in addition to parameters, inputs and state: outputs, what is saved for the
    backward, gradients, and what is computed on the way; 0 if it is not known, for a reason in `notes`. held: the
    tensors that it holds then, largest first.
    """

    name: str
    kernels: tuple[Kernel, ...]
    bytes_saved: int
    notes: tuple[str, ...] = ()
    peak_bytes: int = 0
    held: tuple[Held, ...] = ()

    def of(self, *kinds: str) -> list[Kernel]:
        """Return the kernels of these kinds."""
        return [k for k in self.kernels if k.kind in kinds]

    @property
    def gemm_bytes(self) -> int:
        """Bytes that matmuls read and write, without what their epilogues add."""
        return sum(k.bytes_moved - k.epilogue for k in self.of("gemm"))

    @property
    def rest_bytes(self) -> int:
        """Bytes that all other kernels, and the epilogues of matmuls, read and write, without scratch."""
        return sum(k.bytes_moved for k in self.of("triton", "extern")) + sum(k.epilogue for k in self.kernels)

    @property
    def launches(self) -> int:
        """Number of Triton kernel launches."""
        return len(self.of("triton"))

    @property
    def extern_launches(self) -> int:
        """Number of calls of ATen ops other than matmuls."""
        return len(self.of("extern"))

    @property
    def seconds(self) -> float:
        """Predicted time of the step, if its kernels run one after the other without gaps."""
        return sum(k.seconds for k in self.kernels)


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    runs: fp8pass; then BF16, the same model through plain Inductor; then the peer, if one was asked for and is
    installed.
    """

    spec: str
    target: str
    torch: str
    runs: tuple[InspectedRun, ...]
    notes: tuple[str, ...] = ()

    def run(self, name: str) -> InspectedRun:
        """Return the run with this name. Raises KeyError if there is none."""
        by_name = {run.name: run for run in self.runs}
        return by_name[name]


def inspect(
    spec: str,
    target: str = "h100",
    recipe: str = "delayed",
    *,
    peer: str | None = None,
    optimizer: str | None = None,
    ptx: bool = False,
    machine: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Inspection:
    """Compile the training step of `spec` for a GPU that this machine need not have.

    spec: "module:factory", a callable without arguments that returns `(model, *inputs)`, importable from the current
    directory too. machine: file of a measured machine, instead of `target`. peer: one of PEERS. optimizer: one of
    OPTIMIZERS; its update is compiled too, with FP8 copies of weights. ptx: compile every Triton kernel to machine
    code, for `Kernel.compiled`. options: further fields of `fp8pass.Config`, as JSON values. Raises ValueError for
    unknown names, and Fp8Error if something is missing or the model can't be compiled.
    """
    if machine is None:
        choose("target", target, tuple(TARGETS))
    if peer is not None:
        choose("peer", peer, PEERS)
    if optimizer is not None:
        choose("optimizer", optimizer, OPTIMIZERS)
    if ":" not in spec:
        raise ValueError(
            f"{spec!r} does not name a model: write module:factory, a callable that returns (model, *inputs)"
        )
    options = {**(options or {}), "recipe": recipe}
    make_config(options)
    request = {
        "spec": spec, "target": target, "peer": peer, "optimizer": optimizer, "ptx": ptx,
        "machine": str(machine) if machine else None, "options": options,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        paths = [str(Path.cwd()), *(p for p in sys.path if p)]
        # Empty caches, which no real compilation uses later: in the child process the GPU is only pretended.
        caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR"), folder)
        fixed = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}  # the same answer every time
        environment = {**os.environ, **fixed, **caches}
        command = [sys.executable, "-m", "fp8pass.inspect.process", json.dumps(request), str(answer)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        answer_fields = json.loads(answer.read_text()) if answer.exists() else {}
    if "error" in answer_fields:
        raise Fp8Error(answer_fields["error"])
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise Fp8Error(f"{spec} could not be compiled for {target}: {last}")
    return _inspection(answer_fields)


def _inspection(values: dict[str, Any]) -> Inspection:
    return Inspection(**{**values, "runs": tuple(map(_run, values["runs"])), "notes": tuple(values["notes"])})


def _run(values: dict[str, Any]) -> InspectedRun:
    lists = {"kernels": tuple(map(_kernel, values["kernels"])), "held": tuple(map(_held, values["held"]))}
    return InspectedRun(**{**values, **lists, "notes": tuple(values["notes"])})


def _held(values: dict[str, Any]) -> Held:
    return Held(**{**values, "shape": tuple(values["shape"])})


def _kernel(fields: dict[str, Any]) -> Kernel:
    compiled = fields["compiled"]
    if compiled is None:
        return Kernel(**fields)
    lists = {name: tuple(compiled[name]) for name in ("loads", "stores")}
    code = None if compiled["code"] is None else code_of(compiled["code"])
    return Kernel(**{**fields, "compiled": Compiled(**{**compiled, **lists, "code": code})})


def code_of(values: Mapping[str, Any]) -> Code:
    """Return the code that JSON describes, as `dataclasses.asdict` writes it."""
    return Code(**{**values, **{part: Work(**values[part]) for part in ("once", "loop")}})
