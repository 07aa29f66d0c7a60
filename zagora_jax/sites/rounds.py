"""How sites agree on rounds, through files alone.

    agreement.json                       what all sites have in common, by the first one
    sites/NAME                           which run has this name
    globals/000000.safetensors           the global adapter (and its velocity): at first, and after every 32nd round
    rounds/000007/NAME.safetensors       a site's update for a round
    rounds/000007/NAME.joins, .leaves    from this round on, others wait for the site, or no more
    rounds/000007/closed.json            which updates count, by their SHA-256: written once, by one site

A round is closed by whoever comes first to create its closed.json, when all updates are there that it waits for, or
when that site's time is up. The storage lets one site succeed and tells the others that it is done: so there is no
leader whose death matters, and no clock that two sites have to share. What counts in a round is thereby the same for
all; each computes the next global adapter from it by itself, and finds its digest in closed.json.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event

from zagora_jax.checkpoints.json_files import parse_json_object
from zagora_jax.errors import UserError
from zagora_jax.sites.folder import Folder
from zagora_jax.sites.outer import Global, OuterRule, Vectors
from zagora_jax.sites.updates import Shapes, Update, global_file, read_global, read_update, update_file

SNAPSHOT_EVERY = 32
# Rounds in a row whose closing left out an update that was there, after which its site gives up.
MOST_LEFT_OUT = 3
_UPDATE, _JOINS, _LEAVES = ".safetensors", ".joins", ".leaves"


class StoppedError(Exception):
    """The exchange was asked to stop before it was done."""


@dataclass(frozen=True)
class Closing:
    """What closed.json says of a round.

    Attributes:
        counted: the SHA-256 of each update that counts, by its site.
        result: digest of the global adapter that comes of them.
        by: the site that closed the round.
    """

    counted: Mapping[str, str]
    result: str
    by: str

    def content(self) -> bytes:
        """Return the file's content, which has a checksum of its own."""
        body = {"counted": dict(sorted(self.counted.items())), "result": self.result, "by": self.by}
        return json.dumps({**body, "sha256": _checksum(body)}, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes, name: str) -> "Closing":
        """Read it.

        Raises:
            UserError: it is damaged.
        """
        found = parse_json_object(content, name)
        checksum = found.pop("sha256", None)
        counted = found.get("counted")
        if checksum != _checksum(found) or found.keys() != {"counted", "result", "by"} or not isinstance(counted, dict):
            raise UserError(f"{name}: is damaged: its content has not the checksum that it gives")
        return cls(counted, found["result"], found["by"])


@dataclass(frozen=True)
class Exchanged:
    """What came of an update.

    Attributes:
        state: the global adapter after the round in which it counted.
        counted: the sites whose updates counted there.
        seconds: how long that took.
    """

    state: Global
    counted: tuple[str, ...]
    seconds: float


@dataclass
class _Arrived:
    """An update that was read: how large its file was, and what it holds, or what is wrong with it."""

    size: int | None
    digest: str = ""
    update: Update | None = None
    problem: str = ""


