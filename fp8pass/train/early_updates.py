"""Update parameters while the backward runs: `update_in_backward` of `fp8pass.train_step`.

The first call of a step updates at `optimizer.step()`, as always. It shows in which order gradients are complete, and
whether anything, such as clipping, writes into them between the backward and the update. From the second call on,
parameters whose gradients are complete one after another form a bucket of at least `update_bucket_bytes`. As soon as
the last gradient of a bucket is complete, a compiled update of these parameters runs, and their gradients are freed. So
`optimizer.step()` finds no gradients, except those of parameters that are in no bucket of this call.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fp8pass.base._torch import undecorated_step
from fp8pass.base.errors import Fp8Error
from fp8pass.weights.update_count import repeat_count

Compile = Callable[[Callable[[], None]], Callable[[], None]]

_WHY = "update_in_backward=True updates a parameter as soon as its gradient is complete"


@dataclass
class _Bucket:
    """Parameters that are updated together, when the last of their gradients is complete. waits_for: those without."""

    parameters: list[Tensor]
    part: _PartOfUpdate
    waits_for: set[int] = field(default_factory=set)


@dataclass
class _Seen:
    """A parameter, as the first call has shown it. grad: its gradient, of this version when it was complete."""

    parameter: Tensor
    grad: Tensor
    version: int
    backwards: int = 1


class EarlyUpdates:
    """The updates that a training step runs in its backward.

    compiled: compiles a function that takes no arguments. bucket_bytes: the number of bytes of gradients from which an
    update runs.
    """

    def __init__(self, compiled: Compile, bucket_bytes: int) -> None:
        self._compiled = compiled
        self._bucket_bytes = bucket_bytes
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._names: dict[int, str] = {}
        self._seen: dict[int, _Seen] = {}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)  # parameters and optimizers keep their hooks
        self._on = False
        self._done: set[int] = set()
        """The parameters that were updated in the current call."""
        self._begun: set[int] = set()
        """The optimizers of which a part has run in the current call."""
        self._steps: list[int] = []
        """The number of `step` calls of each optimizer in the current call, in a list, which Dynamo can write to."""
        self._live = 0
        self.peak_bytes, self.all_bytes = 0, 0
        """In the latest call: the most bytes of complete gradients that were held at once, and those of all."""

    @property
    def held_bytes(self) -> int | None:
        """The most bytes of complete gradients at once in the latest call; None without updates in its backward."""
        return self.peak_bytes if self._done else None

    def note(self) -> str:
        """Return a sentence for reports, about the latest call; "" before the first update in a backward."""
        if not self._done:
            return ""
        return (
            f"{len(self._done)} parameters were updated in {len(self._buckets)} parts while the backward ran: at most "
            f"{self.peak_bytes / 1e6:.1f} MB of complete gradients were held, of {self.all_bytes / 1e6:.1f} MB"
        )

    def rehearse(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Begin the first call: watch the gradients of all parameters of the optimizers.

        Raises Fp8Error for a model that reduces gradients among ranks after they are complete.
        """
        if ddp := [m for m in models if isinstance(m, DistributedDataParallel)]:
            raise Fp8Error(
                f"train_step: {_WHY}, and {type(ddp[0]).__name__} reduces gradients among ranks only afterwards. Use "
                "FSDP2 (fully_shard), whose gradients are reduced when they are complete, or leave update_in_backward "
                "out"
            )
        self.close()
        self._names = {id(p): name for m in models for name, p in m.named_parameters()}
        for i, optimizer in enumerate(optimizers):
            self._optimizers.append(weakref.ref(optimizer))
            self._steps.append(0)
            self._handles.append(optimizer.register_step_post_hook(_counting(self._steps, i)))
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.requires_grad:
                        self._handles.append(p.register_post_accumulate_grad_hook(_held_weakly(self._complete)))

    def begin(self) -> None:
        """Begin a call of the step."""
        self._on = True
        self._done.clear()
        self._begun.clear()
        self._steps[:] = [0] * len(self._steps)  # in place: the optimizers' hooks hold this list
        self._live = self.peak_bytes = self.all_bytes = 0
        for bucket in self._buckets:
            bucket.waits_for = set(map(id, bucket.parameters))

    def end(self, changed: bool = True) -> None:
        """End a call. Raises Fp8Error if it shows that parameters can't be updated in the backward.

        changed: False if the first call has changed no parameter.
        """
        self._on = False
        if self._seen:
            self._plan(changed)
        elif self._done and not all(self._steps):
            raise Fp8Error(
                f"train_step: {_WHY}, and this call ran no optimizer.step(), so {len(self._done)} parameters were "
                "updated too early. A step with gradient accumulation needs update_in_backward=False"
            )

    def close(self) -> None:
        """Remove all hooks, and forget everything."""
        _remove(self._handles)
        for items in (self._optimizers, self._steps, self._buckets):
            items.clear()
        for by_id in (self._names, self._seen, self._bucket_of, self._done):
            by_id.clear()

    def _complete(self, p: Tensor) -> None:
        """Note that a gradient is complete; run the update of its bucket if it is the last one."""
        if not self._on or p.grad is None:
            return
        if id(p) in self._done:
            # raised in the hook, so in the backward: the parameter has been changed between the two
            raise Fp8Error(
                f"train_step: {_WHY}, and {self._names.get(id(p), 'a parameter')} has got a second gradient in the "
                "same call. A step with several backwards needs update_in_backward=False"
            )
        self._live += nbytes_here(p.grad)
        self.all_bytes += nbytes_here(p.grad)
        self.peak_bytes = max(self.peak_bytes, self._live)
        bucket = self._bucket_of.get(id(p))
        if bucket is not None:
            bucket.waits_for.discard(id(p))
            if not bucket.waits_for:
                self._update(bucket)
        elif not self._buckets:
            self._see(p)

    def _see(self, p: Tensor) -> None:
        assert p.grad is not None
        if (seen := self._seen.get(id(p))) is not None:
            seen.backwards += 1
            seen.grad, seen.version = p.grad, p.grad._version
        else:
            self._seen[id(p)] = _Seen(p, p.grad, p.grad._version)

    def _update(self, bucket: _Bucket) -> None:
        whole = id(bucket.part.whole())
        bucket.part(whole not in self._begun)
        self._begun.add(whole)
        for p in bucket.parameters:
            assert p.grad is not None
            self._live -= nbytes_here(p.grad)
            p.grad = None
            self._done.add(id(p))

    def _plan(self, changed: bool) -> None:
        """Divide the parameters into buckets, in the order in which the first call has completed their gradients."""
        seen = list(self._seen.values())
        self._seen.clear()
        self._check(seen, changed)
        for optimizer in (ref() for ref in self._optimizers):
            assert optimizer is not None
            # a bucket has parameters of one optimizer, whose step updates them
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            of_bucket: list[_Seen] = []
            of_optimizer = [s for s in seen if id(s.parameter) in ids]
            for s in of_optimizer:
                of_bucket.append(s)
                if sum(nbytes_here(x.grad) for x in of_bucket) >= self._bucket_bytes or s is of_optimizer[-1]:
                    self._add([x.parameter for x in of_bucket], optimizer)
                    of_bucket = []

    def _add(self, parameters: list[Tensor], optimizer: Optimizer) -> None:
        bucket = _Bucket(parameters, _PartOfUpdate(optimizer, parameters, self._compiled, len(self._buckets)))
        self._buckets.append(bucket)
        self._bucket_of.update({id(p): bucket for p in parameters})

    def _check(self, seen: Sequence[_Seen], changed: bool) -> None:
        """Raise Fp8Error if the first call did something that an update in the backward would come before."""
        if not changed:
            raise Fp8Error(
                f"train_step: {_WHY}, and the first call updated no parameter. Each call must end with an "
                "optimizer.step() that updates all of them; otherwise leave update_in_backward out"
            )
        if several := [s for s in seen if s.backwards > 1]:
            raise Fp8Error(
                f"train_step: {_WHY}, and {self._names.get(id(several[0].parameter), 'a parameter')} got "
                f"{several[0].backwards} gradients in the first call, one from each backward. Call backward once in "
                "each step, or leave update_in_backward out"
            )
        if late := [s for s in seen if s.grad._version != s.version]:
            raise Fp8Error(
                f"train_step: {_WHY}, and something in the first call wrote into the gradient of "
                f"{self._names.get(id(late[0].parameter), 'a parameter')} after that. Clipping by the norm of all "
                "gradients, GradScaler, and zero_grad(set_to_none=False) do so. Leave these out, or update_in_backward"
            )


