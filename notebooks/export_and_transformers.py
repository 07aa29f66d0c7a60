# %% [markdown]
# # Export, and use in transformers and PEFT
#
# A run ends with an adapter in PEFT's format. `save_adapter` gives it away with the tokenizer, `export_merged` makes a
# whole Hugging Face model of it. Here both are opened by the libraries that will use them, on PyTorch, and compared.

# %%
import json
import os
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from zagora_jax import DistributedTrainer

MODEL = os.environ.get("MODEL", "../.cache/SmolLM2-135M-Instruct.Q4_1.gguf")
RUNS = Path(os.environ.get("RUNS", "../runs/notebooks")) / "export"
EPOCHS = int(os.environ.get("EPOCHS", 4))
shutil.rmtree(RUNS, ignore_errors=True)

# %% [markdown]
# ## A short training
#
# As in *Quick start*, but shorter.

# %%
trainer = DistributedTrainer(
    MODEL, output=RUNS / "run", sequence_length=256, packing=True, compute_dtype="float32",
    gradient_accumulation_steps=1,
)  # fmt: skip
trainer.train(
    "../examples/zagora/train.jsonl", epochs=EPOCHS, micro_batch_size=2, learning_rate=1e-3, warmup_steps=2
)  # fmt: skip
question = json.loads(open("../examples/zagora/train.jsonl").readline())["messages"][0]["content"]
print(question, "->", trainer.generate(question, max_new_tokens=16))

# %% [markdown]
# ## The whole model
#
# Weights and adapter are added in float32 and rounded once. `base="original"` takes the weights as they were before
# quantisation; `base="dequantized"` those that training saw. Nothing is quantised again.

# %%
merged = trainer.export_merged(RUNS / "merged")
for path in sorted(merged.iterdir()):
    print(f"{path.name:<24} {path.stat().st_size:>12,} bytes")

# %% [markdown]
# transformers needs nothing of this project to open it:

# %%
tokenizer = AutoTokenizer.from_pretrained(merged)
model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
chat = [{"role": "user", "content": question}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
with torch.no_grad():
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.eos_token_id)
print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))

# %% [markdown]
# ## The adapter alone
#
# PEFT puts the adapter beside a base model in transformers. The base here is the export of the same run with its adapter
# taken off again: PEFT's own merge must give the model that `export_merged` wrote, up to rounding.

# %%
adapter = trainer.save_adapter(RUNS / "adapter")
tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), adapter)
layer = tuned.base_model.model.model.layers[0].self_attn.q_proj
delta = layer.get_delta_weight("default")
print(f"q_proj of layer 0: adapter of rank {layer.r['default']}, its product has the norm {delta.norm():.4f}")

# %%
sizes = {
    name: sum(file.stat().st_size for file in folder.iterdir())
    for name, folder in (("merged", merged), ("adapter", adapter))
}
print({name: f"{size / 2**20:.1f} MiB" for name, size in sizes.items()})
