"""Test the zoo: a sample of its models every day, all of them with `run.sh all`."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import ROOT
from tests.zoo import row as zoo_row
from tests.zoo import toys
from tests.zoo.catalogue import Entry, catalogue
from tests.zoo.page import BEYOND, page, problems
from tests.zoo.row import Beside, Failed, Matmuls, Row, Sample, beside, compare, eager_step, shaken
from tests.zoo.rows import Rows, third
from tests.zoo.sums import ExactSums
from tests.zoo.timm_models import practised

pytestmark = pytest.mark.tools

ENTRIES = catalogue()
EVERY_DAY = ("nn.TransformerDecoderLayer", "nn.LSTM", "op.einsum", "AlbertForMaskedLM")
"""These reach different rules and passes: attention that torch decomposes, recurrent layers that run
outside, products of one dimension, layers that share their weights."""


def about(entry: Entry, row: Row) -> dict[str, Any]:
    return {"package": entry.package, "kind": entry.kind, "date": "", "versions": {}, "lowerings": [], **vars(row)}


def trained(name: str) -> None:
    entry = ENTRIES[name]
    if find_spec(entry.package) is None:
        pytest.skip(f"{entry.package} is not installed")
    row = Row(name)
    zoo_row.fill(row, entry.make)
    assert problems([about(entry, row)]) == []
    assert row.status == "trains", (row.stage, row.error, row.frame)


@pytest.mark.filterwarnings("ignore")  # other people's models warn
@pytest.mark.parametrize("name", EVERY_DAY)
def test_a_sample_trains(name: str) -> None:
    trained(name)


@pytest.mark.variant
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in EVERY_DAY])
def test_every_model_trains(name: str) -> None:
    trained(name)


def test_the_page_has_every_model() -> None:
    text = (ROOT / "docs" / "zoo.md").read_text()
    listed = {*re.findall(r"^\| (\S+) \|", text, re.MULTILINE), *re.findall(r"`(\S+)`", text)}
    assert listed >= set(ENTRIES), "python -m tests.zoo, and then python docs/generate.py zoo"


def test_what_begins_small_is_grown_and_nothing_is_dropped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5))
    nn.init.constant_(model[0].weight, 1e-5)
    nn.init.zeros_(model[0].bias)
    practised(model)
    assert model[0].weight.abs().max() > 0.01 and not model[0].bias.any()
    assert (model[1].weight == 1).all() and model[2].p == 0


def test_rules_that_are_beyond_us_are_limits() -> None:
    limits = (ROOT / "docs" / "limits.md").read_text()
    assert [rule for rule in BEYOND if f"`{rule}`" not in limits] == []


def row(**other: Any) -> dict[str, Any]:
    good = Row("good", status="trains", eager_flops=100, matmuls=4, rewritten=4, flops=100, fp8_flops=90)
    good.owned_flops, good.owned_fp8_flops, good.parameters, good.cosine, good.graphs = 80, 80, 3, 0.99, 1
    entry = Entry("good", "torch", "module_db", lambda: Sample(nn.Linear(2, 2), {}, {}))
    return {**about(entry, good), **other}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"status": "fails", "stage": "train", "error": "E: x"}, ["good fails: train: E: x"]),
        ({"rules": {"composite": 2}}, ["good has matmuls declined by {'composite'}"]),
        ({"owned_fp8_flops": 40}, ["good: 50% of the FLOPs of its parameters"]),
        ({"owned_fp8_flops": 40, "owned_flops_by_rule": {"outside": 40}}, []),
        ({"eager_flops": 200}, ["good: 50% of eager's FLOPs have a verdict"]),
        ({"status": "torch fails too"}, []),
    ],
)
def test_what_is_a_problem(other: dict[str, Any], said: list[str]) -> None:
    assert problems([row(**other)]) == said


def test_the_page_says_what_fails_and_what_is_excused() -> None:
    rows = [
        row(),
        row(
            name="bad",
            status="fails",
            stage="train",
            error="E: a|b<c>",
            excused={"w": (0.9, 0.89)},
            cancelled={"k": 0.1},
        ),
    ]
    text = page(rows)
    assert "2 models: 2 of torch. 1 of 2 train" in text
    assert "| good | module_db | yes | 4 of 4 | 90% | 100% |" in text
    assert "- `bad`, train: E: a/b(c)" in text and "- `bad`, 1 of 3: `w` 0.9 (0.89)" in text
    assert "- `bad`, 1 of 4: `k` (0.1)" in text


class Cancels(nn.Module):
    """The gradient of `shift` is a sum whose terms cancel: a softmax is the same for a row that is shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
        self.shift = nn.Parameter(torch.zeros(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layer(x) @ self.layer(x).t() + self.shift, -1) @ x


def test_gradients_beside_eager() -> None:
    """A wrong gradient is a fault; a gradient that cancels, and that FP8 turns in eager too, is not."""
    model, inputs = Cancels(), {"x": torch.randn(32, 64)}
    eager = eager_step(model, inputs, 0, Matmuls())
    rounded = eager_step(model, inputs, 0, Matmuls(rounds=True))
    again = eager_step(model, inputs, 0, Matmuls(rounds=True))
    found = beside(eager, rounded, again)
    assert not any(b.fault for b in found.values())
    assert found["shift"].cosine < zoo_row.COSINE and found["layer.weight"].cosine > zoo_row.COSINE
    weight = again.gradients["layer.weight"]
    assert weight is not None
    again.gradients["layer.weight"] = weight.flip(0)
    assert "cosine" in beside(eager, rounded, again)["layer.weight"].fault
    again.gradients["layer.weight"] = None
    with pytest.raises(Failed, match="has no gradient"):
        beside(eager, rounded, again)
    again.gradients["layer.weight"] = weight * float("nan")
    with pytest.raises(Failed, match="not finite"):
        beside(eager, rounded, again)
    assert Beside(0.5, 1.0, 0.5, 0.6).fault == "" and Beside(0.5, 1.0, 0.99, 0.1).fault


def test_gradients_that_cancel() -> None:
    """Changing weights by float32's rounding changes no other gradients."""
    model, inputs = Cancels(), {"x": torch.randn(32, 64) / 8}
    eager = eager_step(model, inputs, 0, Matmuls())
    model.load_state_dict(shaken(model.state_dict()))
    found = beside(eager, eager, eager_step(model, inputs, 0, Matmuls()))
    assert found["layer.weight"].cosine > 0.9999 > zoo_row.COSINE > found["shift"].cosine


def test_rounding_goes_by_steps_before() -> None:
    """The first step is rounded by its own amax; values that grow later saturate, as under delayed scaling."""
    amaxes: dict[tuple[int, int], torch.Tensor] = {}
    x, unit = torch.diag(torch.tensor([1.0, 0.5])), torch.eye(2)
    found = []
    for step in 1, 2, 3:
        with Matmuls(rounds=True, amaxes=amaxes):
            found.append(float((step * x @ unit).amax()))
    assert found == [1, 1, 2]


def test_bits_are_compared() -> None:
    model, inputs = nn.Linear(4, 4), {"input": torch.randn(2, 4)}
    one, other = (eager_step(model, inputs, 0, Matmuls()) for _ in range(2))
    assert compare("again", [one], [other]) == 0
    gradient = other.gradients["weight"]
    assert gradient is not None
    other.gradients["weight"] = gradient * (1 + 1e-6)
    with pytest.raises(Failed, match=r"in step 1, 1 gradients are off by up to .*: weight"):
        compare("again", [one], [other])
    assert 0 < compare("again", [one], [other], most=2e-6) < 2e-6


def test_exact_sums_have_no_order() -> None:
    """Sums of sums have none either, and FP8 matmuls are those of dequantized operands."""
    x = torch.randn(64, 48, 32)
    aten, flat = torch.ops.aten, x.reshape(-1, 32)
    assert not torch.equal(x.sum(1).sum(0), flat.double().sum(0).float())
    a, b = (torch.randn(16, 2048).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.tensor(0.3)
    with ExactSums():
        assert torch.equal(aten.sum(aten.sum(x, [1], dtype=torch.float32), [0]), aten.sum(flat.flip(0), [0]))
        scaled = torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.float32)
        assert torch.equal(scaled, (a.float() * scale) @ (b.float() * scale).t())
        assert aten.sum(x.double(), [1]).dtype == torch.float64 and aten.sum(x > 0, [1]).dtype == torch.int64


def test_matmuls_are_counted() -> None:
    with Matmuls() as seen:
        nn.Linear(4, 8)(torch.randn(2, 4)).sum().backward()
    assert (seen.number, seen.flops) == (2, 2 * 2 * 4 * 8 * 2)


def test_configurations_are_small() -> None:
    transformers = pytest.importorskip("transformers")
    config = toys.toy(transformers.LlamaConfig)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size, config.use_cache) == (64, 1, 256, False)
    both = toys.toy(transformers.CLIPConfig, text_config={"hidden_size": 32})
    assert (both.text_config.hidden_size, both.vision_config.hidden_size) == (32, 64)


