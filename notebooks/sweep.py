# %% [markdown]
# # A sweep: how many ranks, how many bits?
#
# Two choices that a LoRA training begins with: the adapter's rank, and how the frozen weights are held. A loop over both
# answers for a task at hand, since a run is one call and its result one number. All else stays the same.

# %%
import os
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zagora_jax import DistributedTrainer
from zagora_jax.reporting.charts import Curve, line_chart
from zagora_jax.reporting.steps import Picture

MODEL = os.environ.get("MODEL", "../.cache/SmolLM2-135M-Instruct.Q4_1.gguf")
RUNS = Path(os.environ.get("RUNS", "../runs/notebooks")) / "sweep"
EPOCHS = int(os.environ.get("EPOCHS", 1))
RANKS = [int(rank) for rank in os.environ.get("RANKS", "2,16").split(",")]
QUANTISERS = ("nf4", "int8")
shutil.rmtree(RUNS, ignore_errors=True)

# %% [markdown]
# Every run has a directory of its own; `python -m zagora_jax.monitor runs/notebooks/sweep` lists them side by side
# while they go on.

# %%
results, histories = {}, {}
for quantization in QUANTISERS:
    for rank in RANKS:
        trainer = DistributedTrainer(
            MODEL,
            output=RUNS / f"{quantization}-{rank}",
            quantization=quantization,
            lora={"rank": rank, "alpha": 2 * rank},
            sequence_length=256,
            packing=True,
            compute_dtype="float32",
            gradient_accumulation_steps=1,
        )
        result = trainer.train(
            "../examples/zagora/train.jsonl",
            eval_dataset="../examples/zagora/heldout.jsonl",
            epochs=EPOCHS, micro_batch_size=2, learning_rate=1e-3, warmup_steps=2,
        )  # fmt: skip
        results[quantization, rank] = result
        histories[quantization, rank] = trainer.history

# %% [markdown]
# ## The held-out losses

# %%
table = Table("rank", *QUANTISERS, title="held-out loss after training")
for rank in RANKS:
    table.add_row(str(rank), *(f"{results[quantization, rank].loss_after:.4f}" for quantization in QUANTISERS))
before = next(iter(results.values())).loss_before
Console().print(table, f"before: {before:.4f}")


# %%
def curve(quantization: str, rank: int) -> Curve:
    return Curve(f"{quantization}, rank {rank}", histories[quantization, rank].series("loss").buckets(200))


Picture(line_chart([curve("nf4", rank) for rank in RANKS], "training loss by rank, nf4"))

# %%
Picture(line_chart([curve(quantization, RANKS[-1]) for quantization in QUANTISERS], "training loss by quantiser"))
