"""How many layers each stage gets, and when that changes."""

import itertools

import numpy as np
import pytest

from sharding.balance import Balancer, Slowdown, StageCost, choose_cut, explain, pace

COSTS = [
    [StageCost(1.0), StageCost(1.0), StageCost(1.0)],
    [StageCost(1.0), StageCost(2.0), StageCost(0.5)],
    [StageCost(1.0, 0.5), StageCost(1.0), StageCost(1.0, 3.2)],
    [StageCost(1.0, most_layers=2), StageCost(4.0), StageCost(1.0, 1.0, most_layers=3)],
]


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("layers", [3, 7, 10])
def test_no_cut_is_faster(costs, layers):
    cut = choose_cut(costs, layers)
    allowed = [
        other
        for other in itertools.product(range(1, layers + 1), repeat=len(costs))
        if sum(other) == layers
        and all(cost.most_layers is None or n <= cost.most_layers for n, cost in zip(other, costs, strict=True))
    ]
    assert tuple(cut) in allowed
    assert pace(costs, cut) == min(pace(costs, other) for other in allowed)


def test_a_card_of_twice_the_speed_gets_twice_the_layers():
    assert choose_cut([StageCost(2.0), StageCost(1.0)], 12) == [4, 8]


def test_layers_that_do_not_fit():
    with pytest.raises(ValueError, match="8 layers do not go into 2 stages that can hold 3, 4"):
        choose_cut([StageCost(1.0, most_layers=3), StageCost(1.0, most_layers=4)], 8)
    with pytest.raises(ValueError, match="1 layers do not go into 2 stages that can hold any number, any number"):
        choose_cut([StageCost(1.0), StageCost(1.0)], 1)


def test_the_reason_names_time_and_memory():
    costs = [StageCost(0.010, most_layers=2), StageCost(0.010, 0.003)]
    assert explain(costs, choose_cut(costs, 7)) == (
        "stage 0: 2 x 10 = 20 ms, as many as its memory holds; stage 1: 5 x 10 + 3 = 53 ms"
    )


class Simulated:
    """Cards whose speed a test changes; every step's times are off by a few percent."""

    def __init__(self, layers, stages, patience=5, threshold=0.1):
        expected = [StageCost(1.0) for _ in range(stages)]
        self.cut = choose_cut(expected, layers)
        self.balancer = Balancer(expected, threshold=threshold, patience=patience)
        self.slowness = [1.0] * stages
        self.rng = np.random.default_rng(0)
        self.moves = []

    def run(self, steps, noise=0.03):
        for step in range(steps):
            times = [
                layers * slow * self.rng.uniform(1 - noise, 1 + noise)
                for layers, slow in zip(self.cut, self.slowness, strict=True)
            ]
            if (move := self.balancer.observe(times, self.cut)) is not None:
                self.moves.append((step, move))
                self.cut = move.cut


def test_even_cards_keep_their_layers():
    cards = Simulated(layers=40, stages=4)
    cards.run(300)
    assert not cards.moves


def test_a_slow_card_gives_layers_away_once_and_takes_them_back():
    cards = Simulated(layers=40, stages=4)
    cards.slowness[1] = 2.5
    cards.run(100)
    assert len(cards.moves) == 1
    step, move = cards.moves[0]
    assert step == 4  # not before `patience` steps
    assert move.cut[1] in (4, 5)
    assert move.gain == pytest.approx(1 - 12 / 25, abs=0.05)
    cards.slowness[1] = 1.0
    cards.run(100)
    assert len(cards.moves) == 2
    assert sorted(cards.cut) == [10, 10, 10, 10]


def test_a_short_hitch_moves_nothing():
    cards = Simulated(layers=40, stages=4)
    for _ in range(10):
        cards.slowness[2] = 3.0
        cards.run(4)
        cards.slowness[2] = 1.0
        cards.run(1)
    assert not cards.moves


def test_a_slowness_below_the_threshold_moves_nothing():
    cards = Simulated(layers=40, stages=4)
    cards.slowness[0] = 1.08
    cards.run(100)
    assert not cards.moves


def test_a_card_at_the_threshold_does_not_make_layers_wander():
    """A card that is slow and fast by turns: what it gains by a move, it must lose for as long before the way back."""
    cards = Simulated(layers=40, stages=4)
    for turn in range(40):
        cards.slowness[3] = 1.0 + 0.4 * (turn % 2)
        cards.run(3)
    assert not cards.moves


def test_a_slowdown_is_told_once_it_has_lasted():
    slowdown = Slowdown(threshold=0.2, patience=3)
    steps = [1.0, 1.1, 0.9]  # usual
    steps += [1.3, 1.3, 1.0]  # too short
    steps += [1.1] * 10  # too little
    assert not any(map(slowdown.observe, steps))
    assert [slowdown.observe(1.3) for _ in range(3)] == [False, False, True]
    assert not any(slowdown.observe(1.3) for _ in range(20))  # this is usual now
    assert [slowdown.observe(1.6) for _ in range(3)] == [False, False, True]
