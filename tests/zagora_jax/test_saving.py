"""Which steps are saved beside a training, and that none waits for the disk."""

import threading
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from runs import recorder

from zagora_jax import hanging
from zagora_jax.checkpoints.background import BackgroundWriter
from zagora_jax.saving import Saver


class Disk:
    """Writes what it is given once it may; until then a job waits, as for a slow disk."""

    def __init__(self, *, slow=True):
        self.saved, self.copies, self.most_copies, self.error = [], 0, 0, None
        self.may_write = threading.Event()
        if not slow:
            self.may_write.set()

    def prepare(self, state):
        self.copies += 1
        self.most_copies = max(self.most_copies, self.copies)
        step = int(state)

        def write():
            assert self.may_write.wait(60)
            if self.error is not None:
                raise self.error
            self.saved.append(step)
            self.copies -= 1

        return write

    def answer(self, background):
        """Write what waits."""
        self.may_write.set()
        background.wait()
        self.may_write.clear()


@pytest.fixture
def training(monkeypatch):
    """A saver that saves every second step to a slow disk; without the tests' own waiting for each save."""
    monkeypatch.setattr(BackgroundWriter, "is_busy", lambda self: self._job is not None and not self._job.done())
    disk, (reporter, printed) = Disk(), recorder()
    with BackgroundWriter() as background:
        saver = Saver(disk.prepare, background, reporter.say, first_step=0, every=2)
        yield SimpleNamespace(disk=disk, background=background, saver=saver, printed=printed)
        disk.may_write.set()


def take(training, steps, **options):
    """Take steps as the training does, and return which of their metrics say that a save was put off."""
    put_off = []
    for step in steps:
        put_off += [step] if training.saver.after(step, is_good=True, **options) else []
        training.saver.save_if_due(jnp.int32(step))
    return put_off


def test_the_first_step_and_every_so_manieth_is_saved(training):
    training.disk.may_write.set()
    for step in range(1, 7):
        take(training, [step])
        training.background.wait()
    assert training.disk.saved == [1, 2, 4, 6]
    assert training.saver.put_off == 0
    assert training.printed() == ""


def test_no_step_waits_for_a_slow_disk_and_what_is_due_is_saved_later(training):
    assert take(training, range(1, 8)) == [2, 3, 4, 5, 6, 7]  # the disk is at step 1 all the time
    training.disk.answer(training.background)
    assert take(training, [8]) == []
    training.disk.answer(training.background)
    assert training.disk.saved == [1, 8]  # the newest, in the place of those that were due
    assert training.disk.most_copies == 1
    assert training.saver.put_off == 6
    assert training.printed().count("step 2 is not saved: the save before, of step 1, is still being written") == 1
    assert "step 3" not in training.printed()


def test_the_last_step_is_saved_however_slow_the_disk(training):
    take(training, [1, 2])
    training.saver.after(3, is_good=True)
    threading.Timer(0.2, training.disk.may_write.set).start()
    training.saver.save(jnp.int32(3))
    training.background.wait()
    assert training.disk.saved == [1, 3]
    assert training.disk.most_copies == 1  # the copy is made when the one before is gone


def test_steps_that_were_skipped_are_not_saved_but_the_next_good_one_is(training):
    training.disk.may_write.set()
    take(training, [1])
    training.background.wait()
    for step, is_good in [(2, False), (3, False), (4, True)]:
        training.saver.after(step, is_good=is_good)
        training.saver.save_if_due(jnp.int32(step))
    training.background.wait()
    assert training.disk.saved == [1, 4]


def fail(training, error, state):
    with pytest.raises(type(error)), training.saver.rescuing(lambda: state):
        raise error


def test_a_run_that_fails_saves_its_last_finished_step_first(training):
    training.disk.may_write.set()
    take(training, [1, 2, 3])
    fail(training, RuntimeError("the rows are gone"), jnp.int32(3))
    assert training.disk.saved[-1] == 3
    assert "step 3 is saved, before the run ends (RuntimeError)" in training.printed()
    fail(training, RuntimeError("again"), jnp.int32(3))
    assert training.disk.saved.count(3) == 1


def test_a_state_that_is_used_up_or_no_good_is_not_saved_in_the_end(training):
    training.disk.may_write.set()
    take(training, [1, 2, 3])
    used_up = jnp.int32(3)
    used_up.delete()
    fail(training, RuntimeError("the device was lost"), used_up)
    training.saver.after(4, is_good=False)
    fail(training, RuntimeError("diverged"), jnp.int32(4))
    training.background.wait()
    assert max(training.disk.saved) == 2


def test_a_disk_that_failed_is_not_tried_again(training):
    training.disk.error = OSError("full")
    training.disk.may_write.set()
    take(training, [1])
    with pytest.raises(OSError, match="full"):
        training.background.wait()
    training.saver.after(2, is_good=True)
    fail(training, OSError("full"), jnp.int32(2))
    assert training.disk.copies == 1


def test_a_rescue_that_fails_does_not_hide_what_happened(training):
    training.disk.may_write.set()
    take(training, [1, 2, 3])
    training.background.wait()
    training.disk.error = OSError("full")
    fail(training, RuntimeError("the rows are gone"), jnp.int32(3))
    assert "warning: step 3 could not be saved before the end: full" in training.printed()


def test_a_save_is_watched_over_by_its_size(training, monkeypatch):
    limits = []
    watched = hanging.watched

    def observed(what, **options):
        limits.append((what, options["longer"], options["saves"]))
        return watched(what, **options)

    monkeypatch.setattr("zagora_jax.saving.watched", observed)
    training.saver.after(1, is_good=True)
    training.disk.may_write.set()
    training.saver._prepare = lambda _: lambda: None
    training.saver.save(jnp.zeros(5_000_000, jnp.float32))
    training.background.wait()
    assert limits == [("saving step 1", 4.0, True)]  # 20 MB at 5 MB/s
