"""Writes files of each kind that outlives its process. Uses public names only, so that it runs with old releases.

    python tests/golden/make_before_moves.py tests/golden/before_moves

Those in `before_moves/` name modules as these were before files moved between folders: a pickled frozen weight, a
pickled `ScaleState`, recipes, a Config, an exported model, a program of `torch.export` that calls our ops, and dumps.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.recipes import (
    BlockwiseScaling,
    DelayedScaling,
    DynamicScaling,
    MXFP8Scaling,
    RowwiseScaling,
    Schedule,
    StaticScaling,
)

STEPS = 2
OPTIONS: dict[str, Any] = {
    "recipe": DelayedScaling(amax_history_len=4),
    "lowering": "eager",
    "min_speedup": 0,
    "monitor": True,
    "optimizer_state": "fp8",
    "skip_nonfinite": True,
    "weight_amax": "predicted",
}
CONFIGS = [
    fp8pass.Config(**OPTIONS),
    fp8pass.Config(recipe=Schedule({0: DynamicScaling(), 9: RowwiseScaling()}), target="h200"),
    fp8pass.Config(recipe={"up": BlockwiseScaling(), "*": MXFP8Scaling()}, filter=["down"]),
    fp8pass.Config(recipe=StaticScaling({"up.x": 0.5})),
]
EXPORTED: dict[str, Any] = {"recipe": RowwiseScaling(), "lowering": "eager", "min_speedup": 0}
DUMPED = [
    "*.Sequential/*.joint.scaled_mm.before.py",
    "*.Sequential/*.joint.scaled_mm.after.py",
    "*.Adapted/*.dynamo.annotate.after.py",
    "*/*.dynamo.write_weights.after.py",
]
"""One dump of each of these is kept, the last that matches."""


class Adapted(nn.Module):
    """A frozen layer with an adapter, and a trained layer whose operands' scales the user placed."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(32, 16, bias=False), nn.Linear(16, 64, bias=False)
        self.head = nn.Parameter(torch.randn(64, 64) / 8)  # large enough for moments in FP8
        self.x_scale, self.w_scale = fp8pass.ScaleState(4), fp8pass.ScaleState(4)

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 32]. Returns [rows, 64]."""
        y = torch.relu(self.base(x) + self.up(self.down(x)))
        return fp8pass.in_qdq(y, self.x_scale) @ fp8pass.in_qdq(self.head, self.w_scale).t()


class Dequantize(nn.Module):
    """Calls an op of fp8pass."""

    def forward(self, x_q: Tensor, scale_inv: Tensor) -> Tensor:
        """x_q: f8[rows, 128]; scale_inv: f32[rows, 1]. Returns f32[rows, 128]."""
        made: Tensor = torch.ops.fp8pass.dequantize_blocks(x_q, scale_inv, torch.float32)
        return made


class Run:
    """A training run of `Adapted`. freeze: keeps the frozen weight in FP8. options: fields of Config."""

    def __init__(self, freeze: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Adapted()
        if freeze:
            fp8pass.freeze(self.model)
        self.optimizer = self._optimizer()
        self.step = fp8pass.train_step(self._step, **OPTIONS, **options)

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], 1e-3)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def train(self, steps: range) -> list[float]:
        """Return the losses of these steps, each of which has its own batch."""
        batches = (torch.randn(64, 32, generator=torch.Generator().manual_seed(at)) for at in steps)
        return [float(self.step(self.model, self.optimizer, x)) for x in batches]

    def checkpoint(self) -> dict[str, Any]:
        """Return all that a run saves."""
        state = fp8pass.state(self.model).state_dict()
        return {"model": self.model.state_dict(), "fp8": state, "optimizer": self.optimizer.state_dict()}

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Resume from `checkpoint`, frozen weights included."""
        self.model.load_state_dict(checkpoint["model"], assign=True)
        self.optimizer = self._optimizer()
        fp8pass.state(self.model).load_state_dict(checkpoint["fp8"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])


def arguments() -> tuple[Tensor, Tensor]:
    """Return the arguments with which `program.pt2` was exported."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 128, generator=generator).to(torch.float8_e4m3fn), torch.rand(16, 1, generator=generator)


def _program() -> torch.export.ExportedProgram:
    program = torch.export.export(Dequantize(), arguments())
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # which names files of this machine
    return program


def _export(folder: Path, dumps: Path) -> None:
    """Export a layer that has trained for a step."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 64))
    run = torch.compile(layer, backend="fp8pass", options={**EXPORTED, "dump_dir": str(dumps)})
    run(torch.randn(16, 32)).sum().backward()
    fp8pass.export_fp8(run, folder)


def _keep_dumps(made: Path, folder: Path) -> None:
    """Copy one dump of each kind to `folder`, without lines that name files of this machine.

    As .txt, which no tool takes for code of ours.
    """
    folder.mkdir(exist_ok=True)
    for pattern in DUMPED:
        file = max(made.rglob(pattern))
        lines = file.read_text().splitlines(keepends=True)
        (folder / f"{file.stem}.txt").write_text("".join(line for line in lines if " File: " not in line))


def main() -> None:
    """Write the files to the folder of the command line."""
    folder = Path(sys.argv[1])
    run = Run()
    losses = run.train(range(STEPS))
    torch.save({**run.checkpoint(), "losses": losses, "module": run.model.x_scale}, folder / "run.pt")
    (folder / "configs.pickle").write_bytes(pickle.dumps(CONFIGS))
    torch.export.save(_program(), folder / "program.pt2")
    with tempfile.TemporaryDirectory() as dumps:
        _export(folder / "export", Path(dumps))
        Run(freeze=False, dump_dir=dumps).train(range(STEPS))
        _keep_dumps(Path(dumps), folder / "dumps")


if __name__ == "__main__":
    main()
