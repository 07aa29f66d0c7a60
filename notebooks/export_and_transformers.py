# %% [markdown]
# # Export, and use in transformers and PEFT
#
# A run ends with an adapter in PEFT's format. `save_adapter` gives it away with the tokenizer, `export_merged` makes a
# whole Hugging Face model of it. Here both are opened by the libraries that will use them, on PyTorch, and compared: with
# the model as it was trained, and with each other.

# %%
import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from zagora_jax import DistributedTrainer
from zagora_jax.base import open_base
from zagora_jax.reporting.charts import Curve, line_chart
from zagora_jax.reporting.steps import Picture

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
# Weights and adapter are added in float32 and rounded once. `base="original"`, the default, takes the weights as they
# were before quantisation; `base="dequantized"` those that training saw. Nothing is quantised again.

# %%
merged = trainer.export_merged(RUNS / "merged")
as_trained = trainer.export_merged(RUNS / "merged-dequantized", base="dequantized")
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
# ## Is it the same model?
#
# The loss on held-out rows says so: here, over the 4-bit weights and the adapter, and by PyTorch, over the merged ones.
# The weights that training saw must give the same loss, up to rounding. The original weights give another one: the
# adapter has learned beside the quantised ones, and what quantisation had lost comes back.

# %%
HELD_OUT = "../examples/zagora/heldout.jsonl"
chats = [json.loads(line)["messages"] for line in open(HELD_OUT)]


def torch_loss(model) -> tuple[float, int]:
    """The mean over the answers' tokens and the token that ends each, and their number."""
    losses = []
    for messages in chats:
        whole, start = (tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=asks)
                        for part, asks in ((messages, False), (messages[:1], True)))  # fmt: skip
        ids, first = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (whole, start))
        end = ids.index(tokenizer.eos_token_id, len(first)) + 1
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(first) - 1 : end - 1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[len(first) : end]), reduction="none")
    return float(torch.stack(losses).mean()), len(losses)


here = trainer.evaluate(HELD_OUT)
table = Table("weights", "computed by", "loss", "tokens", title="held-out rows")
table.add_row("4 bits and adapter", "zagora-jax", f"{here['eval_loss']:.5f}", f"{here['eval_supervised_tokens']}")
for folder, weights in ((as_trained, "merged, as training saw them"), (merged, "merged, original")):
    loss, count = torch_loss(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    table.add_row(weights, "transformers", f"{loss:.5f}", f"{count}")
Console(width=90).print(table)

# %% [markdown]
# ## The adapter alone
#
# PEFT puts the adapter beside a base model. With a Hugging Face folder that is `from_pretrained(MODEL)`; since `MODEL` may
# be a GGUF file, its tensors are put into the model here. What PEFT computes must be what `export_merged` wrote, up to
# rounding.

# %%
adapter = trainer.save_adapter(RUNS / "adapter")
checkpoint = open_base(MODEL, quantization="none", dtype="float32", lora=None).checkpoint
base = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
tensors = {name: torch.tensor(checkpoint.read(name).astype(np.float32)) for name in checkpoint.tensors}
print(base.load_state_dict(tensors, strict=False))

tuned = PeftModel.from_pretrained(base, adapter)
with torch.no_grad():
    logits = {"merged": model(**prompt).logits, "PEFT": tuned(**prompt).logits}
    with tuned.disable_adapter():
        logits["base"] = tuned(**prompt).logits
for name in ("PEFT", "base"):
    print(f"logits of {name} and merged differ by {(logits[name] - logits['merged']).abs().max():.5f} at most")

# %% [markdown]
# How far the training has moved each layer, as PEFT computes it: the norm of the adapter's product over that of the
# weight.


# %%
def moved(projection: str) -> Curve:
    points = []
    for number, layer in enumerate(tuned.base_model.model.model.layers):
        module = layer.get_submodule(projection)
        delta = module.get_delta_weight("default").detach()
        share = float(delta.norm() / module.base_layer.weight.norm())
        points.append((number, share, share, share))
    return Curve(projection, points, dots=True)


names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
Picture(line_chart([moved(name) for name in names], "update of each layer's weights, by their norm", x_name="layer"))

# %% [markdown]
# ## What each of them weighs

# %%
for name, folder in (("merged", merged), ("adapter", adapter)):
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir()) / 2**20:.1f} MiB")
