"""Which compiled kernels a command's options lead to."""

import jax

from models.attention import choose_kernel
from models.remat import group_count
from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.step import ForwardOptions


def forward_options(config: TrainConfig, base: BaseModel, platform: str | None = None) -> ForwardOptions:
    """Resolve "auto" for a platform, by default this machine's, and refuse what cannot be done.

    Raises:
        UserError: says why the kernel cannot be used, or the layers cannot be nested.
    """
    try:
        kernel = choose_kernel(
            config.attention,
            platform=platform or jax.default_backend(),
            packing=config.packing,
            dtype=config.compute_dtype,
            head_dim=base.model.config.head_dim,
            softcap=base.model.config.attention_softcap,
        )
        if config.planned_remat == "nested":
            group_count(base.model.config.num_layers)
    except ValueError as error:
        raise UserError(str(error)) from error
    return ForwardOptions(kernel, config.planned_remat, config.packing, config.offload.activations)
