"""Check one model of the zoo: explain it, train it, compare it with eager and with the reference, and resume it."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import fp8pass
from fp8pass.graph.verdict import Gemm
from fp8pass.options.config import make_config
from fp8pass.passes.joint.expand_quantizers import ExpandQuantizers
from fp8pass.report.report import Report, collect
from tests.zoo.sums import exact_sums, exactly_if_asked

aten = torch.ops.aten
STEPS = 3
COSINE = 0.97
"""The least cosine between a parameter's gradient and eager's."""
NOISE = 2.0
"""A gradient with a smaller cosine may have at most this times the error of eager rounded to FP8."""
SHRINKS = (0.95, 0.9, 0.85, 0.8)
"""Factors of the scales with which eager rounds to FP8 once more, to get other rounding errors."""
ROUNDED = 1e-6
"""The relative difference that a gradient may have from the reference's.

If a factor after a matmul goes into its scale, one rounding is left out."""
SHAKEN = 1e-6
"""The relative change of weights that shows which gradients are left of sums that cancel out."""
OPTIONS: dict[str, Any] = {"lowering": "eager"}
FACTORS = {
    aten.mm.default: 0, aten.bmm.default: 0, aten._grouped_mm.default: 0, aten.addmm.default: 1,
    aten.baddbmm.default: 1,
}  # fmt: skip
"""{op: the index of its first operand among its arguments}."""


@dataclass(frozen=True)
class Sample:
    """A model, its inputs, and its inputs of a second length, or, if the length is fixed, of a second batch size.

    options: of the backend, in addition to those of all samples.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    others: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def checks(self, row: Row, options: Mapping[str, Any] = OPTIONS) -> list[Callable[[], None]]:
        """Return the checks in order, each named after its stage. options: of the backend."""
        c = _Checks(row, self, {**options, **self.options})
        return [c.eager, c.explain, c.train, c.resume, c.reference, c.evaluate]

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        model = copy.deepcopy(self.model)
        run = torch.compile(model, backend=backend)
        for i in range(STEPS):
            step(model, run, self.inputs, seed=i)
            update(model)


class Subject(Protocol):
    """A model or a training loop that is checked, with its results in a row."""

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return the checks in order, each named after its stage."""

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""


def loss_of(outputs: Any) -> Tensor:
    """Return the loss that the model computed; if it computes none, the mean squared distance to random numbers.

    The mean square itself would not do, because for a normalized output its gradient is 0.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, Tensor) and own.dim() == 0:
        return own
    distances = []
    for y in _tensors(outputs):
        if y.requires_grad:
            y = torch.view_as_real(y) if y.is_complex() else y
            target = torch.randn(y.shape, generator=torch.Generator().manual_seed(y.numel()))
            distances.append((y.float() - target).square().mean())
    return torch.stack(distances).sum()


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()))
    elif hasattr(tree, "__dict__") and type(tree).__module__.split(".")[0] not in ("builtins", "torch"):
        yield from _tensors(list(vars(tree).values()))


@dataclass
class Step:
    """The results of one step: the loss, and each parameter's gradient."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def seeded(seed: int) -> None:
    """Seed all generators that models draw from: BigBird draws its blocks, and wav2vec its masks, with numpy."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def step(model: nn.Module, run: Callable[..., Any], inputs: Mapping[str, Any], seed: int) -> Step:
    """Run one forward and backward, and return loss and gradients. Does not change the parameters."""
    seeded(seed)
    model.zero_grad()
    loss = loss_of(run(**inputs))
    loss.backward()
    grads = {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}
    return Step(loss.detach().clone(), grads)


def update(model: nn.Module, rate: float = 0.01) -> None:
    """Take a step of plain SGD in which each gradient is scaled to a length of at most 1."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(rate * p.grad / max(1.0, float(p.grad.norm())))


TENSORS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""The number of tensors that a convolution multiplies, which are its first arguments; the last is the weight."""


def _is_matmul(weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, *others: Any) -> bool:
    """Return whether each output of a convolution reads a part of the input that no other reads, of all channels."""
    kernel, groups = [*weight.shape[2:]], others[2]
    return groups == 1 and not any(padding) and (kernel == [1] * len(kernel) or kernel == [*stride])


