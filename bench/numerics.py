"""Measure the error of each recipe: the SQNR of a linear layer, in dB, and the results for special values.

    python bench/numerics.py            prints the tables of docs/numerics.md
    python bench/numerics.py --write    also writes them into the page

The layer is 512 by 512 in float32, its input has 1024 rows, and its results are compared with float64. The SQNR is
computed for each row of a result and averaged in dB, so that small rows count as much as large ones. All recipes are
measured in their third step, on data like that of the first two, so that delayed scaling has its scales.
"""

from __future__ import annotations

import argparse
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.recipes import BlockwiseScaling, DelayedScaling, DynamicScaling, MXFP8Scaling, Recipe, RowwiseScaling

PAGE = Path(__file__).parent.parent / "docs" / "numerics.md"
ROWS, WIDTH = 1024, 512
RECIPES: dict[str, Recipe] = {
    "delayed, hybrid": DelayedScaling(),
    "delayed, e4m3": DelayedScaling(fp8_format="e4m3"),
    "delayed, margin 1": DelayedScaling(margin=1),
    "dynamic, hybrid": DynamicScaling(),
    "dynamic, e4m3": DynamicScaling(fp8_format="e4m3"),
    "dynamic, power of 2": DynamicScaling(power_of_2=True),
    "rowwise": RowwiseScaling(),
    "rowwise, any scale": RowwiseScaling(power_of_2=False),
    "rowwise, grad_weight in high precision": RowwiseScaling(high_precision=("grad_weight",)),
    "blockwise": BlockwiseScaling(),
    "mxfp8": MXFP8Scaling(),
}


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Return standard normal data."""
    return torch.randn(shape, generator=generator)


def heavy_tailed(generator: torch.Generator, *shape: int) -> Tensor:
    """Return Student's t data with 3 degrees of freedom, in which a few values are a hundred times the usual."""
    chi2 = torch.randn((3, *shape), generator=generator).square().sum(0)
    return torch.randn(shape, generator=generator) / (chi2 / 3).sqrt()


def outliers(generator: torch.Generator, *shape: int) -> Tensor:
    """Return normal data in which each 64th row is 1e5 times larger, like some tokens of language models."""
    x = torch.randn(shape, generator=generator)
    x[::64] *= 1e5
    return x


DATA: dict[str, Callable[..., Tensor]] = {
    "normal": normal,
    "heavy-tailed": heavy_tailed,
    "outlier rows": outliers,
}


def sqnr(exact: Tensor, actual: Tensor) -> float:
    """Return the power of `exact` over that of the difference, in dB, mean over rows; infinite for equal tensors."""
    noise = (exact.double() - actual.double()).square().mean(1)
    return float((10 * torch.log10(exact.double().square().mean(1) / noise)).mean())


def measure(recipe: Recipe, data: Callable[..., Tensor]) -> list[float]:
    """Return the SQNR of output, grad_input and grad_weight in the third step."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        layer.weight.copy_(normal(generator, WIDTH, WIDTH) / WIDTH**0.5)
    run = torch.compile(layer, backend="fp8pass", options=_options(recipe))
    for _ in range(3):
        x = data(generator, ROWS, WIDTH).requires_grad_()
        g = data(generator, ROWS, WIDTH) * 1e-5
        layer.zero_grad()
        y = run(x)
        y.backward(g)
    assert x.grad is not None
    assert layer.weight.grad is not None
    x64, g64, w64 = x.detach().double(), g.double(), layer.weight.detach().double()
    pairs = (x64 @ w64.t(), y.detach()), (g64 @ w64, x.grad), (g64.t() @ x64, layer.weight.grad)
    return [sqnr(exact, actual) for exact, actual in pairs]


def _options(recipe: Recipe) -> dict[str, Any]:
    return {"recipe": recipe, "lowering": "eager", "min_speedup": 0}


def table_of_errors() -> str:
    """Return a table in Markdown with one row per recipe, and three figures per kind of data."""
    head = "".join(f" {name}: output | grad_input | grad_weight |" for name in DATA)
    rows = {name: [f for data in DATA.values() for f in measure(recipe, data)] for name, recipe in RECIPES.items()}
    shown = {name: ["exact" if f > 120 else f"{f:.1f}" for f in figures] for name, figures in rows.items()}
    lines = [f"| {name} | {' | '.join(figures)} |" for name, figures in shown.items()]
    return "\n".join([f"| recipe |{head}", "|---" * (1 + 3 * len(DATA)) + "|", *lines])


SPECIAL = {"0": 0.0, "2**-140 (subnormal)": 2.0**-140, "2**-120": 2.0**-120, "inf": math.inf, "NaN": math.nan}


def table_of_special_values() -> str:
    """Return a table in Markdown: the results for inputs with special amaxes, and the next scales, per recipe."""
    head = ["| recipe | " + " | ".join(f"amax {name}" for name in SPECIAL) + " |", "|---" * (1 + len(SPECIAL)) + "|"]
    names = ("delayed, hybrid", "dynamic, hybrid", "rowwise", "blockwise", "mxfp8")
    cells = {name: [_of_special(RECIPES[name], amax) for amax in SPECIAL.values()] for name in names}
    return "\n".join([*head, *(f"| {name} | {' | '.join(row)} |" for name, row in cells.items())])


def _of_special(recipe: Recipe, amax: float) -> str:
    """Describe the output for an input whose row 3 has this amax, and whose other rows are zeros.

    The weight is the identity matrix, so that the exact output equals the input.
    """
    torch._dynamo.reset()
    layer = nn.Linear(256, 256, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(256))
    run = torch.compile(layer, backend="fp8pass", options=_options(recipe))
    x = torch.zeros(128, 256)
    x[3, 5] = amax
    y = run(x).detach()
    run(torch.zeros(128, 256))  # rolls the history
    value, rest = float(y[3, 5]), y[[*range(3), *range(4, 128)]]
    assert rest.isnan().all() or rest.eq(0).all(), (recipe, amax)
    others = "; all of it NaN" if rest.isnan().all() else "; other rows exact"
    shown = "exact" if value == amax else f"{value:.3g}"
    slots = fp8pass.state(layer).state_dict()
    scale = f"; next scale {float(slots['weight.input.scale']):.3g}" if slots else ""
    return f"{shown}{others if not math.isfinite(amax) else ''}{scale}"


TABLES = {"errors": table_of_errors, "special": table_of_special_values}


def main() -> None:
    """Print the tables, and write them into the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="also write the tables into docs/numerics.md")
    write = parser.parse_args().write
    warnings.filterwarnings("ignore", message="fp8pass: (blockwise|mxfp8) kernels exist")
    text = PAGE.read_text()
    for name, make in TABLES.items():
        table = make()
        print(table, end="\n\n", flush=True)
        text = re.sub(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", rf"\g<1>{table}\n\g<2>", text, flags=re.DOTALL)
    if write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
