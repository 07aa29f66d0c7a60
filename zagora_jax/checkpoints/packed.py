"""Weights that a checkpoint holds quantised: several stored tensors that together are one of the model's."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zagora_jax.checkpoints.checkpoint import TensorInfo
from zagora_jax.errors import UserError


@dataclass(frozen=True)
class PackedTensor(ABC):
    """One weight [out, in] of the model.

    Attributes:
        info: what it is once it is dequantised, in the file and at the place of its packed numbers.
        format: the key of `models.quantization.FORMATS` that can hold it as it is; None where none can.
    """

    info: TensorInfo
    format: str | None

    @abstractmethod
    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Return the rows [start, stop), computed in float32 and rounded once to the dtype of `info`."""

    def read_packed(self) -> Any:
        """Return it in `format`, its arrays numpy's."""
        raise NotImplementedError(f"{type(self).__name__} has no format of its own")


@dataclass(frozen=True)
class Quantization:
    """How the packed weights of a checkpoint are described in config.json.

    Attributes:
        source: the file and field, for messages.
        fields: the field's content.
    """

    source: str
    fields: Mapping[str, Any]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.fields.get("quant_method"))


def read_quantization(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Find out how a checkpoint is quantised, None where it is not.

    Raises:
        UserError: in a way that cannot be read.
    """
    for key in ("quantization_config", "compression_config"):
        content = config.get(key)
        if content is None:
            continue
        method = content.get("quant_method") if isinstance(content, dict) else content
        if isinstance(content, dict) and key == "quantization_config" and method in ("bitsandbytes", "fp8"):
            return Quantization(f"{path}: {key}", content)
        raise UserError(
            f"{path}: {key}.quant_method is {method!r}: weights quantised this way cannot be read, only those of "
            "bitsandbytes (4 bits) and fp8 (in blocks). Use the 16-bit checkpoint of the model."
        )
    return None
