"""What is seen while weights are read: bars on a terminal, plain lines elsewhere."""

import io

from rich.console import Console

from zagora_jax.reporting.progress import Reporter


class Clock:
    """Goes on by `seconds` whenever it is read."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def __call__(self):
        self.now += self.seconds
        return self.now


def test_lines_say_how_far_reading_is_and_what_is_left():
    output = io.StringIO()
    reporter = Reporter(Console(file=output, force_terminal=False, width=200), clock=Clock(4.0))
    with reporter.loading(2 * 10**9) as on_tensor:
        for _ in range(10):
            on_tensor(2 * 10**8)
    lines = output.getvalue().splitlines()
    # Every 10 s at most, which 4 s a tensor make every third one: 12 s for 30 % leave 28 s for the rest.
    assert lines[0] == "weights: 2.00 billion parameters: 30% read in 12 s, about 28 s left"
    assert [line.split(": ")[-1][:3] for line in lines[:-1]] == ["30%", "60%", "90%"]
    assert lines[-1] == "weights: 2.00 billion parameters in place after 48.0 s"


def test_a_bar_shows_the_time_left_on_a_terminal():
    output = io.StringIO()
    reporter = Reporter(Console(file=output, force_terminal=True, width=100, highlight=False), clock=Clock(0.1))
    with reporter.loading(1000) as on_tensor:
        on_tensor(1000)
    assert "100%" in output.getvalue()
    assert "left" in output.getvalue()
    assert output.getvalue().endswith("weights in place after 0.1 s\n")
