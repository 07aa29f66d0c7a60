"""What several sets of held-out rows come to."""

import pytest

from zagora_jax.evaluation import Evaluation, Totals
from zagora_jax.evaluation_sets import MAIN, Measured, compile_sets


class Made:
    """Rows whose measure is known."""

    def __init__(self, loss, tokens, **numbers):
        self.measured = Measured(Totals(loss * tokens, tokens, tokens), numbers)

    def compile(self, *_):
        return lambda adapters: self.measured


def test_the_loss_is_that_of_the_main_set():
    sets = {MAIN: Made(2.0, 10), "a": Made(1.0, 30)}
    assert compile_sets(sets, None, None, None)(None) == Evaluation(2.0, 10, {"loss.a": 1.0})


def test_or_of_all_sets_together_by_their_tokens():
    found = compile_sets({"a": Made(1.0, 30, mrr=0.5), "b": Made(3.0, 10, mrr=0.25)}, None, None, None)(None)
    assert (found.loss, found.supervised_tokens) == (pytest.approx(1.5), 40)
    assert found.numbers == {"loss.a": 1.0, "mrr.a": 0.5, "loss.b": 3.0, "mrr.b": 0.25}
