"""Threads, disks and devices that hang: named in time, and the run that hangs leaves what another can go on from."""

import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager

import pytest
from oracles import tiny_llama
from runs import Child, numbers, remains, tiny_config, write_rows

from zagora_jax import hanging
from zagora_jax.checkpoints.run_state import SavedStates
from zagora_jax.errors import UserError
from zagora_jax.hanging import FAILED, Pace, in_time, watched

# --- By themselves, in processes without JAX --------------------------------------------------------------------------

PRELUDE = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from zagora_jax import hanging
from zagora_jax.hanging import leave, watched

hanging.NAMED_AFTER = hanging.SLOW_NAMED_AFTER = 0.5
hanging.ENDED_AFTER = hanging.SLOW_ENDED_AFTER = 2.0
hanging.POLLING = 0.1
forever = threading.Event().wait
"""


def run(program, *, stopped_for=0.0):
    """Run a program; status, output and errors. It may be stopped, as by Ctrl-Z, when it prints "ready"."""
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program)]
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True)
    if stopped_for:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(stopped_for)
        process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def test_what_hangs_is_named_and_ends_the_process():
    status, _, errors = run("with watched('reading x', advice='Look at the disk'):\n    forever()")
    assert status == FAILED
    assert re.search(r"^warning: reading x: hangs: nothing has come of it for \d s", errors, re.MULTILINE)
    assert re.search(r"^error: reading x: hangs: nothing .* for 2 s.*\nLook at the disk$", errors, re.MULTILINE)


def test_work_that_ends_in_time_is_not_mentioned():
    assert run("for _ in range(20):\n    with watched('reading x'):\n        time.sleep(0.1)") == (0, "", "")


def test_the_time_of_a_stopped_process_is_not_counted():
    program = "with watched('reading x'):\n    print('ready', flush=True)\n    time.sleep(0.3)"
    assert run(program, stopped_for=3) == (0, "", "")


def test_a_save_is_finished_before_other_work_ends_the_process():
    program = """
        def save():
            with watched('saving', slow=True, longer=10, saves=True):
                time.sleep(4)
                print('saved', flush=True)
        threading.Thread(target=save).start()
        with watched('step 7'):
            forever()
    """
    status, output, errors = run(program)
    assert (status, output) == (FAILED, "saved\n")
    assert "error: step 7: hangs" in errors


def test_what_goes_on_while_a_save_is_waited_for_does_not_end_the_process():
    program = """
        def save():
            with watched('saving', slow=True, longer=10, saves=True):
                time.sleep(4)
        threading.Thread(target=save).start()
        with watched('step 7'):
            time.sleep(3)
        time.sleep(2)
        print('went on')
    """
    status, output, errors = run(program)
    assert (status, output) == (0, "went on\n")
    assert "step 7: goes on after all" in errors


def test_a_save_that_hangs_too_is_not_waited_for_longer_than_it_may_take():
    program = """
        def save():
            with watched('saving', slow=True, longer=0.1, saves=True):
                forever()
        threading.Thread(target=save).start()
        with watched('step 7'):
            forever()
    """
    status, _, errors = run(program)
    assert status == FAILED
    assert re.findall("^error: (.*): hangs", errors, re.MULTILINE) == ["step 7", "saving"]


def test_the_first_of_repeated_work_is_only_named_and_later_ones_by_what_they_took(monkeypatch):
    limits = []

    @contextmanager
    def observed(what, **kwargs):
        with watched(what, **kwargs) as activity:
            limits.append((activity.named_after, activity.ended_after))
            yield activity

    monkeypatch.setattr(hanging, "watched", observed)
    clock = iter([0.0, 100.0, 100.0, 107.0, 107.0, 108.0])
    monkeypatch.setattr(hanging.time, "perf_counter", lambda: next(clock))
    pace = Pace()
    for _ in range(3):
        with pace.watched("step"):
            pass
    slow = (60 + 2 * 100, 600 + 20 * 100)
    assert limits == [(60, None), slow, slow]


def test_a_process_that_is_done_does_not_wait_for_a_thread_that_hangs():
    program = """
        def keep():
            with watched('keeping a layer', slow=True, ends=False):
                forever()
        ThreadPoolExecutor(1).submit(keep)
        time.sleep({})
        sys.exit(leave(75))
    """
    for seconds in (0.1, 1.0):  # not named yet by then, and named already
        status, _, errors = run(program.format(seconds))
        assert status == 75
        assert "warning: keeping a layer: hangs" in errors


def test_work_in_time_returns_and_raises():
    assert in_time("adding", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        in_time("dividing", lambda: 1 // 0)
    with pytest.raises(TimeoutError, match="its own"):
        in_time("asking", lambda: (_ for _ in ()).throw(TimeoutError("its own")))


def test_work_that_is_not_done_in_time_is_named(monkeypatch):
    monkeypatch.setattr(hanging, "ENDED_AFTER", 0.2)
    monkeypatch.setattr(hanging, "_hung", False)
    with pytest.raises(UserError, match=r"sleeping: hangs: nothing has come of it for \d+ s(.*\n)*Wake it up"):
        in_time("sleeping", lambda: time.sleep(1), "Wake it up")


# --- In training runs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, rows, an unbroken run, and children that compile each program once."""
    folder = tmp_path_factory.mktemp("hanging")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 11)
    child = Child(folder / "compiled")
    child.train(configure(folder, folder / "unbroken"))
    return folder, child


def configure(folder, run, **options):
    options = {"quantization": "nf4", "max_steps": 8, "save_every": 3, "keep_checkpoints": 9} | options
    return tiny_config(folder / "model", run, folder / "rows.jsonl", **options)


@pytest.mark.parametrize(
    ("moment", "named", "place", "saved"),
    [
        (": batch 6$", "making the next batch", "batches.py", [1, 3, 5]),  # step 5, when the sixth batch does not come
        (": step 6$", "step 6", None, [1, 3]),
        (r"rename .*/checkpoints/3$", "saving step 3", "run_state.py", [1]),
        pytest.param("read model.layers.1", "reading tensor model.layers.1", "reading.py", [], marks=pytest.mark.slow),
    ],
    ids=["batches", "step", "save", "weights"],
)
def test_a_run_that_hangs_is_named_and_can_be_resumed(world, tmp_path, moment, named, place, saved):
    folder, child = world
    run = tmp_path / "run"
    status, errors = child.hang(configure(folder, run), moment)
    assert status == FAILED
    assert f"{named}" in errors
    assert ": hangs: nothing has come of it" in errors
    assert place is None or re.search(rf"\n  .*{place}:\d+, in ", errors)
    assert SavedStates(run / "checkpoints").steps() == saved
    child.train(configure(folder, run, resume=True))
    assert numbers(run) == numbers(folder / "unbroken")
    weights = "adapter/adapter_model.safetensors"
    assert (run / weights).read_bytes() == (folder / "unbroken" / weights).read_bytes()
    assert remains(run) == []


def test_a_cache_that_cannot_be_written_to_is_named_and_holds_nothing_up(world, tmp_path):
    folder, child = world
    config = configure(folder, tmp_path / "run", quantized_cache=tmp_path / "cache")
    status, errors = child.hang(config, rf"replace {tmp_path}/cache")
    assert status == 0
    assert "keeping layer" in errors
    assert numbers(tmp_path / "run") == numbers(folder / "unbroken")
