"""Data sets of the Hugging Face hub: which files are meant, and those files alone in the hub's local cache."""

import glob
import logging
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import yaml

from zagora_jax.data.files import SUFFIXES
from zagora_jax.data.splits import TRAIN, choose_split, require_all_shards
from zagora_jax.errors import UserError
from zagora_jax.hub_errors import HUB_ERRORS, REFUSALS, as_user_error
from zagora_jax.plain_yaml import read_plain

logger = logging.getLogger(__name__)

SCHEME = "hf://datasets/"
_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_ADDRESS = re.compile(rf"{SCHEME}(?P<name>{_NAME})(@(?P<revision>[^/]+))?(/(?P<pattern>.+))?")
CARD = "README.md"


class _Address(NamedTuple):
    name: str
    revision: str | None = None
    pattern: str | None = None


def is_dataset(source: str) -> bool:
    """Tells whether `source` has the form of a data set's name on the hub, and not that of a file."""
    return source.startswith(SCHEME) or bool(re.fullmatch(_NAME, source) and not source.endswith(SUFFIXES))


def download(source: str, split: str | None) -> list[Path]:
    """Brings the data files that `source` names into the hub's local cache.

    Without a pattern, the files are those that the data set's card (README.md) lists for the split, or else those whose
    names tell it.

    Raises:
        UserError: the hub cannot be reached or refuses, or there are no such files.
    """
    address = _parse(source)
    names = _list(address)
    wanted = _choose(address, names, split, source)
    folder = _fetch(address, [glob.escape(name) for name in wanted])
    files = [folder / name for name in wanted]
    require_all_shards(files)
    return files


def _parse(source: str) -> _Address:
    if not source.startswith(SCHEME):
        return _Address(source)
    match = _ADDRESS.fullmatch(source)
    if not match:
        raise UserError(f"{source}: expected {SCHEME}OWNER/NAME, with @REVISION or /PATTERN behind it where wanted")
    return _Address(match["name"], match["revision"], match["pattern"])


def _choose(address: _Address, names: list[str], split: str | None, source: str) -> list[str]:
    data = sorted(name for name in names if name.endswith(SUFFIXES))
    if address.pattern is not None:
        if split is not None:
            raise UserError(f"{source}: give a pattern of files or a split, not both")
        wanted = [name for name in data if _matches(name, address.pattern)]
        what = f"match {address.pattern}"
    else:
        patterns = _patterns(address, split, source) if CARD in names else None
        if patterns is None:
            wanted = choose_split(data, split, source) if data else []
        else:
            wanted = [name for name in data if any(_matches(name, pattern) for pattern in patterns)]
        what = "are data files of this split"
    if not wanted:
        raise UserError(
            f"{source}: none of the data set's {len(names)} files {what}; those that can be read end in "
            f"{', '.join(SUFFIXES)}: {', '.join(data[:5]) or 'there is none'}"
        )
    return wanted


def _matches(name: str, pattern: str) -> bool:
    """Whether a file's path matches; `*` also spans folders, as the hub's own patterns do where they need it to."""
    return name == pattern or fnmatch(name, pattern.replace("**/", "*"))


def _patterns(address: _Address, split: str | None, source: str) -> list[str] | None:
    """The patterns of the files that the data set's card lists for a split; None where it lists none."""
    configs = _card(address).get("configs")
    if not isinstance(configs, list) or not configs:
        return None
    configs = [config for config in configs if isinstance(config, dict) and config.get("data_files")]
    if len(configs) > 1:
        configs = [config for config in configs if config.get("default") is True] or configs
    if len(configs) > 1:
        names = ", ".join(str(config.get("config_name")) for config in configs)
        example = str(next(iter(_by_split(configs[0]["data_files"]).values()))[0])
        raise UserError(
            f"{source}: is several data sets in one ({names}); name the files that are meant by a pattern, such as "
            f"{SCHEME}{address.name}/{example}"
        )
    if not configs:
        return None
    by_split = _by_split(configs[0]["data_files"])
    wanted = split or TRAIN
    if wanted not in by_split:
        raise UserError(
            f"{source}: has no split {wanted}, but {', '.join(by_split)}; name one behind a colon, as "
            f"{source}:{next(iter(by_split))}"
        )
    return by_split[wanted]


def _by_split(data_files: Any) -> dict[str, list[str]]:
    """The patterns of each split, from the card's `data_files`: one pattern, a list of them, or a list by split."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else (TRAIN, entry)
        for path in paths if isinstance(paths, list) else [paths]:
            by_split.setdefault(str(split), []).append(str(path))
    return by_split


def _card(address: _Address) -> dict[str, Any]:
    """The metadata at the head of the data set's README.md; empty where there is none."""
    text = (_fetch(address, [CARD]) / CARD).read_text("utf-8", errors="replace")
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        content = read_plain(match[1]) if match else {}
    except yaml.YAMLError as error:
        raise UserError(f"{address.name}: {CARD}: its metadata is no YAML ({str(error).splitlines()[0]})") from error
    return content if isinstance(content, dict) else {}


def _list(address: _Address) -> list[str]:
    """The names of all files of the data set; where the hub cannot be reached, of those in the cache."""
    try:
        info = huggingface_hub.HfApi().dataset_info(address.name, revision=address.revision)
        return [file.rfilename for file in info.siblings or ()]
    except REFUSALS as error:
        raise _refusal(address, error) from error
    except HUB_ERRORS as error:
        try:
            # The empty list asks for no file, since the client would refuse a folder that lacks some of those it has
            # once seen in the data set.
            folder = _fetch(address, [], local_files_only=True)
        except UserError:
            raise _refusal(address, error) from error
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        logger.warning(
            "%s: the hub cannot be reached; the %d files that are in its local cache are taken",
            address.name,
            len(names),
        )
        return names


def _fetch(address: _Address, patterns: list[str], local_files_only: bool = False) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                address.name,
                repo_type="dataset",
                revision=address.revision,
                allow_patterns=patterns,
                local_files_only=local_files_only,
            )
        )
    except HUB_ERRORS as error:
        raise _refusal(address, error) from error


def _refusal(address: _Address, error: BaseException) -> UserError:
    return as_user_error(address.name, "data set", "a local file or folder", error)
