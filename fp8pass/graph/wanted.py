"""Check whether a matmul is to run in FP8: by its sizes, by the recipe and by the filter.

The annotate pass checks the matmuls of a graph, and `Outside` those that run outside of any graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8pass.graph.refusal import MAX_BATCHES, LeftOut, Reject
from fp8pass.graph.sizes import depends_on_data, is_at_least
from fp8pass.options.config import Config
from fp8pass.recipes import Recipe

LIMITS = {
    "declined": {
        "recipe, filter, high precision": ("your recipe or filter leaves it out", "nothing, if you asked for that"),
        "min_speedup": (
            "it is too small to pay for its quantization, as [predicted](roofline.md); if a size varies, [it says "
            "from which size on it pays](roofline.md#if-the-number-of-tokens-varies), and other compilations serve "
            "those",
            "larger batches; `min_speedup=0` runs it in FP8 anyway; `merge_siblings=True` may make it large enough",
        ),
        "vector": ("M, K or N is 1, so it is not a matrix product", "nothing to gain"),
        "empty": ("M, K or N is 0", "nothing to gain"),
        "data-dependent size": (
            "K or N is known only at run time; or M is, and may be 0, which has no amax",
            "`torch._check(x.shape[0] > 0)` if it is M; or keep it out of the region",
        ),
    },
}
"""Lines of docs/limits.md: see `Reject`."""

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that FP8 replaces."""


@dataclass(frozen=True)
class MatmulSizes:
    """`batches` products of [M, K] by [K, N]. Ints or SymInts."""

    batches: Any
    m: Any
    k: Any
    n: Any


def recipe_of(name: str, config: Config, m: Any, k: Any, n: Any) -> Recipe:
    """Return the recipe of the matmul of this name. Raises LeftOut if the recipe or the filter does not want it.

    m, k, n: ints or SymInts. A filter that compares a SymInt with a number limits the compilation to one side of it: no
    size is guessed. A size that depends on data can't be compared, and the filter is not asked.
    """
    recipe, why = config.recipe_of(name)
    if recipe is None:
        raise LeftOut("recipe", why)
    if callable(config.filter) and any(map(depends_on_data, (m, k, n))):
        return recipe
    if reason := config.leaves_out(name, m, k, n):
        raise LeftOut("filter", reason)
    return recipe


def check_sizes(s: MatmulSizes, max_batches: int, not_grouped: str) -> None:
    """Raise Reject or LeftOut for sizes that no kernel takes.

    not_grouped: the end of the reason if there are too many batches of experts: why no grouped kernel takes them.
    """
    for letter, size in (("M", s.m), ("K", s.k), ("N", s.n)):
        if depends_on_data(size) and (letter != "M" or not is_at_least(size, 1)):
            zero = ", and may be 0: torch._check(x.shape[0] > 0) for its input x, or" if letter == "M" else ";"
            raise Reject(
                "data-dependent size",
                f"{letter}={size} depends on data{zero} keep such matmuls out of the compiled region",
            )
        # isinstance: to compare a symbolic size would add a guard on it
        if isinstance(size, int) and size == 0:
            raise LeftOut("empty", f"{letter}=0: the matmul is empty")
        if isinstance(size, int) and size == 1:
            raise LeftOut("vector", f"{letter}=1: no matrix product, each operand element is used once")
    if not isinstance(s.batches, int) or s.batches > max_batches:
        count = s.batches if isinstance(s.batches, int) else "a varying number of"
        raise LeftOut(
            "batches",
            f"{count} products of [{s.m}, {s.k}] by [{s.k}, {s.n}]: `_scaled_mm` has no batch dimension, and more "
            f"than {MAX_BATCHES} launches would cost more than FP8 gains{not_grouped}",
        )
