"""Which of many files belong together: splits as Hugging Face names them, and numbered sets of files."""

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from zagora_jax.errors import UserError

logger = logging.getLogger(__name__)

TRAIN = "train"

# Words in a file's or folder's name that tell its split:
# https://huggingface.co/docs/hub/datasets-file-names-and-splits
_WORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{4,})-of-(?P<count>\d{4,})(?P<rest>.*)")


def split_of(name: str) -> str | None:
    """The split that the path `name` tells, by its last word that is one; None where no word is."""
    words = [word for part in PurePosixPath(name).parts for word in re.split(r"[^a-z]+", part.lower())]
    for word in reversed(words):
        for split, spellings in _WORDS.items():
            if word in spellings:
                return split
    return None


def choose_split(names: Sequence[str], split: str | None, source: str) -> list[str]:
    """The names of one split: the one asked for, or else `train`; all of them where no name tells a split.

    Raises:
        UserError: there is no such split.
    """
    by_split: dict[str | None, list[str]] = {}
    for name in names:
        by_split.setdefault(split_of(name), []).append(name)
    if split is None and set(by_split) == {None}:
        return list(names)
    wanted = split or TRAIN
    if wanted in by_split:
        if untold := by_split.get(None):
            logger.warning(
                "%s: %d files, whose names tell no split, are left out of %s: %s%s",
                source,
                len(untold),
                wanted,
                untold[0],
                ", ..." if len(untold) > 1 else "",
            )
        return by_split[wanted]
    found = ", ".join(name for name in by_split if name) or "no file that tells its split"
    raise UserError(f"{source}: has no split {wanted}, found {found}; name one behind a colon, as {source}:test")


def require_all_shards(files: Iterable[Path]) -> None:
    """Refuses a set of files, numbered as `train-00000-of-00005.parquet`, of which some are missing.

    Raises:
        UserError: names those that are missing.
    """
    sets: dict[tuple[Path, str, int, str], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            key = (file.parent, match["stem"], int(match["count"]), match["rest"])
            sets.setdefault(key, set()).add(int(match["number"]))
    for (folder, stem, count, rest), numbers in sets.items():
        if count > 10**6 or len(numbers) == count:
            continue
        missing = sorted(set(range(count)) - numbers)
        first = f"{stem}-{missing[0]:05d}-of-{count:05d}{rest}" if missing else "none"
        raise UserError(
            f"{folder}: {len(missing)} of the {count} files {stem}-*-of-{count:05d}{rest} are missing, first {first}; "
            "complete the download, or name the files that are meant one by one"
        )
