"""`fp8pass demo`: train a small language model on real text in BF16 and in FP8, side by side.

The text is the source of the Python standard library, byte by byte, which every machine has. Both models start from the
same weights and see the same batches. The baseline is ordinary eager PyTorch, in float32 on a CPU that can't multiply
BF16; the other model runs the same code in `fp8pass.train_step`.

Under `torchrun --nproc-per-node 8 --no-python fp8pass demo` each rank trains on its part of the same batches, in
`DistributedDataParallel`; losses are of whole batches, and rank 0 prints them.
"""

from __future__ import annotations

import contextlib
import itertools
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

from fp8pass.base._torch import cancel_compilations
from fp8pass.hardware import reference_dtypes
from fp8pass.inspect import explainer
from fp8pass.inspect.demo_checks import Unusable, check
from fp8pass.inspect.demo_output import Curve, phase, plot, say
from fp8pass.options.config import Config
from fp8pass.report.report import Report
from fp8pass.train import training_step

VOCABULARY, CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 256, 128, 16, 256, 4, 4
STEPS, LEARNING_RATE, WARMUP, VALIDATION_BATCHES, TOLERANCE = 100, 1e-3, 20, 16, 0.01
NAMES = {torch.bfloat16: "BF16", torch.float32: "FP32"}
"""The baseline's name by its precision."""
TOO_SLOW = 4
"""A BF16 matmul that takes this many times as long as a float32 one means that the CPU does not multiply BF16. torch's
reference routine takes 40 to 130 times as long."""


class Block(nn.Module):
    """Pre-norm attention and MLP: f32[B, S, WIDTH] -> f32[B, S, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute f32[B, S, WIDTH] from x: f32[B, S, WIDTH]."""
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(x.shape))
        hidden: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + hidden


class GPT(nn.Module):
    """Language model: i64[B, S] bytes -> f32[B, S, 256] logits of the next byte."""

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
        """Compute logits f32[B, CONTEXT, 256] from tokens: i64[B, CONTEXT]."""
        x = self.bytes(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Text:
    """Bytes to train on, and other bytes to validate with, each u8[n]."""

    train: Tensor
    validation: Tensor

    def batch(self, generator: torch.Generator, device: str, validation: bool = False) -> tuple[Tensor, Tensor]:
        """Draw random (tokens, next tokens), both i64[BATCH, CONTEXT]."""
        data = self.validation if validation else self.train
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()]).long().to(device)
        return rows[:, :-1], rows[:, 1:]


def load_text(limit: int = 8 << 20) -> Text:
    """Read the standard library's source, about `limit` bytes; every 20th file is for validation."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Sorted, because file systems list files in different orders, and all ranks need the same text.
    files = sorted(f for f in folder.rglob("*.py") if "site-packages" not in f.parts and "test" not in f.parts)
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    for i, file in enumerate(files):
        if sum(map(len, parts.values())) < limit:
            parts[i % 20 == 0] += file.read_bytes()
    return Text(*(torch.frombuffer(parts[held_out], dtype=torch.uint8) for held_out in (False, True)))


def loss_of(
    model: Callable[[Tensor], Tensor], tokens: Tensor, targets: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute the cross-entropy in nats per byte, f32[]. dtype: of matmuls, bfloat16 (by autocast) or float32."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    targets: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Do one optimizer step and return the loss, f32[]. Ordinary eager code, which `fp8pass.train_step` compiles."""
    loss = loss_of(model, tokens, targets, dtype)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@dataclass
