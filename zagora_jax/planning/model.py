"""The model that a plan is for: its shapes alone, by the name of a released size or from a config.json."""

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
from zagora_jax.checkpoints.released_sizes import find_size
from zagora_jax.checkpoints.synthetic import PREFIX
from zagora_jax.commands import ConfigureConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig


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
