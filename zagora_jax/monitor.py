"""`python -m zagora_jax.monitor [RUN]`: the cards of this machine and a run, while it goes on or afterwards."""

import json
import sys
import time

from zagora_jax.command_line import run_command
from zagora_jax.commands import MonitorConfig
from zagora_jax.interruption import Interrupted


def main(config: MonitorConfig) -> None:
    """Show, until Ctrl-C; once where asked for, or where the output is no terminal.

    Raises:
        UserError: nothing is at the path that was named.
    """
    from zagora_jax.errors import UserError
    from zagora_jax.reporting.dashboard import Monitor
    from zagora_jax.reporting.terminal import SafeConsole

    if "run" in config.model_fields_set and not config.run.is_dir():
        raise UserError(f"{config.run}: expected a run directory, or a folder of some; there is no such folder")
    monitor = Monitor(config.run)
    monitor.refresh()
    if config.as_json:
        print(json.dumps(monitor.to_json(), indent=2, allow_nan=False))
        return
    console = SafeConsole()
    if config.once or not console.is_terminal:
        console.print(monitor.render(console.width))
        return

    from rich.live import Live

    try:
        with Live(monitor.render(console.width), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(config.interval)
                monitor.refresh()
                live.update(monitor.render(console.width), refresh=True)
    except Interrupted:
        pass  # this is how one leaves
    console.print(monitor.render(console.width))


if __name__ == "__main__":
    sys.exit(run_command(MonitorConfig, main))
