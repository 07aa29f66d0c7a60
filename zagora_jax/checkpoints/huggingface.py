"""A local Hugging Face directory: config.json, safetensors files, tokenizer files."""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np

from zagora_jax.checkpoints.checkpoint import Checkpoint, TensorInfo
from zagora_jax.checkpoints.json_files import parse_json_object, read_json_object, read_regular_file
from zagora_jax.checkpoints.packed import PackedTensor, Quantization, read_quantization
from zagora_jax.checkpoints.safetensors_file import read_header, read_rows, read_tensor
from zagora_jax.errors import UserError

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
ASSET_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
# Where transformers keeps chat templates other than the default one.
TEMPLATE_DIRECTORY = "additional_chat_templates"

# Tables of older files that the config determines: never read, quantised or exported.
_IGNORED_TENSOR = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_PICKLED = re.compile(r".*\.(bin|pth|pt|ckpt)")
_WEIGHT_DTYPES = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))

_HOW_TO_CONVERT = (
    "Pickled weights can run code and are never loaded. Convert them once, where you trust them and have torch:\n"
    '  python -c "import sys; from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[2], safe_serialization=True)\" "
    "SOURCE TARGET"
)


@dataclass(kw_only=True)
class HuggingFaceCheckpoint(Checkpoint):
    """A checkpoint in a Hugging Face directory.

    Attributes:
        packed: the weights that are stored quantised, by name; `tensors` describes them as they are read.
    """

    packed: Mapping[str, PackedTensor] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path, name: str) -> "HuggingFaceCheckpoint":
        """Open `directory`, which the user named `name`.

        Raises:
            UserError: A file is missing, damaged or contradicts another.
        """
        config = read_config(directory)
        found = find_tensors(directory)
        ignored = tuple(tensor for tensor in found if _IGNORED_TENSOR.fullmatch(tensor))
        if ignored:
            logger.info("%s: ignored %d stored rotary tables, among them %s", directory, len(ignored), ignored[0])
        tensors = {tensor: info for tensor, info in found.items() if tensor not in ignored}
        packed: dict[str, PackedTensor] = {}
        if (quantization := read_quantization(directory / "config.json", config)) is not None:
            tensors, packed = _unpack(quantization, tensors)
        _check_dtypes(tensors)
        tensors |= {name: weight.info for name, weight in packed.items()}
        return cls(
            name=name,
            path=directory,
            config=config,
            tensors=tensors,
            assets=read_assets(directory),
            ignored=ignored,
            packed=packed,
        )

    def read(self, name: str) -> np.ndarray:
        """Return the tensor `name` as stored, or dequantised."""
        if name in self.packed:
            return self.packed[name].read_rows(0, self.tensors[name].shape[0])
        return read_tensor(self.tensors[name])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the rows [start, stop) of the tensor `name` as stored, or dequantised."""
        if name in self.packed:
            return self.packed[name].read_rows(start, stop)
        return read_rows(self.tensors[name], start, stop)

    def format_of(self, name: str) -> str | None:
        """Return the format that the tensor `name` can be kept in as it is stored."""
        return self.packed[name].format if name in self.packed else None

    def read_packed(self, name: str) -> Any:
        """Return the tensor `name` in its format."""
        return self.packed[name].read_packed()

    @property
    def layout(self) -> dict[str, str]:
        """The file of each tensor, relative to the directory."""
        return {name: info.file.relative_to(self.path).as_posix() for name, info in self.tensors.items()}


def _unpack(
    quantization: Quantization, tensors: dict[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, PackedTensor]]:
    """Tell plain tensors from those that make up packed weights; what it imports needs jax, which others do without."""
    if quantization.method == "bitsandbytes":
        from zagora_jax.checkpoints.bitsandbytes import unpack_bitsandbytes

        return unpack_bitsandbytes(quantization, tensors)
    from zagora_jax.checkpoints.block_fp8 import unpack_block_fp8

    return unpack_block_fp8(quantization, tensors)


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json and refuse what would change the weights' meaning."""
    path = directory / "config.json"
    if not path.exists():
        raise UserError(f"{directory} holds no config.json, which describes the model. {_hint(directory)}".rstrip())
    config = read_json_object(path)
    if "auto_map" in config or config.get("trust_remote_code"):
        logger.warning("%s names code of its own (auto_map, trust_remote_code): it is ignored, never run.", path)
    read_quantization(path, config)
    return config


