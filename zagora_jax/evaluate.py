"""`python -m zagora_jax.evaluate RUN [--data FILE]`: the loss of a run's tuned model over rows."""

import sys

from zagora_jax.command_line import run_command
from zagora_jax.commands import EvaluateConfig


def main(config: EvaluateConfig) -> None:
    """Measure, and print the loss."""
    from zagora_jax.evaluate_run import evaluate_run
    from zagora_jax.reporting.progress import Reporter

    reporter = Reporter()
    result = evaluate_run(config, reporter)
    reporter.say(f"loss {result.loss:.4f} over {result.supervised_tokens:,} supervised tokens")
    for name, value in result.numbers.items():
        reporter.say(f"{name} {value:.4f}")


if __name__ == "__main__":
    sys.exit(run_command(EvaluateConfig, main))
