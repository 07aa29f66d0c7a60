"""A run's tuned model, brought back for evaluation and generation."""

from dataclasses import dataclass
from pathlib import Path

from flax import nnx

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax.adapter import load_adapter
from zagora_jax.base import BaseModel, open_base
from zagora_jax.checkpoints.run_state import SavedStates
from zagora_jax.checkpoints.synthetic import PREFIX
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.run_directory import RunDirectory


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
            seed=config.seed,
        )
    except UserError as error:
        raise UserError(f"{path}: the base model that it was trained on: {error}") from error
    require_same_base(directory, base)
    adapters = _adapter_of_step(directory, base, config, step) if step is not None else _newest(directory, base)
    return TunedModel(base, adapters, config)


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


def _newest(directory: RunDirectory, base: BaseModel) -> nnx.State:
    if not directory.adapter.is_dir():
        raise UserError(f"{directory.path}: no adapter is saved yet; train until the first save, or with --resume")
    return load_adapter(directory.adapter, base.model)


def _adapter_of_step(directory: RunDirectory, base: BaseModel, config: TrainConfig, step: int) -> nnx.State:
    _, _, declared = split(base.model)
    states = SavedStates(directory.checkpoints)
    if step not in states.steps():
        raise UserError(
            f"{directory.checkpoints}: no checkpoint of step {step}; the steps saved are "
            f"{', '.join(map(str, states.steps())) or 'none'}"
        )
    states.check(step)
    return states.adapters(step, initial_adapter(declared, config.seed))
