"""`python -m zagora_jax.preview --model MODEL --data FILE`: rows as the model will see them."""

import sys

from zagora_jax.command_line import run_command
from zagora_jax.config import PreviewConfig
from zagora_jax.errors import UserError


def main(config: PreviewConfig) -> None:
    """Print the first sequences that training would see, and the account of all rows."""
    from rich.console import Console

    from zagora_jax.checkpoints import load_tokenizer, open_checkpoint
    from zagora_jax.data.batches import Batches
    from zagora_jax.data.show import show
    from zagora_jax.data.tokenize import tokenize_rows

    if config.data is None:
        raise UserError("data is required: give --data on the command line, or data: in the YAML file")
    if config.model.startswith("synthetic:"):
        raise UserError(f"--model {config.model}: synthetic weights have no tokenizer, so there is no text to show")
    tokenizer = load_tokenizer(open_checkpoint(config.model))
    data = tokenize_rows(config.data, tokenizer, config.sequence_length)
    batches = Batches(
        data.examples,
        sequence_length=config.sequence_length,
        packing=config.packing,
        micro_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        seed=config.seed,
    )
    forced = {"auto": None, "always": True, "never": False}[config.colour]
    console = Console(force_terminal=forced, highlight=False)
    show(batches, tokenizer, config.rows, console)
    console.print(str(data.statistics), markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(run_command(PreviewConfig, main))
