"""Show what the forward saves for the backward, with and without `save_fp8`, and what that costs in accuracy.

    python bench/saved.py [--verdicts]

Prints two tables, or the verdicts on the tensors that a small layer saves. The first table has megabytes that are
saved, the peak of a step, and bytes and launches around the matmuls, as `fp8pass inspect` counts them for an H100 on
any machine; the second the error of the gradients of a small MLP that runs here. `torch's pass` is Inductor's
`activation_quantization_aten_pass`, which quantizes whatever is saved, by rows, to e5m2.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `bench.blocks:...` from any working directory

import blocks
from torch._inductor import config as inductor_config
from traffic import around_matmuls

import fp8pass
from fp8pass.inspect.inspector import InspectedRun, inspect
from fp8pass.report.report import saved_summary

BLOCKS = ("llama_mlp", "llama_block", "gpt2_mlp")
TORCHS_PASS = {
    "quant_type": "torch.float8_e5m2", "use_scaling": True, "size_in_mb": 1, "exclude_primals": True,
    "allowed_dtypes": "torch.bfloat16",
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "fp8pass delayed": {},
    "fp8pass delayed, save_fp8": {"save_fp8": True},
    "fp8pass delayed, save_fp8, fused": {"save_fp8": True, "epilogues": "always"},
    "fp8pass delayed, save_fp8, weights cached": {"save_fp8": True, "weight_cache": "fp8+transpose"},
}
STEPS = 3


def __getattr__(name: str) -> Any:
    """Return the factory of a block that also turns torch's pass on: `bench.saved:llama_mlp`."""

    def factory() -> tuple[Any, ...]:
        inductor_config.post_grad_fusion_options["activation_quantization_aten_pass"] = TORCHS_PASS
        made: tuple[Any, ...] = getattr(blocks, name)()
        return made

    if name not in BLOCKS:
        raise AttributeError(name)
    return factory


def runs(block: str) -> dict[str, InspectedRun]:
    """Return how a block is trained, by row of the table."""
    found = {name: inspect(f"bench.blocks:{block}", options=options).runs for name, options in ROWS.items()}
    first = inspect(f"bench.blocks:{block}", peer="torchao:tensorwise").runs
    with_pass = inspect(f"bench.saved:{block}").runs
    others = {"bf16": first[1], "bf16, torch's pass": with_pass[1], "torchao tensorwise": first[2]}
    return {**others, **{name: of[0] for name, of in found.items()}}


def table() -> str:
    """Return the counted table in Markdown."""
    found = {block: runs(block) for block in BLOCKS}
    heads = " | ".join(f"{block} saved MB | peak MB | MB moved | launches" for block in BLOCKS)
    lines = [f"| | {heads} |", "|---" + "|---:" * 4 * len(BLOCKS) + "|"]
    rows = ([row, *(_cells(of[row]) for of in found.values())] for row in found[BLOCKS[0]])
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def _cells(run: InspectedRun) -> str:
    moved, triton, others = around_matmuls(run)
    return f"{run.bytes_saved / 1e6:.0f} | {run.peak_bytes / 1e6:.0f} | {moved / 1e6:.0f} | {triton + others}"


def gradients(**options: Any) -> dict[str, Tensor]:
    """Return the gradients of a small MLP in its last step; without options, in float64 and without FP8."""
    torch.manual_seed(0)
    model, x = blocks.LlamaMLP(256, 768), torch.randn(512, 256)
    model, x = (model.double(), x.double()) if not options else (model.bfloat16(), x.bfloat16())
    run = torch.compile(model, backend="fp8pass", options=options) if options else model
    for _ in range(STEPS):  # from the second step on, delayed scales are those of the step before
        model.zero_grad()
        run(x).float().square().mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def torchs_pass() -> Iterator[None]:
    """Turn torch's pass on, for tensors of any size."""
    options = {**TORCHS_PASS, "size_in_mb": 0}
    with inductor_config.patch("post_grad_fusion_options", {"activation_quantization_aten_pass": options}):
        yield


def errors() -> str:
    """Return the error of gradients in Markdown: the norm of the difference from float64, over the norm."""
    exact = gradients()
    ways: dict[str, dict[str, Tensor]] = {"fp8pass delayed": gradients(recipe="delayed")}
    ways["fp8pass delayed, save_fp8"] = gradients(recipe="delayed", save_fp8=True)
    with torchs_pass():
        torch.compiler.reset()
        ways["fp8pass delayed, torch's pass"] = gradients(recipe="delayed")
    lines = ["| | " + " | ".join(exact) + " |", "|---" + "|---:" * len(exact) + "|"]
    for way, found in ways.items():
        cells = (f"{float((found[n] - wanted).norm() / wanted.norm()):.2%}" for n, wanted in exact.items())
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Returning(blocks.LlamaMLP):
    """An MLP that returns its hidden state with the result, as models do if they are asked for hidden states."""

    def forward(self, x: Tensor) -> Any:
        """Return the result, and the input of the activation."""
        gate, up = self.gate(self.norm(x)), self.up(self.norm(x))
        return x + self.down(F.silu(gate) * up), up


def verdicts() -> str:
    """Return what the report says of a layer and an MLP."""
    layer = blocks.LlamaBlock(256, 768, heads=4, kv_heads=2, length=512)
    inputs = [torch.randn(1, 512, 256, requires_grad=True)]
    config = fp8pass.Config(save_fp8=True)
    found = [fp8pass.explain(model, *inputs, config=config) for model in (layer, Returning(256, 768))]
    return "\n".join(line for report in found for line in (saved_summary(report.saved), *map(str, report.saved)))


if __name__ == "__main__":
    print(verdicts() if "--verdicts" in sys.argv else "\n\n".join((table(), errors())))
