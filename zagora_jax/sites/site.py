"""A run as one of several sites: what the trainer calls between optimizer steps, and what it saves of it.

The run's own adapter is always the global one that it knows last, less its pseudo-gradient that does not count yet:

    start of the next steps = global - pending,

where `pending` is the one that is under way. With `overlap` it is sent while the next steps run, and its
outcome applied behind them, one exchange late; what the site itself has learnt is never taken back meanwhile. Without,
the site waits for the outcome, and `pending` is zero.
"""

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flax import nnx

from models.parameters import by_path
from zagora_jax import interruption
from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.hanging import watched
from zagora_jax.sites.agreement import agree, claim_name, facts_of
from zagora_jax.sites.folder import Folder
from zagora_jax.sites.outer import Global, OuterRule, Vectors, digest, minus, zeros
from zagora_jax.sites.rounds import Exchanged, Rounds
from zagora_jax.sites.updates import Update, compress, message_specs

LOOKING = 0.05  # seconds between two looks whether an exchange is over, or a signal has come


@dataclass(frozen=True)
class SiteState:
    """What a site keeps from exchange to exchange; all of it is saved with a checkpoint.

    Attributes:
        known: the newest global adapter that has been applied.
        pending: this site's progress that is sent, and not known to count; zero where nothing is under way.
        residual: what compression has rounded off so far.
        sent: the update under way; None where nothing is.
        step: finished steps at the last exchange.
        skip: rounds up to this one may hold an update of an earlier run of this site's name.
    """

    known: Global
    pending: Vectors
    residual: Vectors
    sent: Update | None = None
    step: int = 0
    skip: int = 0

    @property
    def start(self) -> Vectors:
        """The adapter that the steps since the last exchange have begun with."""
        return minus(self.known.adapter, self.pending)


