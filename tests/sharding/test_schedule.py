"""The order of a pipeline's tasks, and the time it takes."""

import pytest

from sharding.schedule import Task, dispatch_order, inputs_held, producer, simulate, tasks_of_stage

SIZES = [(1, 1), (1, 5), (2, 1), (2, 8), (3, 4), (4, 2), (4, 16), (8, 8)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_task_once_and_behind_what_it_needs(stages, micro_batches, ahead):
    order = dispatch_order(stages, micro_batches, ahead)
    expected = {
        Task(kind, stage, micro_batch)
        for kind in ("forward", "backward")
        for stage in range(stages)
        for micro_batch in range(micro_batches)
        if kind == "backward" or stage < stages - 1
    }
    assert len(order) == len(expected)
    assert set(order) == expected
    place = {task: index for index, task in enumerate(order)}
    for task in order:
        if (needed := producer(task, stages)) is not None:
            assert place[needed] < place[task]
        if task.kind == "backward" and task.stage < stages - 1:
            assert place[Task("forward", task.stage, task.micro_batch)] < place[task]
    for stage in range(stages):
        assert [t for t in order if t.stage == stage] == tasks_of_stage(stage, stages, micro_batches, ahead)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("ahead", [0, 2])
def test_inputs_held_do_not_grow_with_micro_batches(stages, micro_batches, ahead):
    for stage in range(stages):
        held = most = 0
        for task in tasks_of_stage(stage, stages, micro_batches, ahead):
            arrives = task.kind == "forward" or stage == stages - 1
            held += arrives
            most = max(most, held)
            held -= task.kind == "backward"
        assert most == inputs_held(stage, stages, micro_batches, ahead) <= (stages - 1 - stage) * (1 + ahead) + 1


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_equal_stages_idle_as_the_formula_says(stages, micro_batches):
    """(S - 1) / (M + S - 1) of the time (Huang et al. 2018, "GPipe", arXiv:1811.06965)."""
    timeline = simulate([1.0] * stages, [2.0] * stages, micro_batches)
    assert timeline.idle == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert timeline.seconds == pytest.approx(3.0 * (micro_batches + stages - 1))


def test_the_slowest_stage_sets_the_pace():
    one = simulate([1, 3, 1], [2, 6, 2], 50).seconds
    assert simulate([1, 3, 1], [2, 6, 2], 51).seconds - one == pytest.approx(9)


def test_travel_is_hidden_by_tasks_ahead():
    def seconds_a_micro_batch(**options):
        longer, shorter = (simulate([1] * 3, [2] * 3, count, **options).seconds for count in (60, 40))
        return (longer - shorter) / 20

    assert seconds_a_micro_batch(transfer=0.7, ahead=0) > 3.6
    assert seconds_a_micro_batch(transfer=1.4, ahead=1) == pytest.approx(3)  # there and back: 2.8
    assert seconds_a_micro_batch(transfer=2.0, ahead=1) > 3.3
    assert seconds_a_micro_batch(transfer=2.0, ahead=2) == pytest.approx(3)


def test_no_stage_or_micro_batch_is_refused():
    with pytest.raises(ValueError, match="at least 1 stage and 1 micro-batch, found 2 and 0"):
        dispatch_order(2, 0)
