"""Which steps of a run are saved, and when."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from zagora_jax import processes
from zagora_jax.checkpoints.background import BackgroundWriter
from zagora_jax.hanging import watched
from zagora_jax.train_state import TrainState

# Of the slowest disk that is not taken for dead, in bytes a second.
DISK_RATE = 5e6


class Saver:
    """Saves states beside the training, so that no step waits for the disk.

    One save is under way at a time, and it has the only copy of a state. One that is due meanwhile is put off: in its
    place, the first step is saved that ends after that.
    """

    def __init__(
        self,
        prepare: Callable[[TrainState], Callable[[], None]],
        background: BackgroundWriter,
        say: Callable[[str], None],
        *,
        first_step: int,
        every: int,
    ):
        """Begin behind a step that is saved.

        Args:
            prepare: copies a state, whose arrays the next step may reuse, and returns the job that writes the copy.
            background: runs the jobs.
            say: is told what is put off, and of what was saved before a run failed.
            first_step: finished steps before the first one here.
            every: steps from one save to the next. The first step is saved too: that saving works, and can be read
                back, is known within minutes.
        """
        self._prepare, self._background, self._say = prepare, background, say
        self._first_step, self._every = first_step, every
        self._finished = self._saved = first_step
        self._is_due, self._is_good, self._is_put_off = False, True, False
        self._completed: deque[int] = deque()  # filled by the thread that saves
        self.put_off = 0

    def after(self, step: int, *, is_good: bool) -> dict[str, Any]:
        """Take note of a finished step, and return what its metrics should say besides: that its save is put off.

        Args:
            step: its number.
            is_good: whether its update was made. A state amid skipped steps may be the last of a run that diverges: it
                takes no good one's place.
        """
        self._finished, self._is_good = step, is_good
        self._is_due |= step == self._first_step + 1 or step % self._every == 0
        self._is_put_off = self._is_due and is_good and any(processes.present().any_of(self._background.is_busy()))
        if not self._is_put_off:
            return {}
        self.put_off += 1
        if self.put_off == 1:
            self._say(
                f"step {step} is not saved: the save before, of step {self._saved}, is still being written. The first "
                "step that ends after that is saved in its place. More of these are said in metrics.jsonl alone"
            )
        return {"save_put_off": True}

    def save_if_due(self, state: TrainState) -> None:
        """Begin to save the finished step's state, where it is due and not put off."""
        if self._is_due and self._is_good and not self._is_put_off:
            self.save(state)

    def save(self, state: TrainState) -> None:
        """Begin to save the finished step's state, as soon as no other is being saved."""
        self._background.wait()
        step, size, write = self._finished, sum(leaf.nbytes for leaf in jax.tree.leaves(state)), self._prepare(state)

        def job() -> None:
            with watched(
                f"saving step {step}",
                slow=True,
                longer=size / DISK_RATE,
                advice="The steps up to the last saved one stand: once the disk answers, --resume goes on from there",
                saves=True,
            ):
                write()
            self._completed.append(step)

        self._background.submit(job)
        self._saved, self._is_due = step, False

    def completed(self) -> Iterator[int]:
        """Yield the steps whose saves have come to their end since the last call."""
        while self._completed:
            yield self._completed.popleft()

    @contextmanager
    def rescuing(self, latest: Callable[[], TrainState]) -> Iterator[None]:
        """Where the block fails, save the last finished step first, if its state is good and still there.

        Of several processes one fails, and the pieces of the others cannot be had.

        Args:
            latest: returns its state, whose arrays a step that failed may have used up.
        """
        try:
            yield
        except Exception as error:
            if not processes.present().alone:
                raise  # the others are amid a step, and bring nothing together
            state = latest()
            used_up = any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            if self._finished > self._saved and self._is_good and not used_up and not self._background.has_failed:
                self._rescue(state, error)
            raise

    def _rescue(self, state: TrainState, reason: Exception) -> None:
        try:
            self.save(state)
            self._background.wait()
        except Exception as error:
            self._say(f"warning: step {self._finished} could not be saved before the end: {error}")
        else:
            self._say(f"step {self._finished} is saved, before the run ends ({type(reason).__name__})")
