"""Charts are valid SVG that shows what it was given."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zagora_jax.reporting.charts import LEFT, RIGHT, WIDTH, Curve, _ticks, bar_chart, grid_chart, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def points(*pairs):
    return [(x, y, y, y) for x, y in pairs]


def drawn(svg):
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def line_of(svg):
    pairs = drawn(svg).find(f"{SVG}polyline").get("points").split()
    return [tuple(map(float, pair.split(","))) for pair in pairs]


def test_a_line_goes_from_edge_to_edge_and_upwards():
    first, middle, last = line_of(line_chart([Curve("", points((0, 1.0), (5, 2.0), (10, 3.0)))], "loss"))
    assert (first[0], last[0]) == (LEFT, WIDTH - RIGHT)
    assert middle == pytest.approx(((first[0] + last[0]) / 2, (first[1] + last[1]) / 2), abs=0.1)
    assert first[1] > last[1]  # y grows downwards


def test_what_a_point_is_can_be_read():
    svg = line_chart([Curve("card 0", [(10, 60.0, 55.0, 65.0)]), Curve("card 1", points((3, 61.5)))], "heat", " °C")
    titles = [title.text for title in drawn(svg).iter(f"{SVG}title")]
    assert titles == ["heat", "card 0: step 10: 60 °C (55 to 65)", "card 1: step 3: 61.5 °C"]


def test_a_chart_of_nothing_says_so():
    assert "nothing yet" in line_chart([Curve("loss", [])], "loss")


finite = st.floats(-1e300, 1e300)


@given(
    st.lists(
        st.tuples(st.text(), st.lists(st.tuples(st.integers(0, 10**12), finite, finite, finite), max_size=5)),
        max_size=3,
    ),
    st.text(),
)
def test_any_numbers_and_words_make_valid_svg(curves, words):
    made = [Curve(label, sorted((float(x), *sorted(of)) for x, *of in found)) for label, found in curves]
    svg = line_chart([Curve(c.label, [(x, m, lo, hi) for x, lo, m, hi in c.points]) for c in made], words, words)
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<title>.*?</title>|<text.*?</text>", "", svg, flags=re.DOTALL))
    drawn(svg)
    drawn(bar_chart([(label, {label: 1.0, "other": 2.0}) for label, _ in curves], words, words, {words: 3.0}))
    drawn(grid_chart([(label, [0.0, 0.5]) for label, _ in curves], words, words))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.11, 0.49, [0.2, 0.3, 0.4]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low, high, ticks):
    assert _ticks(low, high) == pytest.approx(ticks)


def test_bars_stand_against_their_limits():
    svg = drawn(bar_chart([("gpu:0", {"codes": 4.0, "none": 0.0, "LoRA": 2.0})], "memory", " GiB", {"gpu:0": 12.0}))
    bars = [r for r in svg.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    assert [bar.find(f"{SVG}title").text for bar in bars] == ["gpu:0: codes: 4 GiB", "gpu:0: LoRA: 2 GiB"]
    (limit,) = (line for line in svg.iter(f"{SVG}line") if line.get("class") == "limit")
    start = float(bars[0].get("x"))
    assert float(bars[0].get("width")) == pytest.approx(2 * float(bars[1].get("width")), abs=0.2)
    assert float(limit.get("x1")) - start == pytest.approx(3 * float(bars[0].get("width")), abs=0.3)
    assert "6 of 12 GiB" in [text.text for text in svg.iter(f"{SVG}text")]


def test_cells_are_as_strong_as_their_part():
    svg = drawn(grid_chart([("gpu:0", [1.0, 0.0]), ("gpu:1", [0.25, 0.25])], "layers", "layer"))
    cells = list(svg.iter(f"{SVG}rect"))
    assert [float(cell.get("fill-opacity")) for cell in cells] == pytest.approx([1.0, 0.06, 0.295, 0.295])
    assert cells[2].find(f"{SVG}title").text == "gpu:1: 0.25 of layer 0"
