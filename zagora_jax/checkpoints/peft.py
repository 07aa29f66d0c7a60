"""A LoRA adapter on disk in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.targets import value_of_module
from zagora_jax.checkpoints.atomic import atomic_file, write_bytes
from zagora_jax.checkpoints.json_files import read_json_object
from zagora_jax.checkpoints.safetensors_file import read_header, read_metadata, read_tensor
from zagora_jax.checkpoints.safetensors_writer import write_safetensors
from zagora_jax.errors import UserError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
CHECKSUM = "zagora_jax.sha256"  # in the metadata of the weights, which other tools pass over

_TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+?)"
    r"\.(?P<part>lora_A\.weight|lora_B\.weight|lora_magnitude_vector|lora_embedding_A|lora_embedding_B|weight)"
)
# Where the embedding or the head has an adapter, PEFT writes the base model's table beside it.
_BASE_LAYER = re.compile(r"base_model\.model\..+\.base_layer\.weight")
_EMBEDDING_PARTS = ("lora_embedding_A", "lora_embedding_B")
_DTYPES = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))

# Fields that say nothing about the adapter's arithmetic.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
}
# Initialisations after which the adapter stands on the unchanged base; the others, such as pissa, change the base.
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")
# It takes the adapter's beginning out of the base model, as PEFT does again when it loads such an adapter.
_PISSA = "pissa"


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The fields of PEFT's LoraConfig that are honoured, under its names."""

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    target_modules: str | tuple[str, ...]
    use_rslora: bool = False
    base_model_name_or_path: str | None = None
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: tuple[int, ...] | None = None
    modules_to_save: tuple[str, ...] | None = None
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str = True

    @property
    def scale(self) -> float:
        """The factor of B @ A where no pattern says otherwise: alpha / r, or alpha / sqrt(r) with rsLoRA."""
        return self._scale(self.r, self.lora_alpha)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module such as model.layers.0.self_attn.q_proj."""
        return value_of_module(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module."""
        return value_of_module(self.alpha_pattern, module, self.lora_alpha)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's B @ A."""
        return self._scale(self.rank_of(module), self.alpha_of(module))

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def to_json(self) -> dict[str, Any]:
        """Return the content of adapter_config.json."""
        targets = self.target_modules
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model_name_or_path,
            "revision": None,
            "inference_mode": True,
            "r": self.r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": self.lora_dropout,
            "target_modules": targets if isinstance(targets, str) else list(targets),
            "exclude_modules": None,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": self.init_lora_weights,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "layers_to_transform": None if self.layers_to_transform is None else list(self.layers_to_transform),
            "layers_pattern": None,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "modules_to_save": None if self.modules_to_save is None else list(self.modules_to_save),
            "ensure_weight_tying": self.ensure_weight_tying,
        }


