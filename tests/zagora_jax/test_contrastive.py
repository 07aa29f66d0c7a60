"""The loss of an embedder against the same written plainly, its gradients against those of all sequences at once."""

from functools import partial

import eight_devices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracles import tiny_llama
from runs import numbers, recorder, tiny_config, write_pairs

from models.lora import initial_adapter
from models.parameters import split
from models.placement import LOCAL
from sharding.group import ALONE
from zagora_jax.base import open_base
from zagora_jax.contrastive import Contrastive, embed
from zagora_jax.data.batches import Batch
from zagora_jax.option_groups import LoraConfig, MeshConfig, RetrievalConfig
from zagora_jax.step import ForwardOptions
from zagora_jax.trainer import train

TEMPERATURE = 0.1
OPTIONS = ForwardOptions("chunked", "none", segmented=False)


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


def batch_of(texts, micro_batches, width=8):
    """A batch [A, M, S] of sequences of tokens; an empty one is padding."""
    flat = np.zeros((2, len(texts), width), np.int32)
    for row, text in enumerate(texts):
        flat[0, row, : len(text)], flat[1, row, : len(text)] = text, 1
    tokens, segment_ids = flat.reshape(2, micro_batches, -1, width)
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    return Batch(tokens, np.zeros_like(tokens), np.zeros(tokens.shape, np.float32), segment_ids, positions)


# Groups of query, passage, wrong passage: the second asks the same question as the first with another answer; the
# third has the answer of the first; the last is empty.
TEXTS = [[1, 2], [3, 4, 5], [6], [1, 2], [7, 8], [9], [10], [3, 4, 5], [11, 12], [], [], []]


def test_the_loss_is_that_of_the_right_passage_among_those_that_are_wrong():
    vectors = np.random.default_rng(0).standard_normal((12, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = Contrastive("last", TEMPERATURE, 3).losses(jnp.asarray(vectors), batch_of(TEXTS, 2), ALONE)
    # For each query, the rows of the candidates, the right one first.
    candidates = {0: [1, 2, 5, 8], 1: [4, 2, 5, 7, 8], 2: [7, 2, 4, 5, 8]}
    expected = []
    for group, rows in candidates.items():
        scores = vectors[rows].astype(np.float64) @ vectors[3 * group] / TEMPERATURE
        expected.append(np.log(np.exp(scores).sum()) - scores[0])
    np.testing.assert_allclose(found, [*expected, 0], rtol=1e-5)


def test_gradients_a_micro_batch_at_a_time_are_those_of_all_at_once(tmp_path):
    """Also with dropout, whose masks must be the same both times that a sequence is computed."""
    lora = LoraConfig(rank=4, dropout=0.1)
    base = open_base(str(tiny_llama(tmp_path / "model")), quantization="none", dtype="float32", lora=lora)
    graph, _, declared = split(base.model)
    frozen = base.load()
    adapters = jax.tree.map(lambda x: x + 0.05, initial_adapter(declared, 0))
    objective, batch = Contrastive("mean", TEMPERATURE, 3), batch_of(TEXTS, 4)
    keys = jax.random.split(jax.random.key(0), batch.tokens.shape[:2])

    # Less optimised machine code is made in less time.
    quickly = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

    def at_once(adapters):
        model = nnx.merge(graph, frozen, adapters)
        whole = Batch(*(array.reshape(-1, array.shape[-1]) for array in batch))
        vectors = embed(model, whole, "mean", OPTIONS, keys.reshape(-1), LOCAL)
        return objective.losses(vectors, batch, ALONE).sum()

    @quickly
    def in_parts(adapters):
        model = nnx.merge(graph, frozen, adapters)
        prepared = objective.prepare(model, batch, OPTIONS, keys, LOCAL, ALONE)

        def of_part(adapters, part):
            micro_batch, prepared, keys = part
            model = nnx.merge(graph, frozen, adapters)
            return objective.loss(model, micro_batch, prepared, OPTIONS, keys, LOCAL, None)

        def add(carry, part):
            gradient, loss = jax.grad(of_part, has_aux=True)(adapters, part)
            return (jax.tree.map(jnp.add, carry[0], gradient), carry[1] + loss), None

        zeros = jax.tree.map(jnp.zeros_like, adapters)
        return jax.lax.scan(add, (zeros, jnp.float32(0)), (batch, prepared, keys))[0]

    loss, gradient = quickly(jax.value_and_grad(at_once))(adapters)
    found, total = in_parts(adapters)
    assert float(total) == pytest.approx(float(loss), rel=1e-5)
    # Sums of float32 in another order, see `subjects`. Those of one matrix may cancel: the scale is that of all.
    difference = optax.global_norm(jax.tree.map(jnp.subtract, found, gradient))
    assert difference <= 1e-4 * optax.global_norm(gradient)


@pytest.mark.eight_devices
def test_devices_share_one_loss(tmp_path):
    """Each query stands against the passages of all devices: the numbers are those of one device."""
    tiny_llama(tmp_path / "model")
    rows = write_pairs(tmp_path / "pairs.jsonl", 12)
    common = {
        "retrieval": RetrievalConfig(pooling="last", hard_negatives=1),
        "max_steps": 2,
        "lora": LoraConfig(rank=4, targets=["q_proj", "down_proj"], dropout=0.1),
    }
    for sizes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        devices = int(np.prod(list(sizes.values()), initial=1))
        pairs_at_a_time = 4 // (sizes.get("data", 1) * sizes.get("fsdp", 1))
        options = {"micro_batch_size": pairs_at_a_time, "devices": list(range(devices)), "mesh": MeshConfig(**sizes)}
        config = tiny_config(tmp_path / "model", tmp_path / str(devices), rows, **common | options)
        train(config, recorder()[0])
    for line, expected in zip(numbers(tmp_path / "8"), numbers(tmp_path / "1"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
