"""Whether the other processes of a run still live, asked every two seconds through JAX's coordination service.

Where one process dies, the others wait in an exchange for ever, or fail with a word about a socket. So each leaves a
sign of life with the service, which process 0 runs, and reads those of the others. Who finds one lost, or ended by an
error, says so, and ends too, with status PEER_LOST: nothing is half written, no file has its name before it is whole.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from zagora_jax import hanging
from zagora_jax.interruption import STOPPED

PEER_LOST = 69  # EX_UNAVAILABLE of sysexits.h
BEAT = 2.0  # seconds from one sign of life to the next
LOST_AFTER = 30.0  # seconds without one
LINGERING = 10.0  # seconds that process 0 stays for the others to hear why it ends
SAVING = 120.0  # seconds that a save under way may still take then

ADVICE = (
    "The steps up to the last saved one stand: the same command with --resume goes on from there, also with fewer "
    "processes"
)


class Peers:
    """Watches over the other processes while a run goes on.

    Attributes:
        doing: what this process is at, for the others to say.
    """

    def __init__(self, client: Any, service: str, index: int, names: list[str], run: int):
        """Begin to watch.

        Args:
            client: of the coordination service.
            service: HOST:PORT of that.
            index: of this process.
            names: of all processes, as they are called in messages.
            run: counts the runs of this process, whose signs of life are not to be mixed.
        """
        self.doing = "starting"
        self._service, self._client = service, client
        self._index, self._names, self._folder = index, names, f"zagora/alive/{run}/"
        self._lock, self._count = threading.Lock(), 0
        self._ended: dict[str, Any] | None = None
        self._round = 0  # of signs that were exchanged
        self._found: dict[int, dict[str, Any]] = {}
        self._closing = threading.Event()
        self._verdict = threading.Event()
        for name, work in (("signs of life", self._exchange), ("peers", self._watch)):
            threading.Thread(target=work, name=name, daemon=True).start()
        global _watching
        _watching = self

    def close(self) -> None:
        """Watch no longer: all processes are done."""
        self._closing.set()

    def end(self, status: int, message: str) -> None:
        """Tell the others that this process ends, and why; process 0 waits until they have heard it.

        It does not wait where a second signal asks it to end at once: the others then see that it is gone.
        """
        with self._lock:
            self._ended = {"status": status, "message": message}
        self._closing.set()
        self._tell_in_time()
        if self._index == 0 and status < 128:
            self._linger()

    def wait_for_verdict(self) -> None:
        """Give the watch the time to say which process is lost, and to end this one: an exchange has failed."""
        self._verdict.wait(LOST_AFTER + 5 * BEAT)
        if self._verdict.is_set():
            threading.Event().wait()  # until it has ended this process

    def behind(self) -> str:
        """Say what the others are at, as far as it is not the same as here."""
        others = {
            index: sign["doing"]
            for index, sign in sorted(self._found.items())
            if index != self._index and sign["doing"] != self.doing
        }
        return "".join(f"\n{self._names[index]} is at: {doing}" for index, doing in others.items())

    def lost_service(self) -> str | None:
        """Say that process 0 is gone, if nobody listens any more where it ran the service."""
        host, _, port = self._service.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=BEAT).close()
        except OSError:
            return self._lost(0, 0)
        return None

    def _tell(self) -> None:
        with self._lock:
            self._count += 1
            sign = {"count": self._count, "doing": self.doing, "ended": self._ended}
        try:
            self._client.key_value_set(f"{self._folder}{self._index}", json.dumps(sign), allow_overwrite=True)
        except Exception:
            return

    def _read(self) -> bool:
        try:
            entries = self._client.key_value_dir_get(self._folder)
        except Exception:
            return False
        self._found = {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}
        return True

    def _exchange(self) -> None:
        """Leave signs of life and read those of the others; a call may hang where process 0 does."""
        while not self._closing.is_set():
            self._tell()
            self._round += self._read()
            self._closing.wait(BEAT)

    def _watch(self) -> None:
        silent: dict[int, float] = dict.fromkeys(range(len(self._names)), 0.0)  # seconds
        counts: dict[int, int] = {}
        ending: dict[int, float] = {}  # seconds since a process has said that it ends
        rounds, without_round, last = 0, 0.0, time.monotonic()
        while not self._closing.wait(BEAT / 4):
            now = time.monotonic()
            passed, last = min(now - last, BEAT), now  # that this process was stopped is not the others' fault
            without_round = without_round + passed if rounds == self._round else 0.0
            rounds = self._round
            if without_round >= LOST_AFTER and self._index:
                self._judge(0, self._lost(0, without_round))
            for index in silent.keys() - {self._index}:
                sign = self._found.get(index)
                if sign is not None and sign["ended"]:
                    ending[index] = ending.get(index, 0.0) + passed
                    if ending[index] >= BEAT:  # else this process may be about to say the same by itself
                        self._judge(index, self._error(index, sign["ended"]), sign["ended"]["status"])
                    continue
                is_new = sign is not None and counts.get(index) != sign["count"]
                silent[index] = 0.0 if is_new else silent[index] + passed
                counts[index] = -1 if sign is None else sign["count"]
                if silent[index] >= LOST_AFTER and not without_round:
                    self._judge(index, self._lost(index, silent[index]))

    def _lost(self, index: int, seconds: float) -> str:
        at = f", last at: {self._found[index]['doing']}" if index in self._found else ""
        what = f"has given no sign of life for {seconds:.0f} s" if seconds else "is gone"
        return (
            f"error: {self._names[index]} {what}{at}. It was killed or stopped, its machine is down, or the network to "
            f"it is cut. So ends {self._names[self._index]} too. {ADVICE}"
        )

    def _error(self, index: int, ended: dict[str, Any]) -> str:
        if ended["status"] == PEER_LOST:  # it found out first
            return str(ended["message"])
        if ended["status"] == STOPPED:
            return f"{self._names[index]} was stopped ({ended['message']}), and so ends {self._names[self._index]}"
        return (
            f"error: {self._names[index]} ended: {ended['message']}\nSo ends {self._names[self._index]} too. {ADVICE}"
        )

    def _judge(self, index: int, message: str, status: int = PEER_LOST) -> None:
        """End this process, behind a save that is under way."""
        self._verdict.set()
        status = STOPPED if status == STOPPED else PEER_LOST
        print(message, file=sys.stderr, flush=True)
        with self._lock:
            self._ended = {"status": status, "message": message}
        self._tell_in_time()
        hanging.wait_for_saves(SAVING)
        if self._index == 0:
            self._linger(without=index)
        sys.stdout.flush()
        os._exit(status)

    def _tell_in_time(self) -> None:
        """Tell the others, unless the service does not answer."""
        teller = threading.Thread(target=self._tell, daemon=True)
        teller.start()
        teller.join(BEAT)

    def _linger(self, without: int | None = None) -> None:
        """Keep the service, which ends with this process, until the others have ended too, or for LINGERING seconds."""
        others = set(range(len(self._names))) - {self._index, without}
        end = time.monotonic() + LINGERING
        while time.monotonic() < end:
            self._read()
            if all(self._found.get(index, {}).get("ended") for index in others):
                break
            time.sleep(BEAT / 4)


_watching: Peers | None = None
_joining = ""  # what to say where not all come
_handler: Callable[[int], None] | None = None


def say_when_aborted(joining: str) -> None:
    """Say a clear word, and end with our status, where the coordination service's client aborts the process.

    It does so, from C++, where not all processes come in time, and later as soon as process 0 is gone; a handler of the
    signal is the only way in.

    Args:
        joining: what to say in the first case.
    """
    global _joining, _handler
    _joining = joining
    if _handler is None:
        _handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_abort)
        ctypes.CDLL(None).signal(signal.SIGABRT, _handler)


def _on_abort(_number: int) -> None:
    """Handle SIGABRT, in the thread that raised it; by returning where it has another cause."""
    if _watching is None:
        message, status = f"error: {_joining}", hanging.FAILED
    elif lost := _watching.lost_service():
        message, status = lost, PEER_LOST
    else:
        return
    print(message, file=sys.stderr, flush=True)
    os._exit(status)
