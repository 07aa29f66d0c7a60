"""The base model of a command: found, declared and checked, before any device memory is used."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.llama import Llama
from models.lora import LayerRanks, LoRAConfig
from models.modules import HEAD, linear_modules, norm_modules, table_modules
from models.parameters import Path
from models.targets import lora_targets, value_of_module
from zagora_jax.checkpoints.checkpoint import Checkpoint
from zagora_jax.checkpoints.load import (
    ONE_DEVICE,
    Destination,
    check_tensors,
    expected_tensors,
    is_stacked,
    load_frozen,
    read_originals,
    trained_in_full,
)
from zagora_jax.checkpoints.quantized_cache import QuantizedCache
from zagora_jax.checkpoints.reading import Prepare
from zagora_jax.checkpoints.source import open_checkpoint
from zagora_jax.checkpoints.synthetic import PREFIX, synthetic_config, synthetic_frozen, synthetic_originals
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class BaseModel:
    """A declared model and where its weights come from; `checkpoint` is None for a synthetic one.

    `quantization` is how its linear weights are held: as the user asked, or as the files have them already.
    `quantized_cache` is the folder of quantised models; None: there is none. `prepare` makes what is held of the
    weights that are read.
    """

    name: str
    checkpoint: Checkpoint | None
    model: Llama
    quantization: str
    dtype: jnp.dtype
    seed: int
    quantized_cache: FilePath | None = None
    prepare: Prepare | None = None

    @property
    def synthetic(self) -> bool:
        """Whether the weights are random."""
        return self.checkpoint is None

    def with_embeddings(self, embeddings: str) -> "BaseModel":
        """Return the same model with its embedding and head held in another way."""
        return replace(self, model=self.model.with_embeddings(embeddings))

    def fingerprint(self) -> str:
        """Return a short text that tells these weights from others, as `Checkpoint.fingerprint` does."""
        return f"{self.name} seed {self.seed}" if self.checkpoint is None else self.checkpoint.fingerprint()

    def tensor_count(self) -> int:
        """Count the tensors that `load` reads."""
        return len(expected_tensors(self.model))

    def parameter_count(self) -> int:
        """Count the base model's parameters, as they are before quantisation."""
        return sum(math.prod(tensor.shape) for tensor in expected_tensors(self.model).values())

    def load(
        self,
        on_tensor: Callable[[int], None] = lambda _: None,
        destination: Destination = ONE_DEVICE,
        say: Callable[[str], None] = logger.info,
        *,
        fill_cache: bool = False,
        prepare: Prepare | None = None,
    ) -> nnx.State:
        """Put the frozen parameters on the devices, from the cache of quantised models where they are there.

        Args:
            on_tensor: called after every tensor read with the number of its elements.
            destination: where the parameters go.
            say: told what the cache is used for, also by its writing later.
            fill_cache: whether all layers are to be in the cache in the end, for `open_cache`.
            prepare: by default the `prepare` of the model.

        Raises:
            UserError: what is wrong with the weights, or the cache cannot be filled.
        """
        if self.checkpoint is None:
            return synthetic_frozen(self.model, self.seed, destination)
        cache = None
        prepare = prepare or self.prepare
        if prepare is not None:
            self._require_plain(say)
        elif fill_cache or QuantizedCache.pays(self.checkpoint, self.quantization, self.model):
            cache = self.open_cache(say)
        return load_frozen(
            self.checkpoint,
            self.model,
            self.quantization,
            on_tensor,
            destination,
            cache,
            fill_cache=fill_cache,
            prepare=prepare,
        )

    def _require_plain(self, say: Callable[[str], None]) -> None:
        """Refuse to change weights that the files hold quantised."""
        assert self.checkpoint is not None
        if packed := [name for name in layer_modules(self.model) if self.checkpoint.format_of(f"{name}.weight")]:
            raise UserError(
                f"lora.initialization: {packed[0]} is quantised in {self.name} already; it takes the 16-bit checkpoint"
            )
        if self.quantized_cache is not None:
            say("quantised cache: not used, since adapters begin as a part of the weights (lora.initialization)")

    def originals(self, on_tensor: Callable[[int], None] = lambda _: None) -> dict[Path, np.ndarray]:
        """Read what is trained in full as the base model has it, in the host's memory; see `load`."""
        if self.checkpoint is None:
            return synthetic_originals(self.model, self.seed)
        return read_originals(self.checkpoint, self.model, on_tensor)

    def open_cache(self, say: Callable[[str], None] = logger.info) -> QuantizedCache | None:
        """Open this model's entry in the cache of quantised layers; None where there is no cache."""
        if self.quantized_cache is not None and any(map(is_stacked, trained_in_full(self.model))):
            say("quantised cache: not used, since norms of layers are trained, which it keeps with their layers")
            return None
        if self.quantized_cache is None or self.checkpoint is None or self.prepare is not None:
            return None
        return QuantizedCache(self.quantized_cache, self.checkpoint, self.quantization, self.model, say)

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer that accompanies the weights, which is loaded once."""
        return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        if self.checkpoint is None:
            raise UserError(f"--model {self.name}: synthetic weights have no tokenizer, so they cannot read text")
        from zagora_jax.checkpoints.tokenizer import load_tokenizer

        return load_tokenizer(self.checkpoint)


def open_base(
    name: str,
    *,
    quantization: str,
    dtype: str,
    lora: LoraConfig | None,
    embeddings: str = "none",
    seed: int = 0,
    quantized_cache: FilePath | None = None,
) -> BaseModel:
    """Find the model `name`, declare it with adapters as asked, and check that its tensors are all there.

    Raises:
        UserError: whatever is wrong with the model's files, its config or the adapter's targets.
    """
    synthetic = name.startswith(PREFIX)
    checkpoint = None if synthetic else open_checkpoint(name)
    config = synthetic_config(name) if checkpoint is None else checkpoint.config
    try:
        if checkpoint is not None:
            _check_layer_count(checkpoint)
        model_config = ModelConfig.from_hf(config)
        if checkpoint is not None:
            bare = declare_model(model_config, quantization=quantization, dtype=dtype, lora=None)
            quantization = _held_format(checkpoint, bare, quantization)
        model = declare_model(model_config, quantization=quantization, dtype=dtype, lora=lora)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    if checkpoint is not None:
        check_tensors(checkpoint, model)
    model = model.with_embeddings(embeddings)
    return BaseModel(name, checkpoint, model, quantization, jnp.dtype(dtype), seed, quantized_cache)


def _check_layer_count(checkpoint: Checkpoint) -> None:
    """Refuse a number of layers so wrong that to list them would take all memory."""
    layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(checkpoint.tensors):
        raise ValueError(
            f"config.json: num_hidden_layers is {layers}, but the files hold {len(checkpoint.tensors)} tensors in all"
        )


def declare_model(config: ModelConfig, *, quantization: str, dtype: str, lora: LoraConfig | None) -> Llama:
    """Declare a model with adapters as asked, without values.

    Raises:
        ValueError: the adapter's targets do not fit the model.
    """
    declare = partial(Llama, config, quantization=quantization, dtype=jnp.dtype(dtype))
    return declare(lora=None if lora is None else _lora_config(lora, declare()))


def _held_format(checkpoint: Checkpoint, model: Llama, wanted: str) -> str:
    """Return the format that linear weights are held in: as wanted, or, where the files have one already, as there.

    Raises:
        ValueError: the files' formats cannot be kept.
    """
    weights = [f"{module}.weight" for module in layer_modules(model)]
    stored = {name: found for name in weights if (found := checkpoint.format_of(name)) is not None}
    if not stored or wanted == "none":
        return wanted
    formats = sorted(set(stored.values()))
    if len(formats) > 1:
        raise ValueError(f"weights in several formats cannot be read: {', '.join(formats)}. Use the 16-bit checkpoint")
    if wanted not in ("nf4", formats[0]):
        raise ValueError(
            f"quantization {wanted}: the files hold {formats[0]} weights, and to quantise them again would lose more. "
            "Leave the option out to keep them, or use the 16-bit checkpoint"
        )
    plain = [name for name in weights if name not in stored]
    if plain and formats[0] != "nf4":
        raise ValueError(
            f"{len(plain)} of {len(weights)} weights, first {plain[0]}, are not quantised, the others are "
            f"{formats[0]}, which is only read. Use the 16-bit checkpoint"
        )
    if plain:
        logger.warning(
            "%s: %d of %d weights, first %s, are stored in 16 bits or more; they are quantised to nf4 like the others.",
            checkpoint.name,
            len(plain),
            len(weights),
            plain[0],
        )
    return formats[0]


def layer_modules(model: Llama) -> dict[str, str]:
    """Map Hugging Face's name of each layer's linear modules, such as model.layers.0.mlp.up_proj, to the stack's."""
    return {
        path.replace("model.layers.", f"model.layers.{layer}."): path
        for path in linear_modules(model)
        for layer in range(model.config.num_layers)
    }


