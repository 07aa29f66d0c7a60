"""Between the model's stacked adapter parameters and PEFT's files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import ValidationError

from models.llama import Llama
from models.lora import MAGNITUDE
from models.modules import HEAD, linear_modules, table_modules
from models.parameters import Adapter, by_path
from zagora_jax.checkpoints.peft import AdapterConfig, read_adapter, write_adapter
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig
from zagora_jax.options import in_words

Config = TypeVar("Config", bound=TrainConfig)

PEFT_PREFIX = "base_model.model"


@dataclass(frozen=True)
class Place:
    """Where a tensor of PEFT's file lies in the model's trained parameters.

    Attributes:
        path: the parameter's.
        layer: the place in its stack; None for a parameter that is no stack.
        part: what a layer has of its slice of the stack, whose rank is that of the largest.
        transposed: whether the file has it the other way round.
        shape: in the file.
    """

    path: tuple[str, ...]
    layer: int | None
    part: tuple[slice | int, ...]
    transposed: bool
    shape: tuple[int, ...]

    def take(self, values: np.ndarray) -> np.ndarray:
        """Cut the tensor out of the parameter."""
        own = self._own(values)
        return np.ascontiguousarray(own.T if self.transposed else own)

    def put(self, values: np.ndarray, tensor: np.ndarray) -> None:
        """Write the tensor to its place in the parameter."""
        self._own(values)[...] = tensor.T if self.transposed else tensor

    def _own(self, values: np.ndarray) -> np.ndarray:
        return (values if self.layer is None else values[self.layer])[self.part]


def peft_places(model: Llama) -> dict[str, Place]:
    """Map each PEFT tensor name to where it lies; a tied table has two names."""
    places: dict[str, Place] = {}
    for path, variable in by_path(nnx.state(model, Adapter)).items():
        shape = variable.get_value().shape
        if "whole" in variable.get_metadata():
            places |= _places_in_full(model, path, shape)
        elif path[:2] == ("model", "layers"):
            places |= _places_of_layers(model, path, shape)
        else:
            places |= _places_of_table(path, shape)
    return {f"{PEFT_PREFIX}.{name}": place for name, place in places.items()}


def _places_of_layers(model: Llama, path: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Place]:
    adapter = linear_modules(model)[".".join(path[:-2])].adapter
    assert adapter is not None
    places = {}
    suffix = "" if path[-1] == MAGNITUDE else ".weight"
    for layer in range(model.config.num_layers):
        if rank := adapter.layer_ranks.rank(layer):
            part, own = {
                "lora_A": ((slice(rank),), (rank, shape[-1])),
                "lora_B": ((slice(None), slice(rank)), (shape[1], rank)),
                MAGNITUDE: ((slice(None), 0), shape[1:2]),
            }[path[-1]]
            name = ".".join(("model", "layers", str(layer), *path[2:-2], path[-1])) + suffix
            places[name] = Place(path, layer, part, False, own)
    return places


def _places_of_table(path: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Place]:
    """Name R [vocab, r] and C [1, r, hidden] of `models.table`."""
    *module, _, weight = path
    of_head, is_rows = module == [HEAD], weight == "rows"
    side = "B" if is_rows == of_head else "A"
    name = f"lora_{side}.weight" if of_head else f"lora_embedding_{side}"
    sizes = shape if is_rows else shape[1:]
    return {
        ".".join((*module, name)): Place(
            path, None if is_rows else 0, (), not of_head, sizes if of_head else sizes[::-1]
        )
    }


def _places_in_full(model: Llama, path: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Place]:
    if path[:2] == ("model", "layers"):
        return {
            ".".join(("model", "layers", str(layer), *path[2:])): Place(path, layer, (), False, shape[1:])
            for layer in range(model.config.num_layers)
        }
    if path[-2] == "norm":
        return {".".join(path): Place(path, 0, (), False, shape[1:])}
    names = [".".join(path)]
    if model.config.tie_embeddings:
        names.append(f"{HEAD}.weight")
    return {name: Place(path, None, (), False, shape) for name in names}


def adapted_modules(model: Llama) -> dict[str, tuple[int, float]]:
    """Map the name of every module that carries an adapter to its rank and scale: model.layers.0.self_attn.q_proj."""
    found = {}
    for path, linear in linear_modules(model).items():
        for layer in range(model.config.num_layers):
            if linear.adapter is not None and (rank := linear.adapter.layer_ranks.rank(layer)):
                name = path.replace("model.layers.", f"model.layers.{layer}.")
                found[name] = rank, linear.adapter.layer_ranks.scale(layer)
    for path, table in table_modules(model).items():
        if table.adapter is not None:
            found[path] = table.adapter.rank, table.adapter.scale
    return found


def trained_modules(model: Llama) -> list[str]:
    """Name the modules that are trained in full, as Hugging Face does."""
    return [
        name.removeprefix(f"{PEFT_PREFIX}.").removesuffix(".weight")
        for name, place in peft_places(model).items()
        if place.path[-1] == "weight"
    ]


def peft_tensors(model: Llama, adapters: nnx.State) -> dict[str, np.ndarray]:
    """Cut stacked adapter parameters into PEFT's tensors, by name."""
    values = {path: np.asarray(variable.get_value()) for path, variable in by_path(adapters).items()}
    return {name: place.take(values[place.path]) for name, place in peft_places(model).items() if place.path in values}


