"""Train torchtitan's debug Llama in FP8 on a CPU, with accumulation; then resume from a checkpoint."""

import inspect
import logging
import os
import tempfile
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")  # what torchtitan and its imports warn of
from torchtitan.tools import utils  # noqa: E402

# torchtitan asks for a GPU. On a machine that has one, leave out these lines up to the next import
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    current_device=lambda: 0, device_count=lambda: 1, empty_cache=lambda: None, get_device_name=lambda _: "cpu",
    get_device_properties=lambda _: SimpleNamespace(total_memory=2**33), memory_stats=lambda _: {},
    reset_peak_memory_stats=lambda: None, set_device=lambda _: None, synchronize=lambda: None,
)  # fmt: skip
if not hasattr(dist, "set_timeout"):  # which torch 2.13 lacks
    dist.set_timeout = lambda *_: None

import torchtitan.trainer  # noqa: E402
from datasets import Dataset  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from fp8pass.integrations.torchtitan import Fp8Trainer, in_fp8  # noqa: E402


class Bytes(BaseTokenizer):
    """Takes each byte of a text for a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Has no options."""

    def __init__(self, config: Config, **_: str) -> None:
        super().__init__()

    def encode(self, text: str, **_: bool) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Return the text that bytes encode."""
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return 256


text = {"text": [inspect.getsource(torchtitan.trainer)]}
DATASETS["source"] = DatasetConfig("", lambda _: Dataset.from_dict(text), lambda sample: sample["text"])


def config(folder: str) -> Fp8Trainer.Config:
    """Return the config of a run of 6 steps of two microbatches each, with a checkpoint after step 3."""
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for _, _, layer, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(layer, name, ScaledDotProductAttention.Config())  # FlexAttention has no backward on a CPU
    config.tokenizer, config.dataloader.dataset = Bytes.Config(), "source"
    config.dump_folder, config.metrics.disable_color_printing = folder, True
    config.training.local_batch_size, config.training.global_batch_size, config.training.seq_len = 2, 4, 64
    config.training.steps, config.training.disable_cuda_graphs, config.debug.seed = 6, True, 0
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    config.compile.enable, config.compile.components = True, ["model"]
    return in_fp8(config, recipe="delayed", lowering="eager")  # "eager" needs no C++ compiler; leave it out on a GPU


def train(folder: str, load_step: int = -1) -> list[torch.Tensor]:
    """Train, and return the parameters."""
    settings = config(folder)
    settings.checkpoint.load_step = load_step
    trainer = settings.build()
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
    return [x.detach().to_local() for x in trainer.model_parts[0].parameters()]


def print_figures(record: logging.LogRecord) -> bool:
    """Print the losses, and the share of FLOPs in FP8, of what torchtitan and fp8pass log."""
    line = record.getMessage()
    if "loss:" in line or "matmuls in FP8" in line:
        print(line.partition("  grad_norm")[0].partition(", compiled")[0])
    return False


logging.basicConfig(level=logging.INFO)
logging.getLogger().handlers[0].addFilter(print_figures)
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
with tempfile.TemporaryDirectory() as folder:
    whole = train(folder)
    resumed = train(folder, load_step=3)
print("equal, to the bit, after resuming at step 3:", all(map(torch.equal, whole, resumed)))
