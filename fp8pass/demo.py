"""`fp8pass demo`: a small language model, trained on real text in BF16 and in FP8, side by side.

The text is the Python standard library's own source, byte by byte, which every machine has. Both models start from the
same weights and see the same batches; the one difference is the backend of `torch.compile`.

Under `torchrun --nproc-per-node 8 --no-python fp8pass demo` each rank trains on its part of the same batches, in
`DistributedDataParallel`; the losses are those of whole batches, and rank 0 shows them.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8pass
from fp8pass.report import Report

VOCABULARY, CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 256, 128, 16, 256, 4, 4
LEARNING_RATE, WARMUP, VALIDATION_BATCHES, TOLERANCE = 1e-3, 20, 16, 0.01


class Block(nn.Module):
    """Pre-norm attention and MLP: f32[B, S, WIDTH] -> f32[B, S, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x: f32[B, S, WIDTH]."""
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(x.shape))
        hidden: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class GPT(nn.Module):
    """i64[B, S] bytes -> f32[B, S, 256] logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: i64[B, CONTEXT]."""
        x = self.bytes(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Text:
    """Bytes to train on, and others to validate with: u8[n]."""

    train: Tensor
    validation: Tensor

    def batch(self, generator: torch.Generator, device: str, validation: bool = False) -> tuple[Tensor, Tensor]:
        """Random (tokens, next tokens), both i64[BATCH, CONTEXT]."""
        data = self.validation if validation else self.train
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()]).long().to(device)
        return rows[:, :-1], rows[:, 1:]


def load_text(limit: int = 8 << 20) -> Text:
    """The standard library's source; every 20th file is for validation."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in folder.rglob("*.py") if "site-packages" not in f.parts and "test" not in f.parts)
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    for i, file in enumerate(files):
        if sum(map(len, parts.values())) < limit:
            parts[i % 20 == 0] += file.read_bytes()
    return Text(*(torch.frombuffer(parts[held_out], dtype=torch.uint8) for held_out in (False, True)))


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats per byte, f32[], of logits in bfloat16."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """What is compiled: one optimizer step, of ordinary eager code. Returns the loss."""
    loss = loss_of(model, tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@dataclass
class Run:
    """One model in training, in `DistributedDataParallel` where there are other ranks.

    compiled: the model itself, for validation; train: a compiled `train_step`.
    """

    name: str
    model: nn.Module
    compiled: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    train: Callable[..., Tensor] = train_step
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    seconds: float = 0.0

    def step(self, tokens: Tensor, targets: Tensor, rate: float) -> None:
        """One optimizer step."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.losses.append(mean_over_ranks(self.train(self.model, self.optimizer, tokens, targets)).item())
        self.seconds += time.perf_counter() - started

    @torch.no_grad()
    def validate(self, text: Text, device: str) -> None:
        """Mean loss over the same held-out batches for every run."""
        generator = torch.Generator().manual_seed(1)
        batches = [text.batch(generator, device, validation=True) for _ in range(VALIDATION_BATCHES)]
        self.validation = sum(loss_of(self.compiled, *b).item() for b in batches) / len(batches)


def new_run(name: str, device: str, recipe: Any = None) -> Run:
    """A model with the weights that every run starts from, trained in BF16, or in FP8 by a recipe (`Config.recipe`)."""
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    trained = DistributedDataParallel(model) if dist.is_initialized() else model
    if recipe is None:
        return Run(name, trained, torch.compile(model), optimizer, torch.compile(train_step))
    options: dict[str, Any] = {
        "recipe": recipe,
        "min_speedup": 0,
    }  # a model this small is for looking at losses, not at speed
    compiled = torch.compile(model, backend="fp8pass", options=options)
    return Run(name, trained, compiled, optimizer, fp8pass.train_step(**options)(train_step))


def rate_at(step: int, steps: int) -> float:
    """Learning rate: linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(runs: list[Run], text: Text, steps: int, device: str) -> Iterator[int]:
    """Train all runs on the same batches; yields after every step."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        tokens, targets = map(part_of, text.batch(generator, device))
        for run in runs:
            run.step(tokens, targets, rate_at(step, steps))
        yield step


def explain(recipe: str, device: str, text: Text) -> Report:
    """The verdicts on the demo's model."""
    model = GPT().to(device)
    tokens, _ = text.batch(torch.Generator().manual_seed(0), device)
    with torch.autocast(device.split(":")[0], dtype=torch.bfloat16):
        return fp8pass.explain(model, tokens, config=fp8pass.Config(recipe=recipe, min_speedup=0))


def plot(runs: list[Run], path: Path) -> None:
    """Both loss curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=True):
        axes.plot(run.losses, style, label=f"{run.name} (validation {run.validation:.4f})", linewidth=1.2)
    axes.set(
        xlabel="step", ylabel="training loss, nats per byte", title="Byte-level GPT on the Python standard library"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@contextlib.contextmanager
def among_ranks(device: str) -> Iterator[str]:
    """This rank's device, while it can talk to those that torchrun has started with it, if any; rank 0 prints."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield device
        return
    if BATCH % ranks:
        raise SystemExit(f"fp8pass demo: {ranks} ranks can't have equal parts of batches of {BATCH}")
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    with contextlib.redirect_stdout(sys.stdout if dist.get_rank() == 0 else None):
        yield device
    dist.destroy_process_group()  # not after an error, where the others do not come


def part_of(batch: Tensor) -> Tensor:
    """This rank's of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def mean_over_ranks(loss: Tensor) -> Tensor:
    """The loss of the whole batch, of those of its parts, which are equally large."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss


def main(steps: int, recipe: str, device: str, out: Path) -> int:
    """Run the demo; returns the exit status: 1 if nothing runs in FP8 or FP8's loss is more than 1% above BF16's."""
    with among_ranks(device) as own:
        return _main(steps, recipe, own, out)


def _main(steps: int, recipe: str, device: str, out: Path) -> int:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        print("fp8pass demo needs rich and matplotlib: pip install 'fp8pass[demo]'")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    text = load_text()
    report = explain(recipe, device, text)
    print(report, end="\n\n")
    runs = [new_run("BF16", device), new_run("FP8", device, recipe)]
    size = sum(p.numel() for p in runs[0].model.parameters())
    print(
        f"{size / 1e6:.1f}M parameters, {len(text.train) / 1e6:.1f} MB of text, "
        f"{steps} steps of {BATCH} x {CONTEXT} bytes"
    )
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns) as progress:
        task = progress.add_task("compiling", total=steps)
        for _ in train(runs, text, steps, device):
            losses = "  ".join(f"{run.name} {run.losses[-1]:.4f}" for run in runs)
            progress.update(task, advance=1, description=losses)
    for run in runs:
        run.validate(text, device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        plot(runs, out / "loss.png")
    return verdict(runs, report, out)


def verdict(runs: list[Run], report: Report, out: Path) -> int:
    """Print the validation losses side by side and decide the exit status."""
    bf16, fp8 = runs
    gap = fp8.validation / bf16.validation - 1
    print(f"\nvalidation loss   BF16 {bf16.validation:.4f}   FP8 {fp8.validation:.4f}   FP8 is {gap:+.2%}")
    print(f"loss curves       {out / 'loss.png'}")
    if not report.rewritten:
        print("FAILED: no matmul runs in FP8")
        return 1
    if not gap <= TOLERANCE:
        print(f"FAILED: FP8's validation loss is more than {TOLERANCE:.0%} above BF16's")
        return 1
    return 0
