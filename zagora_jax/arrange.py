"""Which arrangement of a model on its devices a run's options ask for."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from models.llama import Llama
from models.parameters import Adapter, by_path
from sharding.balance import choose_cut
from sharding.mesh import shard_count
from sharding.targets import is_absent
from zagora_jax.arrangement import Arrangement
from zagora_jax.calibration import estimated_costs
from zagora_jax.config import TrainConfig
from zagora_jax.devices import choose_mesh, memory_limit
from zagora_jax.distribution import Distribution
from zagora_jax.equal_stages import EqualStages
from zagora_jax.errors import UserError
from zagora_jax.pipeline import Balance, Pipeline
from zagora_jax.reporting.sensors import GIB
from zagora_jax.streaming import slots_of, stream_of
from zagora_jax.tensor_parts import tensor_segments
from zagora_jax.watched_stages import WatchedStages


def arrange(config: TrainConfig, model: Llama, mesh: Mesh | None = None) -> Arrangement:
    """Lay a declared model out on a mesh, by default the one that the options ask for.

    Raises:
        UserError: options that do not go together, or with these devices.
    """
    mesh = choose_mesh(config) if mesh is None else mesh
    _check(config, mesh)
    check_ends(config, ends_trained(model))
    if config.offload.embedding and model.config.embedding_scale != 1:
        raise UserError("--offload.embedding: not for this family, which multiplies embeddings; leave it out")
    tensor_segments(model.config, mesh.shape["tensor"])  # refuses what cannot be cut
    stream = stream_of(config, model)
    if config.strategy != "layerwise":
        return Distribution(
            mesh,
            model,
            config.gradient_compression,
            config.gradient_exchange,
            stream,
            moments_on_host=config.offload.optimizer,
            slots=None if stream is None else slots_of(config, stream.streamed_layers),
        )
    layers, why_programs = layers_of_stages(config, model, mesh), why_not_one_jit(config, model, mesh)
    balance = Balance(config.balance.threshold, config.balance.patience) if config.balance.threshold else None
    if why_programs is None:
        common = (mesh, model, config.gradient_compression, config.offload.optimizer)
        return EqualStages(*common) if balance is None else WatchedStages(*common, balance)
    measured = None if config.stage_layers == "auto" else layers
    return Pipeline(
        mesh,
        model,
        measured,
        config.gradient_compression,
        balance,
        config.offload.embedding,
        config.streamed_weights,
        config.offload.optimizer,
        why_programs,
    )


def why_not_one_jit(config: TrainConfig, model: Llama, mesh: Mesh | AbstractMesh) -> str | None:
    """Say why the stages of the mesh do not run one program; None where they do.

    Raises:
        UserError: `stage_form` asks for one, and something is against it.
    """
    if config.stage_form == "programs":
        return "--stage-form programs"
    reason = _against_one_jit(config, model, mesh)
    if config.stage_form == "one-jit" and reason is not None:
        raise UserError(f"--stage-form one-jit: {reason}; use --stage-form auto or programs")
    return reason


def _against_one_jit(config: TrainConfig, model: Llama, mesh: Mesh | AbstractMesh) -> str | None:
    stages, layers = mesh.shape["stage"], model.config.num_layers
    if stages == 1:
        return "there is one stage"
    if layers % stages:
        return f"{layers} layers do not go into {stages} equal stages"
    if config.stage_layers != "auto" and len(set(config.stage_layers)) > 1:
        return "--stage-layers are not equal"
    if config.streamed_weights != "none":
        return "--offload.weights has each stage stream its own layers"
    if config.offload.embedding:
        return "--offload.embedding leaves the embedding to the first stage"
    if config.offload.activations and config.planned_remat != "stage":
        return f"--offload.activations has each stage leave in host memory what remat {config.planned_remat} keeps"
    if isinstance(mesh, Mesh) and len(kinds := {_kind(device, mesh) for device in mesh.devices.flat}) > 1:
        return f"the cards differ: {', '.join(sorted(kinds))}"
    return None


def _kind(device: jax.Device, mesh: Mesh) -> str:
    limit = None if is_absent(mesh) else memory_limit(device)
    return device.device_kind if limit is None else f"{device.device_kind} with {limit / GIB:.0f} GiB"


def _check(config: TrainConfig, mesh: Mesh) -> None:
    compression, exchange = config.gradient_compression, config.gradient_exchange
    given = [f"--gradient-compression {compression}"] if compression != "none" else []
    given += [f"--gradient-exchange {exchange}"] if exchange != "synchronous" else []
    if exchange != "synchronous" and config.strategy == "layerwise":
        raise UserError(
            f"--gradient-exchange {exchange} does not go with --strategy layerwise, whose stages exchange their "
            "gradients as soon as each is done with the step; leave it out"
        )
    if given and mesh.shape["data"] * shard_count(mesh) == 1:
        whose, more = ("one device has", "use more devices")
        if mesh.shape["stage"] > 1:
            whose, more = ("each stage is one device, which has", "give --mesh.data 2 or more")
        raise UserError(f"{' '.join(given)}: {whose} nobody to send gradients to; leave it out, or {more}")
    if config.streamed_weights != "none" and exchange != "synchronous":
        raise UserError(
            f"--gradient-exchange {exchange} does not go with --offload.weights, with which a layer's gradients are "
            "exchanged under the copies of other layers; leave it out"
        )
    if config.streamed_weights != "none" and mesh.shape["tensor"] > 1:
        raise UserError(
            f"--mesh.tensor {mesh.shape['tensor']} does not go with --offload.weights: use --mesh.fsdp, or --strategy "
            "streaming, with which every card streams all layers"
        )
    if config.offload.weights_from not in ("auto", "host") and config.strategy == "layerwise":
        raise UserError(
            f"--offload.weights-from {config.offload.weights_from} does not go with --strategy layerwise, whose stages "
            "go through their layers once a micro-batch: leave it out, or use --strategy streaming"
        )
    if exchange == "delayed" and mesh.shape["data"] == 1:
        raise UserError(
            "--gradient-exchange delayed: is between replicas, and the mesh has none (data is 1); use "
            "--gradient-exchange overlapped, or --mesh.data 2 or more"
        )
    if compression == "none":
        return
    if shard_count(mesh) > 1 and config.strategy == "layerwise":
        raise UserError(
            f"--gradient-compression {compression} with --strategy layerwise compresses what travels between replicas "
            "of the pipeline, along --mesh.data; leave --mesh.fsdp and --mesh.tensor at 1"
        )
    in_backward = shard_count(mesh) > 1 or exchange == "overlapped"
    if config.compute_dtype == "float16" and in_backward:
        raise UserError(
            f"--gradient-compression {compression} in the backward pass, as over fsdp, over tensor, or with "
            "--gradient-exchange overlapped, does not go with --compute-dtype float16, whose loss scale changes while "
            "residuals keep the old one; use bfloat16, or --strategy replicas with another --gradient-exchange"
        )


def ends_trained(model: Llama) -> list[str]:
    """Name the modules before and behind the layers of which something is trained: the tables and the last norm."""
    ends = [path for path in by_path(nnx.state(model, Adapter)) if path[:2] != ("model", "layers")]
    return [".".join(path[: 1 if path[0] == "lm_head" else 2]) for path in ends]


def check_ends(config: TrainConfig, ends: Sequence[str]) -> None:
    """Refuse what does not go with training the modules `ends`, which belong to no layer.

    Raises:
        UserError: an option knows layers alone.
    """
    if not ends:
        return
    reasons = {
        "--strategy layerwise": (config.strategy == "layerwise", "each stage trains layers alone"),
        f"--gradient-compression {config.gradient_compression}": (
            config.gradient_compression != "none",
            "gradients are compressed a layer at a time",
        ),
        f"--gradient-exchange {config.gradient_exchange}": (
            config.gradient_exchange != "synchronous",
            "gradients are exchanged under the backward pass of layers",
        ),
        "--offload.optimizer": (config.offload.optimizer, "moments are brought in a layer at a time"),
    }
    for option, (given, reason) in reasons.items():
        if given:
            raise UserError(
                f"{option} does not go with training {ends[0]} (lora.targets, lora.modules_to_save): {reason}. Leave "
                "one of the two out"
            )


def layers_of_stages(config: TrainConfig, model: Llama, mesh: Mesh | AbstractMesh) -> list[int]:
    """Return how many layers each stage of the mesh has, by estimate where that is to be measured.

    Raises:
        UserError: more stages than layers, or numbers that do not cut the model into these stages.
    """
    stages, layers = mesh.shape["stage"], model.config.num_layers
    if stages > layers:
        raise UserError(f"--mesh.stage {stages}: the model has {layers} layers; a stage needs at least one")
    if config.stage_layers == "auto":
        if why_not_one_jit(config, model, mesh) is None:
            return [layers // stages] * stages
        return choose_cut(estimated_costs(model.config, stages), layers)
    given = config.stage_layers
    if len(given) != stages or sum(given) != layers:
        raise UserError(
            f"--stage-layers {','.join(map(str, given))}: expected {stages} numbers, one a stage, that sum to the "
            f"model's {layers} layers; found {len(given)}, which sum to {sum(given)}"
        )
    return list(given)
