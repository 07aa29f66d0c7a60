"""The settings that a plan chooses between, as configurations of train."""

import difflib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from models.config import ModelConfig
from models.remat import group_count
from zagora_jax.config import ConfigureConfig, TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.options import options_of
from zagora_jax.planning.shapes import mesh_shape
from zagora_jax.planning.strategies import STRATEGIES, Settings, Strategy

# What may be done to save memory, from none to much; each line is tried with all others.
ACTIVATIONS: tuple[Settings, ...] = (
    {"remat": "none"},
    {"remat": "attention"},
    {"remat": "full"},
    {"remat": "attention", "offload.activations": True},
    {"remat": "full", "offload.activations": True},
    {"remat": "nested"},
)
OPTIMIZERS = ("adamw", "adamw_8bit")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Candidate:
    """One configuration of train, and the settings that tell it from others."""

    strategy: str
    settings: Settings
    config: TrainConfig

    @property
    def kind(self) -> tuple:
        """What tells kinds of settings apart: where arrays lie and what is kept."""
        config = self.config
        return (*mesh_shape(config).values(), config.remat, config.offload.activations)

    @property
    def settings_text(self) -> str:
        """The settings but for the size of a micro-batch, for people."""
        config = self.config
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh_shape(config).items() if size > 1)
        offloaded = " and offload.activations" if config.offload.activations else ""
        return f"{axes or 'one device'}, remat {config.remat}{offloaded}, {config.optimizer}"

    def __str__(self) -> str:
        return f"{self.settings_text}, {self.config.micro_batch_size} x {self.config.sequence_length} tokens"

    def changed(self, **settings: Any) -> "Candidate":
        """Return it with other settings; names have `__` in place of the dot."""
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return replace(self, settings={**self.settings, **named}, config=changed(self.config, named))


def candidates(config: ConfigureConfig, count: int, model: str, shapes: ModelConfig) -> Iterator[Candidate]:
    """Go through all settings that the options leave open, for a number of devices.

    Raises:
        UserError: an option names what does not exist, or what leaves nothing to choose from.
    """
    base = _given(config, model)
    activations = _kept_activations(config, shapes.num_layers)
    optimizers = OPTIMIZERS if config.optimizer is None else (config.optimizer,)
    sizes = MICRO_BATCHES if config.micro_batch_size is None else (config.micro_batch_size,)
    found = False
    for strategy in _strategies(config):
        for layout in strategy.layouts(count):
            for kept, optimizer, size in itertools.product(activations, optimizers, sizes):
                if kept["remat"] == "nested" and layout["strategy"] == "layerwise":
                    continue  # a stage has other numbers of layers, and computes its forward pass again anyway
                replicas = layout.get("mesh.data", 1) * layout.get("mesh.fsdp", 1)
                accumulation = max(1, math.ceil(config.rows_per_step / (size * replicas)))
                if config.micro_batch_size is None and size > 1 and size * replicas > config.rows_per_step:
                    continue  # more rows a step than were asked for
                settings = {
                    **layout,
                    **kept,
                    "optimizer": optimizer,
                    "micro_batch_size": size,
                    "gradient_accumulation_steps": accumulation,
                }
                found = True
                yield Candidate(strategy.name, settings, train_config(base | settings))
    if not found:
        raise UserError(
            f"--strategy {config.strategy}: does not go with {count} device{'s' if count > 1 else ''}; "
            f"what does: {', '.join(s.name for s in STRATEGIES if list(s.layouts(count)))}"
        )


def _given(config: ConfigureConfig, model: str) -> dict[str, Any]:
    """The options of train that the options of configure say outright."""
    names = ("quantization", "sequence_length", "compute_dtype", "packing", "epochs")
    given: dict[str, Any] = {name: getattr(config, name) for name in names}
    given |= {f"lora.{name}": value for name, value in config.lora.model_dump().items()}
    return {"model": model, **given}


def _strategies(config: ConfigureConfig) -> tuple[Strategy, ...]:
    if config.strategy is None:
        return STRATEGIES
    chosen = tuple(strategy for strategy in STRATEGIES if strategy.name == config.strategy)
    if not chosen:
        raise UserError(f"--strategy {config.strategy}: {_known(config.strategy, [s.name for s in STRATEGIES])}")
    return chosen


def _kept_activations(config: ConfigureConfig, layers: int) -> list[Settings]:
    remats = options_of(TrainConfig)["remat"].choices
    if config.remat is not None and config.remat not in remats:
        raise UserError(f"--remat {config.remat}: {_known(config.remat, list(remats))}")
    return [
        settings
        for settings in ACTIVATIONS
        if config.remat in (None, settings["remat"]) and (settings["remat"] != "nested" or _can_nest(layers))
    ]


def _can_nest(layers: int) -> bool:
    try:
        return group_count(layers) > 1
    except ValueError:
        return False


def _known(text: str, names: list[str]) -> str:
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    return f"not known{f'; the nearest is {close[0]}' if close else ''}; all: {', '.join(names)}"


def train_config(settings: Settings) -> TrainConfig:
    """Make a configuration of settings by option name."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        group, _, field = name.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[field] = value
    return TrainConfig.model_validate(nested)


def changed(config: TrainConfig, settings: Settings) -> TrainConfig:
    """Return a configuration with other settings, by option name; checked as given ones are."""
    return train_config({**_flat(config), **settings})


def _flat(config: TrainConfig) -> dict[str, Any]:
    return {
        f"{name}.{field}" if isinstance(value, dict) else name: inner
        for name, value in config.model_dump().items()
        for field, inner in (value.items() if isinstance(value, dict) else [("", value)])
    }


def replicas_of(config: TrainConfig) -> int:
    """How many devices have rows of their own."""
    shape = mesh_shape(config)
    return shape["data"] * shape["fsdp"]
