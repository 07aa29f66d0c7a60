import json
from collections import Counter

import numpy as np
import pytest

from zagora_jax.data.batches import Batches, Share
from zagora_jax.data.examples import Example, Examples
from zagora_jax.data.sources import Location
from zagora_jax.errors import UserError


def make_examples(count: int, seed: int = 0, longest: int = 20) -> Examples:
    """Rows whose first token is their number."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(rng.integers(2, longest + 1))
        tokens = np.concatenate([[number], rng.integers(1000, 2000, length - 1)]).astype(np.int32)
        supervised = rng.random(length) < 0.5
        supervised[0], supervised[-1] = False, True
        rows.append(Example(tokens, supervised, Location("train.jsonl", number + 1)))
    return Examples.of(rows)


def rows_in(batch) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, targets and weights of each row, found by segment ids."""
    found = []
    flat = [array.reshape(-1, array.shape[-1]) for array in batch]
    for tokens, targets, weights, segments, positions in zip(*flat, strict=True):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert positions[here].tolist() == list(range(here.sum()))
            found.append((tokens[here].tolist(), targets[here].tolist(), weights[here].tolist()))
        padding = segments == 0
        assert not tokens[padding].any()
        assert not weights[padding].any()
        assert not np.any(np.diff(padding.astype(int)) < 0), "padding stands at the end"
    return found


def expected_row(examples, row):
    tokens, weights, _ = examples[row]
    return tokens.tolist(), [*tokens[1:].tolist(), 0], [*weights[1:].tolist(), 0.0]


@pytest.mark.parametrize("packing", [False, True])
def test_an_epoch_has_every_row_once_as_it_is(packing):
    examples = make_examples(37)
    batches = Batches(
        examples, sequence_length=48, packing=packing, micro_batch_size=2, gradient_accumulation_steps=3, seed=1
    )
    assert batches.width == (48 if packing else 32)
    for epoch in range(3):
        found = []
        for batch in batches.epoch(epoch):
            assert [(array.shape, array.dtype) for array in batch] == [
                (spec.shape, spec.dtype) for spec in batches.abstract()
            ]
            assert batch.tokens.shape == (3, 2, batches.width)
            found += rows_in(batch)
        assert sorted(found) == [expected_row(examples, row) for row in range(37)]


def test_supervised_targets_are_counted_after_the_shift():
    # five prompt tokens, one answer token and its end token: exactly two targets
    example = Example(np.arange(7, dtype=np.int32), np.arange(7) >= 5, Location("a", 1))
    batch = Batches(Examples.of([example]), sequence_length=16, packing=False, micro_batch_size=1).at(0)
    assert batch.weights.sum() == 2
    assert batch.targets[batch.weights == 1].tolist() == [5, 6]


def test_weights_sum_to_the_supervised_tokens_for_any_split():
    examples = make_examples(50)
    total = examples.supervised_tokens
    for packing in (False, True):
        for rows, accumulation in ((1, 1), (4, 4), (3, 7)):
            batches = Batches(
                examples,
                sequence_length=64,
                packing=packing,
                micro_batch_size=rows,
                gradient_accumulation_steps=accumulation,
            )
            assert sum(batch.weights.sum() for batch in batches.epoch(0)) == total


def test_last_window_of_an_epoch_is_a_step_of_its_own():
    # three micro-batches, accumulation 4, two epochs: two optimizer steps
    batches = Batches(
        make_examples(6), sequence_length=32, packing=False, micro_batch_size=2, gradient_accumulation_steps=4
    )
    assert batches.total_steps(2) == 2
    for batch in batches.from_step(0, 2):
        assert batch.tokens.shape == (4, 2, 32)
        assert (batch.segment_ids[3] == 0).all()
        assert batch.weights[3].sum() == 0
        assert len(rows_in(batch)) == 6


