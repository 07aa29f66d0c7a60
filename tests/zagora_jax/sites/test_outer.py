"""The outer step, against plain references."""

import numpy as np
from several_sites import SHAPES, vectors

from zagora_jax.sites.outer import Global, OuterRule


def test_rounds_are_those_of_a_plain_diloco():
    """The paper's algorithm 1, written out in float64."""
    rule, state = OuterRule(0.7, 0.9), Global.begin(vectors(0))
    adapter = {name: values.astype(np.float64) for name, values in vectors(0).items()}
    velocity = dict.fromkeys(SHAPES, 0.0)
    for number in range(5):
        updates = [vectors(10 * number + site) for site in range(1, 4)]
        state = state.after(updates, rule)
        for name in SHAPES:
            gradient = sum(update[name].astype(np.float64) for update in updates) / 3
            velocity[name] = 0.9 * velocity[name] + gradient
            adapter[name] = adapter[name] - 0.7 * (gradient + 0.9 * velocity[name])
    assert state.round == 5
    for name in SHAPES:
        # Some 40 roundings of float32 (6e-8 each) of numbers of at most 20.
        np.testing.assert_allclose(state.adapter[name], adapter[name], atol=40 * 6e-8 * 20)


def test_without_momentum_and_with_a_rate_of_one_it_is_the_mean_of_the_sites_adapters():
    start, ends = vectors(0), [vectors(1), vectors(2)]
    gradients = [{name: start[name] - end[name] for name in SHAPES} for end in ends]
    state = Global.begin(start).after(gradients, OuterRule(1.0, 0.0))
    for name in SHAPES:
        np.testing.assert_allclose(state.adapter[name], (ends[0][name] + ends[1][name]) / 2, atol=2e-6)


def test_a_round_in_which_nothing_counts_changes_nothing_but_its_number():
    state = Global.begin(vectors(0)).after([vectors(1)], OuterRule(0.7, 0.9))
    after = state.after([], OuterRule(0.7, 0.9))
    assert (after.round, after.digest()) == (2, state.digest())


def test_a_digest_tells_a_single_bit():
    state, other = Global.begin(vectors(0)), Global.begin(vectors(0))
    assert state.digest() == other.digest()
    other.velocity["b"][3] = np.nextafter(np.float32(0), np.float32(1))
    assert state.digest() != other.digest()
