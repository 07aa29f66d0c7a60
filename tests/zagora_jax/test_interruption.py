"""Signals to processes that work, compile, save or hang; in processes of their own, without JAX."""

import signal
import subprocess
import sys
import textwrap

import pytest

from zagora_jax.interruption import STOPPED, Interrupted, interruptible, requested, saving_first

PRELUDE = """
import hashlib, signal, sys, threading, time
from zagora_jax import interruption
from zagora_jax.interruption import Interrupted, check, interruptible, requested, saving_first

interruption.UNWINDING = 0.5
# As in a terminal, however these tests were started: a shell has SIGINT ignored in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

def in_compiled_code():
    # One call of minutes that gives back the interpreter's lock, as XLA's do.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def command(work):
    with interruptible():
        try:
            work()
        except Interrupted as error:
            print("stopped by", error, flush=True)
            return interruption.STOPPED
        return 0

def ready():
    print("ready", flush=True)
"""


def heed_hangups():
    """Undo what nohup does to a program, which hands it on to these tests."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run(work, *signals):
    """Run `work`, a body that calls ready(), and send a signal for every "ready" it prints; status, output, errors."""
    program = PRELUDE + "def work():\n" + textwrap.indent(textwrap.dedent(work), "    ") + "\nsys.exit(command(work))\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=-1, stderr=-1, text=True, bufsize=1, preexec_fn=heed_hangups
    )
    for number in signals:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_where_nothing_is_to_be_saved_a_signal_ends_at_once_and_cleans_up(number):
    work = """
        try:
            ready()
            time.sleep(60)
        finally:
            print("cleaned up", flush=True)
    """
    assert run(work, number) == (STOPPED, f"cleaned up\nstopped by {number.name}\n", "")


def test_where_work_is_to_be_saved_it_is_saved_first():
    work = """
        with saving_first(grace=30):
            ready()
            while not requested():
                time.sleep(0.01)
            time.sleep(1)  # the rest of the step
            print("saved", flush=True)
    """
    status, output, errors = run(work, signal.SIGTERM)
    assert (status, output) == (STOPPED, "saved\nstopped by SIGTERM\n")
    assert "SIGTERM: the step that runs is finished and saved, within 30 s; a second signal ends at once" in errors


def test_a_signal_while_compiled_code_runs_is_not_waited_with():
    """As in a compilation by XLA, where Python's handlers cannot run."""
    status, output, errors = run("threading.Timer(0.5, ready).start(); in_compiled_code()", signal.SIGTERM)
    assert (status, output) == (STOPPED, "")
    assert "SIGTERM: ended; there was nothing left to save" in errors


def test_a_second_signal_ends_at_once():
    work = """
        with saving_first(grace=30):
            ready()
            while not requested():
                time.sleep(0.01)
            ready()
            time.sleep(60)
    """
    status, _, errors = run(work, signal.SIGTERM, signal.SIGINT)
    assert status == 128 + signal.SIGINT
    assert "SIGINT: ended at once" in errors


def test_the_grace_comes_to_an_end():
    work = """
        with saving_first(grace=0.5):
            ready()
            time.sleep(60)
    """
    status, _, errors = run(work, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "SIGTERM: not finished within 0.5 s: ended; the steps since the last save are lost" in errors


def test_what_the_shell_ignores_stays_ignored():
    """As of `command &` in a script, which Ctrl-C at its terminal is not meant for."""
    program = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from zagora_jax.interruption import interruptible\n"
        "with interruptible():\n    os.kill(os.getpid(), signal.SIGINT)\nprint('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "went on\n"


def test_handlers_are_those_of_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]

    def stopped():
        with interruptible(), interruptible(), saving_first(5.0):
            assert not requested()
            signal.raise_signal(signal.SIGTERM)
            assert requested()

    with pytest.raises(Interrupted, match="SIGTERM"):  # at the end of the block
        stopped()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before
    assert not requested()
