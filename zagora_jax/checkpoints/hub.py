"""A model of the Hugging Face hub: the files that are needed, and no others, as a local directory."""

import glob
import re
from pathlib import Path

import huggingface_hub

from zagora_jax.checkpoints.huggingface import ASSET_FILES, INDEX, TEMPLATE_DIRECTORY, WEIGHTS, read_weight_map
from zagora_jax.hub_errors import HUB_ERRORS, as_user_error

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(model: str) -> bool:
    """Tell whether `model` has the form OWNER/NAME."""
    return bool(_HUB_ID.fullmatch(model))


def download(hub_id: str) -> Path:
    """Bring the model `hub_id` into the hub's local cache and return its directory there.

    The index is read first and names the weight files, so that no other format, no duplicate and no code is fetched.
    Files that are in the cache already are not fetched again, and do without the hub.

    Raises:
        UserError: The hub cannot be reached, refuses, or does not hold such a model.
    """
    directory = _snapshot(hub_id, [*ASSET_FILES, f"{TEMPLATE_DIRECTORY}/*.jinja", INDEX])
    index = directory / INDEX
    if index.is_file():
        weights = sorted(set(read_weight_map(index.read_bytes(), str(index)).values()))
    else:
        weights = [WEIGHTS]
    return _snapshot(hub_id, [glob.escape(name) for name in weights])


def download_config(hub_id: str) -> Path:
    """Bring the config.json of the model `hub_id` alone into the hub's local cache and return its path.

    Raises:
        UserError: as `download`.
    """
    return _snapshot(hub_id, ["config.json"]) / "config.json"


def _snapshot(hub_id: str, patterns: list[str]) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns))
    except HUB_ERRORS as error:
        raise as_user_error(hub_id, "model", "a local folder or GGUF file", error) from error
