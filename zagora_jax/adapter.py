"""Between the model's stacked adapter parameters and PEFT's files."""

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.llama import Llama, linear_modules
from models.parameters import Adapter, by_path
from zagora_jax.checkpoints.peft import AdapterConfig, read_adapter, write_adapter
from zagora_jax.config import LoraConfig
from zagora_jax.errors import UserError

PEFT_PREFIX = "base_model.model"


def peft_names(model: Llama) -> dict[str, tuple[tuple[str, ...], int]]:
    """Map each PEFT tensor name to a parameter's path and the layer of its stack."""
    names = {}
    for path in by_path(nnx.state(model, Adapter)):
        *module, _adapter, weight = path[2:]
        for layer in range(model.config.num_layers):
            name = ".".join((PEFT_PREFIX, "model", "layers", str(layer), *module, weight, "weight"))
            names[name] = (path, layer)
    return names


def save_adapter(
    directory: Path, model: Llama, adapters: nnx.State, lora: LoraConfig, base_name: str, *, trained: bool
) -> None:
    """Write the adapter as PEFT does: one tensor a layer and matrix, float32.

    Raises:
        ValueError: `adapters` lacks a module of `model`, or has been `trained` and is zero still.
    """
    stacks = {path: np.asarray(variable.get_value()) for path, variable in by_path(adapters).items()}
    tensors = {name: stacks[path][layer] for name, (path, layer) in peft_names(model).items() if path in stacks}
    config = peft_config(model, lora, base_name)
    write_adapter(directory, tensors, config, modules=adapted_modules(model), trained=trained)


def adapted_modules(model: Llama) -> list[str]:
    """Name the modules of every layer that carry an adapter, as Hugging Face does: model.layers.0.self_attn.q_proj."""
    return [
        path.replace("model.layers.", f"model.layers.{layer}.")
        for path, linear in linear_modules(model).items()
        for layer in range(model.config.num_layers)
        if linear.adapter is not None
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
    )


def check_scale(directory: Path, config: AdapterConfig, model: Llama) -> None:
    """Refuse an adapter that was trained with another scale than `model` applies.

    Raises:
        UserError: adapter_config.json and the options that `model` was declared with differ.
    """
    scale = next(linear.adapter.scale for linear in linear_modules(model).values() if linear.adapter is not None)
    if not math.isclose(config.scale, scale):
        raise UserError(
            f"{directory}: was trained with rank {config.r}, alpha {config.lora_alpha:g}, use_rslora "
            f"{str(config.use_rslora).lower()}, a scale of {config.scale:g}; the run's config.yaml now gives "
            f"{scale:g}. Set its lora options back"
        )


def load_adapter(directory: Path, model: Llama) -> nnx.State:
    """Read a PEFT adapter into the declared `model`'s adapter parameters, as float32.

    Raises:
        UserError: a tensor is missing, has no place in the model, has another shape or is not finite; or the scale is
            not the model's.
    """
    tensors, config = read_adapter(directory)
    names = peft_names(model)
    declared = by_path(nnx.state(model, Adapter))
    missing, extra = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
    if missing or extra:
        raise UserError(
            f"{directory}: the adapter does not fit the model: {len(missing)} tensors missing"
            f"{f' (first {missing[0]})' if missing else ''}, {len(extra)} without a place"
            f"{f' (first {extra[0]})' if extra else ''}"
        )
    stacks = {path: np.empty(variable.get_value().shape, np.float32) for path, variable in declared.items()}
    for name, (path, layer) in names.items():
        if tensors[name].shape != stacks[path].shape[1:]:
            raise UserError(
                f"{directory}: tensor {name} has shape {tensors[name].shape}, the model's adapter needs "
                f"{stacks[path].shape[1:]}"
            )
        if not np.isfinite(tensors[name]).all():
            raise UserError(f"{directory}: tensor {name} holds numbers that are not finite: the training diverged")
        stacks[path][layer] = tensors[name]
    check_scale(directory, config, model)
    return nnx.from_flat_state(
        [(path, variable.replace(jnp.asarray(stacks[path]))) for path, variable in declared.items()]
    )
