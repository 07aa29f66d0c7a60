"""A run's history in a notebook."""

from xml.etree import ElementTree

import pytest

from zagora_jax.errors import UserError
from zagora_jax.reporting.steps import Steps, _spread

STEPS = Steps(
    {"step": step, "loss": 3.0 / step, "finite": True, "cards": [{"card": 0, "celsius": 60.0}]} for step in range(1, 51)
)


def test_steps_are_a_list_that_can_be_drawn(tmp_path):
    assert STEPS[-1]["loss"] == 3.0 / 50
    picture = STEPS.plot("loss", "cards.0.celsius")
    texts = [text.text for text in ElementTree.fromstring(picture._repr_svg_()).iter() if text.tag.endswith("}text")]
    assert {"loss", "cards.0.celsius"} <= set(texts)
    picture.save(tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text() == picture.svg == STEPS.plot("loss", "cards.0.celsius").svg
    assert STEPS.plot().svg == STEPS.plot("loss").svg


def test_what_no_step_has_is_named():
    with pytest.raises(UserError, match=r"accuracy: no step has such a number; there are cards\.0\.celsius, loss"):
        STEPS.plot("accuracy")
    with pytest.raises(UserError, match="there are no steps yet"):
        Steps().plot()


def test_the_table_has_the_first_step_and_the_last():
    table = ElementTree.fromstring(STEPS._repr_html_())
    rows = [[cell.text for cell in row] for row in table.iter("tr")]
    assert rows[0] == ["step", "loss"]
    assert len(rows) == 13
    assert (rows[1], rows[-1]) == (["1", "3"], ["50", "0.06"])
    assert ElementTree.fromstring(Steps([{"step": 1, "loss": None}])._repr_html_()).find(".//td[2]").text is None


def test_steps_are_spread_evenly():
    assert _spread(3, 12) == [0, 1, 2]
    assert _spread(100, 3) == [0, 50, 99]