class Rounds:
    """One site's part in the rounds."""

    def __init__(
        self,
        folder: Folder,
        site: str,
        shapes: Shapes,
        rule: OuterRule,
        *,
        wait: float,
        scratch: Path,
        say: Callable[[str], None],
    ):
        """Take part under the name `site`.

        Args:
            folder: shared by all sites.
            site: this one.
            shapes: of the adapter.
            rule: the outer optimizer.
            wait: seconds after which a round is closed without the updates that are missing, and after which a folder
                that cannot be reached is an error.
            scratch: a local folder for copies of files.
            say: is told what is left out, and what cannot be reached.
        """
        self.folder = folder
        self._site, self._shapes, self._rule = site, shapes, rule
        self._wait, self._scratch, self._say = wait, scratch, say
        self._poll = min(max(wait / 100, 0.02), 5.0)
        self._arrived: dict[str, _Arrived] = {}
        # Bytes of an update at most: uncompressed, and its header.
        self._largest = sum(4 * math.prod(shape) + 1000 for shape in shapes.values()) + 10_000
        self._counted: tuple[int, frozenset[str]] = (0, frozenset())  # a round, and whose updates count in it
        self._lost_since: float | None = None

    # Joining and leaving.

    def begin(self, adapter: Vectors, is_first: bool) -> None:
        """Publish the adapter that all begin with, where this site has it and nobody has published it."""
        if is_first and _global_name(0) not in {f"globals/{name}" for name in self.folder.list("globals")}:
            self.folder.write(_global_name(0), global_file(Global.begin(adapter)))

    def newest(self, own_start: Global | None) -> Global:
        """Return the global adapter after the last round that is closed.

        Args:
            own_start: what this site would begin with, if all others do too; None: they began with something else.

        Raises:
            UserError: the folder has no global adapter to begin with, or rounds are missing.
        """
        deadline = time.monotonic() + self._wait
        while (
            state := self._snapshot(0 if own_start is None else 1) or own_start
        ) is None:  # the first site is about to
            if time.monotonic() >= deadline:
                raise UserError(f"{self.folder.url}/globals: no global adapter to begin with; take an empty folder")
            time.sleep(self._poll)
        while (closing := self._closing(state.round + 1)) is not None:
            state = self._apply(state, closing)
        self._require_no_gap(state)
        return state

    def newest_closed(self) -> int:
        """Return the number of the last round that is closed and kept, 0 where there is none."""
        rounds = sorted((name for name in self.folder.list("rounds") if name.isdigit()), reverse=True)
        return next((int(name) for name in rounds if "closed.json" in self.folder.list(f"rounds/{name}")), 0)

    def announce(self, after_round: int) -> int:
        """Let others wait for this site, from the round after the next one on, or from the first; returns it."""
        first = 1 if after_round == 0 else after_round + 2
        self.folder.write(f"{_round(first)}/{self._site}{_JOINS}", b"1")
        return first

    def leave(self, after_round: int) -> None:
        """Let others wait for this site no more, and its name be free."""
        self.folder.write(f"{_round(after_round + 1)}/{self._site}{_LEAVES}", b"1")
        self.folder.remove(f"sites/{self._site}")

    def has_posted(self, round_number: int) -> bool:
        """Tell whether an update of this site's name is in a round."""
        return f"{self._site}{_UPDATE}" in self.folder.list(_round(round_number))

    # The exchange.

    def exchange(self, state: Global, update: Update, stop: Event, skip: int = 0) -> Exchanged:
        """Send an update to the round that is open, and to the next ones until it counts.

        Args:
            state: the newest global adapter that this site knows.
            update: what to send.
            stop: is set to give up.
            skip: updates of this name up to that round are an earlier run's.

        Raises:
            StoppedError: `stop` was set.
            UserError: the folder cannot be reached or holds what cannot be used; or the update is left out again and
                again.
        """
        began = time.monotonic()
        posted = left_out = 0
        deadline = began
        while not stop.is_set():
            try:
                while (closing := self._closing(state.round + 1)) is not None:
                    state = self._apply(state, closing)
                    if self._site in closing.counted and state.round > skip:
                        return Exchanged(state, tuple(sorted(closing.counted)), time.monotonic() - began)
                    if posted == state.round > skip:
                        left_out += 1
                        self._give_up_if(left_out == MOST_LEFT_OUT, closing)
                state = self._snapshot(state.round + 1 + SNAPSHOT_EVERY) or state  # as closings are kept no longer
                if posted != state.round + 1:
                    posted, deadline = state.round + 1, time.monotonic() + self._wait
                    if posted > skip:
                        self._post(state, update)
                is_late = time.monotonic() >= deadline
                if not self._close_if(state, is_late):
                    stop.wait(self._poll)
                self._lost_since = None
            except OSError as error:
                self._note_lost(error)
                stop.wait(self._poll)
        raise StoppedError

    def _post(self, state: Global, update: Update) -> None:
        """Publish an update, which never changes then: others may have read it."""
        self._require_no_gap(state)
        round_number = state.round + 1
        if not self.has_posted(round_number):
            content = update_file(update, site=self._site, round_number=round_number)
            self.folder.write(name := _update_name(round_number, self._site), content)
            self._arrived[name] = _Arrived(len(content), sha256(content).hexdigest(), update)

    def _require_no_gap(self, state: Global) -> None:
        """Refuse to open a round anew that was closed, and removed with what it led to."""
        newest = self.newest_closed()
        if newest > state.round and self._closing(state.round + 1) is None:
            raise UserError(
                f"{self.folder.url}: round {newest} is closed, but round {state.round + 1} is not there, and nothing "
                "intact in globals/ leads beyond it: put the files back, or take an empty folder"
            )

    def _close_if(self, state: Global, is_late: bool) -> bool:
        """Try to close the round after `state`, where all is there or the time is up; tells whether that was tried."""
        number = state.round + 1
        names = self.folder.list(_round(number))
        sizes = {name.removesuffix(_UPDATE): size for name, size in names.items() if name.endswith(_UPDATE)}
        joining, leaving = (
            {name.removesuffix(end) for name in names if name.endswith(end)} for end in (_JOINS, _LEAVES)
        )
        for site, size in sizes.items():
            self._look_at(number, site, size, again=is_late)
        arrived = {site: self._arrived[_update_name(number, site)] for site in sizes}
        usable = {site: update for site, update in arrived.items() if update.update is not None}
        if not is_late and not (self._counted_in(state.round) | joining) - leaving <= usable.keys():
            return False
        for site in sorted(sizes.keys() - usable.keys()):
            self._say(f"sites: left out of round {number}: {arrived[site].problem}")
        after = self._after(state, [usable[site] for site in sorted(usable)])
        closing = Closing({site: update.digest for site, update in usable.items()}, after.digest(), self._site)
        if self.folder.create(_closed_name(number), closing.content()) and number % SNAPSHOT_EVERY == 0:
            self.folder.write(_global_name(number), global_file(after))
            self._tidy(number - SNAPSHOT_EVERY)
        return True

    def _counted_in(self, number: int) -> frozenset[str]:
        if self._counted[0] != number:
            closing = self._closing(number)
            self._counted = number, frozenset() if closing is None else frozenset(closing.counted)
        return self._counted[1]

    def _look_at(self, number: int, site: str, size: int | None, *, again: bool) -> None:
        """Read an update that is new, has another size than it had, or was bad at the last look in time."""
        name = _update_name(number, site)
        known = self._arrived.get(name)
        if known is not None and size in (known.size, None) and (known.update is not None or not again):
            return
        if size is not None and size > self._largest:
            self._arrived[name] = _Arrived(size, problem=f"{name}: {size:,} bytes, where {self._largest:,} would do")
            return
        local = self._scratch / f"{number}.{site}{_UPDATE}"
        try:
            self.folder.fetch(name, local)
            content = local.read_bytes()
            update = read_update(local, name, self._shapes, site=site, round_number=number)
            self._arrived[name] = _Arrived(size, sha256(content).hexdigest(), update)
        except UserError as error:
            self._arrived[name] = _Arrived(size, problem=str(error))
        finally:
            local.unlink(missing_ok=True)

    def _closing(self, number: int) -> Closing | None:
        """Read what closed a round; None where it is open."""
        name = _closed_name(number)
        content = self.folder.read(name)
        if content is None:
            return None
        try:
            return Closing.parse(content, f"{self.folder.url}/{name}")
        except UserError as error:  # perhaps it is still being written
            raise OSError(f"{error}. If that stays so, remove the file: the round is then closed anew") from error

    def _apply(self, state: Global, closing: Closing) -> Global:
        """Compute the global adapter of the next round."""
        number = state.round + 1
        updates = []
        for site, expected in sorted(closing.counted.items()):
            name = _update_name(number, site)
            self._look_at(number, site, None, again=True)
            update = self._arrived[name]
            if update.update is None or update.digest != expected:
                self._arrived.pop(name)
                problem = update.problem or f"{name}: its SHA-256 is not that in closed.json"
                raise OSError(f"{problem}. It counts in round {number}, so that nobody can do without it")
            updates.append(update)
        after = self._after(state, updates)
        if after.digest() != closing.result:
            raise UserError(
                f"{self.folder.url}/{_closed_name(number)}: from the same updates {closing.by} has computed another "
                "global adapter than this machine: one of them reckons wrongly, or another site changed its options"
            )
        self._counted = number, frozenset(closing.counted)
        of_round = f"{_round(number)}/"
        self._arrived = {name: update for name, update in self._arrived.items() if not name.startswith(of_round)}
        return after

    def _after(self, state: Global, updates: Sequence[_Arrived]) -> Global:
        return state.after((one.update.vectors(self._shapes) for one in updates if one.update), self._rule)

    def _snapshot(self, least_round: int) -> Global | None:
        """Return the newest intact global adapter that is published, of that round at least."""
        for name in sorted(self.folder.list("globals"), reverse=True):
            match = re.fullmatch(r"(\d{6,})\.safetensors", name)
            if match is None or int(match[1]) < least_round:
                continue
            local = self._scratch / f"global.{name}"
            try:
                self.folder.fetch(f"globals/{name}", local)
                return read_global(local, f"globals/{name}", self._shapes, int(match[1]))
            except UserError as error:
                self._say(f"sites: left out: {error}")
            finally:
                local.unlink(missing_ok=True)
        return None

    def _tidy(self, until: int) -> None:
        """Remove rounds that a published global adapter has made superfluous, and older ones of those."""
        for name in self.folder.list("rounds"):
            if name.isdigit() and int(name) <= until:
                self.folder.remove(f"rounds/{name}")
        for name in self.folder.list("globals"):
            if int(name.partition(".")[0]) < until:
                self.folder.remove(f"globals/{name}")

    def _give_up_if(self, hopeless: bool, closing: Closing) -> None:
        if hopeless:
            raise UserError(
                f"{self.folder.url}: {MOST_LEFT_OUT} updates of {self._site} in a row were there and did not count; "
                f"the last round was closed by {closing.by}. --sites.wait may be too short for this link, or files "
                "arrive damaged"
            )

    def _note_lost(self, error: OSError) -> None:
        """Say once that something cannot be read or reached, and give up after `wait` seconds."""
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
            self._say(f"warning: sites: {error}; tried again for {self._wait:g} s")
        elif now - self._lost_since > self._wait:
            raise UserError(
                f"--sites.folder {self.folder.url}: for {self._wait:g} s: {error}. What was saved before stands: once "
                "this is mended, the same command with --resume goes on"
            ) from error


def _checksum(body: Mapping[str, object]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _round(number: int) -> str:
    return f"rounds/{number:06d}"


def _update_name(number: int, site: str) -> str:
    return f"{_round(number)}/{site}{_UPDATE}"


def _closed_name(number: int) -> str:
    return f"{_round(number)}/closed.json"


def _global_name(number: int) -> str:
    return f"globals/{number:06d}.safetensors"
