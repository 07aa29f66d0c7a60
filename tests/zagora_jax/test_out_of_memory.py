"""What a user is told when a device has no room: as with 6 of a card's 24 GB in the use of another process."""

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import pytest

from zagora_jax import out_of_memory as module
from zagora_jax.command_line import run_command
from zagora_jax.commands import GenerateConfig
from zagora_jax.devices import TAKES_LESS
from zagora_jax.out_of_memory import out_of_memory
from zagora_jax.reporting.cards import Card, CardReading
from zagora_jax.reporting.sensors import GIB

ERROR = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.\n[more]"
)


@dataclass(eq=False)
class Device:
    """As JAX shows a card."""

    statistics: dict[str, int]
    device_kind: str = "RTX 4090"
    id: int = 0

    def memory_stats(self):
        return self.statistics


@pytest.fixture
def shared_card(monkeypatch):
    """A card of 24 GiB, of which XLA may take 18, and another process has 6."""
    statistics = {"bytes_in_use": 16 * GIB, "bytes_limit": 18 * GIB}
    device = Device(statistics)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    read = SimpleNamespace(
        cards=(Card(0, "NVIDIA RTX 4090", 24.0, None, None),), read=lambda: [CardReading(0, memory_gib=23.5)]
    )
    monkeypatch.setattr(module, "Cards", lambda: read)
    return device


def test_what_is_needed_what_is_free_and_what_takes_less(shared_card):
    told = out_of_memory(ERROR, {shared_card: round(19.8 * GIB)}, TAKES_LESS)
    assert told == (
        "the memory of a device ran out: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes; "
        "RTX 4090 0: the step needs 19.80 GiB; RTX 4090 0: 16.00 GiB in use of 18.00 that this process may take; "
        "card 0 (NVIDIA RTX 4090): 0.50 of 24.00 GiB are free; end what else uses it, or take less. " + TAKES_LESS
    )


def test_other_errors_are_left_alone():
    assert out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: the device was lost")) is None


def test_devices_that_could_not_be_opened(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "local_devices", fail)
    error = RuntimeError("Unable to initialize backend 'cuda': RESOURCE_EXHAUSTED: no room")
    told = out_of_memory(error)
    assert told is not None
    assert told.endswith("end what else uses it, or take less")


def test_commands_say_so_without_a_traceback(monkeypatch, capsys, shared_card):
    def run_out(config):
        raise ERROR

    def break_down(config):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(sys, "argv", ["generate", "model", "--prompt", "x"])
    assert run_command(GenerateConfig, run_out) == 2
    assert capsys.readouterr().err.startswith("error: the memory of a device ran out: RESOURCE_EXHAUSTED")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run_command(GenerateConfig, break_down)


def test_what_the_user_says_of_xlas_memory_stays():
    program = """
import os
given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".7"}
given |= {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
os.environ |= given
import zagora_jax.trainer, zagora_jax.generate, zagora_jax.export, zagora_jax.evaluate, jax
jax.devices()
assert {name: value for name, value in os.environ.items() if name.startswith("XLA_PYTHON")} == given
"""
    subprocess.run([sys.executable, "-c", program], check=True)
