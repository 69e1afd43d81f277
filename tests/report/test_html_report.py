"""Test the HTML report: the data in it, and how it behaves in a browser."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.graph.verdict import Gemm
from fp8pass.report.html import page, page_data, script_safe
from fp8pass.report.report import Break, DrawnOp, KernelCode, Picture, Recompile, Report
from tests.helpers.harness import compiled
from tests.helpers.models import Attention, Block, Transformer, batches, make

pytestmark = [pytest.mark.tools, pytest.mark.xdist_group("html_report")]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = "</script><img src=x onerror=\"document.title='owned'\">&\u2028"


def embedded(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def report() -> Report:
    """Return the report of a transformer of two layers, with one declined matmul; its GPU target gives predictions."""
    torch._dynamo.reset()
    model = nn.Sequential(make(Transformer), nn.Linear(32, 1))
    config = fp8pass.Config(target="h100", min_speedup=0, merge_siblings=False)
    return fp8pass.explain(model, torch.randn(2, 8, 32, requires_grad=True), config=config)


# ---------------------------------------------------------------------------------------------------------------------
# Data


def test_pictures_know_what_became_of_each_matmul(report: Report) -> None:
    """Equal layers have one picture, whose ops stand for the matmuls of all of them."""
    layers = [p for p in report.pictures if p.title.startswith("2 equal layers")]
    assert [p.part for p in layers] == ["before", "forward", "backward"]
    assert {len(op.gemms) for p in layers for op in p.ops if op.kind == "gemm" and op.gemms} == {2}
    before = [p for p in report.pictures if p.part == "before"]
    after = [p for p in report.pictures if p.part != "before"]
    for parts in (before, after):
        assert sorted(gemm for p in parts for op in p.ops for gemm in op.gemms) == list(range(39))
        assert all(op.kind == "gemm" for p in parts for op in p.ops if op.gemms)
    for p in report.pictures:
        for op in p.ops:
            if op.gemms:
                gemm = report.gemms[op.gemms[0]]
                assert (op.source, gemm.name.startswith(op.module)) == (gemm.source, True)
    kinds = {op.kind for p in after for op in p.ops}
    assert kinds >= {"input", "state", "amax", "quantize", "gemm", "attention", "compute"}
    assert not {op.kind for p in before for op in p.ops} & {"state", "amax", "quantize"}
    assert {op.kind for op in layers[1].ops if op.name.startswith("primals")} == {"input", "state"}
    made = {op.made_by for p in after for op in p.ops if p.part == "forward" and op.kind == "quantize"}
    assert made <= {"fold_quantizes", "quantize_tiles", "materialize"}


def test_before_has_the_users_matmuls_where_layers_are_equal_and_siblings_merged() -> None:
    model = nn.Sequential(Attention(), Attention())
    config = fp8pass.Config(target="h100", min_speedup=0, merge_siblings=True)
    report = fp8pass.explain(model, torch.randn(2, 8, 32, requires_grad=True), config=config)
    parts = {p.part: sum(op.kind == "gemm" for op in p.ops) for p in report.pictures if p.title.startswith("2 equal")}
    assert parts == {"before": 3 * 4, "forward": 2, "backward": 2 * 2}


def test_equal_matmuls_of_one_line_are_linked_in_order() -> None:
    fc = nn.Linear(32, 32)
    report = fp8pass.explain(lambda x: fc(fc(fc(x))), torch.randn(16, 32, requires_grad=True))
    linked = [op.gemms[0] for op in report.pictures[0].ops if op.gemms]
    assert len(linked) == 9 and linked[:3] == sorted(linked[:3])


def test_the_page_holds_the_report(report: Report, tmp_path: Path) -> None:
    written = report.to_html(tmp_path / "report.html").read_text()
    data = embedded(written)
    assert len(data["gemms"]) == 39
    assert data["numerics"] is None
    assert data["summary"] == report.summary()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", written)
    first = [data["texts"][i] for i in data["gemms"][0][:2]]
    assert first == ["0.layers.0.0.q", "output"]


def test_names_are_escaped() -> None:
    gemm = Gemm("output", NASTY, 16, 16, 16, ("f32", "f32", "f32"), NASTY, rule=NASTY, reason=NASTY)
    written = page(Report([gemm], graphs=1, notes=[NASTY], error=NASTY))
    assert written.count("</script>") == 2  # the page's own
    assert "<img" not in written
    data = embedded(written)
    assert data["notes"] == [NASTY] and NASTY in data["texts"]
    assert script_safe("</script>") == "\\u003c/script\\u003e"


def test_numerics_are_made_charts() -> None:
    rows = [
        {"slot": "a.input", "step": 2, "amax": 3.0, "sqnr": math.inf},
        {"slot": "a.input", "step": 1, "amax": math.nan, "scale": None},
        {"slot": "b.input", "step": 1, "underflow": 0.25},
    ]
    assert page_data(Report(), rows)["numerics"] == [
        {"slot": "a.input", "step": [1, 2], "amax": [None, 3.0]},
        {"slot": "b.input", "step": [1], "underflow": [0.25]},
    ]
    with pytest.raises(ValueError, match="a row of numerics has no 'step'"):
        page(Report(), [{"slot": "a"}])


def test_kernels() -> None:
    """Each matmul has its call, and the ops around it have the code that computes them."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 40), nn.Linear(40, 32)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(self.up(x).relu())
            return y

    report = fp8pass.explain(Mlp(), torch.randn(32, 32), kernels=True)
    forward, backward = report.pictures[1:]
    for p in (forward, backward):
        for op in p.ops:
            if op.kind == "gemm":
                assert op.gemms and op.kernel is not None
                assert re.search(r"extern_kernels\.(mm|addmm|_scaled_mm)\(", p.kernels[op.kernel].code)
            if op.kind == "quantize" and op.kernel is not None:
                assert re.search(r"= async_compile\.(cpp_pybinding|triton)\(", p.kernels[op.kernel].code)
    assert sorted(op.gemms[0] for p in (forward, backward) for op in p.ops if op.kind == "gemm") == [0, 1, 2, 3, 4]
    assert any(op.kernel is not None for op in forward.ops if op.kind == "quantize")


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


