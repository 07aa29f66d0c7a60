"""When a run has had enough, and which of its steps was the best."""

import pytest

from zagora_jax.held_out_losses import Best, HeldOutLosses
from zagora_jax.option_groups import EarlyStoppingConfig


def lines(*losses):
    """Metrics of steps 1, 2, ...; None: not evaluated."""
    return [
        {"step": step} if loss is None else {"step": step, "eval_loss": loss} for step, loss in enumerate(losses, 1)
    ]


def first_stop(losses, **options):
    watched = HeldOutLosses(EarlyStoppingConfig(**options))
    for line in lines(*losses):
        watched.after(line)
        if watched.stop:
            return line["step"]
    return None


@pytest.mark.parametrize(
    ("losses", "options", "stops_at"),
    [
        ([3, 4, 4, 4], {}, None),
        ([3, 4, 4], {"patience": 2}, 3),
        ([3, 3, 3], {"patience": 2}, 3),  # as low is not lower
        ([3, 4, 2.9, 4, 4], {"patience": 2}, 5),
        ([3, 4, None, None, 4], {"patience": 2}, 5),  # steps without an evaluation do not count
        ([3, 2.95, 2.91, 2.5], {"patience": 2, "min_delta": 0.1}, 3),
        ([3, 2.95, 2.85, 2.8, 2.8], {"patience": 2, "min_delta": 0.1}, 5),  # small steps that add up are progress
        ([float("nan"), float("nan")], {"patience": 2}, 2),
    ],
)
def test_a_run_ends_behind_so_many_evaluations_in_vain(losses, options, stops_at):
    assert first_stop(losses, **options) == stops_at


def test_the_best_is_the_lowest_and_of_equal_ones_the_first():
    watched = HeldOutLosses(EarlyStoppingConfig(min_delta=1.0))
    assert [watched.after(line) for line in lines(3, 4, 2.9, None, 2.9)] == [True, False, True, False, False]
    assert watched.best == Best(3, 2.9)


def test_a_loss_that_is_not_finite_is_no_best_and_counts_when_read_back_too():
    for not_finite in (float("nan"), None):
        watched = HeldOutLosses(EarlyStoppingConfig(patience=2))
        found = [watched.after({"step": step, "eval_loss": loss}) for step, loss in enumerate([3, not_finite, 3.5], 1)]
        assert found == [True, False, False]
        assert watched.best == Best(1, 3)
        assert watched.stop is not None
    first = HeldOutLosses(EarlyStoppingConfig())
    assert not first.after({"step": 1, "eval_loss": float("nan")})
    assert first.after({"step": 2, "eval_loss": 3.0})


def test_only_what_is_saved_can_be_the_best_but_all_counts():
    watched = HeldOutLosses(EarlyStoppingConfig(patience=2), lines(3, 1, 2), saved={1, 3})
    assert watched.best == Best(3, 2)
    assert watched.stop is None
    assert not watched.after({"step": 4, "eval_loss": 1.5}, may_be_best=False)
    assert "not below 1.0000 in 2 evaluations" in watched.stop
