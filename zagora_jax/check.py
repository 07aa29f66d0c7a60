"""`python -m zagora_jax.check MODEL DATA` or `check CONFIG.yaml`: what is wrong, before a device is used."""

import json
import sys

from zagora_jax.command_line import run_command
from zagora_jax.commands import CheckConfig

FAILED = 2


def main(config: CheckConfig) -> int:
    """Print what was found; the status is 2 where training would refuse to start."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # GPUs are left to whoever uses them now

    from zagora_jax.checking import check
    from zagora_jax.reporting.findings import show
    from zagora_jax.reporting.terminal import SafeConsole

    report = check(config)
    if config.as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show(report, SafeConsole())
    return 0 if report.passed else FAILED


if __name__ == "__main__":
    sys.exit(run_command(CheckConfig, main))