def many(layers: int = 200) -> Report:
    """Return a report as of a large model: thousands of rows, and a graph with a few nodes for each."""
    gemms, ops = [], [DrawnOp("primals_1", "primals_1", "input", "", "", "bf16[64, 64]", "", [])]
    for layer in range(layers):
        for name in ("q", "k", "v", "o", "up", "gate", "down"):
            for kind in ("output", "grad_input", "grad_weight"):
                declined = {"rule": "min_speedup", "reason": "too small: predicted 0.9x"} if name == "o" else {}
                status: Any = "declined" if declined else "rewritten"
                gemm = Gemm(kind, f"layers.{layer}.{name}", 64, 64, 64, ("e4m3", "e4m3", "bf16"), "model.py:7")  # type: ignore[arg-type]
                gemm.status, gemm.predicted_speedup = status, 0.9 if declined else 1 + layer / 1000
                gemm.rule, gemm.reason = declined.get("rule", ""), declined.get("reason", "")
                gemms.append(gemm)
            at, module = len(ops), f"layers.{layer}.{name}"
            ops += [
                DrawnOp(f"amax_{at}", "amax", "amax", module, "model.py:7", "f32[]", "", [at - 1]),
                DrawnOp(
                    f"quantize_{at}", "quantize", "quantize", module, "model.py:7", "e4m3[64, 64]", "", [at - 1, at]
                ),
                DrawnOp(
                    f"mm_{at}",
                    "_scaled_mm",
                    "gemm",
                    module,
                    "model.py:7",
                    "bf16[64, 64]",
                    "",
                    [at + 1],
                    [len(gemms) - 3],
                    0,
                ),
            ]
    code = KernelCode("extern_kernels._scaled_mm", "extern_kernels._scaled_mm(buf0, buf1)")
    report = Report(gemms, graphs=1, pictures=[Picture(0, "forward", ops, [code])])
    report.breaks.append(Break("model.py:9", "print", 0))
    report.recompiles.append(Recompile("forward", "model.py:3", ["x.size()[0] == 4"]))
    return report


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield a Chromium without a screen. It must not be missing in the gate."""
    if CHROMIUM is None and os.environ.get("CI") == "true":
        pytest.fail("no Chromium: .ci/chromium installs it")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: bash .ci/chromium installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


DESKTOP, PHONE = (1280, 900), (390, 844)


class Page:
    """A page in its own window, with its console messages and its requests."""

    def __init__(self, browser: Any, file: Path, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        viewport = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: object, *_: object) -> None:
        requests = [url for url in self.asked if not url.startswith("file:")]
        self.context.close()
        if kind is None:
            assert (self.said, requests, len(self.asked)) == ([], [], 1)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return many().to_html(tmp_path / "large.html")


def test_thousands_of_rows(browser: Any, large: Path) -> None:
    with Page(browser, large) as page:
        assert page.text_content("#count") == "4,200 rows"
        assert 10 < page.locator(".row").count() < 60
        page.locator("#rows").evaluate("box => box.scrollTop = box.scrollHeight")
        page.locator("#row-4199").wait_for()
        assert page.locator(".row").count() < 60
        started = page.evaluate("performance.now()")
        page.fill("#search", "layers.17.up grad")
        assert page.locator(".row").count() == 2
        assert page.evaluate("performance.now()") - started < 2000
        assert page.text_content("#count").startswith("2 rows of 4,200, 100% of their FLOPs in FP8")
        assert [t.strip() for t in page.locator(".row .kind").all_text_contents()] == ["grad_input", "grad_weight"]
        page.fill("#search", "nothing like it")
        assert page.text_content("#empty") == "No matmul matches these filters."
        page.click("#clear")
        assert page.text_content("#count") == "4,200 rows"


def test_filters_and_order(browser: Any, large: Path) -> None:
    with Page(browser, large) as page:
        page.select_option("#status", "declined")
        assert page.text_content("#count").startswith("600 rows of 4,200")
        page.select_option("#kind", "output")
        page.select_option("#rule", "min_speedup")
        assert page.text_content("#count").startswith("200 rows of 4,200, 0% of their")
        page.get_by_role("button", name="matmul").click()
        assert page.get_by_role("columnheader", name="matmul").get_attribute("aria-sort") == "ascending"
        names = page.locator(".row > span:first-child").all_text_contents()
        assert names[:3] == ["layers.0.o", "layers.1.o", "layers.2.o"]  # natural order: 10 comes after 9
        page.click("#clear")
        gain = page.get_by_role("button", name="predicted")
        gain.click()
        gain.click()
        assert page.locator(".row .gain").first.text_content() == "1.20×"


def test_a_row_leads_to_its_node_and_its_kernel(browser: Any, large: Path) -> None:
    with Page(browser, large) as page:
        page.fill("#search", "layers.42.gate output")
        page.locator(".row").click()
        assert page.text_content("#detail-title") == "layers.42.gate, output"
        hit = page.locator("#canvas .op.hit")
        assert hit.count() == 1
        assert hit.locator("title").text_content().startswith("mm_")
        assert "in layers.42.gate" in hit.locator("title").text_content()
        assert hit.is_visible()
        assert page.text_content("#code") == "extern_kernels._scaled_mm(buf0, buf1)"
        page.fill("#module", "layers.3.up")
        page.press("#module", "Enter")
        page.locator("#canvas .op:not(.outside)").nth(2).wait_for()
        assert page.text_content("#graph-count") == "layers.3.up: 3 ops"
        page.fill("#module", "")
        page.press("#module", "Enter")
        page.get_by_text("too many for a picture").wait_for()


def test_by_keyboard(browser: Any, large: Path) -> None:
    with Page(browser, large) as page:
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "search"
        page.keyboard.type("layers.5.")
        page.locator("#rows").focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"):
            page.keyboard.press(key)
        assert page.get_attribute("#rows", "aria-activedescendant") == page.locator(".row.at").get_attribute("id")
        page.keyboard.press("Enter")
        assert page.text_content("#detail-title") == "layers.5.q, grad_input"
        page.locator("#rows").focus()
        page.keyboard.press("End")
        assert page.locator(".row.at").text_content().startswith("layers.5.down")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_sizes_and_schemes(browser: Any, report: Report, tmp_path: Path, size: tuple[int, int], scheme: str) -> None:
    numerics = [{"slot": f"s{s}", "step": i, "amax": 2.0**i, "sqnr": 30.0} for s in range(40) for i in range(5)]
    with Page(browser, report.to_html(tmp_path / "report.html", numerics), size, scheme) as page:
        page.locator(".row").first.click()
        assert page.locator("#canvas .op.hit").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.locator("#slots .slot").count() < 40
        assert page.locator("#slots path").count() > 0
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark == ("rgb(15, 18, 23)" if scheme == "dark" else "rgb(246, 247, 249)")
        fills = {
            kind: page.locator(f"#canvas .op.{kind}:not(.outside) rect").first.evaluate("r => getComputedStyle(r).fill")
            for kind in ("gemm", "quantize", "amax", "state", "compute")
        }
        assert len(set(fills.values())) == 5, fills
        for part in ("before", "backward, after"):
            page.get_by_role("button", name=part).click()
            assert page.get_by_role("button", name=part).get_attribute("aria-pressed") == "true"
            assert page.locator("#canvas .op").count() > 3


def test_charts_of_what_the_monitor_counted(browser: Any, tmp_path: Path) -> None:
    model = make(Block)
    run = compiled(model, monitor=True, lowering="eager")
    for x in batches(3, 16, 32):
        run(x).sum().backward()
    found, report = fp8pass.stats(model), fp8pass.explain(model, torch.randn(16, 32))
    with Page(browser, report.to_html(tmp_path / "report.html", found)) as page:
        page.fill("#slot-search", "up.")
        names = page.locator("#slots .slot").all_text_contents()
        assert [next(n for n in names if f"up.{role}" in n) for role in ("input", "weight", "grad_output")] == names
        assert page.locator("#slots .slot").first.locator("svg").count() == 6
        data = embedded((tmp_path / "report.html").read_text())["numerics"]
        (weight,) = (slot for slot in data if slot["slot"] == "up.weight")
        amax = model.up.weight.detach().abs().max().item()
        assert weight["step"] == [0, 1, 2] and weight["amax"] == [pytest.approx(amax, rel=1e-5)] * 3  # 6 digits


def test_escaped_names_in_a_browser(browser: Any, tmp_path: Path) -> None:
    gemm = Gemm("output", NASTY, 16, 16, 16, ("f32", "f32", "f32"), NASTY, rule=NASTY, reason=NASTY)
    broken = Report([gemm], graphs=1, notes=[NASTY], error=NASTY)
    with Page(browser, broken.to_html(tmp_path / "nasty.html", [{"slot": NASTY, "step": 0, "amax": 1.0}])) as page:
        page.locator(".row").click()
        assert page.title() == "fp8pass report"
        assert page.locator("img").count() == 0
        assert page.text_content("#detail-title") == f"{NASTY}, output"
        assert page.locator("#error").is_visible() and NASTY in page.text_content("#error")


def test_an_empty_report(browser: Any, tmp_path: Path) -> None:
    with Page(browser, Report().to_html(tmp_path / "empty.html")) as page:
        assert page.text_content("#empty") == "No matmul was seen."
        assert not page.locator("#graph").is_visible()
