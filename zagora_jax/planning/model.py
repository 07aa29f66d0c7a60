"""The model that a plan is for: its shapes alone, by the name of a released size or from a config.json."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from models.config import ModelConfig
from zagora_jax.base import BaseModel, declare_model, open_base
from zagora_jax.checkpoints import hub
from zagora_jax.checkpoints.checkpoint import Checkpoint
from zagora_jax.checkpoints.json_files import read_json_object
from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.checkpoints.synthetic import PREFIX
from zagora_jax.config import ConfigureConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig

# Of sizes with one name in several families, the first of these is meant.
PREFERRED = ("llama-3.3", "llama-3.2", "llama-3.1", "llama-2", "qwen3", "qwen2.5", "mistral")


@dataclass(frozen=True)
class PlannedModel:
    """A declared model without weights, and what `train` is to call it.

    Attributes:
        base: shapes; its checkpoint is None where the weights are not here.
        name: as a person reads it.
        train_name: the option `model` of train.
        lora: the adapter's options.
        notes: what was assumed.
    """

    base: BaseModel
    name: str
    train_name: str
    lora: LoraConfig
    notes: tuple[str, ...] = ()

    def with_lora(self, lora: LoraConfig) -> "PlannedModel":
        """Return the same model with other adapters."""
        base = self.base
        model = declare_model(base.model.config, quantization=base.quantization, dtype=base.dtype.name, lora=lora)
        return replace(self, base=replace(base, model=model), lora=lora)


def find_model(config: ConfigureConfig) -> PlannedModel:
    """Declare the model that `model` or `model_size` names.

    Raises:
        UserError: a size that was never released, with the nearest that were; or wrong files.
    """
    if config.model_size is not None:
        name, notes = find_size(config.model_size)
        return _of_config(config, KNOWN_MODELS[name], name, PREFIX + name, notes)
    assert config.model is not None  # ConfigureConfig requires one of the two
    path = Path(config.model).expanduser()
    if path.is_dir() and not _has_weights(path):
        fields = read_json_object(path / "config.json")
        note = f"{path} holds no weights (*.safetensors): train needs them there"
        return _of_config(config, fields, config.model, config.model, (note,))
    if not path.exists() and hub.is_hub_id(config.model):
        fields = read_json_object(hub.download_config(config.model))
        return _of_config(config, fields, config.model, config.model)
    base = open_base(
        config.model, quantization=config.quantization, dtype=config.compute_dtype, lora=config.lora, seed=0
    )
    return PlannedModel(base, config.model, config.model, config.lora)


def _of_config(
    config: ConfigureConfig, fields: dict[str, Any], name: str, train_name: str, notes: tuple[str, ...] = ()
) -> PlannedModel:
    try:
        shapes = ModelConfig.from_hf(fields)
        model = declare_model(shapes, quantization=config.quantization, dtype=config.compute_dtype, lora=config.lora)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    checkpoint: Checkpoint | None = None
    base = BaseModel(name, checkpoint, model, config.quantization, jnp.dtype(config.compute_dtype), seed=0)
    return PlannedModel(base, name, train_name, config.lora, notes)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def find_size(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the known model that a text names ("70B", "llama-3.1-8b"), and what was assumed.

    Raises:
        UserError: no such size was released; names the nearest ones.
    """
    plain = re.sub(r"[\s_/]+", "-", text.strip().lower())
    plain = re.sub(r"^(?:meta-llama-(?=llama|meta)|qwen-(?=qwen)|mistralai-)", "", plain).removeprefix("meta-")
    plain = re.sub(r"^llama(?=\d)", "llama-", re.sub(r"^qwen-(?=\d)", "qwen", plain))
    plain = re.sub(r"-(?:instruct|chat|base|it|hf)$", "", plain)
    if plain in KNOWN_MODELS:
        return plain, ()
    size = re.fullmatch(r"(?:(.+)-)?(\d+(?:\.\d+)?)([bm])", plain)
    if size is None:
        raise UserError(f"--model-size {text}: expected a size (70B) or a model (llama-3.1-8b); known: {_all()}")
    family, billions = size[1], float(size[2]) / (1000 if size[3] == "m" else 1)
    of_size = [name for name in KNOWN_MODELS if _billions(name) == billions]
    if family is None:
        if of_size:
            first = min(of_size, key=_preference)
            others = ", ".join(name for name in of_size if name != first)
            return first, (f"{text} was taken for {first}" + (f"; others of this size: {others}" if others else ""),)
        nearest = sorted(KNOWN_MODELS, key=lambda name: abs(_billions(name) - billions))
        sizes = list(dict.fromkeys(f"{_billions(name):g}B ({name})" for name in nearest))[:4]
        raise UserError(f"--model-size {text}: no known model has that size; the nearest are {', '.join(sizes)}")
    raise UserError(f"--model-size {text}: {_never_released(family, billions, of_size)}")


def _never_released(family: str, billions: float, of_size: list[str]) -> str:
    relatives = [name for name in KNOWN_MODELS if name.rpartition("-")[0] == family]
    same = f"; {billions:g}B are {', '.join(sorted(of_size, key=_preference))}" if of_size else ""
    if relatives:
        sizes = sorted(relatives, key=lambda name: abs(_billions(name) - billions))
        return f"no {family} of {billions:g}B was released; the nearest are {', '.join(sizes[:3])}{same}"
    families = ", ".join(dict.fromkeys(name.rpartition("-")[0] for name in KNOWN_MODELS))
    return f"no model family {family!r} is known; known: {families}{same}"


def _billions(name: str) -> float:
    size = name.rpartition("-")[2]
    return float(size[:-1]) / (1000 if size.endswith("m") else 1)


def _preference(name: str) -> int:
    family = name.rpartition("-")[0]
    return PREFERRED.index(family) if family in PREFERRED else len(PREFERRED)


def _all() -> str:
    return ", ".join(KNOWN_MODELS)