class DemoRun:
    """One model in training, in `DistributedDataParallel` if there are other ranks.

    evaluate: the model, as validation calls it. train: `train_step`, eager or compiled. dtype: see `loss_of`.
    """

    name: str
    model: nn.Module
    evaluate: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    train: Callable[..., Tensor] = train_step
    dtype: torch.dtype = torch.bfloat16
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan

    def step(self, tokens: Tensor, targets: Tensor, rate: float) -> None:
        """Do one optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)  # in place: the compiled update has this tensor as an input
        loss = self.train(self.model, self.optimizer, tokens, targets, self.dtype)
        self.losses.append(mean_over_ranks(loss).item())

    @torch.no_grad()
    def validate(self, text: Text, device: str) -> None:
        """Compute the mean loss over held-out batches, the same for every run."""
        generator = torch.Generator().manual_seed(1)
        batches = [text.batch(generator, device, validation=True) for _ in range(VALIDATION_BATCHES)]
        self.validation = sum(loss_of(self.evaluate, *b, self.dtype).item() for b in batches) / len(batches)


def new_run(name: str, device: str, recipe: Any = None, dtype: torch.dtype = torch.bfloat16) -> DemoRun:
    """Create a run: a model with the weights that every run starts from, to be trained in `dtype`, or in FP8.

    recipe: `Config.recipe`; None for eager PyTorch.
    """
    torch.manual_seed(0)
    model = GPT().to(device)
    # A tensor, because Dynamo recompiles the update when a learning rate that is a Python number changes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(LEARNING_RATE), betas=(0.9, 0.95))
    trained = DistributedDataParallel(model) if dist.is_initialized() else model
    if recipe is None:
        return DemoRun(name, trained, model, optimizer, dtype=dtype)
    options = {"recipe": recipe, "min_speedup": 0}  # a model this small is for looking at losses, not at speed
    # Op by op, because validation is too short to pay for compiling more kernels.
    evaluate = torch.compile(model, backend="fp8pass", options={**options, "lowering": "eager"})
    return DemoRun(name, trained, evaluate, optimizer, training_step.train_step(**options)(train_step), dtype)


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine to a tenth."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(runs: list[DemoRun], text: Text, steps: int, device: str) -> Iterator[int]:
    """Train all runs on the same batches, and yield the number of steps done after every step."""
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        tokens, targets = map(part_of, text.batch(generator, device))
        for run in runs:
            run.step(tokens, targets, rate_at(step, steps))
        yield step + 1


def explain(recipe: str, device: str, text: Text, dtype: torch.dtype) -> Report:
    """Return `fp8pass.explain`'s verdicts on the matmuls of the demo's model."""
    model = GPT().to(device)
    tokens, _ = text.batch(torch.Generator().manual_seed(0), device)
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        return explainer.explain(model, tokens, config=Config(recipe=recipe, min_speedup=0))


def multiplies_bf16() -> tuple[bool, str]:
    """Return whether this CPU multiplies BF16, and the reason: what torch says of it, and the time of a matmul."""
    says = torch.bfloat16 not in reference_dtypes()
    bf16, fp32 = map(_seconds_of_matmul, (torch.bfloat16, torch.float32))
    said = "torch multiplies BF16 on this CPU" if says else "torch has only a reference routine for BF16 on this CPU"
    times = f"{1e3 * bf16:.2g} ms in BF16, {1e3 * fp32:.2g} ms in FP32"
    return says and bf16 < TOO_SLOW * fp32, f"{said}; [256, 256] x [256, 256] takes one core {times}"


def _seconds_of_matmul(dtype: torch.dtype) -> float:
    """Return the shortest CPU time of ten matmuls on one core; other processes hardly change CPU time."""
    a, shortest, threads = torch.ones(256, 256, dtype=dtype), math.inf, torch.get_num_threads()
    torch.set_num_threads(1)  # thread_time counts this thread only
    for _ in range(10):
        started = time.thread_time()
        torch.mm(a, a)
        shortest = min(shortest, time.thread_time() - started)
    torch.set_num_threads(threads)
    return shortest


def choose_precision(device: str) -> tuple[torch.dtype, str]:
    """Return the dtype of both models outside of FP8, bfloat16 or float32, and the reason; rank 0 chooses."""
    if device.startswith("cuda"):
        return torch.bfloat16, "GPUs multiply it"
    answer = [multiplies_bf16() if is_first_rank() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(answer)
    assert answer[0] is not None
    bf16, why = answer[0]
    return (torch.bfloat16 if bf16 else torch.float32), why


@contextlib.contextmanager
def among_ranks(device: str) -> Iterator[str]:
    """Yield this rank's device, within a process group of the ranks that torchrun started, if any; rank 0 prints.

    Raises Unusable if the batch size is not a multiple of the number of ranks.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield device
        return
    if BATCH % ranks:
        raise Unusable(f"{ranks} ranks can't have equal parts of batches of {BATCH}; start 2, 4, 8 or 16")
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    # print writes nothing where sys.stdout is None.
    with contextlib.redirect_stdout(sys.stdout if is_first_rank() else None):
        yield device
    dist.destroy_process_group()  # not after an error, when the other ranks may not get here


