"""The ring of streamed layers that threads fill: what is read when, and what is left alone."""

from __future__ import annotations

import threading
import time

import pytest

from models.stream_order import arrivals
from zagora_jax.layer_ring import LayerRing

PIECES = 3


class Disk:
    """Layers of a few pieces, which come when they are let through."""

    def __init__(self, slots: int):
        self.slots: list[dict[int, int]] = [{} for _ in range(slots)]
        self.read: list[int] = []
        self.broken: int | None = None

    def jobs(self, layer: int, slot: int):
        self.read.append(layer)

        def piece(number: int) -> None:
            if layer == self.broken:
                raise OSError(5, "Input/output error")
            self.slots[slot][number] = layer

        return [lambda number=number: piece(number) for number in range(PIECES)]


@pytest.fixture
def ring_of(request):
    def make(slots: int, devices: int = 1) -> tuple[LayerRing, Disk]:
        disk = Disk(slots)
        ring = LayerRing(slots, devices, disk.jobs)
        request.addfinalizer(ring.close)
        return ring, disk

    return make


def settled(ring: LayerRing) -> None:
    """Wait until the threads have nothing to do."""
    for _ in range(1000):
        with ring._changed:
            if not ring._filling and ring._next() is None:
                return
        time.sleep(0.002)
    pytest.fail("the threads did not come to rest")


def go_through(ring: LayerRing, disk: Disk, order: tuple[int, ...], device: int = 0) -> None:
    """Run a program of one device: what it has asked for stays as it is until the layer after the next one."""
    used: list[int] = []
    for layer in order:
        ring.arrive(layer, device)
        used = [*used[-1:], layer]
        for one in used:
            assert disk.slots[one % ring.slots] == dict.fromkeys(range(PIECES), one)


def test_order_of_arrivals_turns_back():
    assert arrivals(3, backward=False) == (0, 1, 2, 2)
    assert arrivals(3, backward=True) == (0, 1, 2, 2, 1, 0, 0)
    assert arrivals(1, backward=True) == (0, 0, 0)


@pytest.mark.parametrize(("layers", "slots"), [(9, 4), (9, 2), (9, 8), (1, 1), (3, 3)])
def test_every_layer_is_there_when_it_is_used(ring_of, layers, slots):
    ring, disk = ring_of(slots)
    for backward in (True, False, False, True, True):
        order = arrivals(layers, backward=backward)
        ring.begin(order)
        go_through(ring, disk, order)
    assert ring.failure is None


def test_what_is_there_is_not_read_again(ring_of):
    ring, disk = ring_of(4)
    order = arrivals(10, backward=True)
    ring.begin(order)
    go_through(ring, disk, order)
    settled(ring)
    # Forwards all; backwards those that are not among the last four; then no more than the next program begins with.
    assert disk.read == [*range(10), *reversed(range(6))]
    ring.begin(order)
    go_through(ring, disk, order)
    settled(ring)
    assert disk.read[16:] == [*range(4, 10), *reversed(range(6))]


def test_with_room_for_all_each_is_read_once(ring_of):
    ring, disk = ring_of(5)
    order = arrivals(5, backward=True)
    for _ in range(3):
        ring.begin(order)
        go_through(ring, disk, order)
    assert sorted(disk.read) == list(range(5))


def test_reading_runs_ahead_of_the_slowest_device(ring_of):
    ring, disk = ring_of(4, devices=2)
    order = arrivals(8, backward=False)
    ring.begin(order)
    for layer in (0, 1, 2, 3):
        ring.arrive(layer, 0)
    settled(ring)
    assert disk.read == [0, 1, 2, 3]  # the other device has used none of them
    slow = threading.Thread(target=go_through, args=(ring, disk, order, 1))
    slow.start()
    for layer in order[4:]:
        ring.arrive(layer, 0)
    slow.join()
    assert disk.read[:8] == list(range(8))


def test_a_failure_ends_the_waiting(ring_of):
    ring, disk = ring_of(4)
    disk.broken = 5
    order = arrivals(8, backward=True)
    ring.begin(order)
    for layer in order:
        ring.arrive(layer, 0)  # to the end, so that a program can end
    assert isinstance(ring.failure, OSError)


def test_a_layer_out_of_order_is_a_failure(ring_of):
    ring, _ = ring_of(4)
    ring.begin(arrivals(8, backward=False))
    ring.arrive(0, 0)
    ring.arrive(2, 0)
    assert "layer 2 came out of order, in place of 1" in str(ring.failure)
