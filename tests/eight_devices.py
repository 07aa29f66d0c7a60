"""Tests that need eight devices: run in a process of their own, which fakes them on the CPU.

`python tests/eight_devices.py -m slow FILES` runs the slow ones.
"""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

DEVICES = 8


def available() -> bool:
    """Whether this process has the devices."""
    return jax.device_count() >= DEVICES


def run(file: str, **environment: str) -> None:
    """Run a file's tests in a process that has the devices, and fail as it fails."""
    if available():
        pytest.skip("this process has the devices")
    command = [sys.executable, __file__, file]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{done.stdout}{done.stderr}", pytrace=False)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
