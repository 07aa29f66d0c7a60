"""The decoder of Llama and its relatives.

Attribute names are Hugging Face's module names, so a parameter's path is its tensor's name.

The layers' parameters are stacked on a leading axis and run in one `lax.scan`:

    Llama
      model.embed_tokens.weight             [vocab, hidden], plain or quantised (models.tables)
      model.layers.self_attn.q_proj.weight  [L, out, in], stored in the chosen format
      model.layers.self_attn.q_proj.adapter.lora_A  [L, r, in]
      model.norm.weight                     [hidden]
      lm_head.weight                        [vocab, hidden], absent where it is tied to the embedding
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models import tables
from models.attention import attention, decode_attention
from models.cache import KVCache
from models.config import ModelConfig
from models.decoder_layer import DecoderLayer, LayerContext, RMSNorm
from models.embedding import Embedding, HeadTerm
from models.layer_kinds import LayerKind, LayerKinds
from models.lora import LoRAConfig
from models.modules import HEAD, linear_modules, norm_modules, table_modules
from models.parameters import Adapter, split
from models.placement import LOCAL, Placement
from models.remat import LAYER_INPUT, scan_layers
from models.rope import rope_tables
from models.stream import LayerInputs, StreamedLoop, rerun_layers, run_layers, stream_layers
from models.tables import Table


@dataclass(frozen=True)
class Ends:
    """Whether a decoder's layers begin behind the embedding, and end before the norm and the output head."""

    first: bool = True
    last: bool = True


class Decoder(nnx.Module):
    """Embedding, stacked layers and final norm."""

    def __init__(self, config: ModelConfig, *, quantization: str, embeddings: str, dtype: jnp.dtype, ends: Ends):
        embeds = ends.first or (ends.last and config.tie_embeddings)
        self.embed_tokens = Embedding((config.vocab_size, config.hidden_size), embeddings, dtype) if embeds else None
        self.layers = DecoderLayer(config, quantization=quantization, dtype=dtype, stack=(config.num_layers,))
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, offset=float(config.gemma))
        self.norm = norm() if ends.last else None


