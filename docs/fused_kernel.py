"""Print a generated kernel of a fused matmul, and what it moves, for docs/fused-matmuls.md.

    python docs/fused_kernel.py

The model is an MLP with ReLU squared, [8192, 4096] to 14336, in training with delayed scaling. Nothing is measured.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # to import docs.fused_kernel in the process that pretends a GPU

from fp8pass.hardware import TARGETS  # noqa: E402
from fp8pass.inspect.fake_cuda import FakeCuda, fakes  # noqa: E402
from fp8pass.inspect.inspector import Kernel, inspect  # noqa: E402
from fp8pass.states.slots import registry  # noqa: E402


class MLP(nn.Module):
    """down(relu(up(x)) squared)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 14336, bias=False), nn.Linear(14336, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [8192, 4096] to the same shape."""
        hidden = self.up(x).relu()
        result: Tensor = self.down(hidden * hidden)
        return result


def model() -> tuple[Any, ...]:
    """Return the MLP and its input."""
    return MLP().to(torch.bfloat16), torch.randn(8192, 4096, dtype=torch.bfloat16, requires_grad=True)


def kernels(epilogues: str) -> list[Kernel]:
    """Return the kernels that compute the hidden tensor, and its gradient."""
    run = inspect("docs.fused_kernel:model", options={"epilogues": epilogues}).runs[0]
    return [k for k in run.kernels if "relu" in k.what or "4096] x [4096, 14336]" in k.what]


def table() -> str:
    """Return what these kernels read and write, without and with fusion."""
    rows = ["| | kernel | MB read | MB written |", "|---|---|---:|---:|"]
    for title, how in (("apart", "off"), ("fused", "always")):
        for k in kernels(how):
            cells = title, f"{k.graph}: {k.what}", f"{k.bytes_read / 1e6:.0f}", f"{k.bytes_written / 1e6:.0f}"
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def source() -> str:
    """Return the source of the kernel of the forward."""
    registry.on_new.append(lambda state: state.assume_scales())  # as after the first step
    gpu = FakeCuda(TARGETS["h100"])
    with gpu.compiles() as found, fakes():
        made, *inputs = model()
        options = {"target": "h100", "epilogues": "always"}
        torch.compile(made, backend="fp8pass", options=options)(*inputs)
    (text,) = re.findall(r"^def scaled_mm_fused.*?(?=\n''')", found[0].code, flags=re.MULTILINE | re.DOTALL)
    return str(text)


def main() -> None:
    """Print the table and the source, as Markdown."""
    print(f"{table()}\n\n```python\n{source()}\n```")


if __name__ == "__main__":
    main()
