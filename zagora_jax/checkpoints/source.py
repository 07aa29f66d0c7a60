"""Find the model that a user names: a folder, a GGUF file or a model of the Hugging Face hub."""

import difflib
from pathlib import Path

from zagora_jax.checkpoints import hub
from zagora_jax.checkpoints.checkpoint import Checkpoint
from zagora_jax.checkpoints.gguf import GGUFCheckpoint
from zagora_jax.checkpoints.huggingface import HuggingFaceCheckpoint
from zagora_jax.checkpoints.released_sizes import unreleased
from zagora_jax.errors import UserError


def open_checkpoint(model: str) -> Checkpoint:
    """Open the model that `model` names, and validate its files without reading weights.

    Args:
        model: A Hugging Face directory, a GGUF file, or OWNER/NAME on the hub. What exists on disk comes first.

    Raises:
        UserError: There is no such model, or its files are incomplete, damaged or of an unsupported kind.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return HuggingFaceCheckpoint.open(path, model)
    if path.exists():
        return _open_file(path, model)
    if model.lower().endswith(".gguf"):
        raise UserError(f"{path} does not exist.{_nearest(path)}")
    if hub.is_hub_id(model):
        try:
            folder = hub.download(model)
        except UserError as error:
            raise UserError(f"{error}{_unreleased(model)}") from error
        return HuggingFaceCheckpoint.open(folder, model)
    raise UserError(
        f"{model!r} is no folder, no GGUF file, and does not have the form OWNER/NAME of a model on the hub."
        f"{_nearest(path)}{_unreleased(model)}"
    )


def _unreleased(model: str) -> str:
    """Say which sizes there are instead of one that never was."""
    found = unreleased(model)
    return f" (By its name: {found}.)" if found else ""


def _open_file(path: Path, model: str) -> Checkpoint:
    if path.name.endswith((".safetensors", ".json")):
        raise UserError(f"{path} is one file of a model: name its folder, {path.parent}.")
    if not path.name.lower().endswith(".gguf"):
        raise UserError(f"{path} is a file, but no GGUF file. Name a folder, a .gguf file or OWNER/NAME on the hub.")
    return GGUFCheckpoint.open(path, model)


def _nearest(path: Path) -> str:
    """Say which existing names are like that of `path`."""
    parent = path.parent
    try:
        names = [entry.name for entry in parent.iterdir() if entry.is_dir() or entry.name.lower().endswith(".gguf")]
    except OSError:
        return f" The folder {parent} does not exist either."
    close = difflib.get_close_matches(path.name, names, n=3)
    return f" Did you mean {' or '.join(str(parent / name) for name in close)}?" if close else ""