class Site:
    """This run's part in a training of several sites."""

    def __init__(self, config: TrainConfig, base: BaseModel, adapters: nnx.State, say: Callable[[str], None]):
        """Describe the site; nothing is reached yet.

        Args:
            config: with `sites.folder`.
            base: the base model.
            adapters: give shapes.
            say: is told what happens.
        """
        self._config, self._base, self._say, self._options = config, base, say, config.sites
        self._shapes = {name: tuple(leaf.shape) for name, leaf in _leaves(adapters).items()}
        self._state: SiteState | None = None
        self._flight: _Flight | None = None
        self._rounds: Rounds | None = None
        self._scratch = config.output / ".sites"

    # A run begins, goes on, ends.

    def begin(self, adapters: nnx.State) -> nnx.State:
        """Join the other sites, with the adapter that this run would begin with; returns the global one.

        Raises:
            UserError: the folder cannot be used, or the sites there have agreed on other options.
        """
        own = _vectors(adapters)
        rounds, start = self._join(own)
        is_first = start == digest(own)
        rounds.begin(own, is_first)
        known = rounds.newest(Global.begin(own) if is_first else None)
        skip = known.round + 1 if rounds.has_posted(known.round + 1) else 0
        self._state = SiteState(known, zeros(own), zeros(own), skip=skip)
        rounds.announce(known.round)
        self._say(f"sites: {self._options.name} begins with the global adapter of round {known.round}")
        return _filled(adapters, self._state.start)

    def go_on(self, adapters: nnx.State, saved: Mapping[str, Any]) -> None:
        """Take part again with what was saved; what was under way is sent again, where it has not counted yet."""
        rounds, _ = self._join(_vectors(adapters))
        self._state = state = _unpacked(saved, self._options.compression)
        rounds.announce(max(rounds.newest_closed(), state.known.round))
        if state.sent is not None:
            self._flight = _Flight(rounds, state)
        self._say(f"sites: {self._options.name} goes on behind round {state.known.round}")

    def _join(self, own: Vectors) -> tuple[Rounds, str]:
        options = self._options
        assert options.absolute_folder is not None
        assert options.name is not None
        with watched(f"opening {options.folder}", slow=True, advice="Does the storage answer?"):
            folder = Folder(options.absolute_folder)
            folder.require_exclusive_creation(f"probe.{options.name}")
            start = agree(folder, facts_of(self._config, self._base, own), digest(own))
            claim_name(folder, options.name, self._config.output)
        self._scratch.mkdir(parents=True, exist_ok=True)
        rule = OuterRule(options.outer_learning_rate, options.outer_momentum)
        self._rounds = Rounds(
            folder, options.name, self._shapes, rule, wait=options.wait, scratch=self._scratch, say=self._say
        )
        return self._rounds, start

    def leave(self) -> None:
        """Tell the others that this site is done; what cannot be reached then does not matter any more."""
        assert self._rounds is not None
        assert self._state is not None
        try:
            self._rounds.leave(self._state.known.round)
        except OSError as error:
            self._say(f"warning: sites: {error}; the others wait once for this site")

    def close(self) -> None:
        """Give up what is under way."""
        if self._flight is not None:
            self._flight.cancel()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # Between steps.

    def is_due(self, step: int, *, ends: bool) -> bool:
        """Tell whether something is to be exchanged behind a step; `ends`: it is the run's last."""
        assert self._state is not None
        return ends or (self._state.step < step and step % self._options.every == 0)

    def exchange(self, step: int, adapters: nnx.State, *, ends: bool) -> tuple[nnx.State, dict[str, Any]] | None:
        """Send what was learnt since the last exchange, and apply what has come in.

        Args:
            step: finished steps.
            adapters: as they are now.
            ends: whether to wait for all that is under way: no more steps come.

        Returns:
            The adapters to go on with, and metrics; None where a signal came while it waited: then nothing has changed.

        Raises:
            UserError: see `Rounds.exchange`.
        """
        assert self._state is not None
        assert self._rounds is not None
        began, state, outcome = time.monotonic(), self._state, None
        if self._flight is not None:
            if (outcome := self._await(self._flight)) is None:
                return None
            state = replace(state, known=outcome.state, pending=zeros(state.pending), sent=None)
        flight = None
        if state.step < step:
            progress = minus(self._state.start, _vectors(adapters))
            _require_finite(progress, step)
            messages, residual = compress(progress, state.residual, self._options.compression)
            update = Update(messages, self._options.compression)
            state = replace(state, pending=progress, residual=residual, sent=update, step=step)
            flight = _Flight(self._rounds, state)
        if flight is not None and (ends or not self._options.overlap):
            if (outcome := self._await(flight)) is None:
                return None
            state, flight = replace(state, known=outcome.state, pending=zeros(state.pending), sent=None), None
        self._state, self._flight = state, flight
        return _filled(adapters, state.start), self._metrics(outcome, time.monotonic() - began)

    def _await(self, flight: "_Flight") -> Exchanged | None:
        """Wait for an exchange; None where a signal came first, and it was given up."""
        wait = self._options.wait
        advice = f"Does {self._options.folder} answer? The same command with --resume goes on from the last saved step"
        with watched("the exchange between sites", slow=True, longer=2 * wait, advice=advice):
            while not flight.is_over(LOOKING):
                if interruption.requested():
                    flight.cancel()
                    return None
        return flight.result()

    def _metrics(self, outcome: Exchanged | None, seconds: float) -> dict[str, Any]:
        assert self._state is not None
        assert self._rounds is not None
        folder = self._rounds.folder
        return {
            "sites": {
                "round": self._state.known.round,
                "counted": [] if outcome is None else list(outcome.counted),
                "sent_bytes": folder.sent,
                "received_bytes": folder.received,
                "waited_seconds": seconds,
            }
        }

    # What is saved.

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: arrays alone, always of the same shapes."""
        assert self._state is not None
        state = self._state
        specs = message_specs(self._shapes, self._options.compression)
        empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in specs.items()}
        numbers = {
            "round": state.known.round,
            "step": state.step,
            "skip": state.skip,
            "under_way": int(state.sent is not None),
        }
        return {
            "numbers": {name: np.int64(value) for name, value in numbers.items()},
            "adapter": state.known.adapter,
            "velocity": state.known.velocity,
            "pending": state.pending,
            "residual": state.residual,
            "messages": empty if state.sent is None else state.sent.messages,
        }

    def like_saved(self) -> dict[str, Any]:
        """Return shapes and types of what `saved` returns."""
        values = {name: np.zeros(shape, np.float32) for name, shape in self._shapes.items()}
        specs = message_specs(self._shapes, self._options.compression)
        return {
            "numbers": {name: np.int64(0) for name in ("round", "step", "skip", "under_way")},
            **dict.fromkeys(("adapter", "velocity", "pending", "residual"), values),
            "messages": {name: np.zeros(shape, dtype) for name, (shape, dtype) in specs.items()},
        }


class _Flight:
    """An exchange that goes on in a thread of its own, which ends no process by its staying."""

    def __init__(self, rounds: Rounds, state: SiteState):
        assert state.sent is not None
        self._stop = threading.Event()
        self._outcome: queue.Queue[Exchanged | BaseException] = queue.Queue()
        self._found: Exchanged | BaseException | None = None
        arguments = (rounds, state.known, state.sent, state.skip)
        threading.Thread(target=self._run, args=arguments, name="sites", daemon=True).start()

    def _run(self, rounds: Rounds, known: Global, sent: Update, skip: int) -> None:
        try:
            self._outcome.put(rounds.exchange(known, sent, self._stop, skip))
        except BaseException as error:
            self._outcome.put(error)

    def is_over(self, seconds: float) -> bool:
        """Tell whether it is over within so many seconds."""
        if self._found is None:
            try:
                self._found = self._outcome.get(timeout=seconds)
            except queue.Empty:
                return False
        return True

    def result(self) -> Exchanged:
        """Return what came of it, or raise what it raised."""
        assert self._found is not None
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def cancel(self) -> None:
        """Let it end, and wait a little for that."""
        self._stop.set()
        self.is_over(10.0)


def _unpacked(saved: Mapping[str, Any], compression: Any) -> SiteState:
    numbers = {name: int(value) for name, value in saved["numbers"].items()}
    known = Global(numbers["round"], saved["adapter"], saved["velocity"])
    sent = Update(saved["messages"], compression) if numbers["under_way"] else None
    return SiteState(known, saved["pending"], saved["residual"], sent, numbers["step"], numbers["skip"])


def _leaves(adapters: nnx.State) -> dict[str, Any]:
    return {".".join(path): variable.get_value() for path, variable in by_path(adapters).items()}


def _vectors(adapters: nnx.State) -> Vectors:
    return {name: np.array(leaf, np.float32) for name, leaf in _leaves(adapters).items()}


def _filled(adapters: nnx.State, vectors: Vectors) -> nnx.State:
    """Return the adapters with other values."""
    filled = [(path, variable.replace(vectors[".".join(path)])) for path, variable in by_path(adapters).items()]
    return nnx.from_flat_state(filled)


def _require_finite(progress: Vectors, step: int) -> None:
    for name, values in progress.items():
        if not np.isfinite(values).all():
            raise UserError(f"step {step}: the adapter's {name} is not finite; nothing of it is sent to other sites")
