# %% [markdown]
# # Domain adaptation: plain texts in place of chats
#
# A model that is to work in a field of its own can first read what the field writes. `DomainAdaptationTrainer` trains on
# plain texts: long ones are split, short ones packed, and every token is supervised. The domain here is this project's
# own documentation: a few pages are held out, and the loss on them says what was learned.

# %%
import json
import math
import os
import shutil
from pathlib import Path

from zagora_jax import DomainAdaptationTrainer
from zagora_jax.generation import Sampling, open_generator

MODEL = os.environ.get("MODEL", "../.cache/SmolLM2-135M-Instruct.Q4_1.gguf")
RUNS = Path(os.environ.get("RUNS", "../runs/notebooks")) / "domain"
EPOCHS = int(os.environ.get("EPOCHS", 1))
shutil.rmtree(RUNS, ignore_errors=True)
RUNS.mkdir(parents=True)

# %% [markdown]
# ## The texts
#
# A row is a JSON object with a `text`. Sections of the pages are rows of their own; every eighth is held out.


# %%
def sections(path: Path) -> list[str]:
    return [part.strip() for part in path.read_text().split("\n## ") if len(part) > 200]


pages = sorted(path for path in Path("../docs").glob("*.md") if path.name != "options.md")
rows = [{"text": text} for page in pages for text in sections(page)][: int(os.environ.get("ROWS", 48))]
train, held_out = [r for i, r in enumerate(rows) if i % 8], rows[::8]
for name, part in (("train", train), ("held_out", held_out)):
    (RUNS / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
print(f"{len(train)} rows to learn from, {len(held_out)} held out, of {len(pages)} pages")

# %% [markdown]
# ## Adapting
#
# The keys are those of the trainer's configuration; any other option may stand beside them.

# %%
trainer = DomainAdaptationTrainer(
    {
        "base_model": MODEL,
        "domain_data": str(RUNS / "train.jsonl"),
        "epochs": EPOCHS,
        "batch_size_per_gpu": 1,
        "gradient_checkpointing": False,
        "optimizer": "adamw_8bit",
        "max_length": 256,
        "eval_data": [str(RUNS / "held_out.jsonl")],
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-4,
        "warmup_steps": 1,
        "compute_dtype": "float32",
        "output": RUNS / "run",
    }
)
result = trainer.adapt()

# %%
trainer.history.plot("loss")

# %% [markdown]
# ## Before and after
#
# Perplexity is the exponential of the loss: among so many words, in a manner of speaking, the model hesitates.

# %%
for when, loss in (("before", result.loss_before), ("after", result.loss_after)):
    print(f"held-out loss {when}: {loss:.3f}, perplexity {math.exp(loss):.2f}")

# %%
beginning = "With the strategy fsdp, each card"
print("before:", open_generator(MODEL).complete([beginning], Sampling(max_new_tokens=40))[0])
print("after: ", trainer.generate(beginning, chat=False, max_new_tokens=40))