def find_tensors(directory: Path) -> dict[str, TensorInfo]:
    """List the tensors of the one set of safetensors files that makes up the model in `directory`."""
    if (directory / INDEX).exists():
        if (directory / WEIGHTS).exists() and WEIGHTS not in _read_weight_map(directory / INDEX).values():
            raise UserError(
                f"{directory} holds both {WEIGHTS} and {INDEX}, which does not name it: two models in one folder. "
                "Move one of them away."
            )
        return _find_indexed_tensors(directory)
    if (directory / WEIGHTS).exists():
        _warn_of_unused(directory, {WEIGHTS})
        return read_header(directory / WEIGHTS)
    raise UserError(_explain_missing_weights(directory))


def read_assets(directory: Path) -> dict[str, bytes]:
    """Read the small files that accompany the weights."""
    names = [name for name in ASSET_FILES if (directory / name).exists()]
    templates = sorted((directory / TEMPLATE_DIRECTORY).glob("*.jinja"))
    names += [f"{TEMPLATE_DIRECTORY}/{template.name}" for template in templates]
    return {name: read_regular_file(directory / name) for name in names}


def describe_unexpected(names: Iterable[str]) -> str | None:
    """Say what a checkpoint is whose tensor names are not those of a plain model.

    Args:
        names: Tensor names as found.

    Returns:
        A sentence for an error message; None where the names tell nothing.
    """
    names = list(names)
    kinds = {
        r"base_model\.model\..*|.*\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\b.*|.*\.base_layer\..*": (
            "this looks like an unmerged PEFT dump: merge it with PEFT's merge_and_unload(), or start from the base "
            "model"
        ),
        r".*\.(SCB|quant_state\..*|absmax|quant_map)": "this looks like a bitsandbytes-quantised model",
        r".*\.(qweight|qzeros|g_idx|scales)": "this looks like a GPTQ- or AWQ-quantised model",
        r".*\.weight_scale(_inv)?": "this looks like an fp8-quantised model",
        r"(_orig_mod|module|_fsdp_wrapped_module)\..*": "this looks like the state of a training wrapper",
        r"(layers\.\d+\.(attention|feed_forward)\..*|tok_embeddings\..*)": (
            "this looks like Meta's own format: convert it to Hugging Face's"
        ),
    }
    for pattern, explanation in kinds.items():
        matching = [name for name in names if re.fullmatch(pattern, name)]
        if matching:
            return f"{len(matching)} of {len(names)} tensors are named like {matching[0]!r}: {explanation}."
    return None


def read_weight_map(data: bytes, source: str) -> dict[str, str]:
    """Validate the content of an index and return its weight_map: file name by tensor name.

    Raises:
        UserError: It is malformed, or names a file outside its own folder.
    """
    weight_map = parse_json_object(data, source).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{source}: weight_map must map tensor names to file names.")
    for tensor, file in weight_map.items():
        path = PurePosixPath(file) if isinstance(file, str) else None
        if path is None or path.is_absolute() or ".." in path.parts or path.name != file.split("/")[-1] or "\0" in file:
            raise UserError(
                f"{source}: weight_map[{tensor!r}] is {file!r}: expected the name of a file inside the folder."
            )
        if not path.name.endswith(".safetensors"):
            raise UserError(f"{source}: weight_map[{tensor!r}] is {file!r}, which is no .safetensors file.")
    return weight_map


def _read_weight_map(index: Path) -> dict[str, str]:
    return read_weight_map(read_regular_file(index), str(index))


