"""Count the bytes that a parameter costs in training: its value, FP8 copies, the optimizer's state, its gradient.

Everything is counted by the storages of the tensors that live, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8pass.quant.moments import moment_of
from fp8pass.weights.weight_cache import weights_of

PARAMETERS, COPIES, SCALES, GRADIENTS = "parameters", "FP8 copies", "scales and counts", "gradients"


@dataclass
class ParameterBytes:
    """Bytes of memory by part: "parameters", "FP8 copies", each entry of the optimizer's state ("exp_avg"), others.

    elements: the number of elements of all parameters. steady: bytes between two steps. gradients: bytes of the
    gradients when the optimizer's update began, as many as then live in addition; None if no update was compiled.
    """

    elements: int
    steady: dict[str, int] = field(default_factory=dict)
    gradients: int | None = None

    @property
    def per_parameter(self) -> dict[str, float]:
        """Bytes per element of a parameter, by part; with "gradients" if these are known."""
        parts = self.steady if self.gradients is None else {**self.steady, GRADIENTS: self.gradients}
        elements = max(self.elements, 1)  # a rank may have empty shards only
        return {part: n / elements for part, n in parts.items()}

    @property
    def peak(self) -> float:
        """Bytes per element of a parameter when the optimizer's update begins."""
        return sum(self.per_parameter.values())

    def __str__(self) -> str:
        by_part = self.per_parameter
        gradients = by_part.pop(GRADIENTS, None)
        parts = ", ".join(f"{part} {n:.2f}" for part, n in by_part.items())
        said = f"bytes per parameter: {parts}: {sum(by_part.values()):.2f} between steps"
        return said if gradients is None else f"{said}; with gradients, {gradients:.2f} more: {self.peak:.2f}"


def parameter_bytes(
    parameters: Sequence[Tensor], optimizers: Iterable[Optimizer], gradients: int | None = None
) -> ParameterBytes:
    """Count the bytes of tensors that live for these parameters. gradients: their bytes when an update began."""
    counted = set[int]()

    def nbytes(tensors: Iterable[Tensor]) -> int:
        new = {key: n for key, n in storages_of(tensors).items() if key not in counted}
        counted.update(new)
        return sum(new.values())

    # of a sharded parameter, the elements of this rank's shard
    elements = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    count = ParameterBytes(elements, gradients=gradients)
    count.steady[PARAMETERS] = nbytes(parameters)
    if weights := weights_of(parameters):
        count.steady[COPIES] = nbytes(x for w in weights for x in w.tensors)
    scales = [w.scales for w in weights]
    for name, states in _states(optimizers).items():
        moments = [m for m in map(moment_of, states) if m is not None]
        plain = [x for x in states if moment_of(x) is None]
        values = [*(m.x_q for m in moments), *(x for x in plain if x.dim())]
        if values:
            count.steady[name] = nbytes(values)
        scales += [m.moment_scales for m in moments] + [m.blocks for m in moments if m.blocks is not None]
        scales += [x for x in plain if not x.dim()]
    if scales:
        count.steady[SCALES] = nbytes(scales)
    return count


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage that the tensors have."""
    storages = (part.untyped_storage() for x in tensors for part in _parts(x))
    return {s._cdata: s.nbytes() for s in storages}


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor consists of: itself, unless it is a wrapper without storage."""
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:
        part = getattr(x, name)
        if isinstance(part, Tensor):  # a DTensor names its mesh, too
            yield from _parts(part)


def _states(optimizers: Iterable[Optimizer]) -> dict[str, list[Tensor]]:
    """Return the tensors of the optimizers' states by name."""
    by_name: dict[str, list[Tensor]] = {}
    for state in (state for o in optimizers for state in o.state.values()):
        for name, x in state.items():
            if isinstance(x, Tensor):
                by_name.setdefault(name, []).append(x)
    return by_name
