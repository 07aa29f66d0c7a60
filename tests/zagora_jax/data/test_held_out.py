import numpy as np
import pytest

from zagora_jax.data.held_out import is_held_out, is_in_part
from zagora_jax.data.rows import Completion, Conversation, Instruction, PlainText, TokenRow
from zagora_jax.data.turns import Turn


def test_the_part_is_as_large_as_asked_for():
    held = [is_held_out(PlainText(f"row {number}"), 0.2) for number in range(5000)]
    # Of 5000 draws at 0.2, the standard deviation of the mean is 0.0057.
    assert np.mean(held) == pytest.approx(0.2, abs=4 * 0.0057)


def test_a_larger_part_holds_the_smaller_one():
    rows = [PlainText(f"row {number}") for number in range(500)]
    small, large = ({row.text for row in rows if is_held_out(row, part)} for part in (0.1, 0.3))
    assert small < large


def test_only_the_content_counts():
    def parts(form):
        return [is_held_out(form, part / 1000) for part in range(1000)]

    turns = (Turn("user", "Hi"), Turn("assistant", "Hello"))
    weighted = (Turn("user", "Hi"), Turn("assistant", "Hello", 0.5))
    assert parts(Conversation(turns)) == parts(Conversation(weighted))
    assert parts(PlainText("a", 0.5)) == parts(PlainText("a"))
    assert parts(TokenRow(np.array([1, 2]), np.ones(2))) == parts(TokenRow(np.array([1, 2]), np.zeros(2)))
    others = [
        Conversation(turns),
        Conversation(turns, ({"name": "f"},)),
        PlainText("Hi"),
        Completion("Hi", "Hello"),
        Instruction("Hi", "", "Hello"),
        TokenRow(np.array([1, 2]), np.ones(2)),
    ]
    assert len({sum(parts(form)) for form in others}) == len(others)


def test_the_choice_never_changes():
    """Written down: another choice would move rows of resumed runs from one side to the other."""
    assert [number for number in range(60) if is_held_out(PlainText(f"row {number}"), 0.1)] == [1, 22, 23, 31, 57]


def test_parts_for_several_sites_have_all_rows_and_none_in_common():
    rows = [PlainText(f"row {number}") for number in range(2000)]
    parts = [[row.text for row in rows if is_in_part(row, part, 4)] for part in range(4)]
    assert sorted(text for part in parts for text in part) == sorted(row.text for row in rows)
    # Of 2000 draws at 1/4, the standard deviation is 19.4.
    assert all(abs(len(part) - 500) < 4 * 19.4 for part in parts)


def test_a_part_has_its_share_of_the_rows_that_are_held_out():
    rows = [PlainText(f"row {number}") for number in range(4000)]
    held_out = [row for row in rows if is_held_out(row, 0.5)]
    # Of some 2000 draws at 1/2, the standard deviation is 22.4.
    assert abs(sum(is_in_part(row, 0, 2) for row in held_out) - len(held_out) / 2) < 4 * 22.4
