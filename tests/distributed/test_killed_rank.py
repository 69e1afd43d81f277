"""Test that, if one of two ranks is killed in the middle of a step, the other ends, and the last checkpoint goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_checkpoints import Run
from tests.helpers import torchrun

pytestmark = pytest.mark.ranks

EVERY, KILLED_IN, STEPS = 2, 5, 8
"""Steps between checkpoints; the step, from 0, in which rank 1 is killed; and the number of steps of a whole run."""
SOON = 25
"""Seconds that the other rank has to end: less than `torchrun.TIMEOUT`, when gloo gives up, and than the 30 after
which torchrun kills whoever does not heed its SIGTERM."""


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first: metadata are written last."""
    return sorted(file.parent for file in folder.glob("step*/.metadata"))


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_other_rank_ends_and_the_last_checkpoint_goes_on(tmp_path: Path) -> None:
    result = torchrun.run(2, "-m", "tests.distributed.test_killed_rank", str(tmp_path), timeout=300)
    ended = time.time()
    assert result.returncode == 1
    assert re.search(r"exitcode\s*: -9 ", result.stderr), result.stderr[-2000:]

    said = [line.removeprefix("[rank0]: ") for line in result.stderr.splitlines() if line.startswith("[rank0]: ")]
    assert re.match(r"RuntimeError: .*gloo.*(Connection (closed|reset) by peer|Broken pipe)", said[-1]), said[-5:]
    assert ended - float((tmp_path / "killed").read_text()) < SOON

    assert [folder.name for folder in checkpoints(tmp_path)] == ["step2", "step4"]
    goes_on(checkpoints(tmp_path)[-1], json.loads((tmp_path / "losses").read_text()))


def goes_on(folder: Path, losses: list[float]) -> None:
    """Go on in one process with the same global batches; the first loss is that of the run after its checkpoint."""
    run = Run("ddp")
    run.load(folder)
    assert run.at == 4
    first, *others = run.go_on(STEPS)
    torch.testing.assert_close(first, losses[4], rtol=1e-5, atol=0)
    assert len(losses) == KILLED_IN and max(others[-2:]) < 0.95 * losses[0]


def main(folder: Path) -> None:
    """Train as one rank."""
    # torchrun ends the others when one is dead; here rank 0 is to notice it by itself
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo", timeout=timedelta(seconds=torchrun.TIMEOUT))
    run = Run("ddp")
    losses: list[float] = []

    def in_backward(_: Any) -> None:
        if run.at == KILLED_IN and dist.get_rank() == 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    next(run.model.parameters()).register_post_accumulate_grad_hook(in_backward)
    while run.at < STEPS:
        losses += run.go_on(run.at + 1)
        if dist.get_rank() == 0:
            (folder / "losses").write_text(json.dumps(losses))
        if run.at % EVERY == 0:
            run.save(folder / f"step{run.at}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
