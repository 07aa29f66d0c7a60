import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.lora import LoRA, LoRAConfig, initial_adapter
from models.parameters import Adapter, by_path
from models.placement import LOCAL

IN, OUT, RANK = 48, 20, 4


def config(**changes):
    options = {"rank": RANK, "alpha": 6, "dropout": 0.0, "use_rslora": False, "targets": frozenset()}
    return LoRAConfig(**options | changes)


def adapter(config, stream=0, seed=0):
    """One layer's adapter with random A and B."""
    graph, declared = nnx.split(LoRA(IN, OUT, config, (), stream))
    keys = iter(jax.random.split(jax.random.key(seed), 2))
    return nnx.merge(graph, jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), declared))


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 6 / 4), (True, 6 / 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_update_is_the_scaled_product(use_rslora, scale, dtype):
    lora = adapter(config(use_rslora=use_rslora))
    x = jax.random.normal(jax.random.key(1), (2, 5, IN), dtype)
    y = lora(x, LOCAL, None)
    chex.assert_shape(y, (2, 5, OUT))
    chex.assert_type(y, dtype)
    expected = scale * np.asarray(x, np.float64) @ np.asarray(lora.lora_A[...]).T @ np.asarray(lora.lora_B[...]).T
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-8 * 6  # six roundings to 8 bits
    assert np.abs(np.asarray(y, np.float64) - expected).max() <= tolerance * np.abs(expected).max()


def test_parameters_are_float32_and_stacked():
    stacked = LoRA(IN, OUT, config(), (3,), 0)
    chex.assert_shape([stacked.lora_A.get_value(), stacked.lora_B.get_value()], [(3, RANK, IN), (3, OUT, RANK)])
    chex.assert_type([stacked.lora_A.get_value(), stacked.lora_B.get_value()], jnp.float32)


def declared(*modules):
    return nnx.state(nnx.Dict({name: LoRA(IN, OUT, config(), (3,), 0) for name in modules}), Adapter)


def test_initial_weights_are_those_of_peft():
    drawn = by_path(initial_adapter(declared("one", "other"), seed=0))
    bound = 1 / math.sqrt(IN)  # torch.nn.init.kaiming_uniform_ with a = sqrt(5)
    for path, variable in drawn.items():
        weights = np.asarray(variable.get_value())
        if path[-1] == "lora_B":
            assert not weights.any()
            continue
        assert np.abs(weights).max() <= bound
        # A uniform distribution's deviation is bound / sqrt(3), and 0.45 / sqrt(n) the standard error of n values'.
        assert weights.std() == pytest.approx(bound / math.sqrt(3), rel=6 * 0.45 / math.sqrt(weights.size))
        assert abs(weights.mean()) < 6 * bound / math.sqrt(3 * weights.size)


def test_initial_weights_depend_on_the_seed_and_their_own_name_alone():
    both, one, reseeded = (
        {path: np.asarray(v.get_value()) for path, v in by_path(initial_adapter(declared(*names), seed)).items()}
        for names, seed in ((("one", "other"), 0), (("one",), 0), (("one",), 1))
    )
    a = ("one", "lora_A")
    np.testing.assert_array_equal(both[a], one[a])
    assert (one[a] != reseeded[a]).any()
    assert (both[a] != both["other", "lora_A"]).any()
    assert (one[a][0] != one[a][1]).any()  # layers differ


def kept(lora, keys, rows=64):
    """Which inputs of ones [B, rows, IN] go through, for an adapter whose output is its input."""
    lora.lora_A.set_value(jnp.eye(IN))
    lora.lora_B.set_value(jnp.eye(IN))
    return np.asarray(lora(jnp.ones((len(keys), rows, IN)), LOCAL, keys)) / lora.layer_ranks.scales[0]


def test_dropout_keeps_the_mean_and_draws_for_each_row_and_module():
    keys = jax.random.split(jax.random.key(0), 3)
    first, second = (kept(adapter(config(dropout=0.25), stream), keys) for stream in (0, 1))
    np.testing.assert_allclose(np.unique(first), [0, 1 / 0.75], rtol=1e-6)
    error = 6 * math.sqrt(0.25 * 0.75 / first.size)  # six standard errors
    assert (first > 0).mean() == pytest.approx(0.75, abs=error)
    assert ((first > 0) & (second > 0)).mean() == pytest.approx(0.75**2, abs=error)  # independent of one another
    assert ((first[0] > 0) & (first[1] > 0)).mean() == pytest.approx(0.75**2, abs=2 * error)
    # What is dropped of a row does not depend on the rows beside it.
    np.testing.assert_array_equal(kept(adapter(config(dropout=0.25)), keys[1:2]), first[1:2])


def test_no_keys_or_no_rate_means_no_dropout():
    keys = jax.random.split(jax.random.key(0), 2)
    assert (kept(adapter(config(dropout=0.0)), keys) == 1).all()
    lora = adapter(config(dropout=0.5))
    x = jax.random.normal(jax.random.key(1), (2, 5, IN))
    np.testing.assert_array_equal(lora(x, LOCAL, None), adapter(config())(x, LOCAL, None))
