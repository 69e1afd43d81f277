"""Trains a small model and writes its checkpoint and report. Uses public names only, so that it runs with old releases.

    python tests/golden/make.py CHECKPOINT.pt REPORT.json

The checkpoint holds all that a run saves: parameters with those of a `ScaleState`, the state of `fp8pass.state`, and an
optimizer's state with moments in FP8. The report is that of `fp8pass.explain`, and rows of `fp8pass.stats`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.recipes import DelayedScaling

STEPS = 3
RECIPE = DelayedScaling(amax_history_len=4)


class Model(nn.Module):
    """A layer norm, three linear layers, and a matmul whose operands' scales the user placed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.gate = nn.Linear(32, 64), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32)
        self.head = nn.Parameter(torch.randn(48, 32) / 6)
        self.x_scale = fp8pass.ScaleState(4)
        self.w_scale = fp8pass.ScaleState(4)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 32]. Returns [rows, 48]."""
        y = self.norm(x)
        y = x + self.down(torch.relu(self.up(y)) * self.gate(y))
        return fp8pass.in_qdq(y, self.x_scale) @ fp8pass.in_qdq(self.head, self.w_scale).t()


class Run:
    """A training run that can save its checkpoint and resume from one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.step = fp8pass.train_step(self._step, recipe=RECIPE, lowering="eager", optimizer_state="fp8")

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def train(self, steps: range) -> list[float]:
        """Return the losses of these steps, each of which has its own batch."""
        batches = (torch.randn(64, 32, generator=torch.Generator().manual_seed(at)) for at in steps)
        return [float(self.step(self.model, self.optimizer, x).detach()) for x in batches]

    def checkpoint(self) -> dict[str, Any]:
        """Return all that a run saves."""
        state = fp8pass.state(self.model).state_dict()
        return {"model": self.model.state_dict(), "fp8": state, "optimizer": self.optimizer.state_dict()}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Resume from `checkpoint`."""
        self.model.load_state_dict(checkpoint["model"])
        fp8pass.state(self.model).load_state_dict(checkpoint["fp8"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])


def report() -> dict[str, Any]:
    """Return `fp8pass.explain`'s report of the model, and the rows of `fp8pass.stats` of a layer, as plain numbers."""
    torch.manual_seed(0)
    explained = fp8pass.explain(Model(), torch.randn(64, 32), config=fp8pass.Config(recipe=RECIPE)).to_dict()
    layer = nn.Linear(32, 32)
    options = {"recipe": RECIPE, "lowering": "eager", "monitor": True}
    torch.compile(layer, backend="fp8pass", options=options)(torch.randn(16, 32)).sum().backward()
    return {"explain": explained, "stats": fp8pass.stats(layer).to_dicts()}


def main() -> None:
    """Write the checkpoint and the report to the two files of the command line."""
    run = Run()
    losses = run.train(range(STEPS))
    checkpoint = {**run.checkpoint(), "losses": losses}
    torch.save(checkpoint, sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(report(), indent=1) + "\n")


if __name__ == "__main__":
    main()