@pytest.mark.parametrize("packing", [False, True])
def test_resumed_iterator_gives_the_same_batches(packing):
    examples = make_examples(64)

    def make():
        return Batches(examples, sequence_length=40, packing=packing, micro_batch_size=4, seed=3)

    batches = make()
    total = batches.total_steps(2)
    unbroken = list(batches.from_step(0, total))
    assert len(unbroken) == total
    stop = batches.steps_per_epoch(0) + 5

    iterator = make().from_step(0, total)
    for _ in range(stop):
        next(iterator)
    state = json.dumps(iterator.get_state())
    assert len(state) < 400
    resumed = make().from_step(0, total)
    resumed.set_state(json.loads(state))
    for iterator in (resumed, make().from_step(stop, total)):
        rest = list(iterator)
        assert len(rest) == total - stop
        for ours, theirs in zip(rest, unbroken[stop:], strict=True):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))

    second_epoch = unbroken[batches.steps_per_epoch(0) : stop] + rest
    seen = Counter(tokens[0] for batch in second_epoch for tokens, _, _ in rows_in(batch))
    assert seen == Counter(range(64))


def test_state_of_other_data_or_options_is_refused():
    def batches(**changes):
        options = {"sequence_length": 32, "packing": False, "micro_batch_size": 2, "seed": 0}
        return Batches(changes.pop("examples", make_examples(8)), **options | changes)

    state = batches().from_step(0, 4).get_state()
    batches().from_step(0, 4).set_state(state)
    for changes, named in (
        ({"examples": make_examples(8, seed=1)}, "rows"),
        ({"seed": 1}, r"seed \(0 before, 1 now\)"),
        ({"micro_batch_size": 1}, r"sequences_a_step \(2 before, 1 now\)"),
        ({"packing": True}, "packing"),
        ({"shuffle": False}, "shuffle"),
        ({"mixture": [Share(range(8), 2.0)]}, r"mixture \(None before, \[\[8, 2.0\]\] now\)"),
    ):
        with pytest.raises(UserError, match=named):
            batches(**changes).from_step(0, 4).set_state(state)


