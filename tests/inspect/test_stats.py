"""`fp8pass.stats`: it finds a divergence, and writes its rows as JSON lines, plots and TensorBoard events."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.inspect import cli, demo, plots
from fp8pass.inspect.statistics import SlotStats, Stats
from tests.helpers.models import Block, batches, make

pytestmark = [pytest.mark.gpu_code, pytest.mark.xdist_group("stats")]

LAYERS = 1
PLANTED = 12
"""From this step on, one layer's activations are a million times as large."""


class Planted(nn.Module):
    """A layer of a model whose input is multiplied by `gain`, which a test raises later."""

    def __init__(self, layer: nn.Module, factor: float = 1e6) -> None:
        super().__init__()
        self.layer, self.factor = layer, factor
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x * self.gain)
        return y


@pytest.fixture(scope="module")
def diverging() -> Stats:
    """Return the stats of the demo's model, made small, trained with a fault in its layer."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patched:
        for name, size in (("WIDTH", 32), ("LAYERS", LAYERS), ("HEADS", 2), ("CONTEXT", 32), ("BATCH", 4)):
            patched.setattr(demo, name, size)
        return _diverging()


def _diverging() -> Stats:
    model = demo.GPT()
    planted = Planted(model.blocks[0].down)  # type: ignore[union-attr, arg-type]
    model.blocks[0].down = planted  # type: ignore[union-attr]
    optimizer, text = torch.optim.AdamW(model.parameters(), lr=1e-4), demo.load_text(1 << 16)
    train = fp8pass.train_step(monitor=True, lowering="eager", min_speedup=0)(demo.train_step)
    generator = torch.Generator().manual_seed(0)
    for i in range(PLANTED + 2):
        if i == PLANTED:
            planted.gain.fill_(1e6)
        train(model, optimizer, *text.batch(generator, "cpu"))
    return fp8pass.stats(train)


def test_a_divergence_is_found(diverging: Stats) -> None:
    """The first saturated row names slot, step and line; nothing saturates before."""
    first = diverging.first_saturated()
    assert first is not None
    assert (first.slot, first.step, first.role) == ("blocks.0.down.layer.input", PLANTED, "input")
    assert first.source.startswith("test_stats.py:") and first.saturation > 0.9
    told = f"the first to saturate: {first.saturation:.2%} of blocks.0.down.layer.input, step {PLANTED} (test_stats.py:"
    assert told in str(diverging)
    history = diverging.of("blocks.0.down.layer.input")
    assert [row.step for row in history] == list(range(PLANTED + 2))
    assert history[PLANTED].amax / history[PLANTED - 1].amax == pytest.approx(1e6, rel=0.5)
    assert history[PLANTED - 1].sqnr > 25 > 1 > history[PLANTED].sqnr
    assert history[PLANTED + 1].scale < history[PLANTED].scale / 1e5, "the scale does not follow the large amax"


def test_every_quantized_tensor_has_a_row(diverging: Stats) -> None:
    """Each layer has rows for its input, weight and gradient in each step."""
    of_step = [row for row in diverging.rows if row.step == 1]
    assert len({row.slot for row in of_step}) == len(of_step) == 3 * (4 * LAYERS + 1)
    table = str(diverging).splitlines()
    assert len([line for line in table if line.startswith("blocks.0.up.")]) == 3
    assert max(map(len, table)) < 150


@pytest.mark.shares_code
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_that_is_not_finite(bad: float) -> None:
    model = nn.Sequential(make(Block), make(Block, seed=1))
    run = torch.compile(model, backend="fp8pass", options={"monitor": True, "lowering": "eager", "min_speedup": 0})
    for i, x in enumerate(batches(4, 16, 32)):
        if i == 2:
            with torch.no_grad():
                model[1].up.bias[3] = bad  # type: ignore[index, union-attr]
        run(x).square().mean().backward()
    found = fp8pass.stats(model)
    first = found.first_nonfinite
    assert first is not None and (first.slot, first.step) == ("1.down.input", 2)
    assert first.nonfinite == 16 * (1 if math.isnan(bad) or bad > 0 else 0)
    assert found.last_finite is not None and found.last_finite.slot == "1.up.weight"
    assert (
        f"the first NaN or inf is in 1.down.input, step 2 ({first.source}): 16 of 896 elements; 1.up.weight, quantized "
        "before it, is finite"
    ) in str(found)


def test_json_lines_and_their_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], diverging: Stats) -> None:
    file, picture = tmp_path / "stats.jsonl", tmp_path / "stats.png"
    diverging.to_jsonl(file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == len(diverging.rows)
    assert rows[5] == diverging.to_dicts()[5]
    assert cli.main(["plot", str(file), "--slots", "blocks.0", "--out", str(picture)]) == 0
    drawn = capsys.readouterr().out
    assert "blocks.0.down.layer.input" in drawn and "head" not in drawn and drawn.count(",") == plots.MAX_SLOTS - 1
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    file.write_text('{"step": 1}\n')
    assert cli.main(["plot", str(file)]) == 2
    assert "line 1 is not a row of fp8pass.stats(model).to_jsonl: 'slot'" in capsys.readouterr().err


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    row = SlotStats("a.input", "input", "a.py:1", 0, math.nan, math.inf, 0.0, 0.0, math.nan, 3, 4)
    found = Stats((row,))
    found.to_jsonl(tmp_path / "a")
    found.to_jsonl(tmp_path / "a", append=True)
    lines = (tmp_path / "a").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["amax"] is None and json.loads(lines[1])["nonfinite"] == 3
    plots.plot(plots.read(tmp_path / "a"), tmp_path / "a.png")
    assert str(Stats(())).startswith("nothing has been watched yet")


def test_tensorboard(tmp_path: Path, diverging: Stats) -> None:
    """TensorBoard's own reader reads the written events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    found = Stats(tuple(diverging.of("blocks.0.down")))
    with SummaryWriter(str(tmp_path)) as writer:  # type: ignore[no-untyped-call]
        found.to_tensorboard(writer)
    events: Any = EventAccumulator(str(tmp_path)).Reload()
    read = [(e.step, e.value) for e in events.Scalars("fp8/blocks.0.down.layer.input/saturation")]
    assert [step for step, _ in read] == list(range(PLANTED + 2)) and read[PLANTED][1] > 0.9
    assert len(events.Tags()["scalars"]) == 3 * 8
