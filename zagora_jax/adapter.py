"""Between the model's stacked adapter parameters and PEFT's files."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.llama import Llama, linear_modules
from models.lora import MAGNITUDE, LayerRanks
from models.parameters import Adapter, by_path
from zagora_jax.checkpoints.peft import AdapterConfig, read_adapter, write_adapter
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig

Config = TypeVar("Config", bound=TrainConfig)

PEFT_PREFIX = "base_model.model"


def peft_names(model: Llama) -> dict[str, tuple[tuple[str, ...], int]]:
    """Map each PEFT tensor name to a parameter's path and the layer of its stack."""
    names = {}
    for path, ranks in _ranks(model).items():
        *module, _adapter, weight = path[2:]
        suffix = () if weight == MAGNITUDE else ("weight",)
        for layer in range(model.config.num_layers):
            if ranks.rank(layer):
                name = ".".join((PEFT_PREFIX, "model", "layers", str(layer), *module, weight, *suffix))
                names[name] = (path, layer)
    return names


def _ranks(model: Llama) -> dict[tuple[str, ...], LayerRanks]:
    """Return the ranks that go with each adapter parameter."""
    modules = linear_modules(model)
    found = {}
    for path in by_path(nnx.state(model, Adapter)):
        adapter = modules[".".join(path[:-2])].adapter
        assert adapter is not None
        found[path] = adapter.layer_ranks
    return found


def _own_part(path: tuple[str, ...], rank: int) -> tuple[slice | int, ...]:
    """Index what a layer of `rank` has of its slice of a stack, whose rank is that of the largest."""
    return {"lora_A": (slice(rank),), "lora_B": (slice(None), slice(rank)), MAGNITUDE: (slice(None), 0)}[path[-1]]


def peft_tensors(model: Llama, adapters: nnx.State) -> dict[str, np.ndarray]:
    """Cut stacked adapter parameters into PEFT's tensors, by name."""
    stacks = {path: np.asarray(variable.get_value()) for path, variable in by_path(adapters).items()}
    ranks = _ranks(model)
    return {
        name: np.ascontiguousarray(stacks[path][layer][_own_part(path, ranks[path].rank(layer))])
        for name, (path, layer) in peft_names(model).items()
        if path in stacks
    }


def peft_shapes(model: Llama) -> dict[str, tuple[int, ...]]:
    """Return the shapes of PEFT's tensors, by name."""
    declared, ranks = by_path(nnx.state(model, Adapter)), _ranks(model)
    shapes = {}
    for name, (path, layer) in peft_names(model).items():
        sizes, rank = declared[path].get_value().shape[1:], ranks[path].rank(layer)
        shapes[name] = {"lora_A": (rank, sizes[-1]), "lora_B": (sizes[0], rank), MAGNITUDE: sizes[:1]}[path[-1]]
    return shapes


def save_adapter(
    directory: Path, model: Llama, adapters: nnx.State, lora: LoraConfig, base_name: str, *, trained: bool
) -> None:
    """Write the adapter as PEFT does: one tensor a layer and matrix, float32.

    Raises:
        ValueError: `adapters` lacks a module of `model`, or has been `trained` and is zero still.
    """
    config = peft_config(model, lora, base_name)
    tensors = peft_tensors(model, adapters)
    write_adapter(directory, tensors, config, modules=adapted_modules(model), trained=trained)


def adapted_modules(model: Llama) -> list[str]:
    """Name the modules of every layer that carry an adapter, as Hugging Face does: model.layers.0.self_attn.q_proj."""
    return [
        path.replace("model.layers.", f"model.layers.{layer}.")
        for path, linear in linear_modules(model).items()
        for layer in range(model.config.num_layers)
        if linear.adapter is not None and linear.adapter.layer_ranks.rank(layer)
    ]


def peft_config(model: Llama, lora: LoraConfig, base_name: str) -> AdapterConfig:
    """Describe the adapter for PEFT; "all-linear" is spelled out as the names of the adapted modules."""
    targets = lora.targets
    if targets == "all-linear":
        targets = sorted({path[-3] for path in by_path(nnx.state(model, Adapter))})
    return AdapterConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        base_model_name_or_path=base_name,
        use_dora=lora.use_dora,
        rank_pattern=lora.rank_patterns,
        alpha_pattern=lora.alpha_patterns,
        layers_to_transform=None if lora.layers is None else tuple(lora.layers),
    )


