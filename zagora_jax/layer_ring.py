"""Host memory for some of the streamed layers at a time, which threads fill from files ahead of the layers' use.

A program brings the streamed layers to the device in an order that is known (`models.stream_order.arrivals`), and the
next program begins like the last one. So the threads read what is needed next into every slot whose layer is not needed
before that. The order turns back at its end: what is still in a slot is not read again.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from zagora_jax.checkpoints.read_ahead import READERS

# The layer that is computed with, the one on its way to the device, and two that are read meanwhile.
LEAST_SLOTS = 4

# Reads one piece of a layer into a slot.
Job = Callable[[], None]


class _Filling(NamedTuple):
    """A layer that is being read: what is to be read yet, and by how many threads pieces are being read."""

    layer: int
    left: deque[Job]
    running: list[int]


class LayerRing:
    """Which streamed layer is in which slot, and the threads that read.

    Attributes:
        slots: how many layers there is room for: layer k lies in slot k modulo `slots`.
        failure: what went wrong in a thread. From then on layers are not waited for, and what is in the slots is wrong:
            whoever runs programs is to raise it behind each.
        layers_read: how many layers have been read since the beginning.
        waited: seconds that each device has waited for layers in this program.
    """

    def __init__(
        self, slots: int, devices: int, jobs_of: Callable[[int, int], Sequence[Job]], *, readers: int = READERS
    ):
        """Start reading as soon as `begin` says what is needed.

        Args:
            slots: see above.
            devices: how many of them run the same program; each asks for each layer.
            jobs_of: returns what reads the pieces of a layer into a slot, of all devices.
            readers: how many threads read.
        """
        self.slots, self._jobs_of = slots, jobs_of
        self.failure: BaseException | None = None
        self.layers_read = 0
        self._held: list[int | None] = [None] * slots
        self._order: Sequence[int] = ()
        self._asked = [0] * devices  # how many layers each device has asked for in this program
        self.waited = [0.0] * devices
        self._filling: dict[int, _Filling] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._read, name=f"layers-{number}", daemon=True) for number in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, order: Sequence[int]) -> None:
        """Announce a program, which brings layers in this `order`; no other may run."""
        with self._changed:
            self._order = order
            self._asked, self.waited = [0] * len(self._asked), [0.0] * len(self._asked)
            self._changed.notify_all()

    def arrive(self, layer: int, device: int) -> None:
        """Wait until a layer is in its slot; see `models.stream_order.Ring`."""
        with self._changed:
            number = self._asked[device]
            if self.failure is None and (number >= len(self._order) or self._order[number] != layer):
                expected = self._order[number] if number < len(self._order) else "none"
                self.failure = RuntimeError(f"streamed layer {layer} came out of order, in place of {expected}")
            self._asked[device] = number + 1
            self._changed.notify_all()
            started = time.perf_counter()
            self._changed.wait_for(
                lambda: self._held[layer % self.slots] == layer or self.failure is not None or self._closed
            )
            self.waited[device] += time.perf_counter() - started

    def close(self) -> None:
        """Let the threads end; layers are not waited for any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self) -> int | None:
        """Return a layer whose slot may be filled with it; None where there is nothing to do."""
        if not self._order:
            return None
        # A layer is used until its device has asked for the layer after the next one.
        first = max(0, min(self._asked) - 2)
        needed: dict[int, int] = {}
        for number in range(first, first + len(self._order)):
            layer = self._order[number % len(self._order)]
            slot = layer % self.slots
            if needed.setdefault(slot, layer) != layer:
                return None  # what is in the slot is needed before
            if self._held[slot] != layer and slot not in self._filling:
                return layer
        return None

    def _read(self) -> None:
        """Read pieces, one after the other; what a thread does."""
        while True:
            with self._changed:
                while (work := self._take()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            filling, job = work
            try:
                job()
            except BaseException as error:  # raised where the program was started
                with self._changed:
                    self.failure = self.failure or error
            with self._changed:
                filling.running[0] -= 1
                if not filling.left and not filling.running[0]:
                    slot = filling.layer % self.slots
                    del self._filling[slot]
                    self._held[slot] = filling.layer
                    self.layers_read += 1
                self._changed.notify_all()

    def _take(self) -> tuple[_Filling, Job] | None:
        """Take a piece that is to be read, of a layer that is begun or of the next one."""
        if self._closed or self.failure is not None:
            return None
        filling = next((filling for filling in self._filling.values() if filling.left), None)
        if filling is None and (layer := self._next()) is not None:
            slot = layer % self.slots
            filling = _Filling(layer, deque(self._jobs_of(layer, slot)), [0])
            self._filling[slot], self._held[slot] = filling, None
        if filling is None:
            return None
        filling.running[0] += 1
        return filling, filling.left.popleft()