def is_first_rank() -> bool:
    """Return whether this process is the one that prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def part_of(batch: Tensor) -> Tensor:
    """Return this rank's part of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def mean_over_ranks(loss: Tensor) -> Tensor:
    """Return the loss of the whole batch: the mean of its equally large parts' losses, reduced in place."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss


def main(steps: int, recipe: str, device: str, out: Path) -> int:
    """Run the demo and return the exit status.

    0 for success; 1 if nothing runs in FP8, or its validation loss is more than 1% above the baseline's; 130 after
    Ctrl-C, with the losses so far in the plot. Raises Unusable before training if something that the demo needs is
    missing, and after it if the plot can't be written.
    """
    runs: list[DemoRun] = []
    path = out / "loss.png"
    try:
        check(recipe, device, path)
        with among_ranks(device) as group:
            return _main(steps, recipe, group, path, runs)
    except KeyboardInterrupt:
        return _interrupted(runs, steps, path)


def _main(steps: int, recipe: str, device: str, path: Path, runs: list[DemoRun]) -> int:
    """Run the demo on this rank, see `main`. runs: an empty list, to which the models in training are added."""
    started = time.perf_counter()
    dtype, why = choose_precision(device)
    name = NAMES[dtype]
    say(f"{name} against FP8, recipe {recipe}, torch {torch.__version__}, {device}. {name}: {why}.")
    text = load_text()
    with phase("fp8pass.explain: what becomes of every matmul"):
        report = explain(recipe, device, text, dtype)
    say(f"\n{report}\n")
    runs += [new_run(name, device, dtype=dtype), new_run("FP8", device, recipe, dtype)]
    size, data = sum(p.numel() for p in runs[0].model.parameters()), len(text.train)
    say(f"{size / 1e6:.1f}M parameters, {data / 1e6:.1f} MB of text, {steps} steps of {BATCH} x {CONTEXT} bytes")
    _train(runs, text, steps, device)
    with phase(f"validation on {VALIDATION_BATCHES} other batches"):
        for run in runs:
            run.validate(text, device)
    status = verdict(runs, report)
    _save(runs, path)
    say(f"loss curves       {path}\ntotal time        {time.perf_counter() - started:.0f} s")
    say("next              your own model: fp8pass explain my_module:make_model --html report.html")
    return status


def _train(runs: list[DemoRun], text: Text, steps: int, device: str) -> None:
    done = train(runs, text, steps, device)
    # Two steps: the first has no scales yet and runs op by op, so the backward is compiled in the second.
    say(f"{runs[0].name} is eager PyTorch, FP8 is fp8pass.train_step, which compiles forward, backward and update")
    with phase("steps 1 and 2, which compile"):
        for _ in itertools.islice(done, 2):
            pass
    with phase("training", range(2, steps)) as show:
        for step in done:
            show(step, "   ".join(f"{run.name} {run.losses[-1]:.4f}" for run in runs))


def _save(runs: list[DemoRun], path: Path) -> None:
    """Plot the losses so far."""
    if not is_first_rank():
        return
    try:
        plot([Curve(run.name, run.losses, run.validation) for run in runs], path)
    except OSError as error:
        raise Unusable(f"{path} can't be written ({error.strerror}); name another folder with --out") from error


def _interrupted(runs: list[DemoRun], steps: int, path: Path) -> int:
    cancel_compilations()
    done = min((len(run.losses) for run in runs), default=0)
    if done:
        _save(runs, path)
    if is_first_rank():
        say(f"stopped after {done} of {steps} steps" + (f"; the losses so far: {path}" if done else ""))
    return 130


def verdict(runs: list[DemoRun], report: Report) -> int:
    """Print the validation losses side by side and decide the exit status."""
    baseline, fp8 = runs
    gap = fp8.validation / baseline.validation - 1
    losses = "   ".join(f"{run.name} {run.validation:.4f}" for run in runs)
    say(f"\nvalidation loss   {losses}   FP8 is {gap:+.2%}")
    if not report.rewritten:
        say("FAILED: no matmul runs in FP8")
        return 1
    if not gap <= TOLERANCE:  # true for NaN, too
        say(f"FAILED: FP8's validation loss is more than {TOLERANCE:.0%} above {baseline.name}'s")
        return 1
    return 0
