"""What a forward task keeps, and the gradients that come of it later."""

import jax
import jax.numpy as jnp
import numpy as np

from sharding.kept import Pullback, keeping

WIDTH = 3


def layers(trained: jax.Array, x: jax.Array, frozen: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: tuple) -> tuple[jax.Array, None]:
        ours, theirs = weights
        return jnp.tanh(ours * (x @ theirs)), None

    return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, (trained, frozen))[0]


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


TRAINED, X, FROZEN = draw(4), draw(2, WIDTH), draw(4, WIDTH, WIDTH)


def test_gradients_come_of_what_another_program_kept() -> None:
    found: dict[str, Pullback] = {}

    @jax.jit
    def forward(trained: jax.Array, x: jax.Array, frozen: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        out, kept, found["pull_back"] = keeping(
            lambda trained, x: layers(trained, x, frozen), (trained, x), (trained, frozen)
        )
        return out, kept

    @jax.jit
    def backward(trained: jax.Array, kept: list[jax.Array], frozen: jax.Array, cotangent: jax.Array) -> tuple:
        return found["pull_back"](kept, (trained, frozen), cotangent)

    out, kept = forward(TRAINED, X, FROZEN)
    expected, pull_back = jax.vjp(lambda trained, x: layers(trained, x, FROZEN), TRAINED, X)
    np.testing.assert_allclose(out, expected, rtol=1e-6)  # float32, compiled otherwise
    for gradient, wanted in zip(backward(TRAINED, kept, FROZEN, out), pull_back(expected), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)
    assert [array.shape for array in kept] == [(4, 2, WIDTH)]  # the layers' inputs, and no weights


def test_arrays_that_are_not_held_are_kept() -> None:
    def shapes(held: tuple) -> list[tuple[int, ...]]:
        arguments = (TRAINED, X)
        return sorted(array.shape for array in keeping(lambda *a: layers(*a, FROZEN), arguments, held)[1])

    assert shapes((TRAINED, FROZEN)) == [(4, 2, WIDTH)]
    assert shapes((FROZEN,)) == [(4,), (4, 2, WIDTH)]
    assert shapes(()) == [(4,), (4, 2, WIDTH), (4, WIDTH, WIDTH)]
