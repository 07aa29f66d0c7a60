"""What a Watch tells of the tasks that it waits for, and how it bounds their number."""

import threading
import time

import pytest

from sharding.watch import Watch


class Result:
    """All that a Watch asks of an array: it is ready when a test says so, or when so many seconds are over."""

    def __init__(self, seconds=None, error=None):
        self.seconds, self.error, self.event = seconds, error, threading.Event()

    def block_until_ready(self):
        if self.error is not None:
            raise self.error
        if self.seconds is not None:
            time.sleep(self.seconds)
        else:
            self.event.wait()


@pytest.fixture
def watch():
    made = Watch(most_queued=2)
    yield made
    made.close()


def test_tasks_are_counted_and_timed_by_kind(watch):
    for kind, seconds in [("forward", 0.01), ("backward", 0.03), ("backward", 0.03)]:
        watch.wait_for_place()
        watch.dispatched(kind, None, Result(seconds))
    work = watch.take()
    assert work.tasks == {"forward": 1, "backward": 2}
    assert work.busy["backward"] >= 0.06
    assert work.seconds == pytest.approx(work.busy["forward"] + work.busy["backward"])
    assert work.ended - work.began >= work.seconds
    assert watch.take().tasks == {}


def test_time_spent_waiting_for_inputs_is_not_counted(watch):
    watch.wait_for_place()
    watch.dispatched("forward", Result(0.2), Result(0.0))
    assert watch.take().seconds < 0.2


def test_no_more_tasks_than_places(watch):
    results = [Result(), Result()]
    for result in results:
        watch.wait_for_place()
        watch.dispatched("forward", None, result)
    third = threading.Thread(target=watch.wait_for_place)
    third.start()
    third.join(0.05)
    assert third.is_alive()
    results[0].event.set()
    third.join(10)
    assert not third.is_alive()
    results[1].event.set()


def test_a_task_that_fails_is_heard_of(watch):
    watch.wait_for_place()
    watch.dispatched("forward", None, Result(error=MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        watch.take()
    with pytest.raises(MemoryError, match="full"):
        watch.wait_for_place()
