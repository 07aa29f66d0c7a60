"""Typed access to the metadata of a Llama GGUF file, which notices what nobody asked for."""

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zagora_jax.errors import UserError

T = TypeVar("T")

# Entries of the architecture that say nothing about its arithmetic, or what the tensors say already.
_WITHOUT_EFFECT = {"vocab_size", "tensor_data_layout", "use_parallel_residual"}
# Entries that are harmless with the value that switches their subject off.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
}


class Metadata:
    """Metadata of a GGUF file; keys without a prefix are those of its architecture, `llama.`."""

    def __init__(self, path: Path, entries: dict[str, Any]):
        self.path = path
        self.entries = entries
        self._read: set[str] = set()

    def require_llama(self) -> None:
        """Refuse every architecture but Llama's."""
        architecture = self.get("general.architecture", str)
        if architecture != "llama":
            raise UserError(
                f"{self.path}: general.architecture is {architecture!r}; of GGUF files, only those of 'llama' "
                "models can be read. Use the model's safetensors files."
            )

    @staticmethod
    def full_key(key: str) -> str:
        """Return the key as the file has it."""
        return key if key.startswith(("general.", "tokenizer.")) else f"llama.{key}"

    def __contains__(self, key: str) -> bool:
        return self.full_key(key) in self.entries

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the entry `key`, of type `kind`; `default` where it is absent.

        Raises:
            UserError: It is of another type, or absent without a default.
        """
        key = self.full_key(key)
        self._read.add(key)
        value = self.entries.get(key, default)
        if value is None:
            raise UserError(f"{self.path} has no metadata entry {key}.")
        if type(value) is not kind:
            raise UserError(f"{self.path}: {key} must be of type {kind.__name__}, found {type(value).__name__}.")
        return value

    def items(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """Return the entry `key`, a list whose elements are of type `kind`."""
        values: list[T] = self.get(key, list, default)
        if not all(type(value) is kind for value in values):
            raise UserError(f"{self.path}: {self.full_key(key)} must hold values of type {kind.__name__}.")
        return values

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(key, int, default)
        if value < 1:
            raise UserError(f"{self.path}: {self.full_key(key)} is {value}, expected at least 1.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float32 entry as the shortest decimal that denotes it: 1e-05, not 9.999999747378752e-06."""
        value = float(str(np.float32(self.get(key, float, default))))
        if not 0 < value < float("inf"):
            raise UserError(f"{self.path}: {self.full_key(key)} is {value}, expected a positive number.")
        return value

    def token_id(self, token: str) -> int | None:
        """Return the id of the special token `token` ("bos", "eos", ...), if the file names one."""
        key = f"tokenizer.ggml.{token}_token_id"
        if key not in self:
            return None
        number, count = self.get(key, int), len(self.get("tokenizer.ggml.tokens", list))
        if not 0 <= number < count:
            raise UserError(f"{self.path}: {key} is {number}, but there are {count} tokens.")
        return number

    def refuse_unread(self) -> None:
        """Refuse entries of the architecture that were not read and are not known to be without effect."""
        for key, value in self.entries.items():
            if not key.startswith("llama.") or key in self._read:
                continue
            short = key.removeprefix("llama.")
            if short not in _WITHOUT_EFFECT and value not in _NEUTRAL_VALUES.get(short, ()):
                raise UserError(f"{self.path}: {key} = {value!r:.80} is not supported.")
