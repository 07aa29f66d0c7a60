"""Writes a run's report.html at every save, beside the training."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from zagora_jax.callbacks import Begin, Callback, End, Sampled, Saved
from zagora_jax.checkpoints.atomic import write_bytes
from zagora_jax.interruption import Interrupted
from zagora_jax.reporting.report_page import Samples, render_report
from zagora_jax.reporting.run_view import RunView
from zagora_jax.run_directory import RunDirectory

LAST_PAGE = 30.0  # seconds that the last page may take


class ReportWriter(Callback):
    """Writes report.html in a thread of its own. A page that cannot be made is said once, and ends nothing.

    Attributes:
        failures: pages that could not be made.
    """

    def __init__(self, say: Callable[[str], None]):
        """Begin; `say` is told of the first failure."""
        self._say = say
        self._thread = threading.Thread()
        self._samples = Samples()
        self._view: RunView | None = None
        self.failures = 0

    def on_begin(self, event: Begin) -> None:
        """Take the directory, and write what is known before the first step."""
        self._view = RunView(event.run_directory)
        self._place = os.stat(event.run_directory)
        self._samples = _earlier_samples(event.run_directory)
        self._begin_to_write("running")

    def on_sample(self, event: Sampled) -> None:
        """Keep the first answers and the newest."""
        texts = {sample.prompt: sample.text for sample in event.samples}
        before, step = self._samples.before, self._samples.before_step
        if not before:
            before, step = texts, event.step
        self._samples = Samples(before, step, texts, event.step)

    def on_save(self, event: Saved) -> None:
        """Begin to write the page, unless the one before is still being written."""
        if not self._thread.is_alive():
            self._begin_to_write("running")

    def on_end(self, event: End) -> None:
        """Write the last page, and wait for it as long as a disk may take that is not dead."""
        state = "finished"
        if isinstance(event.error, Interrupted):
            state = f"stopped by {event.error}; --resume goes on"
        elif event.error is not None:
            state = f"broken off: {event.error}"
        if self._thread.ident is not None:
            self._thread.join(LAST_PAGE)
        if not self._thread.is_alive():
            self._begin_to_write(state)
            self._thread.join(LAST_PAGE)
        if self._thread.is_alive():
            self._say(f"warning: report.html is not written after {LAST_PAGE:g} s, and is left as it is")

    def _begin_to_write(self, state: str) -> None:
        # The process does not wait for it at its end, unlike for a thread of a pool.
        self._thread = threading.Thread(target=self._write, args=(state,), name="report", daemon=True)
        self._thread.start()

    def _write(self, state: str) -> None:
        assert self._view is not None
        try:
            if not os.path.samestat(self._place, os.stat(self._view.path)):
                return  # the directory was replaced by another, as the trainer will say
            page = render_report(self._view, self._samples, state)
            write_bytes(RunDirectory(self._view.path).report_page, page.encode("utf-8", errors="replace"))
        except Exception as error:  # a picture of the training is no reason to end it
            self.failures += 1
            if self.failures == 1:
                self._say(f"warning: report.html could not be written: {type(error).__name__}: {error}")


def _earlier_samples(run: Path) -> Samples:
    """Return the first and the newest answers of a run that goes on; none where there are none that can be read."""
    texts: dict[int, dict[str, str]] = {}
    try:
        for line in RunDirectory(run).samples.read_text("utf-8").splitlines():
            entry = json.loads(line)
            texts.setdefault(int(entry["step"]), {})[str(entry["prompt"])] = str(entry["text"])
    except (OSError, ValueError, TypeError, KeyError):
        return Samples()
    return Samples(texts[min(texts)], min(texts), texts[max(texts)], max(texts)) if texts else Samples()