class Matmuls(TorchDispatchMode):
    """Counts the matmuls that eager calls, and their FLOPs.

    It leaves out products with vectors, which Inductor computes as sums of products.

    rounds: round the operands of matmuls to FP8, without using fp8pass, also those of convolutions that are matmuls,
    which are not counted. The scale of an operand comes from its largest amax in earlier steps, in the first step from
    its own amax. Operands that the forward has seen are rounded to e4m3, gradients to e5m2. amaxes: {(number of the
    matmul, or less than 0 of the convolution; index of the operand): largest amax so far}. shrink: a factor for all
    scales.
    """

    def __init__(
        self, rounds: bool = False, amaxes: dict[tuple[int, int], Tensor] | None = None, shrink: float = 1.0
    ) -> None:
        super().__init__()
        self.rounds, self.shrink = rounds, shrink
        self.amaxes = {} if amaxes is None else amaxes
        self.flops = self.number = self.convolutions = 0
        self.backward = False
        self.seen: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op, and count it if it is a matmul; with `rounds`, call matmuls on rounded operands."""
        if func in FACTORS and args[FACTORS[func]].is_floating_point():
            at = FACTORS[func]
            a, b = args[at], args[at + 1]
            *batch, m, k = a.shape
            is_matrix = min(m, k, b.shape[-1]) > 1 and math.prod(batch) > 0
            self.number += is_matrix
            self.flops += is_matrix * 2 * math.prod(batch) * m * k * b.shape[-1]
            if self.rounds and is_matrix and math.prod(batch) <= 16:
                operands = (self._rounded(x, (self.number, i)) for i, x in enumerate((a, b)))
                args = (*args[:at], *operands, *args[at + 2 :])
        if self.rounds and func in TENSORS and _is_matmul(*args[TENSORS[func] - 1 :]):
            self.convolutions += 1
            operands = (self._rounded(x, (-self.convolutions, i)) for i, x in enumerate(args[: TENSORS[func]]))
            args = (*operands, *args[TENSORS[func] :])
        return func(*args, **(kwargs or {}))

    def _rounded(self, x: Tensor, at: tuple[int, int]) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if not self.backward:
            self.seen[place] = x  # a reference, so that no gradient gets this memory
        kind = torch.float8_e4m3fn if place in self.seen else torch.float8_e5m2
        largest = torch.finfo(kind).max
        amax = x.abs().amax().float()
        before = self.amaxes.get(at, amax)
        self.amaxes[at] = torch.maximum(amax, before)
        scale = self.shrink * largest / torch.where(before > 0, before, amax).clamp(min=1e-30)
        return (x.float() * scale).clamp(-largest, largest).to(kind).to(x.dtype) / scale.to(x.dtype)


def flops_through_aot(sample: Sample) -> int:
    """Return the matmul FLOPs of a step that AOTAutograd compiled, as torch's profiler counts them."""
    torch._dynamo.reset()
    model = copy.deepcopy(sample.model)
    run = torch.compile(model, backend="aot_eager_decomp_partition")
    for _ in range(2):  # the first step compiles the backward
        with profile(activities=[ProfilerActivity.CPU], with_flops=True, record_shapes=True) as seen:
            step(model, run, sample.inputs, seed=0)
    found = [e for e in seen.events() or () if e.name.removeprefix("aten::") in ("mm", "bmm", "addmm", "baddbmm")]
    shapes = [[x for x in e.input_shapes if x][-2:] for e in found]
    return sum(e.flops for e, of in zip(found, shapes, strict=True) if min(*of[0][-2:], of[1][-1]) > 1)


def eager_step(model: nn.Module, inputs: Mapping[str, Any], seed: int, mode: Matmuls) -> Step:
    """Run one step in eager within `mode`, and return loss and gradients."""

    def backward_begins(gradient: Tensor) -> Tensor:
        mode.backward = True
        return gradient

    seeded(seed)
    model.zero_grad()
    with mode:
        loss = loss_of(model(**inputs))
        loss.register_hook(backward_begins)
        loss.backward()
    grads = {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}
    return Step(loss.detach().clone(), grads)


@dataclass
class Beside:
    """A parameter's gradient compared with eager's, and the same of eager rounded to FP8 (rounded_...)."""

    cosine: float
    error: float
    rounded_cosine: float
    rounded_error: float

    @property
    def fault(self) -> str:
        """Return why the gradient is wrong; "" if it is right."""
        if self.cosine >= COSINE or self.error <= NOISE * self.rounded_error:
            return ""
        return f"cosine {self.cosine:.3f}; with rounding to FP8 alone it is {self.rounded_cosine:.3f}"


