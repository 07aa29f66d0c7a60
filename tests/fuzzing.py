"""What fuzz tests of readers share: damage to files, and the promise that a reader makes about them.

FUZZ_EXAMPLES sets how many examples each test tries; without it, as many as take a few seconds.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from zagora_jax.errors import UserError

T = TypeVar("T")

SECONDS = 20  # of this process's own computing, for one example
MEMORY = 400 * 2**20  # bytes that an example may add to the highest memory so far


def profile(quick: int) -> settings:
    """Settings that try `quick` examples, or as many as FUZZ_EXAMPLES says."""
    return settings(
        max_examples=int(os.environ.get("FUZZ_EXAMPLES", quick)),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


# Numbers that sizes are computed from, as well as small ones.
INTEGERS = st.integers() | st.sampled_from([-1, 0, 1, 2**31, 2**32, 2**63, 10**18, 10**400])
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: Callable[..., Any], content: bytes) -> bytes:
    """Overwrite, insert, cut out or cut off some bytes."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(len(changed) - 1, 0)))
        replacement = draw(st.binary(max_size=9))
        removed = draw(st.sampled_from([0, len(replacement), 1, 100]))
        changed[position : position + removed] = replacement
    return bytes(changed)


@st.composite
def changed_json(draw: Callable[..., Any], content: Any) -> Any:
    """JSON values of which some, however deep, are replaced, left out or added."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    if isinstance(content, dict):
        left_out = draw(st.sampled_from([None, None, None, *content]))
        changed = {key: draw(changed_json(value)) for key, value in content.items() if key != left_out}
        return changed | (draw(st.dictionaries(st.text(max_size=8), JSON, max_size=1)) if draw(st.booleans()) else {})
    if isinstance(content, list):
        return [draw(changed_json(value)) for value in content[: draw(st.integers(0, len(content)))]]
    return content


def accepts_or_refuses(action: Callable[[], T], inside: Path | None = None) -> T | None:
    """Return the action's result, None where it refused; every other exception fails the test.

    So does an action that computes too long, takes too much memory or, with `inside`, opens a file for its content
    outside of that folder.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _limited_time(), _confined(inside):
        try:
            return action()
        except UserError:
            return None
        finally:
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            assert grown < MEMORY, f"an example took {grown / 2**20:.0f} MiB"


@contextmanager
def _limited_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"a reader computed for {SECONDS} s")

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


_allowed: Path | None = None
_strays: list[str] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or _allowed is None or not isinstance(arguments[0], str):
        return
    path = os.path.realpath(arguments[0])
    # Programs load their own code and tables, and libraries unpack to the folder for temporary files.
    libraries = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parent.parent), "/proc", "/sys", "/dev")
    temporary = os.path.basename(os.path.dirname(path)).startswith("tmp")
    if not path.startswith((str(_allowed), *libraries)) and not temporary and os.path.isfile(path):
        _strays.append(path)


sys.addaudithook(_watch)


@contextmanager
def _confined(folder: Path | None) -> Iterator[None]:
    global _allowed
    _strays.clear()
    _allowed = folder and folder.resolve()
    try:
        yield
    finally:
        _allowed = None
    assert not _strays, f"opened outside of {folder}: {_strays}"
