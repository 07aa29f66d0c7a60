"""zagora-jax: fine-tune Llama-family models with 4-bit weights and LoRA on a few GPUs."""

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zagora_jax.domain_adaptation import DomainAdaptationTrainer as DomainAdaptationTrainer
    from zagora_jax.embedding_trainer import EmbeddingTrainer as EmbeddingTrainer
    from zagora_jax.rag import PassageIndex as PassageIndex
    from zagora_jax.rag import Rag as Rag
    from zagora_jax.rag import grounded_rows as grounded_rows
    from zagora_jax.trainers import DistributedTrainer as DistributedTrainer

__version__ = "0.1.0"


def _require_own_siblings() -> None:
    """Refuse to start where a foreign package hides `models` or `sharding`, names that others use too.

    Raises:
        ImportError: in a program that imports zagora_jax.
        SystemExit: with status 2 and one line on stderr, under `python -m zagora_jax.COMMAND`.
    """
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in ("models", "sharding"):
        own = os.path.join(home, name, "__init__.py")
        loaded = sys.modules.get(name)
        spec = None if loaded else importlib.util.find_spec(name)
        found = getattr(loaded, "__file__", None) or (spec and spec.origin)
        if found and os.path.realpath(found) == own:
            continue
        if found:
            message = (
                f"zagora_jax: {found} hides the package {name!r} of zagora-jax ({own}): "
                "rename it, or keep its folder off Python's path (another working directory, `python -P`, PYTHONPATH)"
            )
        else:
            message = f"zagora_jax: its package {name!r} is missing ({own}): install zagora-jax again"
        if sys.argv[:1] == ["-m"]:  # what runpy leaves there while it imports the package of a command
            print(message, file=sys.stderr)
            raise SystemExit(2)
        raise ImportError(message)


_require_own_siblings()

# What a program finds here, and the module that it comes from when it is first used: commands need little of it.
_LAZY = {
    "DistributedTrainer": "zagora_jax.trainers",
    "DomainAdaptationTrainer": "zagora_jax.domain_adaptation",
    "EmbeddingTrainer": "zagora_jax.embedding_trainer",
    "PassageIndex": "zagora_jax.rag",
    "Rag": "zagora_jax.rag",
    "grounded_rows": "zagora_jax.rag",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
