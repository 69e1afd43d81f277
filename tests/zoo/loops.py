"""The zoo's training loops, after nanoGPT and modded-nanogpt, with models of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fp8pass
from tests.zoo import toys
from tests.zoo.row import OPTIONS, STEPS, Failed, Matmuls, Row

MICROBATCHES = 2
LOSS = 0.02
"""The largest relative difference between a loss and eager's."""


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a microbatch, divided by the number of microbatches."""
    return model(input_ids=tokens, labels=tokens).loss / MICROBATCHES


def ordinary(model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Tensor) -> Tensor:
    """Take one step as both loops do: accumulate microbatches, clip gradients, run the optimizers; return the loss."""
    total = batch.new_zeros((), dtype=torch.float32)
    for tokens in batch.chunk(MICROBATCHES):
        loss = loss_of(model, tokens)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return nanoGPT's optimizer: AdamW with weight decay for matrices, and without for vectors."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), foreach=True)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return modded-nanogpt's optimizers: Muon for the matrices of the blocks, Adam for all other parameters."""
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "head" not in n]
    others = [p for p in model.parameters() if not any(p is q for q in inner)]
    return [torch.optim.Muon(inner, lr=0.02, momentum=0.95), torch.optim.Adam(others, lr=3e-3, betas=(0.8, 0.95))]


@dataclass(frozen=True)
class Loop:
    """A model, a function that returns its optimizers, a batch, and fields of `fp8pass.Config`."""

    model: nn.Module
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]
    batch: Tensor
    options: Mapping[str, Any] = field(default_factory=dict)

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return the checks in order, each named after its stage."""
        c = _Checks(row, self)
        return [c.eager, c.explain, c.train, c.resume]

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        model, optimizers = self.fresh()
        run = torch.compile(ordinary, backend=backend)
        for _ in range(STEPS):
            run(model, optimizers, self.batch)

    def fresh(self) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return a copy of the untrained model, and its optimizers."""
        model = copy.deepcopy(self.model)
        return model, self.optimizers(model)


class _Checks:
    def __init__(self, row: Row, loop: Loop) -> None:
        self.row, self.loop = row, loop
        self.losses: list[float] = []

    def eager(self) -> None:
        """Train in eager, and count the matmuls of one microbatch, since all microbatches run the same graph."""
        model, _ = self.loop.fresh()
        with Matmuls() as seen:
            loss_of(model, self.loop.batch.chunk(MICROBATCHES)[0]).backward()
        self.row.eager_matmuls, self.row.eager_flops = seen.number, seen.flops
        model, optimizers = self.loop.fresh()
        self.losses = [float(ordinary(model, optimizers, self.loop.batch)) for _ in range(STEPS)]

    def explain(self) -> None:
        """Fill the row from the report."""
        model, optimizers = self.loop.fresh()
        with mock.patch("fp8pass.inspect.explain_backend.draw_before"):
            self.row.tell(fp8pass.explain(ordinary, model, optimizers, self.loop.batch), model)

    def train(self) -> None:
        """Train with the whole step compiled, and compare the losses with eager's."""
        torch._dynamo.reset()
        (model, optimizers), step = self.loop.fresh(), self._step()
        for i, wanted in enumerate(self.losses):
            if i == STEPS - 1:
                parts: tuple[Any, ...] = model, *optimizers, fp8pass.state(model)
                self.saved = [copy.deepcopy(part.state_dict()) for part in parts]
            self.row.losses.append(float(step(model, optimizers, self.loop.batch)))
            if abs(self.row.losses[-1] - wanted) > LOSS * wanted:
                raise Failed("losses", f"step {i} has {self.row.losses[-1]:.4f}, eager {wanted:.4f}")
        self.row.notes += step.report.notes

    def resume(self) -> None:
        """Repeat the last step with another instance that loads the saved state: the bits must be the same."""
        (model, optimizers), step = self.loop.fresh(), self._step()
        parts: tuple[Any, ...] = model, *optimizers, fp8pass.state(model)
        for part, state in zip(parts, self.saved, strict=True):
            part.load_state_dict(state)
        again = float(step(model, optimizers, self.loop.batch))
        if again != self.row.losses[-1]:
            raise Failed("resume", f"loss {again!r} is not {self.row.losses[-1]!r}")

    def _step(self) -> Any:
        return fp8pass.train_step(**OPTIONS, **self.loop.options)(ordinary)


def of_transformers(name: str, optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]], **options: Any) -> Loop:
    """Return a training loop with a model of transformers."""
    import transformers

    model_class = getattr(transformers, name)
    model = model_class(toys.toy(model_class.config_class)).train()
    return Loop(model, optimizers, torch.randint(3, 200, (4, 32)), options)


LOOPS: dict[str, tuple[str, Callable[[nn.Module], list[torch.optim.Optimizer]], dict[str, Any]]] = {
    "loop.nanoGPT": ("GPT2LMHeadModel", adamw, {}),
    "loop.nanoGPT-fp8-moments": ("GPT2LMHeadModel", adamw, {"optimizer_state": "fp8"}),
    "loop.modded-nanogpt": ("NanoChatForCausalLM", muon, {}),
}
"""{loop: (class of its model, function that returns its optimizers, fields of `fp8pass.Config`)}."""
