"""`python -m zagora_jax.generate RUN|MODEL --prompt TEXT`: answer prompts."""

import sys
from pathlib import Path

from zagora_jax.command_line import run_command
from zagora_jax.commands import GenerateConfig
from zagora_jax.config import quantized_folder
from zagora_jax.errors import UserError
from zagora_jax.reporting.terminal import visible


def main(config: GenerateConfig) -> None:
    """Answer on the standard output; the prompts of a file each stand above their answer."""
    prompts = [str(config.prompt)] if config.prompts is None else read_prompts(config.prompts)

    from zagora_jax.generation import Sampling, open_generator

    generator = open_generator(config.model, config.checkpoint, quantized_folder(config.quantized_cache))
    sampling = Sampling(config.max_new_tokens, config.temperature, config.seed)
    answers = (generator.answer if config.chat else generator.complete)(prompts, sampling)
    if sys.stdout.isatty():  # a file or another program gets the text as it is
        answers = list(map(visible, answers))
    if config.prompts is None:
        print(answers[0])
        return
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"> {prompt}\n{answer}\n")


def read_prompts(path: Path) -> list[str]:
    """Read a file with a prompt a line.

    Raises:
        UserError: it cannot be read, is empty, or has a blank line.
    """
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise UserError(f"--prompts {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {path}: expected text in UTF-8, found other bytes ({error.reason})") from error
    prompts = text.removesuffix("\n").split("\n")
    for line, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise UserError(f"--prompts {path}:{line}: expected a prompt, found a blank line")
    return prompts


if __name__ == "__main__":
    sys.exit(run_command(GenerateConfig, main))