def beside(eager: Step, rounded: Step, ours: Step) -> dict[str, Beside]:
    """Return {parameter: comparison} for parameters with a gradient in eager.

    Raises Failed if a gradient is missing, is not finite, or should not exist.
    """
    found = {}
    for name, wanted in eager.gradients.items():
        got, other = ours.gradients[name], rounded.gradients[name]
        if wanted is None or not wanted.any():
            if got is not None and got.any():
                raise Failed("gradients", f"{name} has a gradient, but not in eager")
            continue
        if got is None or other is None:
            raise Failed("gradients", f"{name} has no gradient, but has one in eager")
        if not got.isfinite().all() and wanted.isfinite().all():
            raise Failed("gradients", f"{name} has a gradient that is not finite")
        found[name] = Beside(*_distance(wanted, got), *_distance(wanted, other))
    return found


def worse(found: Mapping[str, Beside], others: Mapping[str, Beside]) -> dict[str, Beside]:
    """Return, for each gradient, the comparison in which eager rounded to FP8 has the larger error.

    others: with other scales. Rounding sends a token to another expert by chance, so that one set of scales may do it
    and another may not.
    """
    return {n: b if b.rounded_error >= others[n].rounded_error else others[n] for n, b in found.items()}


def shaken(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights that are changed randomly, by about as much as float32 may round a sum."""
    noise = torch.Generator().manual_seed(0)
    return {
        name: x * (1 + SHAKEN * torch.randn(x.shape, generator=noise)) if x.is_floating_point() else x
        for name, x in weights.items()
    }


def _distance(wanted: Tensor, got: Tensor) -> tuple[float, float]:
    a, b = wanted.double().flatten(), got.double().flatten()
    cosine = float(a @ b / (a.norm() * b.norm()).clamp(min=1e-300))
    return cosine, float((a - b).norm() / a.norm())


def _in_fp8(report: Report) -> set[tuple[str, str]]:
    """Return the matmuls in FP8 as a set, because a graph that is compiled again lists the same matmuls again."""
    return {(g.name, g.kind) for g in report.rewritten}


def _alike(trained: set[tuple[str, str]], explained: set[tuple[str, str]]) -> bool:
    """Return whether these are the same matmuls. After a graph break, training knows only the ends of their names."""
    if trained == explained:
        return True

    def is_it(short: tuple[str, str], full: tuple[str, str]) -> bool:
        return short[1] == full[1] and f".{full[0]}".endswith(f".{short[0]}")

    return all(any(is_it(t, e) for e in explained) for t in trained) and all(
        any(is_it(t, e) for t in trained) for e in explained
    )


class Failed(Exception):
    """A check failed. stage: the name of the check."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage


def compare(
    stage: str,
    wanted: Sequence[Step],
    got: Sequence[Step],
    most: float = 0.0,
    shaky: Callable[[int], Mapping[str, float]] = lambda i: {},
) -> float:
    """Return the largest relative difference of a gradient: 0 if all bits are the same.

    Raises Failed if a gradient's difference is above `most`, and above what `shaky(i)` returns for it in the i-th step.
    """
    worst = 0.0
    for i, (one, other) in enumerate(zip(wanted, got, strict=True), 1):
        if not _same(one.loss, other.loss) and _away(one.loss, other.loss) > most:
            raise Failed(stage, f"in step {i}, the loss is {float(other.loss)!r}, not {float(one.loss)!r}")
        off = {n: _away(x, other.gradients[n]) for n, x in one.gradients.items() if not _same(x, other.gradients[n])}
        worst = max([worst, *off.values()])
        if too_far := [n for n, away in off.items() if not away <= most]:
            too_far = [n for n in too_far if not off[n] <= shaky(i).get(n, 0.0)]
        if too_far:
            raise Failed(
                stage, f"in step {i}, {len(too_far)} gradients are off by up to {worst:.1e}: {', '.join(too_far)}"[:300]
            )
    return worst


def _away(x: Tensor | None, y: Tensor | None) -> float:
    return math.inf if x is None or y is None else float((x - y).norm() / x.norm())


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def parts_of(name: str) -> list[str]:
    """Return the names of the matmuls that were merged: "a.q", "a.k" for "a.q+k"."""
    stem, *others = name.split("+")
    parent = stem.rpartition(".")[0]
    return [stem, *(other if "." in other or not parent else f"{parent}.{other}" for other in others)]


def _ends_of_names(model: nn.Module) -> set[str]:
    """Return all ends of parameters' names that begin at a module, since a graph after a break begins in a module."""
    paths = (name.removesuffix(".weight").split(".") for name, _ in model.named_parameters(remove_duplicate=False))
    return {".".join(path[i:]) for path in paths for i in range(len(path))}


@dataclass
class Row:
    """The results of one model. seconds: {stage: seconds}."""

    name: str
    status: str = "fails"
    stage: str = ""
    error: str = ""
    frame: str = ""
    trains_elsewhere: str = ""
    eager_matmuls: int = 0
    eager_flops: int = 0
    """FLOPs of matmuls in eager; if fewer have a verdict, at most those after AOTAutograd removed unused results."""
    unsized: int = 0
    """Number of matmuls with a size that depends on data, so that their FLOPs are unknown."""
    matmuls: int = 0
    rewritten: int = 0
    flops: int = 0
    fp8_flops: int = 0
    owned_flops: int = 0
    owned_fp8_flops: int = 0
    owned_flops_by_rule: dict[str, int] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    graphs: int = 0
    breaks: list[str] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    parameters: int = 0
    cosine: float = 1.0
    off_reference: float = 0.0
    """The largest relative difference between a gradient and the reference's."""
    excused: dict[str, tuple[float, float]] = field(default_factory=dict)
    """{parameter: (cosine of its gradient, cosine in eager rounded to FP8)} for cosines below `COSINE`."""
    cancelled: dict[str, float] = field(default_factory=dict)
    """{parameter whose gradient is left of sums that cancel out: cosine in eager between weights and shaken weights}"""
    losses: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def tell(self, report: Report, model: nn.Module) -> None:
        """Fill in the results of the report of `explain`."""
        self.matmuls, self.rewritten = len(report.matmuls), len(report.rewritten)
        self.flops, self.fp8_flops = _flops(report.matmuls), _flops(report.rewritten)
        self.unsized = sum(
            not all(isinstance(size, int) for size in (g.M, g.K, g.N, g.batches)) for g in report.matmuls
        )
        names = _ends_of_names(model)
        owned = [g for g in report.matmuls if {part.removesuffix(".weight") for part in parts_of(g.name)} & names]
        self.owned_flops = _flops(owned)
        self.owned_fp8_flops = _flops(g for g in owned if g.status == "rewritten")
        rules = {g.rule for g in owned if g.rule}
        self.owned_flops_by_rule = {rule: _flops(g for g in owned if g.rule == rule) for rule in rules}
        self.rules, self.graphs = dict(report.rules()), report.graphs
        self.reasons = dict(report.reasons().most_common(8))
        self.notes, self.breaks = report.notes, [str(b) for b in report.breaks]
        self.recompiles = [str(r) for r in report.recompiles]


def _flops(gemms: Iterable[Gemm]) -> int:
    """Return the FLOPs of matmuls; of a size that varies, those of the call."""
    return int(sum(g.in_call(g.flops) for g in gemms))


def fill(row: Row, make: Callable[[], Subject]) -> None:
    """Make a model, run all its checks, and write the results into the row."""
    try:
        seeded(0)
        with _Timed(row, "build"):
            subject = make()
        for check in subject.checks(row):
            with _Timed(row, getattr(check, "func", check).__name__):  # the name of a partial is its function's
                check()
        row.status = "trains"
    except Failed as failed:
        row.stage, row.error = failed.stage, str(failed)
    except Exception as error:  # noqa: BLE001  a model may raise anything, and its row reports it
        traceback.print_exception(_inner(error))
        row.error, row.frame = _told(error), _frame(error)
        if row.stage in ("explain", "train"):
            row.trains_elsewhere = trains_with(subject, "aot_eager")
    if row.stage in ("build", "eager"):
        row.status = "does not run"
    elif row.trains_elsewhere not in ("", "aot_eager"):
        row.status = "torch fails too"


@contextlib.contextmanager
def without_passes() -> Iterator[None]:
    """Within it, the annotated graph is lowered without further passes: the reference, with the same decompositions."""
    with (
        mock.patch("fp8pass.compiler.order.JOINT", (ExpandQuantizers(),)),
        mock.patch("fp8pass.compiler.order.KERNELS", ()),
    ):
        yield


class _Checks:
    def __init__(self, row: Row, sample: Sample, options: Mapping[str, Any]) -> None:
        self.row, self.options = row, options
        self.sample = sample
        self.weights: list[dict[str, Tensor]] = []
        self.states: list[dict[str, Any]] = []
        self.steps: list[Step] = []

    def eager(self) -> None:
        """Run a step in eager, and count its matmuls. A model that eager can't train is not a model for the zoo."""
        mode = Matmuls()
        made = eager_step(copy.deepcopy(self.sample.model), self.sample.inputs, 0, mode)
        self.row.eager_matmuls, self.row.eager_flops = mode.number, mode.flops
        if not all(g.isfinite().all() for g in made.gradients.values() if g is not None):
            raise Failed("eager", "the model has gradients that are not finite")

    def explain(self) -> None:
        """Fill the row from the report."""
        with mock.patch("fp8pass.inspect.explain_backend.draw_before"):  # the drawings are not used
            config = make_config(dict(self.sample.options))
            report = fp8pass.explain(copy.deepcopy(self.sample.model), config=config, **self.sample.inputs)
        self.row.tell(report, self.sample.model)
        if self.row.flops < self.row.eager_flops:
            self.row.eager_flops = min(self.row.eager_flops, flops_through_aot(self.sample))
        self.explained = _in_fp8(report)

    def train(self) -> None:
        """Train three steps, and compare each with an eager step from the same weights."""
        row, inputs = self.row, self.sample.inputs
        torch._dynamo.reset()
        model, plain = copy.deepcopy(self.sample.model), copy.deepcopy(self.sample.model)
        run = torch.compile(model, backend="fp8pass", options=dict(self.options))
        amaxes: dict[tuple[int, int], Tensor] = {}
        with collect() as report, exactly_if_asked():
            for i in range(STEPS):
                self.weights.append(copy.deepcopy(model.state_dict()))
                self.states.append(copy.deepcopy(fp8pass.state(model).state_dict()) if i else {})
                self.steps.append(step(model, run, inputs, seed=i))
                plain.load_state_dict(self.weights[-1])
                eager = eager_step(plain, inputs, i, Matmuls())
                plain.load_state_dict(self.weights[-1])
                rounded = eager_step(plain, inputs, i, Matmuls(rounds=True, amaxes=amaxes))
                found = beside(eager, rounded, self.steps[-1])
                if any(b.fault for b in found.values()):
                    plain.load_state_dict(shaken(self.weights[-1]))
                    self._leave_out(found, eager, eager_step(plain, inputs, i, Matmuls()))
                for shrink in SHRINKS if any(b.fault for b in found.values()) else ():
                    plain.load_state_dict(self.weights[-1])
                    other = eager_step(plain, inputs, i, Matmuls(rounds=True, amaxes=dict(amaxes), shrink=shrink))
                    found = worse(found, beside(eager, other, self.steps[-1]))
                self._compare(found, i)
                update(model)
        row.losses = [float(s.loss) for s in self.steps]
        if not _alike(_in_fp8(report), self.explained):
            raise Failed("train", f"trained with {report.summary()}, but explained with {row.rewritten}/{row.matmuls}")
        self.model, self.run = model, run

    def _leave_out(self, found: dict[str, Beside], eager: Step, moved: Step) -> None:
        """Leave out gradients that cancel, because there is nothing to compare with."""
        for name in [n for n, b in found.items() if b.fault]:
            wanted, got = eager.gradients[name], moved.gradients[name]
            assert wanted is not None and got is not None
            if (cosine := _distance(wanted, got)[0]) < COSINE:
                self.row.cancelled[name] = round(min(cosine, self.row.cancelled.get(name, 1.0)), 3)
                del found[name]

    def _compare(self, found: Mapping[str, Beside], i: int) -> None:
        row = self.row
        row.parameters = max(row.parameters, len(found))
        faults = [f"{name}: {b.fault}" for name, b in found.items() if b.fault]
        excused = {n: b for n, b in found.items() if b.cosine < COSINE and not b.fault}
        row.excused |= {n: (round(b.cosine, 3), round(b.rounded_cosine, 3)) for n, b in excused.items()}
        row.cosine = min([row.cosine, *(b.cosine for b in found.values() if b.cosine >= COSINE)])
        if faults:
            raise Failed("gradients", f"in step {i}, {len(faults)} are wrong: {'; '.join(faults[:3])}")

    def resume(self) -> None:
        """Repeat the later steps with another instance that loads weights and state: the bits must be the same."""
        compare("resume", self.steps[1:], self._take_again())

    def reference(self) -> None:
        """Repeat them with the annotated graph, through AOTAutograd without passes: the bits must be the same.

        Both runs compute exact sums, because passes change the layout of operands, which determines the order of
        additions. Only the rounding of intermediate results that passes remove may make a difference.
        """
        with exact_sums():
            ours = self._take_again()
        torch._dynamo.reset()
        with without_passes(), exact_sums():
            self.row.off_reference = compare("reference", self._take_again(), ours, ROUNDED, self._shaky)
        torch._dynamo.reset()

    def _shaky(self, i: int) -> dict[str, float]:
        """Return how much each gradient of step i, counted from 1, changes in eager if weights change by `SHAKEN`.

        If the terms of a sum in a gradient cancel out, one rounding less changes it more than `ROUNDED`.
        """
        model, steps = copy.deepcopy(self.sample.model), []
        for weights in self.weights[i], shaken(self.weights[i]):
            model.load_state_dict(weights)
            steps.append(eager_step(model, self.sample.inputs, i, Matmuls()))
        return {n: _away(x, steps[1].gradients[n]) for n, x in steps[0].gradients.items() if x is not None}

    def _take_again(self) -> list[Step]:
        model = copy.deepcopy(self.sample.model)
        run = torch.compile(model, backend="fp8pass", options=dict(self.options))
        fp8pass.state(model).load_state_dict(self.states[1])
        steps = []
        with exactly_if_asked():
            for i in range(1, STEPS):
                model.load_state_dict(self.weights[i])
                steps.append(step(model, run, self.sample.inputs, seed=i))
        return steps

    def evaluate(self) -> None:
        """Evaluate at a second length, and compare the shapes of outputs with eager's."""
        model, plain = self.model.eval(), copy.deepcopy(self.sample.model).eval()
        plain.load_state_dict(model.state_dict())
        outputs = []
        with torch.no_grad():
            for run in self.run, plain:
                seeded(0)
                outputs.append([x.shape for x in _tensors(run(**self.sample.others))])
        if outputs[0] != outputs[1]:
            raise Failed("evaluate", "outputs have different shapes than in eager")


class _Timed:
    def __init__(self, row: Row, name: str) -> None:
        self.row, self.name = row, name

    def __enter__(self) -> None:
        self.row.stage, self.started = self.name, time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.row.seconds[self.name] = round(time.perf_counter() - self.started, 1)
        if error[0] is None:
            self.row.stage = ""


def trains_with(subject: Subject, backend: str) -> str:
    """Return the backend's name if torch.compile trains the model with it; otherwise the backend and its error."""
    torch._dynamo.reset()
    try:
        subject.train_with(backend)
    except Exception as error:  # noqa: BLE001  a backend may raise anything, and the row reports it
        return f"{backend}: {_told(error)}"
    return backend


def _told(error: BaseException) -> str:
    inner = _inner(error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()] or [""]
    return f"{type(inner).__name__}: {lines[0]}"[:400]


def _inner(error: BaseException) -> BaseException:
    """Return the original error: Dynamo and fp8pass each wrap the errors that they catch."""
    while True:
        inner = getattr(error, "inner_exception", None) or (error.__cause__ if _wraps(error) else None)
        if not isinstance(inner, BaseException):
            return error
        error = inner


def _wraps(error: BaseException) -> bool:
    return isinstance(error, fp8pass.Fp8Error) or type(error).__module__.startswith("fp8pass")


def _frame(error: BaseException) -> str:
    """Return the last frame in fp8pass and the last frame, as "file.py:12 in f"."""
    root = Path(fp8pass.__file__).parent.parent
    frames = traceback.extract_tb(_inner(error).__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(root / "fp8pass") or "/passes/" in f.filename]
    told = [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in (*ours[-1:], *frames[-1:])]
    return "; ".join(dict.fromkeys(told))
