"""A run's tuned model, brought back for evaluation and generation."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax.adapter import load_adapter, peft_config, peft_tensors
from zagora_jax.base import BaseModel, open_base
from zagora_jax.checkpoints.peft import AdapterConfig, read_adapter
from zagora_jax.checkpoints.run_state import SavedStates
from zagora_jax.checkpoints.synthetic import PREFIX
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.factors import InitialFactors
from zagora_jax.run_directory import RunDirectory, completed_options

logger = logging.getLogger(__name__)

ADAPTER_OPTIONS = {"quantization", "embeddings", "lora"}


@dataclass(frozen=True)
class TunedModel:
    """A checked base model (`base.load()` puts it on the device) and a run's adapter, which is there already."""

    base: BaseModel
    adapters: nnx.State
    config: TrainConfig

    @property
    def graph(self) -> nnx.GraphDef:
        """The structure of the model under its adapter."""
        return split(self.base.model)[0]


def open_tuned(path: Path, step: int | None = None) -> TunedModel:
    """Open a run's base model and load its adapter: the newest one, or that of the checkpoint at `step`.

    Raises:
        UserError: no run, no such checkpoint, or a base model that is gone, not what it was or random.
    """
    directory = RunDirectory(path)
    config = directory.read_config()
    if config.model.startswith(PREFIX):
        raise UserError(f"{path}: was trained on {config.model}, random weights: it has nothing to say")
    try:
        base = open_base(
            config.model,
            quantization=config.quantization,
            dtype=config.compute_dtype,
            lora=config.lora,
            embeddings=config.embeddings,
            seed=config.seed,
            quantized_cache=config.quantized_folder,
        )
    except UserError as error:
        raise UserError(f"{path}: the base model that it was trained on: {error}") from error
    require_same_base(directory, base)
    base = with_initial_adapter(directory, base, config)
    saved = saved_adapter(directory, base, config, step)
    return TunedModel(base, load_adapter(saved.path, saved.tensors, saved.config, base.model), config)


def with_initial_adapter(directory: RunDirectory, base: BaseModel, config: TrainConfig) -> BaseModel:
    """Return the base model as a run holds it: with PiSSA, without what the adapter began as."""
    if config.lora.initialization != "pissa":
        return base
    known, _ = read_adapter(directory.initial_adapter)
    return replace(base, prepare=InitialFactors(base.model, "pissa", base.quantization, known=known))


def require_same_base(directory: RunDirectory, base: BaseModel) -> None:
    """Refuse a base model that is not the one that the run's report names.

    Raises:
        UserError: it is another one, or the report does not say.
    """
    trained_on = directory.read_report().get("model_fingerprint")
    if trained_on is None:
        raise UserError(
            f"{directory.report}: no model_fingerprint, so whether the base model is still the same cannot be told"
        )
    if trained_on != base.fingerprint():
        raise UserError(
            f"{base.name}: is not the model that {directory.path} was trained on any more (its fingerprint is not the "
            f"model_fingerprint in {directory.report}). Put the old model back: an adapter fits no other"
        )


@dataclass(frozen=True)
class SavedAdapter:
    """A run's adapter by PEFT's names, and the folder that it was read from."""

    path: Path
    tensors: dict[str, np.ndarray]
    config: AdapterConfig


def saved_adapter(directory: RunDirectory, base: BaseModel, config: TrainConfig, step: int | None) -> SavedAdapter:
    """Read the newest adapter of a run, or that of the checkpoint at `step`.

    Where the newest one is damaged, that of the newest checkpoint which is not takes its place, with a warning.

    Raises:
        UserError: there is none, the checkpoint that was asked for is damaged, or the adapter was trained with other
            options than config.yaml now has.
    """
    if step is not None:
        return _of_step(directory, base, config, step)
    if not directory.adapter.is_dir():
        raise UserError(f"{directory.path}: no adapter is saved yet; train until the first save, or with --resume")
    try:
        tensors, adapter = read_adapter(directory.adapter)
    except UserError as error:
        newest = SavedStates(directory.checkpoints).newest_intact(logger.warning)
        if newest is None:
            raise
        logger.warning("%s The adapter of checkpoint %d is used.", error, newest)
        return _of_step(directory, base, config, newest)
    _require_same_options(directory, config, directory.read_report().get("options"), directory.report)
    return SavedAdapter(directory.adapter, tensors, adapter)


def _of_step(directory: RunDirectory, base: BaseModel, config: TrainConfig, step: int) -> SavedAdapter:
    states = SavedStates(directory.checkpoints)
    if step not in states.steps():
        raise UserError(
            f"{directory.checkpoints}: no checkpoint of step {step}; the steps saved are "
            f"{', '.join(map(str, states.steps())) or 'none'}"
        )
    states.check(step)
    path = directory.checkpoints / str(step)
    _require_same_options(directory, config, states.progress(step).get("options"), path)
    _, _, declared = split(base.model)
    adapters = states.adapters(step, jax.eval_shape(partial(initial_adapter, declared, config.seed)))
    return SavedAdapter(path, peft_tensors(base.model, adapters), peft_config(base.model, config.lora, config.model))


def _require_same_options(directory: RunDirectory, config: TrainConfig, recorded: Any, source: Path) -> None:
    """Refuse a config.yaml that was changed since, in what the adapter is nothing without."""
    if not isinstance(recorded, Mapping):
        raise UserError(f"{source}: no options, so whether config.yaml is still as in training cannot be told")
    before = completed_options(recorded)
    for name, now in config.model_dump(mode="json", include=ADAPTER_OPTIONS).items():
        if before[name] != now:
            raise UserError(
                f"{directory.config}: {name} is {now}, but the adapter was trained with {before[name]} "
                f"({source}). Set it back"
            )
