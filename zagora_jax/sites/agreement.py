"""What all sites must have in common, written down by the first one."""

import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zagora_jax.base import BaseModel
from zagora_jax.checkpoints.json_files import parse_json_object
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.sites.folder import Folder
from zagora_jax.sites.outer import Vectors
from zagora_jax.sites.updates import FORMAT

AGREEMENT = "agreement.json"


def facts_of(config: TrainConfig, base: BaseModel, adapter: Vectors) -> dict[str, Any]:
    """Name everything on which the meaning of an update depends; each site's data and speed are its own."""
    shapes = {name: list(values.shape) for name, values in sorted(adapter.items())}
    lora = config.lora.model_dump(mode="json", exclude={"dropout"})
    return {
        "format": FORMAT,
        "base model": base.fingerprint(),
        "tokenizer": _tokenizer(base),
        "quantization": config.quantization,
        "embeddings": config.embeddings,
        **{f"lora.{name}": value for name, value in lora.items()},
        "adapter shapes": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
        "retrieval.pooling": config.retrieval.pooling,
        "sites.outer_learning_rate": config.sites.outer_learning_rate,
        "sites.outer_momentum": config.sites.outer_momentum,
    }


def agree(folder: Folder, facts: Mapping[str, Any], start: str) -> str:
    """Write the agreement, or compare with the one that is there.

    Args:
        folder: shared by all sites.
        facts: as `facts_of` this site.
        start: digest of the adapter that this site would begin with.

    Returns:
        The digest of the adapter that all begin with: the first site's.

    Raises:
        UserError: a fact differs.
    """
    content = json.dumps({"facts": dict(facts), "start": start}, indent=1, sort_keys=True).encode()
    folder.create(AGREEMENT, content)
    found = folder.read(AGREEMENT)
    where = f"{folder.url}/{AGREEMENT}"
    if found is None:
        raise UserError(f"{where}: is gone again; another process removes files there")
    agreed = parse_json_object(found, where)
    others = agreed.get("facts")
    if not isinstance(others, dict) or not isinstance(agreed.get("start"), str):
        raise UserError(f"{where}: expected facts and start, found {', '.join(agreed) or 'nothing'}")
    own = json.loads(json.dumps(dict(facts)))
    differences = [
        f"{name}: {others.get(name)!r} there, {own.get(name)!r} here"
        for name in {**others, **own}
        if others.get(name) != own.get(name)
    ]
    if differences:
        raise UserError(
            f"{where}: the sites of this folder have agreed on something else: {'; '.join(differences)}. Give this "
            "site the same, or name another --sites.folder"
        )
    return agreed["start"]


def claim_name(folder: Folder, name: str, run_directory: Path) -> None:
    """Take a name for the run of a directory of this machine; that run can take it again.

    Raises:
        UserError: another run has it.
    """
    file = f"sites/{name}"
    own = hashlib.sha256(f"{socket.gethostname()} {run_directory.absolute()}".encode()).hexdigest()[:16].encode()
    if not folder.create(file, own) and folder.read(file) not in (own, None):
        raise UserError(
            f"{folder.url}/{file}: another run takes part as {name}. Give this one another --sites.name; or, if that "
            "was this site in another --output and has ended, remove that file"
        )


def _tokenizer(base: BaseModel) -> str | None:
    if base.synthetic:
        return None
    tokenizer = base.tokenizer()
    content = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, tokenizer.special_tokens_map]
    return hashlib.sha256(json.dumps(content, default=str, sort_keys=True).encode()).hexdigest()
