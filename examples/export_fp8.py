"""Train a small Llama in FP8, write its FP8 weights for vLLM, SGLang and transformers, and load them back."""

import inspect
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, Trainer

import fp8pass

torch.manual_seed(0)
text = torch.tensor(list(inspect.getsource(Trainer).encode()[: 8 * 4 * 128])).view(8, 4, 128)
config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config).bfloat16()
compiled = torch.compile(model, backend="fp8pass", options={"recipe": "blockwise", "filter": ["lm_head"]})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in text:
    loss = compiled(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss after {len(text)} steps: {loss:.1f}")

with tempfile.TemporaryDirectory() as parent:
    folder = Path(parent, "llama-fp8")
    print(fp8pass.export_fp8(compiled, folder))
    print("files:", *sorted(file.name for file in folder.iterdir()))
    files = load_file(folder / "model.safetensors")
    # a CPU has no kernels for this format: transformers dequantizes the weights when it loads them
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=FineGrainedFP8Config(dequantize=True))

name = "model.layers.0.mlp.up_proj.weight"
x_q, scale_inv = files[name], files[f"{name}_scale_inv"]
print(name, x_q.dtype, "with scales", list(scale_inv.shape))
blocks = x_q.float().view(2, 128, 1, 128) * scale_inv.view(2, 1, 1, 1)
print(
    "transformers has loaded them, to the bit:",
    torch.equal(loaded.get_parameter(name), blocks.view(256, 128).bfloat16()),
)
with torch.no_grad():
    before, after = (of(input_ids=batch, labels=batch).loss for of in (compiled, loaded))
print(f"loss as trained: {before:.1f}, loaded: {after:.1f}")
