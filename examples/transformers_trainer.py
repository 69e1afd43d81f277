"""Train a small Llama in FP8 by the Trainer of transformers, and resume it from a checkpoint."""

import inspect
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from fp8pass.integrations.transformers import Fp8Callback

text = torch.tensor(list(inspect.getsource(Trainer).encode()[: 64 * 128]))
rows = [{"input_ids": row, "labels": row} for row in text.view(-1, 64)]
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def train(folder: str, checkpoint: str | None = None) -> Trainer:
    """Train for 8 steps of two microbatches, with evaluations; save a checkpoint at step 4."""
    set_seed(0, deterministic=True)  # otherwise threads add up the gradient of an embedding in any order
    arguments = TrainingArguments(
        folder, max_steps=8, gradient_accumulation_steps=2, save_steps=4, eval_strategy="steps", eval_steps=2,
        logging_steps=2, lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True,
        torch_compile=True, torch_compile_backend="fp8pass",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    trainer = Trainer(model, arguments, train_dataset=rows[8:], eval_dataset=rows[:8], callbacks=[Fp8Callback()])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


with tempfile.TemporaryDirectory() as folder:
    whole = train(folder)
    resumed = train(folder, f"{folder}/checkpoint-4")
for log in whole.state.log_history:
    if "loss" in log:
        share = f"{log['fp8_share']:.0%}" if "fp8_share" in log else "?%"  # if a cache had the graphs
        print(f"step {log['step']}: loss {log['loss']:.2f}, {share} of matmul FLOPs in FP8")
pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
print("equal, to the bit, after resuming at step 4:", all(torch.equal(a, b) for a, b in pairs))