def write_adapter(
    directory: Path,
    tensors: Mapping[str, np.ndarray],
    config: AdapterConfig,
    *,
    modules: Collection[str] | None = None,
    trained: bool = False,
) -> None:
    """Write an adapter, then open it again and check that it is whole.

    Args:
        directory: Made where it does not exist; each of the two files in it is replaced atomically.
        tensors: A [r, in] and B [out, r] by PEFT's names,
            `base_model.model.<module>.lora_A.weight` and `.lora_B.weight`.
        config: What goes into adapter_config.json.
        modules: Names of the adapted modules, where the caller can say them independently of `tensors`.
        trained: Whether an optimizer step has been made: then some B must not be zero.

    Raises:
        UserError: A training has changed nothing; nothing has been written.
        ValueError: `tensors` are no whole adapter; likewise.
        RuntimeError: What was written reads back differently.
    """
    problem = _find_problem({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, config)
    if problem:
        raise ValueError(f"the adapter is not saved: {problem}")
    found = {match["module"] for name in tensors if (match := _TENSOR_NAME.fullmatch(name))}
    if modules is not None and found != set(modules):
        difference = sorted(found ^ set(modules))
        raise ValueError(
            f"the adapter is not saved: expected {len(set(modules))} modules, found {len(found)}; "
            f"{difference[0]} is on one side only"
        )
    if trained and not any(np.any(tensor) for name, tensor in tensors.items() if begins_as_zero(name)):
        raise UserError(
            f"{directory}: the adapter is not saved: every B is zero after training, so it does nothing. Raise the "
            "learning rate, and look whether the rows have something to learn"
        )

    directory.mkdir(parents=True, exist_ok=True)
    with atomic_file(directory / WEIGHTS) as file:
        write_safetensors(
            file,
            {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()},
            tensors.__getitem__,
            metadata={"format": "pt", CHECKSUM: _checksum(tensors)},
        )
    write_bytes(directory / CONFIG, (json.dumps(config.to_json(), indent=2) + "\n").encode())
    _verify(directory, tensors, config)


def begins_as_zero(name: str) -> bool:
    """Whether a tensor is that matrix of its adapter which is zero before training."""
    return name.endswith((".lora_B.weight", ".lora_embedding_A"))


def read_adapter(directory: Path) -> tuple[dict[str, np.ndarray], AdapterConfig]:
    """Read an adapter.

    Returns:
        The tensors by PEFT's names, each in the dtype it is stored in, and the config. Whether the named modules
        exist in the model is for the caller to check.

    Raises:
        UserError: A file is missing or damaged (which a checksum tells, where we wrote it), or the adapter uses what is
            not supported.
    """
    config = _read_config(directory)
    if not (directory / WEIGHTS).exists():
        pickled = " Found adapter_model.bin, which can run code and is never loaded: load and save it with PEFT once."
        raise UserError(
            f"{directory} holds no {WEIGHTS}.{pickled if (directory / 'adapter_model.bin').exists() else ''}"
        )
    infos = {name: info for name, info in read_header(directory / WEIGHTS).items() if not _BASE_LAYER.fullmatch(name)}
    problem = _find_problem({name: (info.shape, info.dtype) for name, info in infos.items()}, config)
    if problem:
        raise UserError(f"{directory / WEIGHTS}: {problem}.")
    tensors = {name: read_tensor(info) for name, info in infos.items()}
    checksum = read_metadata(directory / WEIGHTS).get(CHECKSUM)
    if checksum not in (None, _checksum(tensors)):
        raise UserError(f"{directory / WEIGHTS}: is damaged: the tensors are not those that were written (checksum).")
    return tensors, config


def _read_config(directory: Path) -> AdapterConfig:
    path = directory / CONFIG
    if not path.exists():
        raise UserError(f"{directory} is no PEFT adapter: it holds no {CONFIG}.")
    content = read_json_object(path)

    def entry(name: str, kinds: tuple[type, ...], default: Any = ...) -> Any:
        value = content.pop(name, default)
        if type(value) not in kinds:
            found = "nothing" if value is ... else repr(value)
            raise UserError(f"{path}: {name} must be {' or '.join(kind.__name__ for kind in kinds)}, found {found}.")
        return value

    peft_type, task_type = content.pop("peft_type", None), content.pop("task_type", None)
    if peft_type != "LORA" or task_type not in ("CAUSAL_LM", None):
        raise UserError(f"{path}: expected peft_type LORA for CAUSAL_LM, found {peft_type} for {task_type}.")
    targets = entry("target_modules", (str, list))
    layers = entry("layers_to_transform", (int, list, type(None)), None)
    saved = entry("modules_to_save", (list, type(None)), None)
    config = AdapterConfig(
        r=entry("r", (int,)),
        lora_alpha=entry("lora_alpha", (int, float)),
        lora_dropout=entry("lora_dropout", (int, float), 0.0),
        target_modules=targets if isinstance(targets, str) else tuple(str(target) for target in targets),
        use_rslora=entry("use_rslora", (bool,), False),
        base_model_name_or_path=content.get("base_model_name_or_path"),
        use_dora=entry("use_dora", (bool,), False),
        rank_pattern=_patterns(path, "rank_pattern", content.pop("rank_pattern", None), (int,)),
        alpha_pattern=_patterns(path, "alpha_pattern", content.pop("alpha_pattern", None), (int, float)),
        layers_to_transform=(layers,) if isinstance(layers, int) else layers and tuple(layers),
        modules_to_save=saved and tuple(str(name) for name in saved),
        ensure_weight_tying=entry("ensure_weight_tying", (bool,), False),
    )
    if not all(type(layer) is int and layer >= 0 for layer in config.layers_to_transform or ()):
        raise UserError(f"{path}: layers_to_transform must be a list of numbers of layers, found {layers!r}.")
    if content.get("layers_pattern") in ("layers", ["layers"]):  # the only stack of layers there is
        del content["layers_pattern"]
    if config.r < 1 or not math.isfinite(config.lora_alpha):
        raise UserError(f"{path}: r is {config.r} and lora_alpha {config.lora_alpha}, expected r >= 1 and a number.")
    initialisation = content.pop("init_lora_weights", True)
    if initialisation == _PISSA:
        config = replace(config, init_lora_weights=_PISSA)
    elif initialisation not in _PLAIN_INITIALISATIONS:
        raise UserError(f"{path}: init_lora_weights {initialisation!r} changes the base model, which is not supported.")
    for name, value in content.items():
        if name not in _WITHOUT_EFFECT and value not in (None, False, "none", {}, []):
            raise UserError(f"{path}: {name} = {value!r:.80} is not supported.")
    return config


def _patterns(path: Path, name: str, content: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """Check the values of a rank_pattern or alpha_pattern."""
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(type(value) in kinds and value > 0 for value in content.values()):
        raise UserError(f"{path}: {name} must map names to positive numbers, found {content!r:.80}.")
    for pattern in content:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{path}: {name}: {pattern!r} is no regular expression: {error}.") from None
    return content


def _find_problem(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], config: AdapterConfig) -> str | None:
    """Say why tensors of these shapes and dtypes are no whole adapter.

    That is A [rank, in] and B [out, rank], with DoRA magnitudes [out]; of an embedding A [rank, vocab] and
    B [hidden, rank]; and of `modules_to_save` the weights themselves.
    """
    if not tensors:
        return "it has no tensors"
    for name, (shape, dtype) in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if not match:
            return f"tensor {name!r} is not named base_model.model.<module>.lora_A.weight or .lora_B.weight"
        if dtype not in _DTYPES:
            return f"tensor {name!r} has the dtype {dtype}, expected a float of 16 bits or more"
        module, part = match["module"], match["part"]
        if part == "weight":
            if not any(module.endswith(ending) for ending in config.modules_to_save or ()) and not (
                config.ensure_weight_tying and module == "lm_head"
            ):
                return f"tensor {name!r} is no adapter's, and modules_to_save does not name it"
            if 0 in shape:
                return f"tensor {name!r} has the shape {list(shape)}"
            continue
        if problem := _find_problem_of_adapter(tensors, name, module, part, config):
            return problem
    return None


def _find_problem_of_adapter(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], name: str, module: str, part: str, config: AdapterConfig
) -> str | None:
    rank, shape = config.rank_of(module), tensors[name][0]
    names = ["lora_A.weight", "lora_B.weight", *(["lora_magnitude_vector"] if config.use_dora else [])]
    a, b, *magnitude = (
        f"base_model.model.{module}.{other}" for other in (_EMBEDDING_PARTS if part in _EMBEDDING_PARTS else names)
    )
    if part == "lora_magnitude_vector" and not config.use_dora:
        return f"tensor {name!r} belongs to DoRA, but use_dora is false"
    if absent := [partner for partner in (a, b, *magnitude) if partner not in tensors]:
        return f"tensor {name!r} is there without {absent[0]!r}"
    out = tensors[b][0][0]
    expected = {a: f"[{rank}, in]", b: f"[out, {rank}]"}.get(name, f"[{out}]")
    fits = {a: len(shape) == 2 and shape[0] == rank, b: len(shape) == 2 and shape[-1] == rank}
    if 0 in shape or not fits.get(name, shape == (out,)):
        return f"tensor {name!r} has the shape {list(shape)}, expected {expected}"
    return None


def _checksum(tensors: Mapping[str, np.ndarray]) -> str:
    """Hash names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _verify(directory: Path, tensors: Mapping[str, np.ndarray], config: AdapterConfig) -> None:
    try:
        written, read_config = read_adapter(directory)
    except UserError as error:
        raise RuntimeError(f"{directory}: the adapter reads back differently from what was written: {error}") from error
    if read_config != config or written.keys() != tensors.keys():
        raise RuntimeError(f"{directory}: the adapter reads back differently from what was written")
    for name, tensor in tensors.items():
        if written[name].dtype != tensor.dtype or written[name].tobytes() != tensor.tobytes():
            raise RuntimeError(f"{directory / WEIGHTS}: tensor {name!r} reads back differently from what was written")
