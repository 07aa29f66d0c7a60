"""`python -m zagora_jax.configure --model-size 70B --gpu rtx4090 --gpu-count 4`: what fits, how fast, and how."""

import json
import sys

from zagora_jax.command_line import run_command
from zagora_jax.commands import ConfigureConfig

DOES_NOT_FIT = 1
WIDTH = 120  # characters, where the output is no terminal


def main(config: ConfigureConfig) -> int:
    """Print the plan, and write what was asked for; the status is 1 where nothing fits."""
    from zagora_jax.planning.plan import as_json, make_plan
    from zagora_jax.planning.plot import check_plot, draw
    from zagora_jax.planning.probe import print_report
    from zagora_jax.planning.show import show
    from zagora_jax.planning.train_file import check_train_file, write_train_file
    from zagora_jax.reporting.terminal import SafeConsole

    if config.report:
        print_report(SafeConsole())
        return 0
    if config.plot is not None:
        check_plot(config.plot)
    if config.output is not None:
        check_train_file(config, config.output)
    progress = SafeConsole(stderr=True)
    plan = make_plan(config, lambda text: progress.print(text, style="dim", markup=False))
    if config.as_json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        console = SafeConsole()
        show(plan, console if console.is_terminal else SafeConsole(width=WIDTH))
    if config.plot is not None:
        draw(plan, config.plot)
    if not plan.fits:
        return DOES_NOT_FIT
    if config.output is not None:
        write_train_file(plan, config.output)
        progress.print(
            f"written: {config.output}; run it with python -m zagora_jax.train {config.output}", markup=False
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(ConfigureConfig, main))
