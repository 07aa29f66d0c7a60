"""`python -m zagora_jax.generate RUN|MODEL --prompt TEXT`: answer prompts."""

import sys

from zagora_jax.command_line import run_command
from zagora_jax.config import GenerateConfig


def main(config: GenerateConfig) -> None:
    """Answer, a prompt after the other on the standard output."""
    from zagora_jax.generation import Sampling, open_generator

    prompts = [config.prompt] if config.prompts is None else config.prompts.read_text("utf-8").splitlines()
    generator = open_generator(config.model, step=config.checkpoint)
    sampling = Sampling(config.max_new_tokens, config.temperature, config.seed)
    for answer in (generator.answer if config.chat else generator.complete)(prompts, sampling):
        print(answer)


if __name__ == "__main__":
    sys.exit(run_command(GenerateConfig, main))
