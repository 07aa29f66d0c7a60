"""What a run says of itself at its beginning."""

import importlib.metadata
import platform

import jax

import zagora_jax
from models.parameters import split
from sharding.lockstep import idle_share
from zagora_jax.adapter import adapted_modules, trained_modules
from zagora_jax.arrangement import Arrangement
from zagora_jax.base import BaseModel
from zagora_jax.config import TrainConfig
from zagora_jax.reporting.sensors import GIB
from zagora_jax.step import ForwardOptions


def run_facts(
    config: TrainConfig, base: BaseModel, arrangement: Arrangement, options: ForwardOptions, *, width: int, steps: str
) -> dict[str, str]:
    """Say in words what is trained, how, and where.

    Args:
        config: the options.
        base: the model.
        arrangement: of it.
        options: of the forward pass.
        width: tokens in a sequence.
        steps: how many, in words.
    """
    total = base.parameter_count()
    _, frozen, adapters = split(base.model)
    trained = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    frozen_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    modules, in_full = adapted_modules(base.model), trained_modules(base.model)
    names = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    stages, times = arrangement.mesh.shape["stage"], config.gradient_accumulation_steps
    waiting = f", of which stages wait {idle_share(stages, times):.0%}" if stages > 1 else ""
    texts = "" if config.retrieval.pooling == "none" else f"{config.retrieval.texts_of_a_pair} texts x "
    return {
        "model": f"{base.name} ({total / 1e6:,.1f} M parameters)"
        + (", output head tied to the embedding" if base.model.config.tie_embeddings else "")
        + (", SYNTHETIC" if base.synthetic else ""),
        "weights": f"{base.quantization}, {frozen_bytes / GIB:.2f} GiB"
        + ("" if config.embeddings == "none" else f", embedding and head {config.embeddings}"),
        "adapter": ("" if config.adapter is None else f"going on from {config.adapter}, ")
        + f"rank {config.lora.rank}, {trained / 1e6:,.2f} M trained parameters ({trained / total:.2%})",
        "adapted": f"{len(modules)} modules: {names}"
        + (
            f"; in full {len(in_full)}: {', '.join(sorted({name.rpartition('.')[2] for name in in_full}))}"
            if in_full
            else ""
        ),
        **arrangement.facts(),
        "computation": f"{config.compute_dtype}, attention {options.kernel}, remat {options.remat}"
        + (", layer inputs in pinned host memory" if options.offload_activations else ""),
        "optimizer step": f"{config.gradient_accumulation_steps} x "
        f"{config.micro_batch_size * arrangement.rows_divisor} x {texts}"
        f"{width} tokens, {config.optimizer}, {config.schedule} schedule{waiting}",
        "steps": steps,
        "run directory": str(config.output),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide numbers."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
    return {
        "python": platform.python_version(),
        "zagora-jax": zagora_jax.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
    }
