"""Tests that need eight devices: run in a process of their own, which fakes them on the CPU.

They have the mark `eight_devices`, and their file a `test_on_eight_devices`, which runs them.
`python tests/eight_devices.py -m slow FILES` runs the slow ones.
"""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

DEVICES = 8

# These tests compile far more than they compute: less optimised machine code is made in less time.
QUICK_COMPILATION = "--xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"


def available() -> bool:
    """Whether this process has the devices."""
    return jax.device_count() >= DEVICES


def run(file: str) -> None:
    """Run a file's tests in a process that has the devices, and fail as it fails."""
    if available():
        pytest.skip("this process has the devices")
    done = subprocess.run([sys.executable, __file__, file], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{done.stdout}{done.stderr}", pytrace=False)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = QUICK_COMPILATION
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
