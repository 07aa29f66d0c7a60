"""A run's tuned model, brought back for evaluation and generation."""

from dataclasses import dataclass
from pathlib import Path

from flax import nnx

from models.lora import initial_adapter
from zagora_jax.adapter import load_adapter
from zagora_jax.base import BaseModel, open_base
from zagora_jax.checkpoints.load import split
from zagora_jax.checkpoints.run_state import RunStates
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import load_config
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
        UserError: no run, no such checkpoint, or a base model that is not what it was.
    """
    directory = RunDirectory(path)
    directory.require_run()
    config = load_config(TrainConfig, directory.config)
    base = open_base(
        config.model, quantization=config.quantization, dtype=config.compute_dtype, lora=config.lora, seed=config.seed
    )
    adapters = _adapter_of_step(directory, base, config, step) if step is not None else _newest(directory, base)
    return TunedModel(base, adapters, config)


def _newest(directory: RunDirectory, base: BaseModel) -> nnx.State:
    if not directory.adapter.is_dir():
        raise UserError(f"{directory.path}: no adapter is saved yet")
    return load_adapter(directory.adapter, base.model)


def _adapter_of_step(directory: RunDirectory, base: BaseModel, config: TrainConfig, step: int) -> nnx.State:
    _, _, declared = split(base.model)
    with RunStates(directory.checkpoints, config.keep_checkpoints) as states:
        if step not in states.steps():
            raise UserError(
                f"{directory.checkpoints}: no checkpoint of step {step}; the steps saved are "
                f"{', '.join(map(str, states.steps())) or 'none'}"
            )
        return states.adapters(step, initial_adapter(declared, config.seed))
