"""`python -m zagora_jax.export RUN --to DIR`: a run's result as Hugging Face files."""

import sys

from zagora_jax.command_line import run_command
from zagora_jax.commands import ExportConfig


def main(config: ExportConfig) -> None:
    """Export, and say where the result is."""
    from zagora_jax.exporter import export
    from zagora_jax.reporting.progress import Reporter

    reporter = Reporter()
    result = export(config, reporter)
    reporter.say(f"{result.format}: {result.directory}")


if __name__ == "__main__":
    sys.exit(run_command(ExportConfig, main))
