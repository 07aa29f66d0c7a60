"""`python -m zagora_jax.train [CONFIG.yaml] [--option value ...]`: train an adapter."""

import sys

from zagora_jax.command_line import run_command
from zagora_jax.config import TrainConfig
from zagora_jax.interruption import Interrupted


def main(config: TrainConfig) -> None:
    """Train, and say where the result is."""
    from zagora_jax.reporting.progress import Reporter
    from zagora_jax.trainer import train

    reporter = Reporter()
    try:
        result = train(config, reporter)
    except Interrupted:
        reporter.say(
            f"{config.output}: every finished step is saved; the same command with --resume goes on from there"
        )
        raise
    if not result.is_told_here:
        return
    if result.loss_before is not None and result.loss_after is not None:
        reporter.say(f"eval loss {result.loss_before:.4f} before, {result.loss_after:.4f} after")
    reporter.say(f"adapter: {result.run_directory / 'adapter'}")


if __name__ == "__main__":
    sys.exit(run_command(TrainConfig, main))