def test_a_third_is_of_each_kind() -> None:
    """They are the cheapest models that train."""
    entries = {
        n: Entry(n, "torch", n[0], lambda: Sample(nn.Linear(2, 2), {}, {})) for n in ("a1", "a2", "a3", "a4", "b")
    }
    rows = {n: row(seconds={"train": float(n[1:] or 9)}) for n in entries}
    rows["a1"]["status"] = "fails"
    assert third(entries.values(), rows) == ["a2", "a3", "b"]


def test_rows_stay(tmp_path: Path) -> None:
    """Kept rows hold in another checkout until one is made there later; a line has only fields that say something."""
    rows = Rows(tmp_path / "made", tmp_path / "rows.jsonl")
    rows.file("", "eager").parent.mkdir(parents=True)
    assert rows.all("eager") == {} and rows.keep() == 0
    old = row(date="2026-01-02T00:00:00Z", cosine=0.98765432, off_reference=1.23456e-7)
    for name in "b", "a":
        rows.file(name, "eager").write_text(json.dumps({**old, "name": name}))
    assert rows.keep() == 2
    lines = rows.kept.read_text().splitlines()
    assert [line[:32] for line in lines] == ['{"lowering":"eager","name":"a","', '{"lowering":"eager","name":"b","']
    assert '"cosine":0.9877' in lines[0] and '"error"' not in lines[0]
    rows.file("a", "eager").unlink()
    later, earlier = (row(name=name, date=f"{year}-01-02", status="fails") for name, year in (("b", 2027), ("a", 2025)))
    for made in later, earlier:
        rows.file(made["name"], "eager").write_text(json.dumps(made))
    found = rows.all("eager")
    assert [(name, made["status"]) for name, made in found.items()] == [("a", "trains"), ("b", "fails")]
    assert found["a"]["error"] == "" and found["a"]["off_reference"] == 1e-7
