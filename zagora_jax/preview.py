"""`python -m zagora_jax.preview --model MODEL --data FILE`: rows as the model will see them."""

import json
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zagora_jax.command_line import run_command
from zagora_jax.commands import PreviewConfig
from zagora_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def main(config: PreviewConfig) -> None:
    """Print the first sequences that training would see, and the account of all rows."""
    from zagora_jax.checkpoints import load_tokenizer, open_checkpoint
    from zagora_jax.data import show, show_pairs
    from zagora_jax.reporting.terminal import SafeConsole

    if config.model.startswith("synthetic:"):
        raise UserError(f"--model {config.model}: synthetic weights have no tokenizer, so there is no text to show")
    tokenizer = load_tokenizer(open_checkpoint(config.model))
    shown: ModuleType = show if config.retrieval.pooling == "none" else show_pairs
    batches, statistics = _read(config, tokenizer)
    if config.as_json:
        print(json.dumps(shown.to_json(batches, tokenizer, config.rows) | {"statistics": statistics.to_json()}))
        return
    forced = {"auto": None, "always": True, "never": False}[config.colour]
    console = SafeConsole(force_terminal=forced)
    shown.show(batches, tokenizer, config.rows, console)
    console.print(str(statistics), markup=False, soft_wrap=True)


def _read(config: PreviewConfig, tokenizer: "PreTrainedTokenizerBase") -> tuple[Any, Any]:
    """Return the batches of the training, of rows or of pairs, and the account of them."""
    from zagora_jax.data.pairs import pair_batches
    from zagora_jax.data.prepare import lay_out, mixture, training_rows

    if config.retrieval.pooling != "none":
        return pair_batches(config, tokenizer, 1)
    # However many rows teach nothing, here is where one looks at them.
    data = training_rows(config.model_copy(update={"max_left_out": 1.0}), tokenizer)
    return lay_out(config, data.examples, 1, mixture(config, data)), data.statistics


if __name__ == "__main__":
    sys.exit(run_command(PreviewConfig, main))
