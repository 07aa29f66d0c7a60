"""The loop over streamed layers against a plain loop over the same layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.stream import StreamedLoop, StreamedStack, stream_layers
from models.stream_order import StreamOrder, stream_order

LAYERS, WIDTH = 7, 6


def layer(x, shared, frozen, adapters, index):
    weight = frozen["codes"].astype(jnp.float32) / 512 * frozen["scale"] + frozen["rows"].astype(jnp.float32)
    return x + jnp.tanh(x @ weight + (x @ adapters["a"]) @ adapters["b"] + shared["bias"] + index)


def parameters(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), 4)
    frozen = {
        "codes": jax.random.randint(keys[0], (layers, WIDTH, WIDTH), 0, 255).astype(jnp.uint8),
        "rows": jax.random.normal(keys[1], (layers, WIDTH)).astype(jnp.bfloat16),
        "scale": jax.random.normal(keys[1], (layers,)),
    }
    trained = {
        "a": jax.random.normal(keys[2], (layers, WIDTH, 2)),
        "b": jax.random.normal(keys[3], (layers, 2, WIDTH)),
    }
    return frozen, trained


def inputs(micro_batches):
    keys = jax.random.split(jax.random.key(1), 2)
    return jax.random.normal(keys[0], (micro_batches, 3, WIDTH)), {
        "bias": jax.random.normal(keys[1], (micro_batches, WIDTH))
    }


def plain(x, shared, frozen, trained):
    for index in range(len(frozen["scale"])):
        of_layer = [jax.tree.map(lambda array, index=index: array[index], tree) for tree in (frozen, trained)]
        x = jax.vmap(lambda x, shared, of_layer=of_layer, index=index: layer(x, shared, *of_layer, index))(x, shared)
    return x


def pinned():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@pytest.mark.parametrize("offload_inputs", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("streamed", [1, 2, 4, 6, 7])
def test_results_and_gradients_are_those_of_a_plain_loop(streamed, micro_batches, offload_inputs):
    frozen, trained = parameters()
    x, shared = inputs(micro_batches)
    order = stream_order(LAYERS, streamed)
    kinds = np.array(order.layer_kinds)
    codes, rows = frozen["codes"], frozen["rows"]
    of_codes = StreamedStack(None if kinds.all() else codes[~kinds], codes.shape[1:], jnp.uint8, 4)
    of_rows = StreamedStack(None if kinds.all() else rows[~kinds], (WIDTH,), jnp.bfloat16, 48)
    as_bytes = np.concatenate(
        [
            np.zeros((streamed, 4), np.uint8),
            np.asarray(codes[kinds]).reshape(streamed, -1),
            np.zeros((streamed, 8), np.uint8),
            np.asarray(rows[kinds]).view(np.uint8),
        ],
        axis=1,
    )
    waiting = jax.device_put(as_bytes, pinned())
    held = {**frozen, "codes": of_codes, "rows": of_rows}
    loop = StreamedLoop(layer, lambda adapters: adapters, lambda frozen: frozen, order, offload_inputs)

    @jax.jit
    def streamed_gradients(x, held, waiting, trained):
        def loss(x, trained):
            return jnp.sum(jnp.sin(stream_layers(loop, x, shared, held, waiting, trained)))

        return jax.value_and_grad(loss, argnums=(0, 1))(x, trained)

    @jax.jit
    def plain_gradients(x, frozen, trained):
        return jax.value_and_grad(lambda x, trained: jnp.sum(jnp.sin(plain(x, shared, frozen, trained))), (0, 1))(
            x, trained
        )

    ours, expected = streamed_gradients(x, held, waiting, trained), plain_gradients(x, frozen, trained)
    # The same operations in another order of summation: some units in the last place of float32 a layer.
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max()


def test_an_order_spreads_the_resident_layers():
    order = stream_order(80, 40)
    assert order == StreamOrder(lead=0, groups=20, streamed=2, resident=2)
    assert order.kinds == (True, False, True, False)


@pytest.mark.parametrize("layers", [1, 2, 7, 80, 88, 126])
def test_an_order_streams_exactly_what_was_asked_for(layers):
    for streamed in range(1, layers + 1):
        kinds = stream_order(layers, streamed).layer_kinds
        assert (len(kinds), sum(kinds)) == (layers, streamed)


@pytest.mark.parametrize("streamed", [0, 8])
def test_an_order_refuses_more_layers_than_there_are(streamed):
    with pytest.raises(ValueError, match="of 7 layers"):
        stream_order(7, streamed)