def _lora_config(options: LoraConfig, model: Llama) -> LoRAConfig:
    """Resolve targets, layers and patterns against the model's modules, as PEFT does."""
    layers = model.config.num_layers
    trained = _trained_modules(options.modules_to_save or [], model)
    by_layer = layer_modules(model) | {path: path for path in table_modules(model)}
    matched = lora_targets(options.targets, list(by_layer))
    _check_tables(options, model, matched, trained)
    if options.layers is not None:
        if beyond := [layer for layer in options.layers if layer >= layers]:
            raise ValueError(f"lora.layers names layer {beyond[0]}, but the model has {layers}, from 0")
        matched = [name for name in matched if _is_table(name) or _layer_of(name) in options.layers]
    ranks, alphas = options.rank_patterns, options.alpha_patterns
    for option, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        for pattern in patterns:
            if not any(value_of_module({pattern: True}, name, False) for name in matched):
                raise ValueError(f"lora.{option}: {pattern} fits none of the adapted modules, such as {matched[0]}")
    plain = LoRAConfig(
        options.rank,
        options.alpha,
        options.dropout,
        options.use_rslora,
        frozenset(by_layer[name] for name in matched),
        options.use_dora,
        trained=trained,
    )
    of_module = {path: ([0] * layers, [0.0] * layers) for path in plain.targets}
    for name in matched:
        rank = value_of_module(ranks, name, options.rank)
        module_ranks, module_scales = of_module[by_layer[name]]
        own = slice(None) if _is_table(name) else slice(_layer_of(name), _layer_of(name) + 1)
        count = len(module_ranks[own])
        module_ranks[own] = [rank] * count
        module_scales[own] = [plain.scale_of(rank, value_of_module(alphas, name, options.alpha))] * count
    exceptions = []
    for path, (module_ranks, module_scales) in sorted(of_module.items()):
        found = LayerRanks(tuple(module_ranks), tuple(module_scales))
        if len(set(found.ranks)) == len(set(found.scales)) == 1:
            found = LayerRanks(found.ranks[:1], found.scales[:1])
        if found != plain.of_module(path):
            exceptions.append((path, found))
    return replace(plain, exceptions=tuple(exceptions))


