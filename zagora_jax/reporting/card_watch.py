"""Watches the cards beside the training: what their sensors say, warnings, and pauses of those that are too hot."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

from zagora_jax import interruption
from zagora_jax.errors import UserError
from zagora_jax.reporting.cards import USUAL_THROTTLES, CardReading, Cards, NoCardsError, summary

INTERVAL = 1.0  # seconds between two readings
STALE_AFTER = 15.0  # seconds after which a driver that gives no reading is not waited for
COOLER_BY = 5.0  # degrees below the limit at which training goes on
CLOSING = 2.0  # seconds that a reading under way may take at the end

Say = Callable[[str], None]


class CardWatch:
    """Reads the cards' sensors once a second, in a thread of its own, so that no step waits for a driver.

    Where there is no card, nothing is read and nothing is said, unless a limit of temperature was asked for.
    """

    def __init__(
        self,
        say: Say,
        pause_above: float | None = None,
        *,
        open_cards: Callable[[], Cards] = Cards,
        interval: float = INTERVAL,
    ):
        """Read every card once.

        Args:
            say: is told what deserves a look.
            pause_above: degrees Celsius above which `cool_down` waits.
            open_cards: connects to the driver.
            interval: seconds between two readings.

        Raises:
            UserError: there is a limit of temperature, and nothing that tells one.
        """
        self._say, self._limit, self._interval = say, pause_above, interval
        self._fresh: dict[int, list[CardReading]] = defaultdict(list)
        self._latest: list[CardReading] = []
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._said: set[str] = set()
        self._paused = 0.0  # seconds since the last step
        self.throttled: Counter[str] = Counter()  # steps by card and reason
        try:
            self._cards: Cards | None = open_cards()
            self._take_in(self._cards.read())
        except NoCardsError as error:
            self._cards = None
            if pause_above is not None:
                raise UserError(
                    f"--pause-above-celsius {pause_above:g}: {error}, so no temperature is known"
                ) from error
        if pause_above is not None and self._hottest() is None:
            raise UserError(f"--pause-above-celsius {pause_above:g}: the cards' driver tells no temperature")
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def __enter__(self) -> Self:
        self._fresh.clear()  # what was read long before the first step
        if self._cards is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(CLOSING)

    def facts(self) -> dict[str, Any]:
        """What report.json says of the cards."""
        cards = [] if self._cards is None else [asdict(card) for card in self._cards.cards]
        return {"cards": cards, "throttled_steps": dict(self.throttled)}

    def after_step(self) -> dict[str, Any]:
        """Return what a step's metrics should say besides: readings since the last, put together for each card."""
        with self._lock:
            fresh, self._fresh = self._fresh, defaultdict(list)
        cards = [summary(readings) for _, readings in sorted(fresh.items())]
        for reading in cards:
            self._warn(reading)
        metrics: dict[str, Any] = {"cards": [reading.to_json() for reading in cards]} if cards else {}
        if self._paused:
            metrics["paused_seconds"], self._paused = round(self._paused, 1), 0.0
        return metrics

    def cool_down(self) -> None:
        """Wait while a card is too hot; not longer than a signal to the process lets it."""
        hot = self._hottest()
        if self._limit is None or hot is None or hot.celsius is None or hot.celsius <= self._limit:
            return
        started, enough = time.monotonic(), self._limit - COOLER_BY
        self._say(
            f"card {hot.card} has {hot.celsius:g} °C, more than --pause-above-celsius {self._limit:g}: training waits "
            f"until every card has {enough:g} °C at most"
        )
        while (hot := self._hottest()) is not None and hot.celsius is not None and hot.celsius > enough:
            if interruption.requested() or self._is_stale():
                break
            time.sleep(self._interval)
        self._paused = time.monotonic() - started
        self._say(f"training goes on after a pause of {self._paused:.0f} s")

    def _hottest(self) -> CardReading | None:
        with self._lock:
            known = [reading for reading in self._latest if reading.celsius is not None]
        return max(known, key=lambda reading: reading.celsius or 0.0, default=None)

    def _is_stale(self) -> bool:
        with self._lock:
            stale = time.monotonic() - self._read_at > STALE_AFTER
        if stale:
            self._say_once(
                f"warning: the cards' driver has told no temperature for {STALE_AFTER:g} s: training does not wait for "
                "it any longer"
            )
        return stale

    def _warn(self, reading: CardReading) -> None:
        if reading.error is not None:
            self._say_once(f"warning: card {reading.card} does not answer: {reading.error}")
        for reason in reading.throttled_by:
            self.throttled[f"{reading.card}: {reason}"] += 1
            if reason not in USUAL_THROTTLES:
                heat = "" if reading.celsius is None else f" at {reading.celsius:g} °C"
                self._say_once(
                    f"warning: card {reading.card} is slowed down{heat}: {reason}. More of these are said in "
                    "metrics.jsonl alone",
                    key=f"{reading.card} {reason}",
                )

    def _say_once(self, text: str, key: str | None = None) -> None:
        if (key or text) not in self._said:
            self._said.add(key or text)
            self._say(text)

    def _take_in(self, readings: list[CardReading]) -> None:
        with self._lock:
            self._latest, self._read_at = readings, time.monotonic()
            for reading in readings:
                self._fresh[reading.card].append(reading)

    def _run(self) -> None:
        assert self._cards is not None
        while not self._ending.wait(self._interval):
            self._take_in(self._cards.read())
