"""Take the screenshots of the HTML report in docs/images/: the demo's model, and a small model's kernels and numerics.

python docs/report_images.py [folder]        needs Chromium (.ci/chromium) and the extra "dev"
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import fp8pass
from fp8pass.inspect import demo
from fp8pass.inspect.statistics import Stats
from fp8pass.report.report import Report

ROOT = Path(__file__).parent.parent
SHOTS = {
    "report-desktop-light": (1200, 1340, "light"),
    "report-desktop-dark": (1200, 1340, "dark"),
    "report-phone": (390, 1500, "light"),
}


def monitored() -> tuple[Report, Stats]:
    """Return the report with kernels of a small model, and the numerics of 40 steps with a high learning rate."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=0.02), torch.randn(512, 256)

    @fp8pass.train_step(monitor=True, lowering="eager")  # type: ignore[untyped-decorator]
    def step() -> None:
        torch.nn.functional.mse_loss(model(x), x.sin()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(40):
        step()
    return fp8pass.explain(model, x, kernels=True), fp8pass.stats(model)


def main(folder: Path) -> None:
    """Write the screenshots into a folder."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("this script needs Chromium: bash .ci/chromium installs it")
    folder.mkdir(parents=True, exist_ok=True)
    config = fp8pass.Config(target="h100", filter=["head"], min_speedup=0)
    model, tokens = demo.GPT(), torch.randint(256, (demo.BATCH, demo.CONTEXT))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = fp8pass.explain(model, tokens, config=config)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        page_file = report.to_html(Path(scratch) / "report.html")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, height, scheme) in SHOTS.items():
            look: dict[str, Any] = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
            page = browser.new_page(**look, reduced_motion="reduce")
            page.goto(page_file.as_uri())
            page.add_style_tag(
                content=".rows { max-height: 200px !important } .canvas { max-height: 470px !important }"
            )
            page.fill("#search", "blocks.1.")
            page.locator(".row", has_text="blocks.1.up").first.click()
            page.evaluate("window.scrollTo(0, 0)")
            page.screenshot(path=folder / f"{name}.png")
            page.close()
        small, numerics = monitored()
        page = browser.new_page(viewport={"width": 1200, "height": 900}, reduced_motion="reduce")
        page.goto(small.to_html(Path(scratch) / "small.html", numerics).as_uri())
        page.add_style_tag(content="#code { max-height: 330px !important }")
        page.locator(".row").first.click()
        page.locator("#kernel").scroll_into_view_if_needed()
        page.evaluate("document.querySelector('#kernel').scrollIntoView()")
        page.screenshot(path=folder / "report-numerics.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
