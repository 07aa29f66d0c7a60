"""Sites in threads of one process, with vectors in the place of models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from zagora_jax.sites.folder import Folder
from zagora_jax.sites.outer import Global, OuterRule, Vectors
from zagora_jax.sites.rounds import Rounds
from zagora_jax.sites.updates import Update, compress

SHAPES = {"a": (3, 40), "b": (7,)}
RULE = OuterRule(0.7, 0.9)
WAIT = 20.0  # seconds: never over where nobody is missing


def vectors(seed: int) -> Vectors:
    """Numbers of the shapes."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def update(seed: int, compression: Any = "none") -> Update:
    """An update that holds `vectors(seed)`, as far as the compression can."""
    start = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return Update(compress(vectors(seed), start, compression)[0], compression)


def site(url: str, name: str, scratch: Path, *, wait: float = WAIT, rule: OuterRule = RULE) -> tuple[Rounds, list[str]]:
    """One site's part in the rounds, and what it says."""
    own = scratch / name
    own.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    return Rounds(Folder(url), name, SHAPES, rule, wait=wait, scratch=own, say=said.append), said


def begin() -> Global:
    """What all begin with."""
    return Global.begin(vectors(0))


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs at the same time, and return what they return, or the errors that they raise."""
    results: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return results
