"""Count the bytes per parameter that training holds, with fp8pass and with others, on the demo's GPT.

    python bench/memory.py

Each row marked "counted" trains two steps, and then walks over the storages of all tensors that live:
parameters, FP8 copies, optimizer state, scales; and the gradients, when the optimizer's update begins. Activations are
not counted. Rows marked "documents" are what a project says of itself: see `DOCUMENTS`. Rows of torchao are missing if
it is not installed. Where a matmul runs, Inductor or op by op, changes nothing of this, so all is run op by op.
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.inspect import demo
from fp8pass.weights.parameter_bytes import COPIES, GRADIENTS, PARAMETERS, SCALES, ParameterBytes, parameter_bytes

SMALL = {"WIDTH": 512, "LAYERS": 4, "CONTEXT": 16, "HEADS": 4, "BATCH": 1}


@dataclass
class Row:
    """Bytes per parameter. copies: of weights, in FP8 or 16 bits. first, second: moments. source: of the numbers."""

    name: str
    parameter: float
    copies: float
    first: float
    second: float
    scales: float
    gradient: float
    source: str = "counted"

    @property
    def cells(self) -> list[str]:
        """The cells of a table."""
        parts = [self.parameter, self.copies, self.first, self.second, self.scales]
        numbers = [*parts, sum(parts), self.gradient, sum(parts) + self.gradient]
        return [self.name, *(f"{n:.2f}" if n else "" for n in numbers), self.source]


MS_AMP = "documents [1]"
TE = "documents [2]"
DOCUMENTS = (
    Row("MS-AMP O0: AMP, float32 weights", 4, 0, 4, 4, 0, 4, MS_AMP),
    Row("MS-AMP O1: float16 weights, FP8 gradients", 2, 0, 4, 4, 0, 1, MS_AMP),
    Row("MS-AMP O2: FP8 and float16 moments too", 2, 0, 1, 2, 0, 1, MS_AMP),
    Row("MS-AMP O3: FP8 weights, float16 master", 2, 1, 1, 2, 0, 1, MS_AMP),
    Row("TransformerEngine: float32 weights, FP8 copies", 4, 2, 4, 4, 0, 4, TE),
    Row("TransformerEngine: FP8 weights, float32 master", 4, 2, 4, 4, 0, 2, TE),
)
"""MS-AMP's table of precisions, and TransformerEngine's: an FP8 weight has both orientations (Hopper), and with FP8
weights alone, gradients are bfloat16."""
NOTES = """\
[1] The table of precisions in MS-AMP's documentation, as the guide of Hugging Face Accelerate repeats it, without
    scales.
[2] What the options do: `Linear` caches FP8 weights in both orientations; `quantized_model_init` has no other weights,
    and an optimizer with master weights keeps these in float32. Its `FusedAdam` also has moments and master weights in
    16 or 8 bits."""


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled functions, as torchao's optimizers have, op by op, without warnings of these packages."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


def _model(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    for name, value in SMALL.items():
        setattr(demo, name, value)
    data = torch.randint(256, (demo.BATCH, demo.CONTEXT + 1))
    return demo.GPT().to(dtype), (data[:, :-1], data[:, 1:])


def of_fp8pass(dtype: torch.dtype = torch.float32, **config: Any) -> ParameterBytes:
    """Train with `fp8pass.train_step`, and count."""
    torch._dynamo.reset()
    model, (tokens, targets) = _model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def train(tokens: Tensor, targets: Tensor) -> None:
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step = fp8pass.train_step(train, **{"min_speedup": 0, "lowering": "eager", **config})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            step(tokens, targets)
    found: ParameterBytes = step.bytes_per_parameter()
    return found


def of_eager(make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> ParameterBytes:
    """Train without fp8pass, and count. With float32 parameters, autocast computes in bfloat16, as in AMP."""
    model, (tokens, targets) = _model(dtype)
    with eagerly():
        optimizer = make(model.parameters())
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
    return parameter_bytes(list(model.parameters()), [optimizer], gradients)


def row(name: str, of: ParameterBytes) -> Row:
    """Return the row of what was counted."""
    n, parts = of.per_parameter, (PARAMETERS, COPIES, "exp_avg", "exp_avg_sq", SCALES, GRADIENTS)
    assert set(n) <= set(parts), set(n) - set(parts)
    parameter, copies, first, second, scales, gradient = (n.get(part, 0.0) for part in parts)
    return Row(name, parameter, copies, first, second, scales, gradient)


FP8PASS: dict[str, dict[str, Any]] = {
    "fp8pass, float32 parameters": {},
    "`optimizer_state='fp8+float16'`": {"optimizer_state": "fp8+float16"},
    "`optimizer_state='fp8'`": {"optimizer_state": "fp8"},
    "`Moments(block=256)`": {"optimizer_state": fp8pass.Moments(block=256)},
    "`weight_cache='fp8'`": {"weight_cache": "fp8"},
    "bfloat16, `update_rounding='stochastic'`": {"dtype": torch.bfloat16, "update_rounding": "stochastic"},
    "bfloat16, and `optimizer_state='fp8'`": {
        "dtype": torch.bfloat16,
        "update_rounding": "stochastic",
        "optimizer_state": "fp8",
    },
    "bfloat16, all of these": {
        "dtype": torch.bfloat16,
        "update_rounding": "stochastic",
        "optimizer_state": "fp8",
        "weight_cache": "fp8",
    },
    "these, and `update_in_backward`": {
        "dtype": torch.bfloat16,
        "update_rounding": "stochastic",
        "optimizer_state": "fp8",
        "weight_cache": "fp8",
        "update_in_backward": True,
        "update_bucket_bytes": 2**20,
    },
}
"""Rows of fp8pass, with their options; the default of `train_step` is `weight_cache="fp8+transpose"`."""


def rows() -> Iterator[Row]:
    """Yield all rows."""
    yield row("torch AdamW, mixed precision (AMP)", of_eager(torch.optim.AdamW))
    yield row("torch AdamW, bfloat16 alone", of_eager(torch.optim.AdamW, torch.bfloat16))
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao import optim

        for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit"):
            yield row(f"torchao {name}", of_eager(getattr(optim, name)))
        rounded = of_eager(lambda p: optim.AdamW8bit(p, bf16_stochastic_round=True), torch.bfloat16)
        yield row("torchao AdamW8bit, bfloat16, rounded stochastically", rounded)
    yield from DOCUMENTS
    for name, config in FP8PASS.items():
        yield row(name, of_fp8pass(**config))


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    heads = ("parameter", "copies", "first", "second", "scales", "between steps", "gradient", "update begins")
    print(f"| | {' | '.join(heads)} | source |\n|---{'|---:' * len(heads)}|---|")
    for each in rows():
        print(f"| {' | '.join(each.cells)} |", flush=True)
    print(f"\n{NOTES}")


if __name__ == "__main__":
    main()