def test_order_differs_by_epoch_and_seed_and_never_by_process():
    def order(seed, epoch):
        batches = Batches(make_examples(20), sequence_length=32, packing=False, micro_batch_size=20, seed=seed)
        return np.concatenate(batches.rows_of_step(epoch)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # Written down, so that a change of libraries that would break resumed runs is noticed.
    assert order(0, 0) == [11, 3, 13, 2, 15, 1, 18, 19, 17, 8, 6, 0, 7, 14, 4, 10, 12, 16, 5, 9]


def test_evaluation_keeps_the_order_of_the_files():
    batches = Batches(make_examples(5), sequence_length=32, packing=False, micro_batch_size=2, shuffle=False)
    assert [row[0][0] for batch in batches.epoch(0) for row in rows_in(batch)] == [0, 1, 2, 3, 4]


def test_segments_follow_rows_and_not_end_tokens():
    end = 7
    turns = np.array([1, end, 2, end, 3, end], np.int32)
    rows = [Example(turns, turns == end, Location("a", line)) for line in (1, 2)]
    batch = Batches(Examples.of(rows), sequence_length=16, packing=True, micro_batch_size=1, shuffle=False).at(0)
    assert batch.segment_ids[0, 0].tolist() == [1] * 6 + [2] * 6 + [0] * 4
    assert batch.positions[0, 0].tolist() == [*range(6), *range(6), 0, 0, 0, 0]
    # the last token of the first row does not have the first token of the second for a target
    assert batch.targets[0, 0, 5] == 0
    assert batch.weights[0, 0, 5] == 0


def test_width_without_packing_is_bounded_by_the_sequence_length():
    examples = make_examples(5, longest=20)
    longest = int(examples.lengths.max())
    assert Batches(examples, sequence_length=longest, packing=False, micro_batch_size=1).width == longest
    assert Batches(examples, sequence_length=4096, packing=False, micro_batch_size=1).width == 32
    with pytest.raises(ValueError, match="longer than sequence_length"):
        Batches(examples, sequence_length=longest - 1, packing=False, micro_batch_size=1)


def test_fingerprint_changes_with_tokens_masks_and_borders():
    def fingerprint(*rows):
        return Examples.of(
            [Example(np.array(t, np.int32), np.array(s, bool), Location("a", 1)) for t, s in rows]
        ).fingerprint

    reference = fingerprint(([1, 2], [0, 1]), ([3], [0]))
    assert reference == fingerprint(([1, 2], [0, 1]), ([3], [0]))
    others = [(([1, 9], [0, 1]), ([3], [0])), (([1, 2], [0, 0]), ([3], [0])), (([1], [0]), ([2, 3], [1, 0]))]
    assert len({reference, *(fingerprint(*rows) for rows in others)}) == 4


MIXTURE = [Share(range(5), 2.0), Share(range(5, 15), 0.3), Share(range(15, 20), 1.0)]


@pytest.mark.parametrize("packing", [False, True])
def test_a_mixture_goes_through_each_source_as_often_as_it_says(packing):
    examples = make_examples(20)
    batches = Batches(examples, sequence_length=40, packing=packing, micro_batch_size=2, seed=4, mixture=MIXTURE)
    fractions: Counter[int] = Counter()
    for epoch in range(10):
        seen = Counter(tokens[0] for batch in batches.epoch(epoch) for tokens, _, _ in rows_in(batch))
        assert all(seen[row] == 2 for row in range(5))
        assert all(seen[row] == 1 for row in range(15, 20))
        part = {row: count for row, count in seen.items() if 5 <= row < 15}
        assert set(part.values()) == {1}
        assert len(part) == 3
        fractions.update(part)
    # 0.3 of ten rows, ten times: every row has had its turn three times, before any has a fourth
    assert fractions == Counter(dict.fromkeys(range(5, 15), 3))


def test_a_mixture_is_resumed_where_it_stood():
    examples = make_examples(20)

    def make():
        return Batches(examples, sequence_length=40, packing=True, micro_batch_size=2, seed=4, mixture=MIXTURE)

    total = make().total_steps(4)
    unbroken = list(make().from_step(0, total))
    iterator = make().from_step(0, total)
    for _ in range(total // 2):
        next(iterator)
    resumed = make().from_step(0, total)
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    rest = list(resumed)
    assert len(rest) == total - total // 2
    for ours, theirs in zip(rest, unbroken[total // 2 :], strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))


def test_once_through_everything_is_no_mixture():
    examples = make_examples(8)
    plain, once = (
        Batches(examples, sequence_length=32, packing=False, micro_batch_size=2, mixture=mixture)
        for mixture in ([], [Share(range(3), 1.0), Share(range(3, 8), 1.0)])
    )
    assert plain.identity() == once.identity()
    assert [rows.tolist() for rows in plain.rows_of_step(1)] == [rows.tolist() for rows in once.rows_of_step(1)]


def test_weights_reach_their_targets():
    example = Example(np.arange(5, dtype=np.int32), np.array([0, 0, 0.5, 2, 0], np.float32), Location("a", 1))
    batch = Batches(Examples.of([example]), sequence_length=8, packing=False, micro_batch_size=1).at(0)
    assert batch.weights[0, 0, :5].tolist() == [0, 0.5, 2, 0, 0]
    assert batch.targets[0, 0, 1:3].tolist() == [2, 3]


def test_padding_is_known_by_place_where_its_token_is_the_end_token_too():
    """As of SmolLM2-Instruct, pad = eos = 2: the row's own end is learned, the padding behind it is not."""
    example = Example(np.array([1, 5, 6, 2], np.int32), np.array([0, 1, 1, 1]), Location("a", 1))
    batch = Batches(Examples.of([example]), sequence_length=6, packing=False, micro_batch_size=1).at(0)
    assert batch.targets[0, 0, :3].tolist() == [5, 6, 2]
    assert batch.weights[0, 0].tolist() == [1, 1, 1, 0, 0, 0]
