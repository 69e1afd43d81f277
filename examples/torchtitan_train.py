"""Train torchtitan's debug model in FP8 on a CPU, with accumulation; then resume from a checkpoint."""

import inspect
import logging
import os
import tempfile
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torchtitan.tools.utils

# torchtitan asks for a GPU: give it a CPU instead. On GPUs leave these three statements out, and what they need
cpu = {"get_device_name": str, "current_device": int, "memory_stats": lambda _: {}, "reset_peak_memory_stats": int}
cpu |= {"get_device_properties": lambda _: SimpleNamespace(total_memory=1 << 33), "empty_cache": int}
torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = (
    "cpu",
    SimpleNamespace(**{**vars(torch.cpu), **cpu}),
)
if not hasattr(dist, "set_timeout"):  # in torch 2.13, torchtitan 0.3 needs it after the first step
    dist.set_timeout = lambda *_: None

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchtitan.trainer
    from datasets import Dataset
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from fp8pass.integrations.torchtitan import Fp8Trainer, in_fp8


class Bytes(BaseTokenizer):
    """Takes each byte for a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """It has no options."""

    def __init__(self, config: Config, **_: str) -> None:
        super().__init__()

    def encode(self, text: str, **_: bool) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Return the text of bytes."""
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return 256


text = inspect.getsource(torchtitan.trainer)
DATASETS["source"] = DatasetConfig("", lambda _: Dataset.from_dict({"text": [text]}), lambda sample: sample["text"])


def config(folder: str) -> Fp8Trainer.Config:
    """Return the config of a run of 6 steps of two microbatches each, with a checkpoint at step 3."""
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for _, _, layer, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(layer, name, ScaledDotProductAttention.Config())  # FlexAttention has no backward on a CPU
    config.tokenizer, config.dataloader.dataset, config.dump_folder = Bytes.Config(), "source", folder
    config.training.local_batch_size, config.training.global_batch_size, config.training.seq_len = 2, 4, 64
    config.training.steps, config.training.disable_cuda_graphs, config.debug.seed = 6, True, 0
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    config.compile.enable, config.compile.components = True, ["model"]
    return in_fp8(config, recipe="delayed")


def train(folder: str, load_step: int = -1) -> dict[str, torch.Tensor]:
    """Train, and return a copy of the parameters."""
    torch.compiler.reset()
    settings = config(folder)
    settings.checkpoint.load_step = load_step
    trainer = settings.build()
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
    parameters = trainer.model_parts[0].named_parameters()
    return {name: x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach() for name, x in parameters}


class Losses(logging.Handler):
    """Prints the loss of each step from torchtitan's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record that has a loss."""
        if "loss:" in (line := record.getMessage()):
            print(line)


logging.getLogger().addHandler(Losses())
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
with tempfile.TemporaryDirectory() as folder:
    whole = train(folder)
    resumed = train(folder, load_step=3)
print("equal, to the bit, after resuming at step 3:", all(torch.equal(whole[name], resumed[name]) for name in whole))
