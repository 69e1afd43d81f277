"""Training loops of the zoo, after nanoGPT and modded-nanogpt, of models that transformers has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import zoo_toys
from torch import Tensor, nn
from zoo_row import OPTIONS, STEPS, Failed, Matmuls, Row

import fp8pass

MICROBATCHES = 2
LOSS = 0.02
"""How far a loss may be from eager's, of it."""


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a microbatch, as its share of the batch's."""
    return model(input_ids=tokens, labels=tokens).loss / MICROBATCHES


def ordinary(model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Tensor) -> Tensor:
    """Take one step as both loops do: microbatches, gradients clipped, the optimizers."""
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
    """Return nanoGPT's: matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), foreach=True)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return modded-nanogpt's: Muon for the matrices of the blocks, Adam for the others."""
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "head" not in n]
    others = [p for p in model.parameters() if not any(p is q for q in inner)]
    return [torch.optim.Muon(inner, lr=0.02, momentum=0.95), torch.optim.Adam(others, lr=3e-3, betas=(0.8, 0.95))]


@dataclass(frozen=True)
class Loop:
    """A model, what makes its optimizers, a batch, and fields of `fp8pass.Config`."""

    model: nn.Module
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]
    batch: Tensor
    options: Mapping[str, Any] = field(default_factory=dict)

    def checks(self, row: Row) -> list[Callable[[], None]]:
        """Return what is done to it, in order, each named after its stage."""
        c = _Checks(row, self)
        return [c.eager, c.explain, c.train, c.resume]

    def train_with(self, backend: str) -> None:
        """Train it with another backend of torch.compile."""
        model, optimizers = self.fresh()
        run = torch.compile(ordinary, backend=backend)
        for _ in range(STEPS):
            run(model, optimizers, self.batch)

    def fresh(self) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return a copy of the model as it was, and its optimizers."""
        model = copy.deepcopy(self.model)
        return model, self.optimizers(model)


class _Checks:
    def __init__(self, row: Row, loop: Loop) -> None:
        self.row, self.loop = row, loop
        self.losses: list[float] = []

    def eager(self) -> None:
        """Train in eager, and count the matmuls of a microbatch: all are the same graph."""
        model, _ = self.loop.fresh()
        with Matmuls() as seen:
            loss_of(model, self.loop.batch.chunk(MICROBATCHES)[0]).backward()
        self.row.eager_matmuls, self.row.eager_flops = seen.number, seen.flops
        model, optimizers = self.loop.fresh()
        self.losses = [float(ordinary(model, optimizers, self.loop.batch)) for _ in range(STEPS)]

    def explain(self) -> None:
        """Fill the row from the report."""
        model, optimizers = self.loop.fresh()
        with mock.patch("fp8pass.debug.explain_backend.draw_before"):
            self.row.tell(fp8pass.explain(ordinary, model, optimizers, self.loop.batch), model)

    def train(self) -> None:
        """Train with the whole step compiled: losses beside eager's."""
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
        """Take the last step again with another instance: the same bits."""
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
    """Return a loop with a model of transformers."""
    import transformers

    model_class = getattr(transformers, name)
    model = model_class(zoo_toys.toy(model_class.config_class)).train()
    return Loop(model, optimizers, torch.randint(3, 200, (4, 32)), options)


LOOPS: dict[str, tuple[str, Callable[[nn.Module], list[torch.optim.Optimizer]], dict[str, Any]]] = {
    "loop.nanoGPT": ("GPT2LMHeadModel", adamw, {}),
    "loop.nanoGPT-fp8-moments": ("GPT2LMHeadModel", adamw, {"optimizer_state": "fp8"}),
    "loop.modded-nanogpt": ("NanoChatForCausalLM", muon, {}),
}
"""Maps each loop to its model, its optimizers, and fields of `fp8pass.Config`."""
