# %% [markdown]
# # RAG: an embedder that finds passages, a generator that answers from them
#
# Retrieval-augmented generation needs two models: one gives texts vectors, so that a question lies near the passage that
# answers it; the other reads what was found, and answers with the number of the passage that it relies on. Here both
# are made of the same small decoder, with a LoRA adapter each.
#
# The passages are what Python's own library says about its functions and classes, which is on every machine: a question
# names one, and the right passage is what stands in its documentation.

# %%
import importlib
import inspect
import os
import random
import shutil
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from zagora_jax import DistributedTrainer, EmbeddingTrainer, PassageIndex, Rag, grounded_rows
from zagora_jax.reporting.charts import bar_chart, grid_chart
from zagora_jax.reporting.steps import Picture

MODEL = os.environ.get("MODEL", "../.cache/SmolLM2-135M-Instruct.Q4_1.gguf")
RUNS = Path(os.environ.get("RUNS", "../runs/notebooks")) / "rag"
EPOCHS = int(os.environ.get("EPOCHS", 1))
ROWS = int(os.environ.get("ROWS", 240))
shutil.rmtree(RUNS, ignore_errors=True)

# %% [markdown]
# ## Questions and passages
#
# A fifth is held out: neither model sees it in training, and at the end both are asked about it.

# %%
MODULES = """argparse asyncio base64 bisect calendar collections configparser contextlib csv dataclasses datetime
decimal difflib dis email.utils enum fractions functools gettext glob gzip heapq html imaplib inspect itertools json linecache
locale logging math mimetypes operator os os.path pathlib pickle pkgutil platform pprint random re secrets shlex shutil signal
smtplib socket statistics string struct subprocess sys sysconfig tarfile tempfile textwrap threading time tokenize
traceback types typing unittest urllib.parse urllib.request uuid warnings wave weakref zipfile zlib"""

passages = {}  # what they are about
for module in map(importlib.import_module, MODULES.split()):
    for name, thing in vars(module).items():
        text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())  # the first paragraph
        is_prose = 30 < len(text) < 200 and "->" not in text and "(" not in text[:30]
        if is_prose and callable(thing) and not name.startswith("_"):
            passages.setdefault(text, f"{module.__name__}.{name}")

pairs = [{"query": f"What is {name}?", "positive": text} for text, name in passages.items()]
pairs = random.Random(0).sample(pairs, min(ROWS, len(pairs)))
held_out, train = pairs[: len(pairs) // 5], pairs[len(pairs) // 5 :]
print(f"of {len(passages)} passages {len(train)} to learn from, {len(held_out)} held out, such as\n")
for pair in held_out[:3]:
    print(f"{pair['query']}\n    {pair['positive']}")

# %% [markdown]
# ## The embedder
#
# The vector of a text is the hidden state of its last token. The loss (InfoNCE) lowers the angle between a question and
# its passage, and raises that to the passages of all other questions of the step: the more there are in a step, the
# better. `gradient_accumulation_steps` makes steps larger than the memory has room for, with the same gradients.

# %%
embedder = EmbeddingTrainer(
    MODEL, output=RUNS / "embedder", pooling="last", sequence_length=48, compute_dtype="float32", remat="none",
    gradient_accumulation_steps=2,
)  # fmt: skip
some = held_out[:24]


def cosines() -> np.ndarray:
    """Between some held-out questions and their passages, [questions, passages]."""
    questions = embedder.embed([pair["query"] for pair in some], query=True)
    return questions @ embedder.embed([pair["positive"] for pair in some]).T


before, cosines_before = embedder.evaluate(held_out), cosines()
embedder.train(train, epochs=EPOCHS, micro_batch_size=8, learning_rate=5e-4, warmup_ratio=0.1)
after, cosines_after = embedder.evaluate(held_out), cosines()

# %%
embedder.history.plot("loss", title="the embedder's loss")

# %% [markdown]
# Recall@k is the part of the held-out questions whose own passage is among the k nearest of all held-out passages.

# %%
table = Table("", *before, title=f"{len(held_out)} held-out questions")
for when, numbers in (("before", before), ("after", after)):
    table.add_row(when, *(f"{value:.3f}" for value in numbers.values()))
Console(width=100).print(table)

# %% [markdown]
# The same in a picture: a row for each question, a column for each passage, the stronger the nearer; the right passages
# are on the diagonal. A decoder that was never trained for it gives all texts much the same direction.


# %%
def nearness(cosines: np.ndarray, title: str) -> Picture:
    scaled = (cosines - cosines.min(axis=1, keepdims=True)) / np.ptp(cosines, axis=1, keepdims=True)
    return Picture(grid_chart([(f"{row + 1}", list(map(float, line**3))) for row, line in enumerate(scaled)], title, "passage"))  # fmt: skip


nearness(cosines_before, "nearness of questions and passages before training")

# %%
nearness(cosines_after, "nearness of questions and passages after training")

# %% [markdown]
# ## The generator
#
# It learns from questions together with what the embedder finds for them, so that it knows how far the first passage is
# to be trusted. The answer begins with the number of its passage. In a tenth of the rows the right passage is missing,
# and the answer says so. Only the passages of these rows are searched: with many more, the right one would often be missed,
# put in the place of the last, and [3] be the answer to learn.

# %%
few = train[:48]
examples = [{"question": pair["query"], "answer": pair["positive"], "passage": pair["positive"]} for pair in few]
rows = grounded_rows(examples, PassageIndex(embedder.embed, [pair["positive"] for pair in few]))
for message in rows[0]["messages"]:
    print(f"{message['role']}: {message['content']}\n")

# %%
generator = DistributedTrainer(
    MODEL, output=RUNS / "generator", sequence_length=1024, compute_dtype="float32", remat="none",
    gradient_accumulation_steps=1,
)  # fmt: skip
generator.train(rows, epochs=EPOCHS, micro_batch_size=8, learning_rate=5e-4, warmup_steps=1)
generator.history.plot("loss", title="the generator's loss")

# %% [markdown]
# ## Both together
#
# `Rag` finds passages, lets the generator answer from them, and returns the answer with the passages that it cites.

# %%
index = PassageIndex(embedder.embed, [pair["positive"] for pair in held_out])
rag = Rag(index, generator.generate, count=3)
asked = held_out[:40]
answers = rag.ask([pair["query"] for pair in asked], max_new_tokens=48)
for pair, answer in list(zip(asked, answers, strict=True))[:6]:
    print(f"{pair['query']}\n    {answer.text}\n    from: {'; '.join(answer.cited) or 'no passage'}")
    print(f"    {'right' if pair['positive'] in answer.cited else 'its passage is: ' + pair['positive']}\n")

# %%
right = [(pair["positive"], answer) for pair, answer in zip(asked, answers, strict=True)]
shares = {
    "found right": sum(passage in answer.found for passage, answer in right),
    "cites right": sum(passage in answer.cited for passage, answer in right),
    "cites any": sum(bool(answer.cited) for answer in answers),
}
Picture(bar_chart([(name, {"": 100 * n / len(asked)}) for name, n in shares.items()], "held-out questions", " %"))
