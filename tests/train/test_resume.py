"""Test that a saved run of `fp8pass.train_step` resumes bit for bit, also after its process was killed."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fp8pass
from fp8pass.recipes import DelayedScaling
from tests.helpers import ROOT
from tests.helpers.harness import without_caches
from tests.helpers.models import Block, make

pytestmark = pytest.mark.tools

STEPS, EVERY = 9, 3


class Run:
    """A model in training, with AdamW, a schedule and clipping. It runs in this process or, as a script, in another."""

    def __init__(self) -> None:
        model = self.model = make(Block)
        optimizer = self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))

        @fp8pass.train_step(recipe=DelayedScaling(amax_history_len=4), lowering="eager")
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x * 0.5)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            return loss.detach()

        self.step, self.at = step, 0
        self.losses: list[float] = []

    def go_on(self, until: int) -> None:
        """Train up to a step."""
        while self.at < until:
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(self.at)) * (1 + self.at % 3)
            self.losses.append(float(self.step(x)))
            self.at += 1

    def saved(self) -> dict[str, Any]:
        """Return all that a run consists of."""
        parts = (self.model, self.optimizer, self.schedule, fp8pass.state(self.model))
        return {"at": self.at, "losses": self.losses, "parts": [p.state_dict() for p in parts]}

    def save(self, file: Path) -> None:
        """Write under another name first: a process that is killed meanwhile leaves the older file."""
        torch.save(self.saved(), file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def load(self, file: Path) -> None:
        """Load before the first step, or after some."""
        saved = torch.load(file, weights_only=True)
        self.at, self.losses = saved["at"], saved["losses"]
        parts: tuple[Any, ...] = (self.model, self.optimizer, self.schedule, fp8pass.state(self.model))
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)


def flat(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [v for key in sorted(x, key=str) for v in (key, *flat(x[key]))]
    return [v for item in x for v in flat(item)] if isinstance(x, (list, tuple)) else [x]


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(flat(a), flat(b), strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Any], Path]:
    """Return a run at its end, all that it consists of, and the file that it saved after four steps."""
    file = tmp_path_factory.mktemp("run") / "run"
    with without_caches(share=True):
        run = Run()
        run.go_on(4)
        run.save(file)
        run.go_on(STEPS)
    return run, copy.deepcopy(run.saved()), file


@pytest.mark.shares_code
def test_a_resumed_run_is_the_uninterrupted_one(uninterrupted: tuple[Run, dict[str, Any], Path]) -> None:
    """The file is loaded into the run that has gone on, and into a new model, which is compiled anew."""
    run, wanted, file = uninterrupted
    run.load(file)
    assert run.at == 4
    run.go_on(STEPS)
    assert_same(run.saved(), wanted)
    torch._dynamo.reset()
    again = Run()
    again.load(file)
    again.go_on(STEPS)
    assert_same(again.saved(), wanted)


@pytest.mark.gate
@pytest.mark.shares_code
def test_a_run_that_was_killed(tmp_path: Path, uninterrupted: tuple[Run, dict[str, Any], Path]) -> None:
    """SIGKILL ends a process somewhere between two checkpoints; a new run goes on from the last one."""
    file, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "tests.train.test_resume", str(file)]
    root = ROOT
    with log.open("w") as output, subprocess.Popen(command, cwd=root, stdout=output, stderr=output) as process:
        deadline = time.monotonic() + 240
        while not file.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, log.read_text()
    run = Run()
    run.load(file)
    assert EVERY <= run.at < STEPS
    assert run.at % EVERY == 0
    run.go_on(STEPS)
    assert_same(run.saved(), uninterrupted[1])


if __name__ == "__main__":
    running, target = Run(), Path(sys.argv[1])
    while running.at < STEPS:
        running.go_on(running.at + 1)
        if running.at % EVERY == 0:
            running.save(target)
        time.sleep(0.2 if running.at >= EVERY else 0)  # the test has the time to kill it
    time.sleep(60)