class Llama(nnx.Module):
    """A decoder with its output head. Built without values: every parameter is a ShapeDtypeStruct.

    `nnx.split(Llama(...), Frozen, Adapter)` gives the graph and the two trees of declared parameters; merging
    the graph with trees of arrays gives a model that computes.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        quantization: str,
        dtype: jnp.dtype,
        embeddings: str = "none",
        lora: LoRAConfig | None = None,
        ends: Ends = Ends(),
    ):
        """Declare the model.

        Args:
            config: its sizes.
            quantization: how the linear layers' weights are held.
            dtype: of computation, and of what is not quantised.
            embeddings: how the embedding and the head are held.
            lora: the adapters.
            ends: what of it stands before and behind the layers.
        """
        self.config, self.dtype, self.ends = config, dtype, ends
        self.quantization, self.embeddings, self.lora = quantization, embeddings, lora
        self.model = Decoder(config, quantization=quantization, embeddings=embeddings, dtype=dtype, ends=ends)
        untied = ends.last and not config.tie_embeddings
        self.lm_head = Embedding((config.vocab_size, config.hidden_size), embeddings, dtype) if untied else None
        if lora is not None:
            self._add_adapters(lora)

    def _add_adapters(self, lora: LoRAConfig) -> None:
        """Declare adapters and what is trained in full; each adapter's dropout is a stream of its own."""
        linears, ends = linear_modules(self), table_modules(self)
        for stream, (path, linear) in enumerate(linears.items()):
            if path in lora.targets:
                linear.add_adapter(lora, stream, lora.of_module(path))
        for stream, (path, table) in enumerate(ends.items(), len(linears)):
            if path in lora.targets:
                table.add_adapter(lora, lora.of_module(path), stream, of_head=path == HEAD)
        for path, module in (ends | norm_modules(self)).items():
            if path in lora.trained:
                module.train_in_full()

    def part(self, num_layers: int, ends: Ends) -> "Llama":
        """Declare consecutive layers of this model as a model of their own, with what stands at their `ends`.

        The head that is tied to the embedding brings a copy of it.
        """
        config = replace(self.config, num_layers=num_layers)
        return self._declared(config, self.embeddings, ends)

    def with_embeddings(self, embeddings: str) -> "Llama":
        """Declare this model with its embedding and head held in another way."""
        return self if embeddings == self.embeddings else self._declared(self.config, embeddings, self.ends)

    def _declared(self, config: ModelConfig, embeddings: str, ends: Ends) -> "Llama":
        return Llama(
            config, quantization=self.quantization, dtype=self.dtype, embeddings=embeddings, lora=self.lora, ends=ends
        )

    @property
    def _head(self) -> Embedding:
        table = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert table is not None, "only a part with the last layer has the head"
        return table

    @property
    def head(self) -> Table:
        """The output head [vocab, hidden], without its adapter."""
        return self._head.weight.get_value()

    @property
    def head_is_trained(self) -> bool:
        """Whether the head itself is trained, in full."""
        return isinstance(self._head.weight, Adapter)

    def head_terms(
        self, hidden: jax.Array, placement: Placement = LOCAL, dropout_keys: jax.Array | None = None
    ) -> list[HeadTerm]:
        """Return what the logits of hidden [B, ..., hidden] are the sum of."""
        return self._head.head_terms(hidden, placement, dropout_keys)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return all logits of hidden [..., hidden], float32 [..., vocab]."""
        terms = self.head_terms(hidden.reshape(-1, hidden.shape[-1]))
        total = sum((tables.logits(term.hidden, term.table) for term in terms), jnp.float32(0))
        cap = self.config.logit_softcap
        return (total if cap is None else cap * jnp.tanh(total / cap)).reshape(*hidden.shape[:-1], -1)

    def hidden_states(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        *,
        kernel: str,
        remat: str = "none",
        offload: bool = False,
        dropout_keys: jax.Array | None = None,
        placement: Placement = LOCAL,
        exchanged: Any = None,
        inputs: jax.Array | None = None,
        first_layer: jax.Array | int = 0,
    ) -> jax.Array:
        """Run the decoder over whole sequences.

        Args:
            tokens: int32 [B, S].
            positions: int32 [B, S], from 0 in every row.
            segment_ids: int32 [B, S], which row a token of a packed sequence belongs to (0: padding), or None where
                each sequence is one row, padded at its end.
            kernel: the attention kernel, see `models.attention.choose_kernel`.
            remat: one of `models.remat.REMATS`: what the backward pass computes again.
            offload: whether the layers' inputs wait for it in pinned host memory; see `models.remat`.
            dropout_keys: keys [B], one a row, that switch the adapters' dropout on.
            placement: reaches parameters that are spread over devices.
            exchanged: arrays [L, ...] for `placement.adapters`; None where that takes nothing.
            inputs: [B, S, hidden], what the layers before this part return; None in a part that has the first layer.
            first_layer: how many layers come before this part.

        Returns:
            The normalised last hidden states [B, S, hidden]; as the layers return them where others follow this part.
        """
        tables = self._rope_tables(positions, segment_ids)
        attend_to = partial(attention, kernel=kernel, softcap=self.config.attention_softcap)

        def context_of(kind: LayerKind, _: None) -> LayerContext:
            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
                return attend_to(q, k, v, segment_ids=segment_ids, window=kind.window), None

            return LayerContext(*kind.rotation(*tables), attend, placement, dropout_keys)

        x = self.embed(tokens, placement) if inputs is None else inputs
        x, _ = self._run(x, context_of, None, remat, offload, placement, exchanged, first_layer)
        return x

    def streamed_hidden_states(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None,
        waiting: jax.Array,
        *,
        kernel: str,
        offload_inputs: bool,
        dropout_keys: jax.Array | None = None,
        placement: Placement = LOCAL,
        exchanged: Any = None,
        inputs: jax.Array | None = None,
        first_layer: jax.Array | int = 0,
        keeping: bool = False,
        kept: LayerInputs | None = None,
    ) -> Any:
        """Do what `hidden_states` does for all micro-batches of an optimizer step, of a model with streamed layers.

        Args:
            tokens: int32 [A, B, S]; so are positions and segment_ids.
            positions: see `hidden_states`.
            segment_ids: see `hidden_states`.
            waiting: the streamed layers' frozen parameters, see `models.stream.stream_layers`.
            kernel: see `hidden_states`.
            offload_inputs: whether layer inputs wait in host memory for the backward pass.
            dropout_keys: keys [A, B].
            placement: its `stream` says which layers are streamed.
            exchanged: see `hidden_states`.
            inputs: [A, B, S, hidden], see `hidden_states`.
            first_layer: see `hidden_states`.
            keeping: whether another program computes the gradients.
            kept: what the program with `keeping` returned: only gradients are computed, and the result is zeros.

        Returns:
            [A, B, S, hidden], what `hidden_states` returns; with `keeping`, the layers' inputs too.
        """
        micro_batches, order = len(tokens), placement.stream
        assert order is not None

        def joined(array: jax.Array | None) -> Any:
            return None if array is None else array.reshape(-1, *array.shape[2:])

        def apart(array: jax.Array) -> jax.Array:
            return array.reshape(micro_batches, -1, *array.shape[1:])

        tables = jax.tree.map(apart, self._rope_tables(joined(positions), joined(segment_ids)))
        attend_to = partial(attention, kernel=kernel, softcap=self.config.attention_softcap)
        graph, frozen, adapters = split(self.model.layers)
        kinds = LayerKinds.of(self.config)

        def layer(x: jax.Array, shared: tuple, frozen: Any, adapters: Any, index: jax.Array) -> jax.Array:
            tables, segment_ids, keys, first = shared
            index = first + index
            kind = kinds.of_layer(index)

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
                return attend_to(q, k, v, segment_ids=segment_ids, window=kind.window), None

            keys = _keys_of_layer(keys, index)
            context = replace(LayerContext(*kind.rotation(*tables), attend, placement, keys), layer=index)
            return nnx.merge(graph, frozen, adapters)(x, context)[0]

        def open_adapters(trained: tuple[Any, Any]) -> Any:
            return placement.adapters.layer(*trained, None)[0]

        loop = StreamedLoop(layer, open_adapters, placement.fetch, order, offload_inputs, placement.ring)
        adapters, exchanged, _ = placement.adapters.begin(adapters, exchanged)
        x = apart(self.embed(joined(tokens), placement)) if inputs is None else inputs
        # An array a micro-batch, since the loop's functions may hold none themselves: see `jax.custom_vjp`.
        first = jnp.full(micro_batches, first_layer)
        shared = (tables, segment_ids, dropout_keys, first)
        arguments = (loop, x, shared, frozen, waiting, (adapters, exchanged))
        if keeping or kept is not None:
            assert self.model.norm is None, "the last part computes both passes in one program"
            return run_layers(*arguments) if keeping else rerun_layers(*arguments, kept)
        x = stream_layers(*arguments)
        return x if self.model.norm is None else self.model.norm(x, placement)

    def extend(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        slot: jax.Array | int,
        slot_positions: jax.Array,
        placement: Placement = LOCAL,
    ) -> tuple[jax.Array, KVCache]:
        """Run the decoder over the next tokens of sequences whose earlier keys and values are cached.

        Args:
            tokens: int32 [B, Q].
            positions: int32 [B, Q].
            cache: keys and values of T slots.
            slot: the first of the Q slots that these tokens take.
            slot_positions: int32 [B, T], of the token that each slot holds or will hold; -1 for none. A token sees
                those that do not come after it, as far back as the layer's window reaches.
            placement: reaches parameters that are spread over devices, each of which computes whole layers.

        Returns:
            The normalised last hidden states [B, Q, hidden], and the cache with these tokens in it.
        """
        tables = self._rope_tables(positions, None, length=positions.max(axis=1) + 1)
        softcap = self.config.attention_softcap
        distance = positions[:, :, None] - slot_positions[:, None, :]  # [B, Q, T]
        earlier = (distance >= 0) & (slot_positions >= 0)[:, None, :]

        def context_of(kind: LayerKind, layer_cache: KVCache) -> LayerContext:
            window = kind.window.limit(slot_positions.shape[1])
            seen = earlier if window is None else earlier & (distance < window)

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KVCache]:
                extended = layer_cache.write(k, v, slot)
                return decode_attention(q, extended.keys, extended.values, seen, softcap), extended

            return LayerContext(*kind.rotation(*tables), attend, placement, dropout_keys=None)

        return self._run(self.embed(tokens, placement), context_of, cache, "none", False, placement, None)

    def _rope_tables(
        self, positions: jax.Array, segment_ids: jax.Array | None, length: jax.Array | None = None
    ) -> tuple[Any, ...]:
        """Return what `LayerKind.rotation` takes."""
        cos, sin = rope_tables(positions, self.config.rope, segment_ids, length=length)
        local = self.config.local_rope
        return cos, sin, None if local is None else rope_tables(positions, local, segment_ids, length=length)

    def embed(self, tokens: jax.Array, placement: Placement) -> jax.Array:
        """Look up the input of the first layer [B, S, hidden]."""
        assert self.model.embed_tokens is not None, "only a part with the first layer takes tokens"
        x = self.model.embed_tokens.embed(tokens, placement, self.dtype)
        scale = self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def _run(
        self,
        x: jax.Array,
        context_of: Callable[[LayerKind, Any], LayerContext],
        per_layer: Any,
        remat: str,
        offload: bool,
        placement: Placement,
        exchanged: Any,
        first_layer: jax.Array | int = 0,
    ) -> tuple[jax.Array, Any]:
        """Scan over the layers and normalise x [B, S, hidden]; `context_of` gets each layer's kind and `per_layer`."""
        graph, frozen, adapters = split(self.model.layers)
        kinds = LayerKinds.of(self.config)
        adapters, exchanged, waiting = placement.adapters.begin(adapters, exchanged)

        def body(carry: tuple, inputs: tuple) -> tuple[tuple, Any]:
            x, waiting = carry
            x = checkpoint_name(x, LAYER_INPUT)
            index, frozen, adapters, exchanged, layer_inputs = inputs
            context = replace(context_of(kinds.of_layer(index), layer_inputs), layer=index)
            context = replace(context, dropout_keys=_keys_of_layer(context.dropout_keys, index))
            adapters, waiting = placement.adapters.layer(adapters, exchanged, waiting)
            x, kept = nnx.merge(graph, frozen, adapters)(x, context)
            return (x, waiting), kept

        indices = first_layer + jnp.arange(self.config.num_layers)
        inputs = (indices, frozen, adapters, exchanged, per_layer)
        (x, _), kept = scan_layers(body, (x, waiting), inputs, remat, offload=offload)
        return x if self.model.norm is None else self.model.norm(x, placement), kept


def _keys_of_layer(dropout_keys: jax.Array | None, index: jax.Array) -> jax.Array | None:
    """Return a layer's own keys [B], made of the rows' keys [B]."""
    return None if dropout_keys is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(dropout_keys, index)