def _find_indexed_tensors(directory: Path) -> dict[str, TensorInfo]:
    weight_map = _read_weight_map(directory / INDEX)
    names_by_file: Mapping[str, list[str]] = defaultdict(list)
    for tensor, file in weight_map.items():
        names_by_file[file].append(tensor)
    _check_shards_exist(directory, names_by_file)
    _warn_of_unused(directory, set(names_by_file))

    tensors: dict[str, TensorInfo] = {}
    for file, names in names_by_file.items():
        held = read_header(directory / file)
        absent = [name for name in names if name not in held]
        if absent:
            raise UserError(
                f"{directory / file} lacks {len(absent)} tensors that {INDEX} places in it, first {absent[0]!r}. "
                "Index and file do not belong together: download both again."
            )
        extra = [name for name in held if weight_map.get(name) != file and not _IGNORED_TENSOR.fullmatch(name)]
        if extra:
            placed = weight_map.get(extra[0])
            raise UserError(
                f"{directory / file} holds {len(extra)} tensors that {INDEX} does not place in it, first {extra[0]!r} "
                f"({f'placed in {placed}' if placed else 'not named at all'}). Download index and files again."
            )
        tensors.update(held)
    return tensors


def _check_shards_exist(directory: Path, names_by_file: Mapping[str, list[str]]) -> None:
    missing = {file: names for file, names in names_by_file.items() if not (directory / file).exists()}
    if missing:
        count = sum(len(names) for names in missing.values())
        first = next(iter(missing.values()))[0]
        listed = ", ".join(list(missing)[:10]) + (", ..." if len(missing) > 10 else "")
        raise UserError(
            f"{directory / INDEX} names {len(missing)} files that are not there: {listed}. "
            f"They hold {count} tensors, first {first!r}. Complete the download. {_hint(directory)}".rstrip()
        )
    root = directory.resolve()
    for file in names_by_file:
        # The file itself may be a link, as in the hub's cache; a folder on the way to it may not lead out.
        if not (directory / file).parent.resolve().is_relative_to(root):
            raise UserError(f"{directory / INDEX} names {file}, which a link leads out of the folder.")


def _warn_of_unused(directory: Path, used: set[str]) -> None:
    unused = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in used)
    if unused:
        logger.warning("%s: not read, since they are not part of the model: %s", directory, ", ".join(unused))


def _check_dtypes(tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse numbers that mean nothing without scales, unless the names tell more (`describe_unexpected`)."""
    for name, info in tensors.items():
        if info.dtype not in _WEIGHT_DTYPES:
            described = describe_unexpected(tensors)
            raise UserError(
                f"{info.file}: tensor {name!r} is stored as {info.dtype}, which is no weight without its scales; "
                "expected float64, float32, float16 or bfloat16." + (f" In all, {described}" if described else "")
            )


def _explain_missing_weights(directory: Path) -> str:
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if "adapter_model.safetensors" in found:
        return f"{directory} holds a PEFT adapter, not a model: name the base model it was trained on."
    if len(found) == 1:
        return f"{directory} holds no {WEIGHTS}, only {found[0]}. If that is the whole model, rename it to {WEIGHTS}."
    if found:
        return (
            f"{directory} holds {len(found)} safetensors files ({', '.join(found[:5])}, ...) but no {INDEX} that says "
            "which of them make up the model. Download the index too."
        )
    return f"{directory} holds no weights: neither {WEIGHTS} nor {INDEX} is there. {_hint(directory)}".rstrip()


def _hint(directory: Path) -> str:
    """Say what else lies in `directory` that a user may have meant."""
    names = sorted(os.listdir(directory))
    pickled = [name for name in names if _PICKLED.fullmatch(name)]
    if pickled:
        return f"Found {', '.join(pickled[:5])}. {_HOW_TO_CONVERT}"
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        return f"Found {gguf[0]}: to use it, name the file itself."
    return ""
