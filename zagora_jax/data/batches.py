"""From tokenised rows to the batches of optimizer steps, in an order that depends on the seed and the step alone.

Every epoch visits each row once, or as often as a mixture says. The last optimizer step of an epoch is filled up with
empty sequences, which have no weight, so that no row is dropped and all shapes are the same.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from zagora_jax.data.examples import Examples
from zagora_jax.data.packing import Packing, best_fit, one_row_each
from zagora_jax.errors import UserError
from zagora_jax.hanging import in_time

# Without packing, sequences are as wide as the longest row, rounded up to a multiple of this.
WIDTH_MULTIPLE = 32
PREFETCHED_BATCHES = 2
AFTER_A_HANG = "The rows lie in a temporary file: look whether the disk of TMPDIR answers, and give --resume to go on"
MIXING = 1  # tells the seeds of a mixture from those of an epoch


class Batch(NamedTuple):
    """The arrays of one optimizer step, each [A, M, S]: accumulated micro-batches, sequences, tokens.

    Attributes:
        tokens: int32.
        targets: int32, the token after each in the same row; 0 after a row's last.
        weights: float32, what the target counts in the loss: 1 where it is supervised, unless the row says otherwise;
            else 0.
        segment_ids: int32, the rows of a sequence numbered from 1; 0 is padding.
        positions: int32, counted from 0 in each row.
    """

    tokens: Any
    targets: Any
    weights: Any
    segment_ids: Any
    positions: Any


class Share(NamedTuple):
    """Rows of a mixture, and how often an epoch goes through them; a fraction takes a part of them in turn."""

    rows: range
    passes: float

    def rows_of(self, epoch: int, order: Callable[[int], np.ndarray]) -> np.ndarray:
        """The rows of an epoch; `order` gives the one in which fractions take them, so that none is left behind."""
        count = len(self.rows)
        whole = int(self.passes)
        part = round((self.passes - whole) * count)
        rows = np.tile(np.arange(self.rows.start, self.rows.stop), whole)
        if not part:
            return rows
        taken = order(count)[(epoch * part + np.arange(part)) % count]
        return np.concatenate([rows, self.rows.start + np.sort(taken)])


_DTYPES = (np.int32, np.int32, np.float32, np.int32, np.int32)


class Batches:
    """The batches of a training run, or of an evaluation, any of them made on its own.

    Attributes:
        width: S, tokens in a sequence.
        own: the sequences of every micro-batch that are wanted here; None: all. The rows of others are not read.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        sequence_length: int,
        packing: bool,
        micro_batch_size: int,
        gradient_accumulation_steps: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        mixture: Sequence[Share] = (),
    ):
        """Describes how rows become batches.

        Args:
            examples: rows of at most `sequence_length` tokens.
            sequence_length: S with packing, and the bound of S without.
            packing: put several rows in one sequence.
            micro_batch_size: M, sequences in a micro-batch, over all devices.
            gradient_accumulation_steps: A, micro-batches in an optimizer step.
            seed: of the order of rows; every epoch has an order of its own.
            shuffle: whether rows are shuffled at all.
            mixture: how often an epoch goes through which rows; where empty, once through all.
        """
        if not len(examples):
            raise ValueError("there are no rows to make batches of")
        if micro_batch_size < 1 or gradient_accumulation_steps < 1:
            raise ValueError("micro_batch_size and gradient_accumulation_steps must be at least 1")
        longest = int(examples.lengths.max())
        if longest > sequence_length:
            raise ValueError(f"a row of {longest} tokens is longer than sequence_length {sequence_length}")
        self.examples = examples
        self.own: Sequence[int] | None = None
        self.width = sequence_length
        if not packing:
            self.width = min(sequence_length, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        self._shape = (gradient_accumulation_steps, micro_batch_size, self.width)
        self._packing = packing
        self._seed = seed
        self._shuffle = shuffle
        self._mixture = tuple(mixture) or (Share(range(len(examples)), 1.0),)
        self._plans: dict[int, Packing] = {}
        self._lock = threading.RLock()  # the prefetching thread makes plans too
        self._sequences: list[int] = []

    @property
    def fingerprint(self) -> str:
        """Changes when a token or a mask of the data does."""
        return self.examples.fingerprint

    def abstract(self) -> Batch:
        """Shapes and dtypes of a batch."""
        return Batch(*(jax.ShapeDtypeStruct(self._shape, dtype) for dtype in _DTYPES))  # type: ignore[arg-type]

    def sequences_per_epoch(self, epoch: int = 0) -> int:
        """Sequences with rows in them in an epoch; with packing, they may differ from epoch to epoch."""
        with self._lock:
            while len(self._sequences) <= epoch:
                following = len(self._sequences)
                self._sequences.append(
                    self._plan(following).sequences if self._packing else self._rows_of(following).size
                )
        return self._sequences[epoch]

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Optimizer steps in an epoch."""
        accumulation, micro_batch_size, _ = self._shape
        return -(-self.sequences_per_epoch(epoch) // (accumulation * micro_batch_size))

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps in the first `epochs` epochs."""
        return sum(self.steps_per_epoch(epoch) for epoch in range(epochs))

    def from_step(self, first: int, total_steps: int) -> "BatchIterator":
        """The batches of the steps from `first` (counted from 0) up to `total_steps`, over as many epochs as needed."""
        return BatchIterator(self, first, total_steps)

    def epoch(self, epoch: int) -> "BatchIterator":
        """The batches of one epoch."""
        return self.from_step(self.total_steps(epoch), self.total_steps(epoch + 1))

    def rows_of_step(self, step: int) -> list[np.ndarray]:
        """The rows of each sequence of an optimizer step, int64[rows]; A * M sequences, fewer at an epoch's end."""
        epoch = 0
        while step >= (steps := self.steps_per_epoch(epoch)):
            step -= steps
            epoch += 1
        plan = self._plan(epoch)
        size = self._shape[0] * self._shape[1]
        sequences = range(step * size, min((step + 1) * size, plan.sequences))
        return [plan.rows[plan.starts[sequence] : plan.starts[sequence + 1]] for sequence in sequences]

    def tokens_of_step(self, step: int) -> int:
        """Tokens of the rows of an optimizer step."""
        rows, starts = np.concatenate(self.rows_of_step(step)), self.examples.starts
        return int((starts[rows + 1] - starts[rows]).sum())

    def at(self, step: int) -> Batch:
        """The batch of an optimizer step, counted from 0 over all epochs; sequences that are not `own` are empty."""
        accumulation, sequences, width = self._shape
        flat = Batch(*(np.zeros((accumulation * sequences, width), dtype) for dtype in _DTYPES))
        for sequence, rows in enumerate(self.rows_of_step(step)):
            if self.own is not None and sequence % sequences not in self.own:
                continue
            begin = 0
            for segment, row in enumerate(rows, start=1):
                tokens, weights, _ = self.examples[row]
                end = begin + len(tokens)
                flat.tokens[sequence, begin:end] = tokens
                flat.targets[sequence, begin : end - 1] = tokens[1:]
                flat.weights[sequence, begin : end - 1] = weights[1:]
                flat.segment_ids[sequence, begin:end] = segment
                flat.positions[sequence, begin:end] = np.arange(len(tokens))
                begin = end
        return Batch(*(array.reshape(self._shape) for array in flat))

    def identity(self) -> dict[str, Any]:
        """What the batches depend on: an iterator's state is good only where all of it is the same."""
        mixed = any(share.passes != 1 for share in self._mixture)
        return {
            "rows": self.fingerprint,
            # Into which micro-batches a step's sequences are split changes no number but by the order of sums.
            "sequences_a_step": self._shape[0] * self._shape[1],
            "sequence_length": self.width,
            "packing": self._packing,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **({"mixture": [[len(share.rows), share.passes] for share in self._mixture]} if mixed else {}),
        }

    def _plan(self, epoch: int) -> Packing:
        with self._lock:
            if epoch not in self._plans:
                order = self._order(epoch)
                plan = best_fit(order, self.examples.lengths, self.width) if self._packing else one_row_each(order)
                self._plans = {**dict(list(self._plans.items())[-1:]), epoch: plan}  # two epochs meet while prefetching
            return self._plans[epoch]

    def _order(self, epoch: int) -> np.ndarray:
        """The rows in the order of an epoch.

        They are sorted by random keys: unlike `permutation`, the raw bits of a generator are the same in all versions
        of numpy, so that a run can be resumed with another.
        """
        rows = self._rows_of(epoch)
        return rows[random_order(self._seed, epoch, len(rows))] if self._shuffle else rows

    def _rows_of(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, in the order of their files."""
        return np.concatenate(
            [
                share.rows_of(epoch, partial(random_order, self._seed, number, MIXING))
                for number, share in enumerate(self._mixture)
            ]
        )


def random_order(*seeds_and_count: int) -> np.ndarray:
    """Return the numbers below `count`, the last argument, in an order that depends on the seeds alone."""
    *seeds, count = seeds_and_count
    keys = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(keys, kind="stable")


class BatchIterator(Iterator[Batch]):
    """Batches one after the other, made ahead by a thread of grain's; its state is a few bytes of JSON."""

    def __init__(self, batches: Batches, first: int, total_steps: int):
        self._batches = batches
        dataset = grain.MapDataset.range(total_steps).map(batches.at)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED_BATCHES)
        self._iterator = iter(dataset.to_iter_dataset(options))
        self._iterator.set_state({"next_index": first})
        self._position = self._iterator.get_state()

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            UserError: none came in time.
        """
        batch, self._position = in_time("making the next batch", self._next, AFTER_A_HANG)
        return batch

    def _next(self) -> tuple[Batch, dict[str, Any]]:
        return next(self._iterator), self._iterator.get_state()

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands and what it goes through, as JSON values."""
        return {"position": self._position, "batches": self._batches.identity()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to where `get_state` stood.

        Raises:
            UserError: the rows, or an option that decides their order, have changed since.
        """
        saved, present = state["batches"], self._batches.identity()
        changed = [
            f"{name} ({saved.get(name)} before, {present.get(name)} now)"
            for name in {**saved, **present}
            if saved.get(name) != present.get(name)
        ]
        if changed:
            raise UserError(
                f"the saved place in the data cannot be found again, since these have changed: {', '.join(changed)}; "
                "use the data and options of the saved run, or begin a new run"
            )
        self._iterator.set_state(state["position"])
        self._position = state["position"]
