"""The settings that a plan chooses between, as configurations of train."""

import difflib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from models.config import ModelConfig
from models.remat import group_count
from zagora_jax.commands import ConfigureConfig
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.options import options_of
from zagora_jax.planning.shapes import mesh_shape
from zagora_jax.planning.strategies import STRATEGIES, Settings, Strategy

# What may be done to save memory, from none to much; each line is tried with all others.
ACTIVATIONS: tuple[Settings, ...] = (
    {"remat": "none"},
    {"remat": "mlp"},
    {"remat": "attention"},
    {"remat": "full"},
    {"remat": "none", "offload.activations": True},
    {"remat": "mlp", "offload.activations": True},
    {"remat": "attention", "offload.activations": True},
    {"remat": "full", "offload.activations": True},
    {"remat": "nested"},
    {"remat": "stage"},
    {"remat": "stage", "offload.activations": True},
)
OPTIMIZERS: tuple[Settings, ...] = (
    {"optimizer": "adamw"},
    {"optimizer": "adamw", "offload.optimizer": True},
    {"optimizer": "adamw_8bit"},
    {"optimizer": "adamw_8bit", "offload.optimizer": True},
)
EMBEDDINGS = ("none", "int8", "nf4")  # each is tried where nothing fits with the one before
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
ROWS_PER_STEP = 16
STREAMED_PARTS, STREAMED_PARTS_OF_STAGES = 8, 4


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
        streams = config.streamed_weights != "none"
        return (*mesh_shape(config).values(), streams, config.planned_remat, config.offload.activations)

    @property
    def settings_text(self) -> str:
        """The settings but for the size of a micro-batch, for people."""
        config = self.config
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh_shape(config).items() if size > 1)
        offloaded = " and offload.activations" if config.offload.activations else ""
        weights = "" if config.streamed_weights == "none" else f", {config.streamed_weights} layers streamed"
        if isinstance(slots := config.offload.weights_from, int):
            weights += f" from the disk through room for {slots}"
        moments = " with offload.optimizer" if config.offload.optimizer else ""
        embeddings = "" if config.embeddings == "none" else f", embeddings {config.embeddings}"
        form = ", a program for each stage" if config.stage_form == "programs" else ""
        kept = f"remat {config.planned_remat}{offloaded}, {config.optimizer}{moments}{embeddings}"
        return f"{axes or 'one device'}{form}{weights}, {kept}"

    def __str__(self) -> str:
        return f"{self.settings_text}, {self.config.micro_batch_size} x {self.config.sequence_length} tokens"

    def changed(self, **settings: Any) -> "Candidate":
        """Return it with other settings; names have `__` in place of the dot."""
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return replace(self, settings={**self.settings, **named}, config=changed(self.config, named))


def candidates(config: ConfigureConfig, count: int, model: str, shapes: ModelConfig) -> Iterator[Candidate]:
    """Go through all settings that the options leave open, for a number of devices; embeddings as given, or plain.

    Raises:
        UserError: an option names what does not exist, or what leaves nothing to choose from.
    """
    base = _given(config, model)
    activations = _kept_activations(config, shapes.num_layers)
    optimizers = [
        settings
        for settings in OPTIMIZERS
        if config.optimizer in (None, settings["optimizer"])
        and config.offload.optimizer in (None, "offload.optimizer" in settings)
    ]
    sizes = MICRO_BATCHES if config.micro_batch_size is None else (config.micro_batch_size,)
    strategies = _strategies(config, shapes.num_layers)
    found = False
    for strategy in strategies:
        for layout, kept in itertools.product(_layouts(strategy, config, count, shapes), activations):
            if not _go_together(layout, kept):
                continue
            for optimizer, size in itertools.product(optimizers, sizes):
                replicas = layout["mesh.data"] * layout["mesh.fsdp"]
                if config.micro_batch_size is None and size > 1 and size * replicas > rows_per_step(config):
                    continue  # more rows a step than were asked for
                for times in _accumulations(config, size * replicas, strategy.streams):
                    settings = {
                        **layout,
                        **kept,
                        **optimizer,
                        "micro_batch_size": size,
                        "gradient_accumulation_steps": times,
                    }
                    found = True
                    yield Candidate(strategy.name, settings, train_config(base | settings))
    if not found:
        raise UserError(_nothing_left(config, count, shapes))


