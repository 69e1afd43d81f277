"""Runs of torchtitan's Trainer for tests: a small Llama on a CPU, on text, with a byte for a token.

As a script, for torchrun: a folder, and flags of torchtitan. Trains for 4 steps with a checkpoint at step 2.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tests.helpers import titan_on_cpu  # noqa: F401  # first: it makes torchtitan take the CPU

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torchtitan's own imports warn of
    import torchtitan.trainer
    from datasets import Dataset
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ConfigManager
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from fp8pass.integrations.torchtitan import Fp8Trainer, in_fp8

STEPS = 4


class Bytes(BaseTokenizer):  # type: ignore[misc]  # torchtitan has no types
    """Takes each byte for a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """It has no options."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def text(_: str) -> Dataset:
    """Return a document for each rank."""
    lines = inspect.getsource(torchtitan.trainer).splitlines()
    return Dataset.from_dict({"text": ["\n".join(lines[::2]), "\n".join(lines[1::2])]})


DATASETS["source"] = DatasetConfig("", text, lambda sample: sample["text"])


def on_cpu() -> Any:
    """Return torchtitan's config of its debug model, with two layers, whose attention has a backward on a CPU."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for _, _, layer, name in list(model.traverse(FlexAttention.Config)):
        setattr(layer, name, ScaledDotProductAttention.Config())
    config.tokenizer, config.dataloader.dataset = Bytes.Config(), "source"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, STEPS
    config.training.disable_cuda_graphs, config.debug.seed = True, 0
    config.debug.enable_structured_logging, config.checkpoint.enable, config.checkpoint.interval = False, True, 2
    config.compile.enable, config.compile.components = True, ["model"]
    return config


def llama() -> Fp8Trainer.Config:
    """Return the config as `--config llama` gets it."""
    return in_fp8(on_cpu(), lowering="eager", on_fault="raise")


def parsed(*flags: str) -> Fp8Trainer.Config:
    """Return what torchtitan makes of its command line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ConfigManager().parse_args(
            ["--module", __spec__.name if __spec__ else __name__, "--config", "llama", *flags]
        )


if __name__ == "__main__":
    config = parsed("--dump_folder", *sys.argv[1:])
    trainer = config.build()
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