def with_adapters_options(config: Config) -> Config:
    """Put the settings of the adapter that training goes on from in the place of the lora options.

    Raises:
        UserError: there is no such adapter, it uses what is not supported, or a lora option that was given differs.
    """
    if config.adapter is None:
        return config
    _, found = read_adapter(config.adapter)
    if found.lora_alpha != int(found.lora_alpha):
        raise UserError(f"{config.adapter}: lora_alpha is {found.lora_alpha}, expected a whole number")
    targets = found.target_modules
    try:
        options = LoraConfig(
            rank=found.r,
            alpha=int(found.lora_alpha),
            dropout=config.lora.dropout if "dropout" in config.lora.model_fields_set else found.lora_dropout,
            targets=targets if isinstance(targets, str) else sorted(targets),
            use_rslora=found.use_rslora,
            use_dora=found.use_dora,
            rank_pattern=[f"{name}={rank}" for name, rank in found.rank_pattern.items()] or None,
            alpha_pattern=[f"{name}={alpha:g}" for name, alpha in found.alpha_pattern.items()] or None,
            layers=None if found.layers_to_transform is None else list(found.layers_to_transform),
        )
    except ValueError as error:
        raise UserError(f"{config.adapter}: adapter_config.json: {error}") from error
    for name in sorted(config.lora.model_fields_set - {"dropout"}):
        given, own = getattr(config.lora, name), getattr(options, name)
        if (sorted(given) if isinstance(given, list) else given) != (sorted(own) if isinstance(own, list) else own):
            raise UserError(
                f"--lora.{name} is {given}, but the adapter in {config.adapter} has {own}; leave the option out"
            )
    return config.model_copy(update={"lora": options})


def check_scale(directory: Path, config: AdapterConfig, model: Llama) -> None:
    """Refuse an adapter that was trained with another scale than `model` applies.

    Raises:
        UserError: adapter_config.json and the options that `model` was declared with differ.
    """
    for path, linear in linear_modules(model).items():
        for layer in range(model.config.num_layers):
            if linear.adapter is None or not (rank := linear.adapter.layer_ranks.rank(layer)):
                continue
            module = path.replace("model.layers.", f"model.layers.{layer}.")
            scale = linear.adapter.layer_ranks.scale(layer)
            if config.rank_of(module) != rank or not math.isclose(config.scale_of(module), scale):
                raise UserError(
                    f"{directory}: {module} was trained with rank {config.rank_of(module)}, alpha "
                    f"{config.alpha_of(module):g}, use_rslora {str(config.use_rslora).lower()}, a scale of "
                    f"{config.scale_of(module):g}; the run's config.yaml now gives rank {rank}, a scale of {scale:g}. "
                    "Set its lora options back"
                )


def open_adapter(directory: Path, model: Llama) -> nnx.State:
    """Read a PEFT adapter into the declared `model`'s adapter parameters; see `load_adapter`."""
    return load_adapter(directory, *read_adapter(directory), model)


def load_adapter(directory: Path, tensors: Mapping[str, np.ndarray], config: AdapterConfig, model: Llama) -> nnx.State:
    """Put the tensors of a PEFT adapter, read from `directory`, into the declared `model`'s parameters, as float32.

    Raises:
        UserError: a tensor is missing, has no place in the model, has another shape or is not finite; or the scale is
            not the model's.
    """
    names = peft_names(model)
    declared = by_path(nnx.state(model, Adapter))
    missing, extra = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
    if missing or extra:
        raise UserError(
            f"{directory}: the adapter does not fit the model: {len(missing)} tensors missing"
            f"{f' (first {missing[0]})' if missing else ''}, {len(extra)} without a place"
            f"{f' (first {extra[0]})' if extra else ''}"
        )
    stacks = {path: np.zeros(variable.get_value().shape, np.float32) for path, variable in declared.items()}
    ranks, shapes = _ranks(model), peft_shapes(model)
    for name, (path, layer) in names.items():
        if tensors[name].shape != shapes[name]:
            raise UserError(
                f"{directory}: tensor {name} has shape {tensors[name].shape}, the model's adapter needs {shapes[name]}"
            )
        if not np.isfinite(tensors[name]).all():
            raise UserError(f"{directory}: tensor {name} holds numbers that are not finite: the training diverged")
        stacks[path][layer][_own_part(path, ranks[path].rank(layer))] = tensors[name]
    check_scale(directory, config, model)
    return nnx.from_flat_state(
        [(path, variable.replace(jnp.asarray(stacks[path]))) for path, variable in declared.items()]
    )
