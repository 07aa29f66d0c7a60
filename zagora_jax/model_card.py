"""The README.md of an export: what it is, what it was made of and how it is loaded."""

from collections.abc import Sequence
from pathlib import Path

from zagora_jax.checkpoints.peft import AdapterConfig

_MERGED = """\
{header}
# {base}, fine-tuned

{base} with a LoRA adapter (rank {rank}, scale {scale:g}) merged into its weights by zagora-jax.
The adapter was added in float32 to: {weights}; the sum was rounded once.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

Checked when it was written:

{checks}
"""

_ADAPTER = """\
{header}
# LoRA adapter for {base}

Rank {rank}, scale {scale:g}, trained by zagora-jax.{notes}

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```
"""


def merged_card(base: str, adapter: AdapterConfig, weights: str, checks: Sequence[str]) -> str:
    """Describe a merged model.

    Args:
        base: The base model's id on the hub, or its absolute path.
        adapter: What was merged.
        weights: Which weights of the base model the adapter was added to.
        checks: What was compared.
    """
    return _MERGED.format(
        header=_header("transformers", base),
        base=_short(base),
        rank=adapter.r,
        scale=adapter.scale,
        weights=weights,
        checks="\n".join(f"- {check}" for check in checks),
    )


def adapter_card(base: str, adapter: AdapterConfig, held: str | None = None) -> str:
    """Describe an adapter alone.

    Args:
        base: The base model's id on the hub, or its absolute path.
        adapter: What it is.
        held: The format of the base model that the adapter is for, where it began with what that loses (LoftQ).
    """
    notes = []
    if adapter.modules_to_save:
        names = ", ".join(adapter.modules_to_save)
        notes.append(
            f"It holds weights trained in full ({names}). PEFT loads them; servers that apply adapters to a running "
            "model, vLLM among them, refuse such adapters: give those a merged export."
        )
    if held is not None:
        notes.append(f"It began with what {held} loses of the weights (LoftQ): load the base model in {held}.")
    return _ADAPTER.format(
        header=_header("peft", base),
        base=_short(base),
        rank=adapter.r,
        scale=adapter.scale,
        notes="".join(f"\n\n{note}" for note in notes),
    )


def _header(library: str, base: str) -> str:
    """Write the metadata that the hub reads; it knows a base model by its id there only."""
    known = [] if Path(base).is_absolute() else [f"base_model: {base}"]
    return "\n".join(["---", f"library_name: {library}", *known, "tags:", "- lora", "---"])


def _short(base: str) -> str:
    """A local path says more of its machine than of the model."""
    return Path(base).name if Path(base).is_absolute() else base