def peft_shapes(model: Llama) -> dict[str, tuple[int, ...]]:
    """Return the shapes of PEFT's tensors, by name."""
    return {name: place.shape for name, place in peft_places(model).items()}


def save_adapter(
    directory: Path, model: Llama, adapters: nnx.State, lora: LoraConfig, base_name: str, *, trained: bool
) -> None:
    """Write the adapter as PEFT does: one tensor a layer and matrix, float32.

    Raises:
        ValueError: `adapters` lacks a module of `model`, or has been `trained` and is zero still.
    """
    config = peft_config(model, lora, base_name)
    tensors = peft_tensors(model, adapters)
    modules = [*adapted_modules(model), *trained_modules(model)]
    write_adapter(directory, tensors, config, modules=modules, trained=trained)


def peft_config(model: Llama, lora: LoraConfig, base_name: str) -> AdapterConfig:
    """Describe the adapter for PEFT; "all-linear" is spelled out as the names of the adapted modules."""
    targets = lora.targets
    if targets == "all-linear":
        targets = sorted({name.rpartition(".")[2] for name in adapted_modules(model)})
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
        modules_to_save=None if lora.modules_to_save is None else tuple(lora.modules_to_save),
        init_lora_weights="pissa" if lora.initialization == "pissa" else True,
        ensure_weight_tying=model.config.tie_embeddings and HEAD in trained_modules(model),
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
    if found.init_lora_weights == "pissa":
        raise UserError(
            f"{config.adapter}: init_lora_weights 'pissa': fits a base model without its principal part alone. Save it "
            "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or go on with --resume"
        )
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
            modules_to_save=None if found.modules_to_save is None else list(found.modules_to_save),
        )
    except ValidationError as error:
        raise UserError(f"{config.adapter}: adapter_config.json: {in_words(error)}") from error
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
    for module, (rank, scale) in adapted_modules(model).items():
        if config.rank_of(module) != rank or not math.isclose(config.scale_of(module), scale):
            raise UserError(
                f"{directory}: {module} was trained with rank {config.rank_of(module)}, alpha "
                f"{config.alpha_of(module):g}, use_rslora {str(config.use_rslora).lower()}, a scale of "
                f"{config.scale_of(module):g}; the run's config.yaml now gives rank {rank}, a scale of {scale:g}. "
                "Set its lora options back"
            )
    if model.config.tie_embeddings and HEAD in trained_modules(model) and not config.ensure_weight_tying:
        raise UserError(
            f"{directory}: trains the embedding apart from the output head (modules_to_save without "
            "ensure_weight_tying), but in this model they are one table (tie_word_embeddings), which stays one here"
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
    places = peft_places(model)
    declared = by_path(nnx.state(model, Adapter))
    missing, extra = sorted(places.keys() - tensors.keys()), sorted(tensors.keys() - places.keys())
    if missing or extra:
        raise UserError(
            f"{directory}: the adapter does not fit the model: {len(missing)} tensors missing"
            f"{f' (first {missing[0]})' if missing else ''}, {len(extra)} without a place"
            f"{f' (first {extra[0]})' if extra else ''}"
        )
    values = {path: np.zeros(variable.get_value().shape, np.float32) for path, variable in declared.items()}
    for name, place in places.items():
        if tensors[name].shape != place.shape:
            raise UserError(
                f"{directory}: tensor {name} has shape {tensors[name].shape}, the model's adapter needs {place.shape}"
            )
        if not np.isfinite(tensors[name]).all():
            raise UserError(f"{directory}: tensor {name} holds numbers that are not finite: the training diverged")
        place.put(values[place.path], tensors[name])
    for name, place in places.items():
        if place.path[-1] == "weight" and not np.array_equal(place.take(values[place.path]), tensors[name]):
            raise UserError(f"{directory}: tensor {name} differs from the embedding, with which it is one table")
    check_scale(directory, config, model)
    return nnx.from_flat_state(
        [(path, variable.replace(jnp.asarray(values[path]))) for path, variable in declared.items()]
    )