def _trained_modules(names: Sequence[str], model: Llama) -> frozenset[str]:
    """Choose the tables and norms that `modules_to_save` names by how they end, as PEFT does.

    The head that is tied to the embedding is that.
    """
    tables, norms = table_modules(model), norm_modules(model)
    by_name = {path: path for path in (*tables, *norms) if not path.startswith("model.layers.")}
    by_name.setdefault(HEAD, EMBEDDING)
    by_name |= {
        path.replace("model.layers.", f"model.layers.{layer}."): path
        for path in norms
        if path.startswith("model.layers.")
        for layer in range(model.config.num_layers)
    }
    chosen = {name: path for name, path in by_name.items() if any(name.endswith(ending) for ending in names)}
    for ending in names:
        if others := [name for name in layer_modules(model) if name.endswith(ending)]:
            raise ValueError(
                f"lora.modules_to_save: {ending} is a linear module ({others[0]}); only the embedding, the output head "
                "and norms are trained in full: give the others an adapter of a high rank"
            )
        if not any(name.endswith(ending) for name in by_name):
            endings = dict.fromkeys(name.rpartition(".")[2] for name in by_name)
            raise ValueError(
                f"lora.modules_to_save: {ending} names nothing that can be trained; the model has {', '.join(endings)}"
            )
    partly = [
        name for name, path in by_name.items() if path in chosen.values() and path in norms and name not in chosen
    ]
    if partly:
        raise ValueError(
            f"lora.modules_to_save: names this norm in some layers, but not {partly[0]}: norms are trained in all "
            "layers or in none"
        )
    return frozenset(chosen.values())


def _check_tables(options: LoraConfig, model: Llama, matched: Sequence[str], trained: frozenset[str]) -> None:
    """Refuse adapters on the embedding and the head that cannot be."""
    tables = [name for name in matched if _is_table(name)]
    if tables and model.config.tie_embeddings:
        raise ValueError(
            f"lora.targets: {tables[0]} is also the output head (tie_word_embeddings), so that an adapter on one of "
            "them could not be merged; train it in full with modules_to_save, or leave it out"
        )
    if tables and options.use_dora:
        raise ValueError(f"lora.use_dora: not for {tables[0]}, whose rows' lengths are not trained apart; leave it out")
    if tables and options.initialization != "default":
        raise ValueError(
            f"lora.initialization {options.initialization}: not for {tables[0]}; leave that out of targets"
        )
    if both := [name for name in tables if name in trained]:
        raise ValueError(f"lora.modules_to_save: {both[0]} has an adapter too (lora.targets); leave one of them out")


def _is_table(module: str) -> bool:
    return not module.startswith("model.layers.")


def _layer_of(module: str) -> int:
    return int(module.split(".")[2])
