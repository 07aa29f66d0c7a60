"""`python -m zagora_jax.preview --model MODEL --data FILE`: rows as the model will see them."""

import json
import sys

from zagora_jax.command_line import run_command
from zagora_jax.config import PreviewConfig
from zagora_jax.errors import UserError


def main(config: PreviewConfig) -> None:
    """Print the first sequences that training would see, and the account of all rows."""
    from zagora_jax.checkpoints import load_tokenizer, open_checkpoint
    from zagora_jax.data.prepare import lay_out, mixture, training_rows
    from zagora_jax.data.show import show, to_json
    from zagora_jax.reporting.terminal import SafeConsole

    if config.model.startswith("synthetic:"):
        raise UserError(f"--model {config.model}: synthetic weights have no tokenizer, so there is no text to show")
    tokenizer = load_tokenizer(open_checkpoint(config.model))
    # However many rows teach nothing, here is where one looks at them.
    data = training_rows(config.model_copy(update={"max_left_out": 1.0}), tokenizer)
    batches = lay_out(config, data.examples, 1, mixture(config, data))
    if config.as_json:
        print(json.dumps(to_json(batches, tokenizer, config.rows) | {"statistics": data.statistics.to_json()}))
        return
    forced = {"auto": None, "always": True, "never": False}[config.colour]
    console = SafeConsole(force_terminal=forced)
    show(batches, tokenizer, config.rows, console)
    console.print(str(data.statistics), markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(run_command(PreviewConfig, main))
