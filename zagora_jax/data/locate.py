"""From the name of a source of rows to its files.

| name | files |
|---|---|
| a file | that file |
| a pattern with `*`, `?`, `[...]` or `**` | the files that match, in the order of their names |
| a folder that `datasets.save_to_disk` wrote | its Arrow files |
| any other folder | the data files in it and below |
| `OWNER/NAME` or `hf://datasets/OWNER/NAME[@REVISION][/PATTERN]` | files of a data set on the Hugging Face hub |

A folder or data set that has splits gives its `train` split, or the one named behind a colon: `OWNER/NAME:test`. What
exists on disk comes before the hub.
"""

import glob
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from zagora_jax.checkpoints.json_files import read_json_object
from zagora_jax.data import hub
from zagora_jax.data.files import SUFFIXES, nearest
from zagora_jax.data.splits import TRAIN, choose_split, require_all_shards
from zagora_jax.errors import UserError

# What `datasets.save_to_disk` writes: of one data set, and of several splits in a folder each.
STATE, SPLITS = "state.json", "dataset_dict.json"
_SPLIT = re.compile(r"(?P<stem>.+):(?P<split>[A-Za-z][\w.-]*)")


def locate(source: str) -> list[Path]:
    """Finds the data files that `source` names, in a fixed order.

    Raises:
        UserError: there are none, files of a numbered set are missing, or there is no such split.
    """
    stem, split = _without_split(source)
    path = Path(stem)
    if path.is_dir():
        return _in_folder(path, split)
    if not path.exists() and hub.is_dataset(stem):
        return hub.download(stem, split)
    if split is not None:
        raise UserError(f"{source}: a split ({split}) is part of a folder or of a data set on the hub, not of files")
    if path.exists():
        return [path]
    if glob.has_magic(stem):
        return _matching(path)
    raise UserError(f"{source}: no such file{nearest(path)}, and no data set's name on the hub (OWNER/NAME)")


def absolute(source: str) -> str:
    """The same source, named so that it means the same in any working directory."""
    stem, split = _without_split(source)
    if not Path(stem).exists() and hub.is_dataset(stem):
        return source
    return f"{Path(stem).absolute()}{'' if split is None else f':{split}'}"


def _without_split(source: str) -> tuple[str, str | None]:
    match = _SPLIT.fullmatch(source)
    return (match["stem"], match["split"]) if match and not Path(source).exists() else (source, None)


def _matching(pattern: Path) -> list[Path]:
    files = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True) if Path(name).is_file())
    if not files:
        raise UserError(f"{pattern}: no file matches this pattern")
    require_all_shards(files)
    return files


def _in_folder(folder: Path, split: str | None) -> list[Path]:
    if (folder / SPLITS).exists():
        names = read_json_object(folder / SPLITS).get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{folder / SPLITS}: splits: expected a list of names")
        wanted = split or TRAIN
        if wanted not in names:
            raise UserError(
                f"{folder}: has no split {wanted}, but {', '.join(names) or 'none'}: name one, as {folder}:NAME"
            )
        return _saved(_inside(folder, wanted, folder / SPLITS))
    if (folder / STATE).exists():
        if split is not None:
            raise UserError(f"{folder}: holds one data set without splits; leave :{split} out")
        return _saved(folder)
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.name.endswith(SUFFIXES) and path.is_file() and not _is_hidden(path.relative_to(folder))
    )
    if not names:
        raise UserError(
            f"{folder}: is a directory without data files; expected names that end in {', '.join(SUFFIXES)}"
        )
    files = [folder / name for name in choose_split(names, split, str(folder))]
    require_all_shards(files)
    return files


def _is_hidden(path: PurePosixPath | Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _saved(folder: Path) -> list[Path]:
    """The files of a data set that `datasets.save_to_disk` wrote, in its order."""
    state = folder / STATE
    content = read_json_object(state)
    if any(content.get(name) for name in ("_indices_data_files", "_indices_files")):
        raise UserError(
            f"{state}: the rows are a selection by an index of their own, which is not supported; save them once more "
            "after flatten_indices()"
        )
    entries = content.get("_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or []]
    if not isinstance(entries, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{state}: _data_files: expected a list of {{filename}}, found {str(entries)[:80]}")
    files = [_inside(folder, str(name), state) for name in names]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(
            f"{state}: names {len(missing)} of {len(files)} files that are not there, first {missing[0].name}; copy "
            "the folder again"
        )
    return files


def _inside(folder: Path, name: str, source: Path) -> Path:
    """The file or folder `name`, which must lie directly in `folder`."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UserError(f"{source}: expected the name of something inside the folder, found {name!r}")
    return folder / name


def locate_all(sources: Sequence[str]) -> list[tuple[str, list[Path]]]:
    """Each source with its files; a file that is named twice is refused.

    Raises:
        UserError: as `locate`, or two sources share a file.
    """
    located = [(source, locate(source)) for source in sources]
    seen: dict[Path, str] = {}
    for source, files in located:
        for file in files:
            real = file.resolve()
            if real in seen:
                raise UserError(f"{file}: is named twice, by {seen[real]} and by {source}; data_weights repeats rows")
            seen[real] = source
    return located