class _PartOfUpdate:
    """The step of an optimizer for some of its parameters. It shares the optimizer's state, and reads its options."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor], compiled: Compile, number: int) -> None:
        self.whole = weakref.ref(optimizer)
        ids = set(map(id, parameters))
        # without `__init__`, which would make other groups and hyperparameters; without hooks, which the whole
        # optimizer's own step calls
        self._part = object.__new__(type(optimizer))
        hooks = {name: type(value)() for name, value in vars(optimizer).items() if name.endswith("_hooks")}
        # a `step` among the attributes is a scheduler's, which counts calls of the whole optimizer
        vars(self._part).update({**vars(optimizer), **hooks})
        vars(self._part).pop("step", None)
        self._groups = [
            (i, {**group, "params": kept})
            for i, group in enumerate(optimizer.param_groups)
            if (kept := [p for p in group["params"] if id(p) in ids])
        ]
        self._part.param_groups = [group for _, group in self._groups]
        self._run = compiled(_step_of(self._part, number))

    def __call__(self, is_first: bool) -> None:
        """Run the step. Raises Fp8Error for an optimizer that counts steps in its groups, which all parts share.

        is_first: True if no other part of the optimizer has run in the same call of the training step.
        """
        whole = self.whole()
        assert whole is not None, "its parameters can't get gradients without a step of this optimizer"
        if not is_first:
            repeat_count(whole)  # all parts are one update, which rounds with the bits of its number
        self._part.state = whole.state  # `load_state_dict` replaces it
        for i, group in self._groups:
            group.update({name: value for name, value in whole.param_groups[i].items() if name != "params"})
        self._run()
        for i, group in self._groups:
            whole_group = whole.param_groups[i]
            if changed := [n for n, value in group.items() if n != "params" and value is not whole_group[n]]:
                raise Fp8Error(
                    f"train_step: {type(whole).__name__} changes {changed[0]!r} of its param_groups in each step, so "
                    "its parameters can't be updated in parts. Leave update_in_backward out"
                )


def _step_of(optimizer: Optimizer, number: int) -> Callable[[], None]:
    """Return a function that does a step. Its code is a new object: Dynamo compiles only a few variants of one."""
    step = undecorated_step(optimizer)

    def update() -> None:
        step(optimizer)

    code = update.__code__.replace(co_name=f"update_{number}")
    return types.FunctionType(code, update.__globals__, None, None, update.__closure__)


def nbytes_here(x: Tensor) -> int:
    """Return the bytes of a tensor, or of this rank's shard of a DTensor."""
    return (x.to_local() if isinstance(x, DTensor) else x).nbytes


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _counting(counts: list[int], i: int) -> Callable[..., None]:
    def count(*_: Any) -> None:
        counts[i] += 1

    return count


def _held_weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that does not keep the object of a method alive: parameters keep their hooks.

    Dynamo does not trace the hook. The updates that it calls are compiled.
    """
    ref = weakref.WeakMethod(method)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hook(p: Tensor) -> None:
        if (bound := ref()) is not None:
            bound(p)

    disabled: Callable[[Tensor], None] = hook
    return disabled
