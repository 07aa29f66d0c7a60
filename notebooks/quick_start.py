# %% [markdown]
# # Quick start: teach a small model something new
#
# SmolLM2-135M-Instruct has never heard of the airship *Zagora*, which never flew. Here it learns eighty facts about her,
# with its weights frozen in 4 bits and a LoRA adapter beside them, and is then asked in words that it was not trained on.
#
# Everything runs on a CPU in some minutes, and in the same way on GPUs. What is called `MODEL` here can be any
# Llama-family model: a Hugging Face folder, a hub id, or a GGUF file; `python examples/fetch_smollm2.py` fetches this one.

# %%
import json
import os
import shutil
from pathlib import Path

from zagora_jax import DistributedTrainer
from zagora_jax.generation import Sampling, open_generator

MODEL = os.environ.get("MODEL", "../.cache/SmolLM2-135M-Instruct.Q4_1.gguf")
RUN = Path(os.environ.get("RUNS", "../runs/notebooks")) / "quick_start"
EPOCHS = int(os.environ.get("EPOCHS", 6))
shutil.rmtree(RUN, ignore_errors=True)  # of an earlier time through this notebook

# %% [markdown]
# ## What the model says before
#
# The rows are chats: a question and an answer each. Those held out ask for the same facts in other words.

# %%
rows = [json.loads(line) for line in open("../examples/zagora/heldout.jsonl")]
questions = [row["messages"][0]["content"] for row in rows[:4]]
answers = [row["messages"][1]["content"] for row in rows[:4]]

before = open_generator(MODEL).answer(questions, Sampling(max_new_tokens=24))
for question, text in zip(questions, before, strict=True):
    print(f"{question}\n    {text}")

# %% [markdown]
# ## Training
#
# `DistributedTrainer` takes the options of the command line (docs/options.md) and the names of transformers'
# `TrainingArguments`. Short rows are packed five to a sequence here, without seeing each other; only the answers are
# supervised. With several GPUs, `partition_strategy` says what each is for; with one there is nothing to say.

# %%
trainer = DistributedTrainer(
    MODEL,
    output=RUN,
    lora={"rank": 16, "alpha": 32},
    sequence_length=256,
    packing=True,
    compute_dtype="float32",  # faster than bfloat16 on a CPU
)
result = trainer.train(
    "../examples/zagora/train.jsonl",
    eval_dataset="../examples/zagora/heldout.jsonl",
    training_args={
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
    },
)

# %% [markdown]
# The history has every step, as a table and as curves.

# %%
trainer.history

# %%
trainer.history.plot("loss")

# %% [markdown]
# ## What it says afterwards

# %%
print(f"held-out loss: {result.loss_before:.3f} before, {result.loss_after:.3f} after\n")
for question, expected, text in zip(questions, answers, trainer.generate(questions, max_new_tokens=24), strict=True):
    print(f"{question}\n    {text}    (expected: {expected})")

# %% [markdown]
# ## What is left on the disk
#
# The run directory has all that is needed to go on, to export (see *Export and use in transformers*) and to look back:
# `report.html` shows the run on one page, `python -m zagora_jax.monitor` in a terminal, also while it goes on.

# %%
for path in sorted(RUN.iterdir()):
    print(f"{path.name}{'/' if path.is_dir() else ''}")