def rows_per_step(config: ConfigureConfig) -> int:
    """Return how many rows an optimizer step is to have."""
    return ROWS_PER_STEP if config.rows_per_step is None else config.rows_per_step


def _accumulations(config: ConfigureConfig, rows: int, streams: bool) -> list[int]:
    """Return numbers of micro-batches of `rows` rows: where layers are streamed, the inputs of all lie somewhere."""
    times = [max(1, math.ceil(rows_per_step(config) / rows))]
    while streams and config.rows_per_step is None and times[-1] > 1:
        times.append(times[-1] // 2)
    return times


def _layouts(strategy: Strategy, config: ConfigureConfig, count: int, shapes: ModelConfig) -> Iterator[Settings]:
    asked, layers = config.offload.weights, shapes.num_layers
    for layout in strategy.layouts(count, shapes):
        if not strategy.streams:
            if asked in ("auto", "none"):
                yield layout
            continue
        parts = STREAMED_PARTS if layout["strategy"] != "layerwise" else STREAMED_PARTS_OF_STAGES
        numbers = streamed_numbers(layers, parts) if asked == "auto" else () if asked == "none" else (asked,)
        for number in numbers:
            yield {**layout, "offload.weights": "all" if number == layers else number}


def streamed_numbers(layers: int, parts: int = STREAMED_PARTS) -> list[int]:
    """Return the numbers of streamed layers to try: so many, about even parts, as a loop of two buffers wants them."""
    numbers = {min(layers, 2 * math.ceil(layers * part / parts / 2)) for part in range(1, parts)}
    return [*sorted(numbers - {layers}), layers]


def _go_together(layout: Settings, kept: Settings) -> bool:
    if "offload.weights" in layout:
        return kept["remat"] == "full"
    # Nested groups would have to divide every stage.
    return kept["remat"] != ("nested" if layout["strategy"] == "layerwise" else "stage")


def _nothing_left(config: ConfigureConfig, count: int, shapes: ModelConfig) -> str:
    devices = f"{count} device{'s' if count > 1 else ''}"
    of_count = [strategy.name for strategy in STRATEGIES if list(strategy.layouts(count, shapes))]
    if config.strategy is not None and config.strategy not in of_count:
        model = f" and {shapes.num_kv_heads} key/value heads" if "tensor" in config.strategy else ""
        if config.strategy == "layerwise":
            model = f" and {shapes.num_layers} layers"
        return f"--strategy {config.strategy}: does not go with {devices}{model}; what does: {', '.join(of_count)}"
    offload = config.offload
    names = (("strategy", config.strategy), ("remat", config.remat), ("offload.weights", offload.weights),
             ("offload.activations", offload.activations), ("offload.optimizer", offload.optimizer))  # fmt: skip
    given = " ".join(f"--{name} {str(value).lower()}" for name, value in names if value not in (None, "auto"))
    return (
        f"{given}: do not go together for {devices}. Layers are streamed (offload.weights) with remat full and a "
        "strategy streaming, streamed-fsdp or streamed-layerwise, remat nested goes without offload.activations and "
        "without stages: leave one of these out"
    )


def _given(config: ConfigureConfig, model: str) -> dict[str, Any]:
    """The options of train that the options of configure say outright."""
    names = ("quantization", "embeddings", "sequence_length", "compute_dtype", "packing", "epochs")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(config, name)) is not None}
    given |= {f"lora.{name}": value for name, value in config.lora.model_dump().items()}
    return {"model": model, **given}


def _strategies(config: ConfigureConfig, layers: int) -> tuple[Strategy, ...]:
    asked = config.offload.weights
    if isinstance(asked, int) and asked > layers:
        raise UserError(f"--offload.weights {asked}: the model has {layers} layers; give {layers} at most, or all")
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
    offload = config.offload.activations
    return [
        settings
        for settings in ACTIVATIONS
        if config.remat in (None, "auto", settings["remat"])
        and offload in (None, "offload.activations" in settings)
        and (settings["remat"] != "nested" or _can_nest(layers))
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


def on_mesh(config: TrainConfig, mesh: Mesh) -> TrainConfig:
    """Return a configuration with every axis of its mesh given, as estimates need it."""
    axes = {f"mesh.{axis}": size for axis, size in mesh.shape.items() if hasattr(config.mesh, axis)}
    return changed(config, axes)


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
