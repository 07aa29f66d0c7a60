"""How much of a layer each of several tensor-parallel devices has."""

from models.config import ModelConfig
from models.quantization.nf4 import BLOCK
from models.quantization.parts import Segments
from zagora_jax.errors import UserError


def tensor_segments(config: ModelConfig, devices: int) -> dict[str, Segments]:
    """Return how each logical axis is cut over `devices`, if it is; the last parts may be padding.

    Heads are cut into whole key/value heads, each with the query heads that attend to it.

    Raises:
        UserError: there are fewer key/value heads than devices.
    """
    if devices == 1:
        return {}
    if devices > config.num_kv_heads:
        raise UserError(
            f"--mesh.tensor {devices}: each device along tensor takes whole key/value heads, and the model has "
            f"{config.num_kv_heads}; give --mesh.tensor {config.num_kv_heads} at most, and spread over the other "
            "devices with --mesh.fsdp or --mesh.data"
        )
    kv_heads = -(-config.num_kv_heads // devices)
    group = config.num_heads // config.num_kv_heads
    heads = (config.num_heads * config.head_dim, kv_heads * group * config.head_dim)
    keys = (config.num_kv_heads * config.head_dim, kv_heads * config.head_dim)
    ffn = (config.intermediate_size, _ffn_part(config.intermediate_size, devices))
    return {
        "heads": (heads,),
        "kv_heads": (keys,),
        "qkv": (heads, keys, keys),
        "ffn": (ffn,),
        "gate_up": (ffn, ffn),
    }


def _ffn_part(size: int, devices: int) -> int:
    """Return the part that takes least memory: a multiple of 64 at real sizes.

    A smaller unit pads less, but a scale is kept for each unit of a row of the down projection.
    """

    def part(unit: int) -> int:
        return -(-size // (unit * devices)) * unit

    def bytes_of_weights(unit: int) -> float:
        return part(unit) * (1 / 2 + 1 / unit)

    return part(min((BLOCK >> shift for shift in range(BLOCK.bit_length())), key=bytes_of_weights))
