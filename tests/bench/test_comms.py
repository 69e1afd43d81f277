"""Test bench/comms.py: formulas against the collectives of small worlds, and results for large ones."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import comms
import pytest
import traced_collectives
from collectives import BF16, FP8, FP8_GRADIENTS, FP8_MATMULS, MODELS, Collective, Layout, Way, collectives, differences

from fp8pass.recipes import KINDS, DelayedScaling
from fp8pass.roofline import call_seconds, overhead_seconds
from tests.helpers import ROOT

pytestmark = pytest.mark.tools

STEP = comms.Step(MODELS["8B"], Layout(data=64))
CLUSTER = comms.Cluster()


@pytest.mark.gate
@pytest.mark.parametrize("worlds", [2, pytest.param(len(comms.WORLDS), marks=pytest.mark.variant)])
def test_formulas_have_what_runs(worlds: int) -> None:
    """The check runs in its own process: groups and slots of other tests would take part in it."""
    command = [sys.executable, "bench/comms.py", "--check", "--worlds", str(worlds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"In {worlds} small worlds the collectives that ran are those of the formulas")


def test_a_difference_is_named() -> None:
    formula = collectives(comms.SMALL, Layout(data=2), FP8, 2, 16)
    assert differences(formula, formula) == []
    (gather,) = (c for c in formula if c.dtype == "uint8")
    trace = formula - Counter({gather: 1})
    assert differences(formula, trace) == ["all_gather of uint8[46336] among data ranks: 4 by formula, 3 ran"]
    trace = Counter({gather._replace(dtype="bfloat16"): 4}) + formula
    trace[gather] = 0
    assert differences(formula, trace) == [
        "all_gather of bfloat16[46336] among data ranks: 0 by formula, 4 ran",
        "all_gather of uint8[46336] among data ranks: 4 by formula, 0 ran",
    ]


def test_the_script_fails_where_a_formula_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    unexpected = Counter({Collective("all_to_all", "bfloat16", 8, "data"): 1})
    monkeypatch.setattr(traced_collectives, "traced", lambda *args: collectives(*args) + unexpected)
    monkeypatch.setattr(comms, "WORLDS", comms.WORLDS[:1])
    monkeypatch.setattr(sys, "argv", ["comms.py"])
    with pytest.raises(SystemExit) as error:
        comms.main()
    assert str(error.value).endswith("all_to_all of bfloat16[8] among data ranks: 0 by formula, 1 ran")


@pytest.mark.parametrize(("name", "billions"), [("8B", 8.03), ("70B", 70.55), ("405B", 405.85)])
def test_parameters(name: str, billions: float) -> None:
    assert round(MODELS[name].parameters / 1e9, 2) == billions


def test_a_ring_sends_less_than_the_whole() -> None:
    layout = Layout(data=4)
    assert Collective("all_gather", "bfloat16", 100, "data").sent(layout) == 200 * 3 / 4
    assert Collective("reduce_scatter", "float32", 100, "data").sent(layout) == 400 * 3 / 4
    assert Collective("all_reduce", "int32", 100, "data").sent(layout) == 2 * 400 * 3 / 4


def test_without_padding_gathers_are_of_the_parameters() -> None:
    model = MODELS["8B"]
    found = collectives(model, Layout(data=8), BF16, 1, 8192)
    gathered = sum(n * c.elements for c, n in found.items() if c.kind == "all_gather")
    reduced = sum(n * c.elements for c, n in found.items() if c.kind == "reduce_scatter")
    assert gathered == 2 * model.layers * model.in_block + model.in_root and reduced == model.parameters


def test_a_weight_of_fewer_rows_than_ranks_is_padded() -> None:
    """Keys and values have 1024 rows, and 14336 is not a multiple of 4096."""
    model, padding = MODELS["8B"], 4096 * (2 * (4096 - 1024) + 2 * (16384 - 14336))
    found = collectives(model, Layout(data=4096), BF16, 1, 8192)
    blocks = {c.elements for c, n in found.items() if n >= model.layers}
    assert blocks == {model.in_block + padding}


def test_fp8_is_half_of_what_is_gathered_and_nothing_of_what_is_reduced() -> None:
    half = STEP.model.layers * 2 * sum(n * k for n, k in STEP.model.linears().values()) * 63 / 64
    saved = STEP.sent(BF16, "data") - STEP.sent(FP8, "data")
    assert saved == pytest.approx(half, rel=1e-5)
    assert STEP.sent(FP8_MATMULS, "data") == pytest.approx(STEP.sent(BF16, "data"), rel=1e-5)


def test_layers_too_small_to_pay_stay_in_bf16() -> None:
    """Tensor parallel leaves 512 columns of queries, too few for FP8; attention's input is gathered in BF16, too."""
    step = replace(STEP, layout=Layout(data=8, tensor=8))
    assert STEP.taken(FP8, CLUSTER.target) == FP8
    way = step.taken(FP8, CLUSTER.target)
    assert way == Way(fp8=True, fp8_wire=True, left_out=("q", "k", "v", "o"))
    gathers = {c.dtype: n for c, n in step.collectives(way).items() if (c.kind, c.group) == ("all_gather", "tensor")}
    assert gathers == {"uint8": 2 * 32, "bfloat16": 2 * 32 + 2}


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    assert CLUSTER.bandwidth(Layout(data=8), "data") == CLUSTER.nvlink
    assert CLUSTER.bandwidth(Layout(data=64), "data") == 8 * CLUSTER.network
    both = Layout(data=8, tensor=8)
    assert CLUSTER.bandwidth(both, "tensor") == CLUSTER.nvlink
    assert CLUSTER.bandwidth(both, "data") == CLUSTER.network
    fast = replace(CLUSTER, network=1e12)
    assert fast.bandwidth(Layout(data=64), "data") == fast.nvlink


def test_fsdp_is_hidden_and_tensor_parallel_is_not() -> None:
    slow, fast = replace(CLUSTER, network=1e9), replace(CLUSTER, network=1e15, nvlink=1e15)
    compute, beside = comms.seconds(STEP, slow, FP8)
    assert beside == pytest.approx(STEP.sent(FP8, "data") / 8e9)
    assert compute == comms.seconds(STEP, fast, FP8)[0] == comms.compute_seconds(STEP, CLUSTER.target, FP8)
    divided = replace(STEP, layout=Layout(tensor=8))
    exposed = comms.seconds(divided, CLUSTER, BF16)[0] - comms.compute_seconds(divided, CLUSTER.target, BF16)
    assert exposed == pytest.approx(divided.sent(BF16, "tensor") / CLUSTER.nvlink)


@pytest.mark.parametrize("way", [BF16, FP8_MATMULS, FP8])
@pytest.mark.parametrize("step", [STEP, replace(STEP, layout=Layout(data=64, tensor=8, recompute=True))])
def test_so_many_tokens_hide_fsdp_and_fewer_do_not(step: comms.Step, way: Way) -> None:
    """Such a step computes as long as it sends, up to attention, which is longer, and AdamW, which is the same."""
    tokens = comms.hiding(replace(step, sequences=4, length=8192), CLUSTER, way)
    enough, fewer = (replace(step, length=n) for n in (tokens, tokens - comms.ROUNDED))
    for short, hidden in ((enough, True), (fewer, False)):
        rest, beside = comms.seconds(short, CLUSTER, short.taken(way, CLUSTER.target))
        assert (beside <= rest) == hidden
        assert beside == pytest.approx(rest, rel=1.5 * comms.ROUNDED / tokens)


def test_what_runs_again_is_quantized_again() -> None:
    """Recomputation adds, for each GPU and linear layer, the matmuls of a forward and its quantization."""
    again = replace(STEP, layout=replace(STEP.layout, recompute=True))

    def more(way: Way) -> float:
        return comms.compute_seconds(again, CLUSTER.target, way) - comms.compute_seconds(STEP, CLUSTER.target, way)

    def forward(recipe: DelayedScaling | None) -> float:
        shapes = [(STEP.tokens, k, n, recipe, 2) for n, k in STEP.model.linears().values()]
        matmuls = sum(call_seconds(CLUSTER.target, *shape, KINDS[:1]) for shape in shapes)
        if recipe is None:
            return matmuls
        quantizing = (overhead_seconds(CLUSTER.target, *shape, KINDS[:1], fused=True) for shape in shapes)
        return matmuls + sum(quantizing)

    beside = more(BF16) - STEP.model.layers * forward(None)
    assert more(FP8) == pytest.approx(STEP.model.layers * forward(DelayedScaling()) + beside)


def test_what_does_not_fit_is_left_out() -> None:
    text = comms.report(["405B"], [8, 512], CLUSTER, 1, 8192, "float32")
    rows, _, left_out = text.partition("Left out")
    assert rows.count("| 405B |") == 1 and "| 405B | 512 | FSDP x TP, recompute |" in rows
    assert "405B by TP on 8 (854 GB)" in left_out


def test_the_table_of_the_page() -> None:
    table = comms.report(list(MODELS), list(comms.GPUS), CLUSTER, 1, 8192, "float32")
    assert table in (ROOT / "docs" / "distributed.md").read_text(), "python docs/generate.py comms"


def test_gradients_in_fp8_are_a_quarter_with_a_scale_for_1024() -> None:
    def sent(way: Way) -> float:
        kinds = {"reduce_scatter", "all_to_all"}
        return sum(n * c.sent(STEP.layout) for c, n in STEP.collectives(way).items() if c.kind in kinds)

    assert sent(FP8_GRADIENTS) / sent(FP8) == pytest.approx((1 + 4 / 1024) / 4, rel=1e-3)


def test_an_all_to_all_passes_the_card_of_each_gpu() -> None:
    """Unlike in a ring, the gradients of all GPUs of a node pass to other nodes: in two stages, their sums do."""
    exchange, layout = Collective("all_to_all", "uint8", 64 * 10**9, "data"), Layout(data=64)
    assert CLUSTER.seconds(exchange, layout) == pytest.approx(56 / CLUSTER.network * 1e9)
    stages = 64e9 * 7 / 8 / CLUSTER.nvlink, 64e9 / 8 * 7 / 8 / CLUSTER.network
    assert CLUSTER.in_two_stages(exchange, layout) == pytest.approx(sum(stages))
    within = Collective("all_to_all", "uint8", 8 * 10**9, "data")
    assert CLUSTER.seconds(within, Layout(data=8)) == pytest.approx(7e9 / CLUSTER.nvlink)
    assert CLUSTER.seconds(within, Layout(data=8, tensor=8)) == pytest.approx(7e9 / CLUSTER.network)
